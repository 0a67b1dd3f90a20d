"""A lowered program as a straight line of steps, compiled once and independent of sizes.

What ``evaluate.py`` finds out node by node at every call (the order, which arguments need an axis, which numbers need
a tensor) is decided here once. Outside the passes every value lives on one side at most, so it is held as users hold
it, ``[*batch, M or N, f]``: what is fed to a fold and what comes out of one needs no view at all. Differentiable by
autograd, and traceable: a step is a torch call.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..program.expr import Expr, topological
from ..program.lower import Fold, Lowered
from ..program.primitives import PRIMITIVES
from .dense import REDUCERS
from .evaluate import Sizes, cast, from_layout, to_layout

Value = Any  # a Tensor as users hold it, or a Python number
Folder = Callable[[Fold, list[Value], Sizes], Sequence[Tensor]]
Step = Callable[[list[Value], Sizes, Folder], None]

_KINDS = {"bool": torch.bool, "int": torch.int64}
_ORDER = {"bool": 0, "int": 1, "float": 2}
# Primitives that take a Python number as their second argument, and what to call when it is the first.
_MIRRORED: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.rsub,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.gt,
    "gt": torch.lt,
    "le": torch.ge,
    "ge": torch.le,
}


@dataclass(frozen=True)
class Script:
    """Steps over slots: inputs are put into theirs, the steps run in order, outputs are taken from theirs."""

    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[Expr, int], ...]
    steps: tuple[Step, ...]
    blank: tuple[Value, ...]  # the slots before a run: constants are there already

    def run(self, values: Sequence[Value], sizes: Sizes, folder: Folder) -> list[Value]:
        """The outputs, given the inputs in order; ``folder`` runs the passes."""
        slots = list(self.blank)
        for (_, slot), value in zip(self.inputs, values, strict=True):
            slots[slot] = value
        for step in self.steps:
            step(slots, sizes, folder)
        return [slots[slot] for _, slot in self.outputs]


@functools.lru_cache(maxsize=4096)
def script(program: Lowered) -> Script:
    """Compile a program."""
    slots: dict[Expr, int] = {}
    blank: list[Value] = []
    steps: list[Step] = []

    def slot(e: Expr) -> int:
        if e not in slots:
            slots[e] = len(blank)
            blank.append(e.attrs[0] if e.op == "const" else float("nan") if e.op == "nan" else None)
        return slots[e]

    def reach(roots: Sequence[Expr]) -> None:
        for e in topological(roots, stop=done.__contains__):
            if e not in done:
                done.add(e)
                place = slot(e)
                if e.op not in ("input", "leaf", "const", "nan"):
                    steps.append(_step(e, place, [slot(a) for a in e.args]))

    done: set[Expr] = set()
    for p in program.passes:
        reach(p.feeds)
        steps.append(_pass(p.fold, [slot(e) for e in p.feeds], [[slot(e) for e in nodes] for nodes in p.results]))
        done.update(e for nodes in p.results for e in nodes)
    reach(program.outputs)
    inputs = tuple((e.attrs[0], at) for e, at in slots.items() if e.op in ("input", "leaf"))
    return Script(inputs, tuple((e, slots[e]) for e in program.outputs), tuple(steps), tuple(blank))


def _pass(fold: Fold, feeds: list[int], results: list[list[int]]) -> Step:
    def step(slots: list[Value], sizes: Sizes, folder: Folder) -> None:
        for value, places in zip(folder(fold, [slots[f] for f in feeds], sizes), results, strict=True):
            for place in places:
                slots[place] = value

    return step


def _step(e: Expr, place: int, args: list[int]) -> Step:
    """One node: its value into its slot."""
    if e.op in PRIMITIVES:
        return _primitive(e, place, args)
    evaluate = _reduce(e) if e.op == "reduce" else functools.partial(_OTHERS[e.op.removesuffix("_index")], e)
    raised = [x.dtype == "float" for x in e.args]

    def step(slots: list[Value], sizes: Sizes, folder: Folder) -> None:
        values = [_raised(slots[a], sizes) if f else slots[a] for a, f in zip(args, raised, strict=True)]
        slots[place] = evaluate(sizes, *values)

    return step


def _raised(value: Value, sizes: Sizes) -> Value:
    """16-bit inputs in the type of the arithmetic."""
    return value.to(sizes.compute) if isinstance(value, Tensor) and value.dtype != sizes.compute else value


def fit(value: Tensor, have: Expr, want: Expr) -> Tensor:
    """A view with the axes that ``want`` has and ``have`` has not, of size 1."""
    vector, side = want.feature is not None, (want.rows or want.cols) and not (have.rows or have.cols)
    if vector and have.feature is None:
        value = value.unsqueeze(-1)
    return value.unsqueeze(-2 if vector else -1) if side else value


def _primitive(e: Expr, place: int, args: list[int]) -> Step:
    primitive = PRIMITIVES[e.op]
    attributes = dict(zip(primitive.attributes, e.attrs, strict=True))
    floats = [x.dtype == "float" for x in e.args]
    views = [x.axes != e.axes for x in e.args]
    plain, mirrored = _takes_numbers(e)
    wanted = list(zip(args, e.args, floats, views, strict=True))
    is_float = e.dtype == "float"

    def step(slots: list[Value], sizes: Sizes, folder: Folder) -> None:
        values, numbers = [], 0
        for k, (slot, x, floating, view) in enumerate(wanted):
            value = slots[slot]
            if not isinstance(value, Tensor):
                numbers |= 1 << k
            else:
                if floating and value.dtype != sizes.compute:
                    value = value.to(sizes.compute)
                if view:
                    value = fit(value, x, e)
            values.append(value)
        if numbers == (1 << len(values)) - 1:
            slots[place] = _number(e, values)
        elif e.op == "cast":
            slots[place] = cast(values[0], e.attrs[0], sizes.compute)
        elif numbers in plain:
            slots[place] = primitive.torch(*values, **attributes)
        elif numbers == 1 and mirrored is not None:
            slots[place] = mirrored(values[1], values[0])
        else:
            made = [v if isinstance(v, Tensor) else filled(v, x, sizes) for v, x in zip(values, e.args, strict=True)]
            found = primitive.torch(*made, **attributes)
            slots[place] = found.to(sizes.compute) if is_float and found.dtype != sizes.compute else found

    return step


def _takes_numbers(e: Expr) -> tuple[frozenset[int], Callable[..., Any] | None]:
    """For which arguments (as bits) torch takes Python numbers as they are, and its mirror image for the first.

    Only where the tensor's class of number holds: torch would round a float beside integers to its default type.
    """
    order = [_ORDER[x.dtype] for x in e.args]
    if e.op == "where":
        alike = order[1] == order[2] != 0
        return frozenset({0, 2, 4} if alike else {0}), None
    if e.op in _MIRRORED or e.op == "div":
        second = order[0] >= order[1] and order[0] > (1 if e.op == "div" else 0)
        first = order[1] >= order[0] and order[1] > 0
        return frozenset({0, 2} if second else {0}), _MIRRORED.get(e.op) if first else None
    return frozenset({0}), None


def filled(value: Value, e: Expr, sizes: Sizes) -> Tensor:
    """A number as a tensor, filled where it is needed: no copy, no wait."""
    return torch.full((), value, dtype=_KINDS.get(e.dtype, sizes.compute), device=sizes.device)


def _number(e: Expr, values: list[Value]) -> Value:
    """Arithmetic on numbers only: exact, in float64, and it stays a number."""
    if any(isinstance(v, torch.SymInt | torch.SymFloat) for v in values):  # a length that the compiler leaves open
        if e.op in _OPEN:
            return _OPEN[e.op](*values)
        values = [int(v) if isinstance(v, torch.SymInt) else float(v) for v in values]
    return _computed(e, tuple(values), tuple(map(repr, values)))  # the texts tell -0.0 from 0.0 and 1 from True


_OPEN: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
}


@functools.lru_cache(maxsize=4096)
def _computed(e: Expr, values: tuple[Value, ...], texts: tuple[str, ...]) -> Value:
    primitive = PRIMITIVES[e.op]
    with _disable_current_modes():  # these are numbers, not a part of what is being traced
        args = [torch.tensor(v, dtype=_KINDS.get(x.dtype, torch.float64)) for v, x in zip(values, e.args, strict=True)]
        if e.op == "cast":
            return {"float": float, "int": int, "bool": bool}[e.attrs[0]](args[0].item())
        return primitive.torch(*args, **dict(zip(primitive.attributes, e.attrs, strict=True))).item()


# What is no primitive


def _reduce(e: Expr) -> Callable[..., list[Value]]:
    """A reduction of a row or column vector, which torch does: its results, in the layout of ``evaluate.py``."""
    kind, over, params = e.attrs
    vectors = [a.feature is not None for a in e.args]

    def evaluate(sizes: Sizes, *values: Value) -> list[Value]:
        ones = (1,) * len(sizes.batch)
        tensors = [
            v if isinstance(v, Tensor) else filled(v, a, sizes).expand(*ones, *((1,) * (a.feature is not None)))
            for v, a in zip(values, e.args, strict=True)
        ]
        fields = [to_layout(v, a) for v, a in zip(tensors, e.args, strict=True)]
        return REDUCERS[kind](fields, vectors, over, params, sizes.of(over))

    return evaluate


def _index(e: Expr, sizes: Sizes) -> Tensor:
    if e.op == "batch_index":
        return torch.arange(_count(sizes.batch), device=sizes.device).view(sizes.batch)
    length = sizes.rows if e.op == "row_index" else sizes.cols
    return torch.arange(length, device=sizes.device).view(*(1,) * len(sizes.batch), length)


def _count(batch: Sequence[int]) -> int:
    return functools.reduce(operator.mul, batch, 1)


def _spread(e: Expr, sizes: Sizes, x: Value) -> Value:
    count = sizes.of(str(e.attrs[0]))
    if not isinstance(x, Tensor):
        return filled(x, e, sizes).expand(*(1,) * len(sizes.batch), count)
    return x.unsqueeze(-1).expand(*x.shape, count)


_OTHERS: dict[str, Callable[..., Value]] = {
    "size": lambda e, sizes: sizes.of(e.attrs[0]),
    "row": _index,
    "col": _index,
    "batch": _index,
    "result": lambda e, sizes, found: from_layout(found[e.attrs[0]], e),
    "fsum": lambda e, sizes, x: x.sum(-1),
    "famax": lambda e, sizes, x: x.amax(-1),
    "famin": lambda e, sizes, x: x.amin(-1),
    "component": lambda e, sizes, x: x[..., e.attrs[0]],
    "spread": _spread,
}
