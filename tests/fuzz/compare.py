"""Runs one program by the library and by plain torch, and says what differs: values, types, shapes, gradients."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

import monoidreduce as mr
from monoidreduce.plan.schedule import Choice, follow

from .programs import DTYPES, Program, Run, flat
from .tree import Node

# Allowed difference, relative to the largest number of a tensor, beside that of plain torch in the same precision.
FLOOR = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# A float64 program that cancels may lose digits; how many is seen from what plain torch loses in float32.
CANCELLED = 2e-6


@dataclass(frozen=True)
class Failure:
    kind: str  # what sort of failure: a shrunk program must fail in the same way
    detail: str


def check(program: Program) -> Failure | None:
    """What is wrong with the library's results for this program; None if nothing is."""
    try:
        reference = _reference(program)
    except Exception as error:  # a mistake of the fuzzer itself
        return Failure("plain torch failed", f"{error}\n{traceback.format_exc()}")
    try:
        with warnings.catch_warnings(), _settings(program):
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", message=".* encountered in", category=RuntimeWarning)  # numpy's, of inf
            warnings.filterwarnings("ignore", category=mr.FallbackWarning)  # a kernel is not promised for everything
            found = _library(program)
    except Exception as error:
        if program.run.mode == "inplace" and "modified by an inplace operation" in str(error):
            return None  # as torch itself would refuse
        first = re.sub(r"\(\w+\.py, line", "(file, line", str(error).splitlines()[0]) if str(error) else ""
        kind = f"raised {type(error).__name__}: {re.sub(r'[0-9]+', '#', first)[:60]}"
        return Failure(kind, f"{kind}\n{traceback.format_exc()}")
    return _compared(program, found, reference)


@contextlib.contextmanager
def _settings(program: Program) -> Iterator[None]:
    run = program.run
    with mr.use(engine=run.engine):
        if run.tile is None:
            yield
        else:
            with follow(Choice("flash", (("tile", run.tile),))):
                yield


# The two sides -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """Named tensors: outputs, gradients, second gradients."""

    tensors: dict[str, Tensor]


def _reference(program: Program) -> list[Results]:
    """Plain torch in float64 and, for other types, in the program's own: the error that rounding makes."""
    kind = DTYPES[program.dtype]
    kinds = [torch.float64] if kind == torch.float64 else [torch.float64, kind]
    return [_plain(program, k) for k in kinds]


def _plain(program: Program, dtype: torch.dtype) -> Results:
    def outputs(*arguments: Any) -> list[Tensor]:
        return program.expected(list(arguments), dtype)

    return _differentiated(program, outputs, program.run.second, dtype)


def _library(program: Program) -> Results:
    mode = program.run.mode
    op = program.op()
    names = [p.name for p in program.params]

    def outputs(*arguments: Any) -> list[Tensor]:
        if program.seed % 7 == 0:  # by keyword, in another order
            return flat(op(**dict(reversed(list(zip(names, arguments, strict=True))))))
        return flat(op(*arguments))

    if mode == "checkpoint":
        call: Callable[..., Any] = lambda *a: torch.utils.checkpoint.checkpoint(outputs, *a, use_reentrant=False)
        return _differentiated(program, call, False)
    if mode == "total":
        total: Callable[..., Any] = lambda *a: flat(op.total(*a))
        return _differentiated(program, total, False)
    if mode == "compile":
        torch._dynamo.reset()
        compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
        return _differentiated(program, lambda *a: flat(compiled(*a)), False)
    if mode == "reuse":  # the same op object has been called before: other sizes, another type, without gradients
        sizes = replace(program.sizes, batch=(2,), rows=program.sizes.rows + 1, cols=program.sizes.cols + 2)
        other = replace(program, sizes=sizes, dtype="float32" if program.dtype == "float64" else "float64")
        _differentiated(replace(other, run=Run()), outputs, False)
        with torch.no_grad():
            outputs(*program.arguments(seed=program.seed + 1))
    if mode == "repeat":
        runs = [_differentiated(program, outputs, False) for _ in range(3)]
        for again in runs[1:]:
            for name, x in runs[0].tensors.items():
                worst = _error(again.tensors[name], x)
                scale = 1 + _largest(x)
                if worst > 1e-3 * FLOOR[DTYPES[program.dtype]] * scale:
                    raise AssertionError(f"{name} differs from that of the first call by {worst:.3g}")
        return runs[-1]
    return _differentiated(program, outputs, program.run.second)


