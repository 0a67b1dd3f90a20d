"""Kernels around tile functions that a user wrote as ``@triton.jit``: for what neither language nor generator can say.

The user's functions see blocks in registers; what is written here is the loop around them. A program instance owns a
tile of rows, loops over the columns and combines with the user's ⊙. A gradient is two kernels, one that owns rows and
one that owns columns, around the same ``proj_fold_bwd``: the compiler drops the half whose result is not used. No
atomics, so one fixed order. See :func:`monoidreduce.MonoidReduce` for the contract.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....errors import ArgumentError, DTypeError, EngineError, NoGradientError, ShapeError
from ....plan.settings import kernels_run_on
from ...common import matmul
from ..codegen.compiler import CONSTANTS, Kernel
from ..codegen.kernel_spec import WIDEST, pad_width
from ..schedules.kernel_plan import KernelPlan
from . import fold_kernel

Tensors = tuple[Tensor, ...]
_SMALLEST = 16  # of a matrix product's sides
_BROKEN = ("CompilationError", "CompileTimeAssertionFailure", "InterpreterError", "UnsupportedLanguageConstruct")


def is_kernel(function: Any) -> bool:
    """True when a function is a ``@triton.jit`` one; asked without importing Triton."""
    return type(function).__module__.startswith("triton.") and hasattr(function, "fn")


@dataclass(frozen=True)
class Layer:
    """A layer of tile functions in Triton. Rows are ``a``, columns ``b``, products ``p``, their cotangents ``gp``."""

    name: str
    init: Callable[[Tensors, Tensors], Tensors]
    sides: tuple[int, int]  # how many tensors of rows and of columns
    tiles: tuple[int, int]  # rows and columns of a tile
    proj_fold: Any
    binary_reduce: Any
    proj_fold_bwd: Any = None

    def __post_init__(self) -> None:
        for name, size in zip(("islice", "jslice"), self.tiles, strict=True):
            whole = isinstance(size, int) and not isinstance(size, bool)
            if not whole or size < _SMALLEST or size & (size - 1):
                raise ArgumentError(
                    detail=f"{self.name}: {name} is {size!r}",
                    fix=f"With @triton.jit functions give how many make a tile: a power of two, at least {_SMALLEST}",
                )
        for name in ("binary_reduce", "proj_fold", "proj_fold_bwd"):  # the first says how many products there are
            self._check(name, getattr(self, name))

    def _check(self, name: str, function: Any) -> None:
        """Raise where a tile function is not Triton's, or does not take what it will be given."""
        if function is None:
            return
        if not is_kernel(function):
            raise ArgumentError(
                detail=f"{self.name}: {name} is no @triton.jit function, another tile function is",
                fix="Write all of them in Triton, or all in torch",
            )
        inputs, products = sum(self.sides), _count_arguments(self.binary_reduce) // 2
        counts = {"proj_fold": inputs + 1, "binary_reduce": 2 * products, "proj_fold_bwd": inputs + 2 * products + 1}
        if _count_arguments(function) != counts[name]:
            raise ArgumentError(
                detail=f"{self.name}: {name} takes {_count_arguments(function)} arguments, not {counts[name]}",
                fix="proj_fold(*a, *b, inside), binary_reduce(*p, *p), proj_fold_bwd(*a, *b, *p, *gp, inside)",
            )

    def forward(self, inputs: Tensors) -> Tensors:
        """The product of every row."""
        rows, cols = self._find_lengths(inputs)
        a, b = inputs[: self.sides[0]], inputs[self.sides[0] :]
        start = self._check_start(self.init(a, b), rows)
        out = tuple(torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in start)
        given = [
            *_list_fields("a", a, "kept"),
            *_list_fields("b", b, "folded"),
            *_list_fields("p", start, "kept", raised=True),
        ]
        self._run("fold", given, out, (rows, cols), over="cols")
        return out

    def backward(
        self, inputs: Tensors, product: Tensors, given: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs that need one: each side by a kernel of its own."""
        if self.proj_fold_bwd is None:
            fix = "Give proj_fold_bwd=, or use the result under torch.no_grad()"
            raise NoGradientError(detail=f"{self.name} was made without a backward", fix=fix)
        gp = [p.new_zeros(()).expand(p.shape) if g is None else g for g, p in zip(given, product, strict=True)]
        lengths = self._find_lengths(inputs)
        grads: list[Tensor | None] = [None] * len(inputs)
        for over, first, count in (("cols", 0, self.sides[0]), ("rows", self.sides[0], self.sides[1])):
            wanted = [k for k in range(first, first + count) if needs[k]]
            if not wanted:
                continue
            rows, cols = ("kept", "folded") if over == "cols" else ("folded", "kept")
            fields = [
                *_list_fields("a", inputs[: self.sides[0]], rows),
                *_list_fields("b", inputs[self.sides[0] :], cols),
            ]
            fields += [*_list_fields("p", product, rows, raised=True), *_list_fields("gp", gp, rows, raised=True)]
            out = tuple(torch.empty(inputs[k].shape, dtype=inputs[k].dtype, device=inputs[k].device) for k in wanted)
            self._run("gradient", fields, out, lengths, over, tuple(wanted))
            for k, grad in zip(wanted, out, strict=True):
                grads[k] = grad
        return tuple(grads)

    def _find_lengths(self, inputs: Tensors) -> tuple[int, int]:
        count = sum(self.sides)
        if len(inputs) != count or not all(isinstance(x, Tensor) for x in inputs):
            words = f"{self.sides[0]} row and {self.sides[1]} column tensors"
            raise ArgumentError(detail=f".apply was given {len(inputs)} arguments", fix=f"{self.name} takes {words}")
        if not kernels_run_on(inputs[0].device) or any(x.device != inputs[0].device for x in inputs):
            devices = ", ".join(str(x.device) for x in inputs)
            raise EngineError(
                detail=f"{self.name}'s tile functions are Triton's, its tensors on {devices}",
                fix="Give tensors on one GPU (TRITON_INTERPRET=1, set before Triton is imported, runs them on a CPU)",
            )
        for x in inputs:
            if x.is_complex():
                raise DTypeError(detail=f"{self.name} was given {str(x.dtype)[6:]}", fix="Give real numbers")
            if not _fits(x):
                fix = f"Give a number or a vector of 1 to {WIDEST} features per row and per column"
                raise ShapeError(detail=f"{self.name} was given shape {list(x.shape)}", fix=fix)
        a, b = ({len(x) for x in side} for side in (inputs[: self.sides[0]], inputs[self.sides[0] :]))
        if len(a) > 1 or len(b) > 1:
            detail = f"{self.name}'s row tensors have {sorted(a)} rows, its column tensors {sorted(b)}"
            raise ShapeError(detail=detail, fix="Give all of a side the same length")
        return a.pop(), b.pop()

    def _check_start(self, product: Any, rows: int) -> Tensors:
        count = _count_arguments(self.binary_reduce) // 2
        good = isinstance(product, (tuple, list)) and len(product) == count
        if not good or not all(isinstance(p, Tensor) and _fits(p) and len(p) == rows for p in product):
            detail = f"{self.name}: init returned no tuple of {count} tensors of {rows} rows"
            fix = f"Return the identity: [rows] or [rows, features], at most {WIDEST}, for each part of the product"
            raise ShapeError(detail=detail, fix=fix)
        return tuple(product)

    def _run(
        self,
        what: str,
        fields: list[Field],
        out: Tensors,
        lengths: tuple[int, int],
        over: str,
        wanted: tuple[int, ...] = (),
    ) -> None:
        """Launch a kernel that owns rows (``over="cols"``) or columns, and writes ``out``."""
        kept, folded = lengths if over == "cols" else lengths[::-1]
        tile = self.tiles if over == "cols" else self.tiles[::-1]
        if not kept:
            return
        floating = tuple(f.tensor.is_floating_point() for f in fields[: sum(self.sides)])
        names = ("proj_fold", "binary_reduce") if what == "fold" else ("proj_fold_bwd",)
        functions = tuple((n, getattr(self, n)) for n in names)
        text = _write_text(what, self.name, tuple(f.form for f in fields), over, floating, wanted)
        arguments: list[Any] = list(out)
        for f in fields:
            arguments += [f.tensor, *f.tensor.stride()]
        plan = KernelPlan(*tile, 4 if tile[0] * tile[1] < 2**14 else 8, 2)
        call = fold_kernel.KernelCall(
            kernel=Kernel(f"{what}_over_{over}", text, (), functions=functions),
            plan=plan,
            grid=-(-kept // tile[0]),
            arguments=(*arguments, kept, folded),
            wide=True,
            precision="ieee",  # unused: tile functions say themselves how they multiply
            ragged=True,
            device=fields[0].tensor.device,
        )
        try:
            fold_kernel.execute(call)
        except Exception as error:
            explained = self._explain(error)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, error: Exception) -> Exception | None:
        """The error that a user sees in place of Triton's own; None for others."""
        kind = type(error).__name__
        if kind == "OutOfResources":
            tiles = " × ".join(map(str, self.tiles))
            return EngineError(
                detail=f"{self.name}: tiles of {tiles} do not fit: {error}", fix="Give a smaller islice or jslice"
            )
        if kind not in _BROKEN:
            return None
        said = str(error).strip().splitlines() or [kind]
        return ArgumentError(
            detail=f"{self.name}: Triton does not take its tile functions: {said[-1]}",
            fix="They return a block per product, or per floating input, in the shape of its tile",
        )


def _fits(x: Tensor) -> bool:
    """True when a tensor is a number or a vector per row."""
    return x.dim() == 1 or (x.dim() == 2 and 0 < x.shape[1] <= WIDEST)


def _count_arguments(function: Any) -> int:
    """How many arguments a kernel function must be given."""
    return sum(p.default is p.empty for p in inspect.signature(function.fn).parameters.values())


# What a kernel is given ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What a text depends on of a tensor."""

    name: str
    side: str  # "kept" or "folded"
    width: int  # its features; 0: a number
    kind: str  # the type in which such numbers are added up
    raised: bool  # whether it is read in that type


@dataclass(frozen=True)
class Field:
    """A tensor and its form."""

    form: Form
    tensor: Tensor


def _list_fields(name: str, tensors: Sequence[Tensor], side: str, raised: bool = False) -> list[Field]:
    found = []
    for k, t in enumerate(tensors):
        kind = "tl.float32" if t.dtype in matmul.SIXTEEN else f"tl.{_TYPES.get(t.dtype, str(t.dtype)[6:])}"
        found.append(Field(Form(f"{name}{k}", side, t.shape[1] if t.dim() == 2 else 0, kind, raised), t))
    return found


_TYPES = {torch.bool: "int1"}  # the others have torch's names


# Its text ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _write_text(
    what: str, name: str, forms: tuple[Form, ...], over: str, floating: tuple[bool, ...], wanted: tuple[int, ...]
) -> str:
    """The text of a kernel around the user's functions, which it finds in its module by their role's name."""
    kept, folded = ([f for f in forms if f.side == side] for side in ("kept", "folded"))
    outs = [f.name for f in forms if f.name[0] == "p"] if what == "fold" else [f"g{k}" for k in wanted]
    strides = [n for f in forms for n in (f"{f.name}_ptr", f"{f.name}_s", *([f"{f.name}_f"] if f.width else []))]
    arguments = [*(f"{o}_out" for o in outs), *strides, "kept_size", "folded_size"]
    inputs = forms[: len(floating)]
    before, step = _fold(forms, inputs) if what == "fold" else _write_gradient(forms, inputs, floating, wanted)
    inside = "kept_in[:, None] & folded_in[None, :]" if over == "cols" else "folded_in[:, None] & kept_in[None, :]"
    stored = {f.name: f.width for f in forms} | {f"g{k}": inputs[k].width for k in wanted}
    lines = [
        f'"""{what.capitalize()} over {over} of {name}, around tile functions of its own. Written by monoidreduce."""',
        "",
        "import triton",
        "import triton.language as tl",
        "",
        "",
        f"@triton.jit(do_not_specialize={['kept_size', 'folded_size']!r})",
        f"def {what}_over_{over}(",
        *(f"    {argument}," for argument in arguments),
        f"    {', '.join(f'{c}: tl.constexpr' for c in CONSTANTS)},",
        "):",
        "    kept_at = tl.program_id(0).to(tl.int64) * KEPT + tl.arange(0, KEPT)",
        "    kept_in = kept_at < kept_size",
        *(f"    {_load(f)}" for f in kept),
        *(f"    {line}" for line in before),
        "    for start in range(0, folded_size, FOLDED):",
        "        folded_at = tl.cast(start, tl.int64) + tl.arange(0, FOLDED)",
        "        folded_in = folded_at < folded_size",
        *(f"        {_load(f)}" for f in folded),
        f"        inside = {inside}",
        *(f"        {line}" for line in step),
        *(f"    {_store(o, stored[o])}" for o in outs),
        "",
    ]
    return "\n".join(lines)


