"""The fast forms of functions in kernels of 16-bit programs: what they are compared with, on all 16-bit numbers.

A fast form may be off by a quarter of the rounding of float16, 2⁻¹² of a number: 2⁻¹⁴ of the value, or of what stands
for it where the value alone says nothing (``SCALES``): a sine near a multiple of π is as exact as its argument, a
sigmoid that is multiplied by its own argument is measured by 1."""

import math
import re
from collections.abc import Callable

import torch
import torch.nn.functional as F

from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.launch import driver
from monoidreduce.program.primitives import PRIMITIVES

BOUND = 2.0**-14
SMALLEST = 2.0**-126  # below, numbers may count as 0

# Of x, in float64. Functions of two arguments are met with pairs of numbers.
EXACT: dict[str, Callable[..., torch.Tensor]] = {
    "decay": lambda x: torch.where(x == -math.inf, 0.0, torch.exp(-x)),
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sinc": torch.sinc,
    "asin": torch.asin,
    "acos": torch.acos,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "polygamma": lambda x: torch.polygamma(1, torch.where((x < 0) & (x == x.round()) & x.isfinite(), 0.0, x)),
    "sin": torch.sin,
    "cos": torch.cos,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "logit": lambda x: torch.log(x) - torch.log1p(-x),
    "erfc": torch.erfc,
    "atan": torch.atan,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gate": torch.sigmoid,
    "normal_gate": torch.special.ndtr,
    "mish_gate": lambda x: torch.tanh(F.softplus(x)),
    "silu": F.silu,
    "gelu": lambda x: x * torch.special.ndtr(x),
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
}
OF_TWO: dict[str, Callable[..., torch.Tensor]] = {
    "pow": torch.pow,
    "xlogy": torch.xlogy,
    "logaddexp": torch.logaddexp,
    "atan2": torch.atan2,
}
UNMEASURED = {"gumbel"}  # fast forms that are draws: their distribution has tests of its own

SCALES: dict[str, Callable[..., torch.Tensor]] = {
    "sin": lambda x, y: x.abs().clamp(max=1.0),
    "cos": lambda x, y: torch.ones_like(x),
    "sinc": lambda x, y: torch.where(x.abs() < 1e5, 1e-6, 2.0**14) / x.abs(),  # as exact as float64's π x
    "lgamma": lambda x, y: torch.lgamma(1 - x).abs() * (x < 0.5),  # below 1/2 a difference of two logarithms
    "digamma": lambda x, y: torch.digamma(1 - x).abs() * (x < 0.5) + 2.0**-5,  # near the zero at 1.46
    "gate": lambda x, y: torch.ones_like(x),
    "normal_gate": lambda x, y: torch.ones_like(x),
    "silu": lambda x, y: x.abs(),
    "gelu": lambda x, y: x.abs(),
    "logit": lambda x, y: torch.full_like(x, 2.0**-7),  # near 1/2, where two logarithms cancel
    "logaddexp": lambda x, y: torch.maximum(x.abs(), y.abs()).clamp(min=1.0),
}


def all_numbers() -> torch.Tensor:
    """All numbers of bfloat16 and of float16, infinities and NaN among them, in float32."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    return torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()])


def pairs_of_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of numbers of all sizes and signs, special ones among them."""
    sizes = torch.logspace(-3, 1.5, 29).bfloat16().float()
    one = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.0, 1.0, 2.0, -3.0, math.inf, -math.inf, math.nan])])
    x, y = torch.meshgrid(one, one, indexing="ij")
    return x.reshape(-1), y.reshape(-1)


def run(form: str, device: str) -> dict[str, torch.Tensor]:
    """The values of all fast forms (``quick`` or ``native``) in a kernel: of all numbers, or of pairs of numbers."""
    texts = {}
    for name, p in PRIMITIVES.items():
        if p.fast and name not in UNMEASURED:
            texts[name] = write_fast(write_exact(name), form)
    texts["cos apart"] = f"{form}_cos_apart(x)"  # where registers are short
    found = {}
    x, of_two = all_numbers().to(device), [t.to(device) for t in pairs_of_numbers()]
    for name, text in texts.items():
        a, b = of_two if name in OF_TWO else (x, x)
        out = torch.empty_like(a)
        driver.load_module(write_kernel(text, 8192)).apply[(-(-len(a) // 8192),)](out, a, b, len(a))
        found[name] = out.cpu()
    return found


def write_exact(name: str) -> str:
    """The text of a primitive of ``x`` (and ``y``), with the defaults of its attributes."""
    p = PRIMITIVES[name]
    attributes = {k: repr(v) if not isinstance(v, str) else v for k, v in p.attributes.items()}
    return p.triton.format("x", "y", **attributes)


def write_kernel(text: str, numbers: int) -> str:
    """The module of a kernel ``apply(out, xs, ys, size)``, whose program instances compute so many numbers."""
    helpers = "\n".join(compiler.copy_device_functions(text))
    return _KERNEL.format(helpers=helpers, text=text, numbers=numbers)


def write_fast(text: str, form: str) -> str:
    """A primitive's text with fast forms, as kernels of 16-bit programs have it."""
    fast = [n.removeprefix("quick_") for n in compiler.device_function_sources() if n.startswith("quick_")]
    return re.sub(rf"(?<![\w.])(?:tl\.)?({'|'.join(fast)})\(", rf"{form}_\1(", text)


_KERNEL = '''"""A function of numbers."""

import triton
import triton.language as tl
{helpers}

@triton.jit
def apply(out, xs, ys, size):
    at = tl.program_id(0) * {numbers} + tl.arange(0, {numbers})
    x = tl.load(xs + at, mask=at < size, other=0)
    y = tl.load(ys + at, mask=at < size, other=0)
    tl.store(out + at, {text}, mask=at < size)
'''


def check(name: str, got: torch.Tensor) -> str:
    """What is wrong with the values of a fast form; nothing if nothing is."""
    name = name.removesuffix(" apart")
    x, y = pairs_of_numbers() if name in OF_TWO else (all_numbers(), all_numbers())
    x, y = x.double(), y.double()
    expected = OF_TWO[name](x, y) if name in OF_TWO else EXACT[name](x)
    expected = expected.float().double()  # what lies beyond float32 is infinite
    scale = SCALES.get(name, lambda x, y: torch.zeros_like(x))(x, y)
    scale = torch.maximum(expected.abs(), scale.nan_to_num(0.0, 0.0, 0.0))
    got = got.double()
    off = (got - expected).abs() / scale.clamp(min=SMALLEST)
    same = (got == expected) | (got.isnan() & expected.isnan())
    same |= torch.maximum(got.abs(), expected.abs()) <= SMALLEST
    # the largest numbers of float32 may be infinite
    same |= got.isinf() & (expected.abs() > 3.4e38 * (1 - 2.0**-9)) & (got.sign() == expected.sign())
    if name in ("sin", "cos"):
        same |= (x.abs() >= 2**21) & (got.abs() <= 1)  # neighbours in float32 lie a quarter apart
    if name == "mish_gate":
        same |= x.isnan() & ((got == 1) | got.isnan())  # its other factor is NaN; which is the least is the processor's
    if name == "logaddexp":
        same |= x.isinf() & y.isinf() & (x == y) & got.isinf()
    wrong = ~same & ~(off <= BOUND)
    if not wrong.any():
        return ""
    worst = torch.where(same, 0.0, off.nan_to_num(math.inf)).argmax()
    return f"{name}({x[worst]:g}, {y[worst]:g}) = {got[worst]:g}, not {expected[worst]:g}; {int(wrong.sum())} wrong"