def _differentiated(
    program: Program, outputs: Callable[..., list[Tensor]], second: bool, dtype: torch.dtype | None = None
) -> Results:
    """Outputs, gradients for one random cotangent each, and for one of those the gradients again."""
    plain = dtype is not None
    mode = program.run.mode
    if mode == "vmap":
        arguments, found = _mapped(program, outputs, plain, dtype)
    else:
        arguments = program.arguments(dtype)
        found = outputs(*arguments)
    if plain and mode == "total":
        found = [x.sum() for x in found]
    if mode == "inplace":
        halved = [x.is_floating_point() for x in found]
        if plain:
            found = [x * 0.5 if h else x for x, h in zip(found, halved, strict=True)]
        else:
            for x, h in zip(found, halved, strict=True):
                if h:
                    x.mul_(0.5)
    tensors = {f"output {k}": x.detach().clone() for k, x in enumerate(found)}
    names = [p.name for p in program.params if p.grad]
    inputs = [a for p, a in zip(program.params, arguments, strict=True) if p.grad]
    if not inputs:
        return Results(tensors)
    if mode == "grad" and not plain:
        return Results(tensors | _transformed(program, outputs, arguments))
    roots, order = found, "gradient"
    for last in (True,) if not second else (False, True):
        gs = _cotangents(roots, program.seed)
        live = [(y, g) for y, g in zip(roots, gs, strict=True) if y.requires_grad]
        grads: Sequence[Tensor | None] = [None] * len(inputs)
        if live:
            ys, cotangents = zip(*live, strict=True)
            grads = torch.autograd.grad(ys, inputs, cotangents, create_graph=not last, allow_unused=True)
        full = [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
        tensors |= {f"{order} of {n}": g.detach().clone() for n, g in zip(names, full, strict=True)}
        roots, order = full, "second gradient"
    return Results(tensors)


def _mapped(
    program: Program, outputs: Callable[..., list[Tensor]], plain: bool, dtype: torch.dtype | None
) -> tuple[list[Any], list[Tensor]]:
    """Two sets of arguments side by side: torch.vmap on the library's side, one call for each on torch's."""
    one, two = program.arguments(dtype), program.arguments(dtype, program.seed + 1)
    number = [p.axis == "number" for p in program.params]
    stacked = [
        a if n else torch.stack([a.detach(), b.detach()]).requires_grad_(a.requires_grad)
        for a, b, n in zip(one, two, number, strict=True)
    ]
    if plain:
        calls = [outputs(*(x if n else x[k] for x, n in zip(stacked, number, strict=True))) for k in range(2)]
        return stacked, [torch.stack(pair) for pair in zip(*calls, strict=True)]
    mapped = torch.vmap(lambda *a: tuple(outputs(*a)), in_dims=tuple(None if n else 0 for n in number))
    return stacked, list(mapped(*stacked))


def _transformed(program: Program, outputs: Callable[..., list[Tensor]], arguments: list[Any]) -> dict[str, Tensor]:
    """The gradients by torch.func.grad."""
    at = [k for k, p in enumerate(program.params) if p.grad]

    def loss(*inputs: Tensor) -> Tensor:
        given = list(arguments)
        for k, x in zip(at, inputs, strict=True):
            given[k] = x
        found = outputs(*given)
        total = torch.zeros((), dtype=DTYPES[program.dtype])
        for y, g in zip(found, _cotangents(found, program.seed), strict=True):
            if y.is_floating_point():
                total = total + (y * g).sum()
        return total

    grads = torch.func.grad(loss, argnums=tuple(range(len(at))))(*(arguments[k].detach() for k in at))
    return {f"gradient of {program.params[k].name}": g for k, g in zip(at, grads, strict=True)}


def _cotangents(roots: Sequence[Tensor], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for y in roots:
        g = torch.randint(-4, 5, y.shape, generator=generator) * 0.25
        found.append(g.to(y.dtype if y.is_floating_point() else torch.float64))
    return found


# The comparison ------------------------------------------------------------------------------------------------------


def _compared(program: Program, found: Results, reference: list[Results]) -> Failure | None:
    truth = reference[0].tensors
    kind = DTYPES[program.dtype]
    largest = max((_largest(x) for n, x in truth.items() if n.startswith("output")), default=0.0)
    for name, expected in truth.items():
        got = found.tensors.get(name)
        what = name.split(" of ")[0].split(" ")[0] if "second" not in name else "second"
        if got is None:
            return Failure(f"{what} missing", f"{name} is missing")
        if got.shape != expected.shape:
            return Failure(f"{what} shape", f"{name} has shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
        if what == "output" and program.run.mode != "total":
            wrong = _wrong_dtype(program.outputs[int(name.split()[1])], got, expected, kind)
            if wrong:
                return Failure("output dtype", f"{name}: {wrong}")
        own = reference[-1].tensors[name]
        # a gradient that cancels is as exact as the numbers that it is made of
        size = 1 + max(_largest(expected), largest if what != "output" else 0.0)
        failure = _apart(program, what, name, got, expected, own, kind, size)
        if failure is not None:
            return failure
    return None


def _wrong_dtype(node: Node, got: Tensor, expected: Tensor, kind: torch.dtype) -> str:
    wanted = {expected.dtype}
    if expected.is_floating_point():
        wanted = {kind} if kind in (torch.float64, torch.float32) else {kind, torch.float32}
        if kind in (torch.bfloat16, torch.float16) and node.feature is None:
            wanted = {torch.float32}
    return "" if got.dtype in wanted else f"has type {got.dtype}, expected {wanted}"


def _apart(
    program: Program, what: str, name: str, got: Tensor, expected: Tensor, own: Tensor, kind: torch.dtype, scale: float
) -> Failure | None:
    if not expected.is_floating_point():
        if torch.equal(got, expected):
            return None
        return Failure(f"{what} differs", f"{name}: got\n{got}\nexpected\n{expected}")
    finite = expected.isfinite()
    if what != "output":
        finite &= own.isfinite()  # what plain torch cannot differentiate in this precision is not asked of us
    if what == "output":
        unequal = ~finite & ~((got == expected) | (got.isnan() & expected.isnan()))
        if unequal.any():
            return Failure(f"{what} differs", f"{name}: got\n{got}\nexpected\n{expected}")
    got64, expected = got.double()[finite], expected[finite]
    if not expected.numel():
        return None
    error = (got64 - expected).abs().max().item()
    rounded = (own.double()[finite] - expected).abs().nan_to_num(0.0, 0.0).max().item()
    allowed = FLOOR[kind] * scale + 4 * rounded
    if error <= allowed:
        return None
    if kind == torch.float64 and error < 1e-3 * scale:
        single = _plain(program, torch.float32).tensors[name].double()[finite]
        allowed += CANCELLED * (single - expected).abs().nan_to_num(1.0).max().item()
        if error <= allowed:
            return None
    return Failure(
        f"{what} differs",
        f"{name} is wrong by {error:.3g}, allowed {allowed:.3g}: got\n{got}\nexpected\n{own}",
    )


def _largest(x: Tensor) -> float:
    x = x.double()
    x = x[x.isfinite()]
    return x.abs().max().item() if x.numel() else 0.0


def _error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return 0.0
    return _largest((a.double() - b.double())[~same]) if a.is_floating_point() else float("inf")