def _fold(forms: tuple[Form, ...], inputs: tuple[Form, ...]) -> tuple[list[str], list[str]]:
    """The product was read as the identity; a tile's own is combined with it."""
    names, products = [f.name for f in inputs], [f for f in forms if f.name[0] == "p"]
    own, running = ", ".join(f"h{f.name}" for f in products), ", ".join(f.name for f in products)
    raised = ", ".join(f"h{f.name}.to({f.kind})" for f in products)
    return [], [
        f"{own} = proj_fold({', '.join(names)}, inside)",
        *(_assert(f"h{f.name}", f.width, "proj_fold") for f in products),
        f"{running} = binary_reduce({running}, {raised})",
        *(f"{f.name} = {f.name}.to({f.kind})" for f in products),
    ]


def _write_gradient(
    forms: tuple[Form, ...], inputs: tuple[Form, ...], floating: tuple[bool, ...], wanted: tuple[int, ...]
) -> tuple[list[str], list[str]]:
    """What every tile gives the wanted inputs, added up."""
    found = ", ".join(f"d{k}" for k, is_float in enumerate(floating) if is_float)
    shapes = {k: f"[KEPT, {pad_width(inputs[k].width)}]" if inputs[k].width else "[KEPT]" for k in wanted}
    return [f"g{k} = tl.zeros({shape}, {inputs[k].kind})" for k, shape in shapes.items()], [
        f"{found} = proj_fold_bwd({', '.join(f.name for f in forms)}, inside)",
        *(_assert(f"d{k}", inputs[k].width, "proj_fold_bwd") for k in wanted),
        *(f"g{k} += d{k}.to({inputs[k].kind})" for k in wanted),
    ]


def _assert(name: str, width: int, source: str) -> str:
    """A block in its tile's shape: nothing is broadcast in silence."""
    features = f" and {name}.shape[1] == {pad_width(width)}" if width else ""
    fits = f"len({name}.shape) == {1 + bool(width)} and {name}.shape[0] == KEPT{features}"
    return f'tl.static_assert({fits}, "{source} returned a block that is not in its tile\'s shape")'


def _load(f: Form) -> str:
    """A tile of a tensor; what does not exist is 0."""
    place, mask = f"{f.name}_ptr + {f.side}_at * {f.name}_s", f"{f.side}_in"
    if f.width:
        lane = f"tl.arange(0, {pad_width(f.width)})[None, :]"
        place = f"{f.name}_ptr + {f.side}_at[:, None] * {f.name}_s + {lane} * {f.name}_f"
        mask = f"{f.side}_in[:, None] & ({lane} < {f.width})"
    raised = f".to({f.kind})" if f.raised else ""
    return f"{f.name} = tl.load({place}, mask={mask}, other=0){raised}"


def _store(name: str, width: int) -> str:
    if not width:
        return f"tl.store({name}_out + kept_at, {name}, mask=kept_in)"
    lane = f"tl.arange(0, {pad_width(width)})[None, :]"
    place, mask = f"{name}_out + kept_at[:, None] * {width} + {lane}", f"kept_in[:, None] & ({lane} < {width})"
    return f"tl.store({place}, {name}, mask={mask})"
