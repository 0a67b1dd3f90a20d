"""Arguments for an op, drawn from what it declares: the same for the same seed, of any size and type.

A vector is normal, scaled so that a product of two has standard deviation LOGIT. What a bare ``Row`` or ``Col`` holds
is not declared, so the program is read: a number compared with ``mr.col_index`` is the index of a column, two that are
compared with each other are the names of sorted groups, any other is normal. ``--set`` says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import MonoidReduceError
from ..op import Op
from ..program.declarations import Parameter
from ..program.expression import Expr, topological
from .command import CommandError
from .layers import LOGIT, SEED

FEATURES = 16  # of a letter that was given no size
NUMBERS = {float: 0.5, int: 3, bool: True}  # of a number that was given no value
_TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Sizes:
    """How large the arguments are."""

    rows: int
    cols: int
    batch: int | None = None
    features: Mapping[str, int] = field(default_factory=dict)  # "" is for every letter that is not named

    def of(self, axis: str) -> int:
        if axis in ("rows", "cols"):
            return getattr(self, axis)
        return int(axis) if axis.isdecimal() else self.features.get(axis, self.features.get("", FEATURES))


Filler = Callable[[torch.Generator, tuple[int, ...], Sizes], Tensor]


def _indices(axis: str) -> Filler:
    return lambda g, shape, sizes: torch.randint(max(1, getattr(sizes, axis)), shape, generator=g)


FILLERS: dict[str, Filler] = {
    "normal": lambda g, shape, sizes: torch.randn(shape, generator=g, dtype=torch.float64),
    "positive": lambda g, shape, sizes: torch.randn(shape, generator=g, dtype=torch.float64).abs() + 0.1,
    "uniform": lambda g, shape, sizes: torch.rand(shape, generator=g, dtype=torch.float64),
    "rows": _indices("rows"),
    "cols": _indices("cols"),
    "sorted": lambda g, shape, sizes: torch.randint(4, shape, generator=g).sort(-1).values,
    "int": lambda g, shape, sizes: torch.randint(-3, 4, shape, generator=g),
    "bool": lambda g, shape, sizes: torch.randint(2, shape, generator=g).bool(),
}


@dataclass(frozen=True)
class Recipe:
    """For each parameter of an op: the name of a filler, a number or fixed choice, or None where it is left out."""

    op: Op
    values: Mapping[str, Any]

    def draw(self, sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int = SEED) -> tuple[Any, ...]:
        """The arguments; those of floating type ask for gradients. Drawn in float64: every type rounds the same."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            _tensor(p, self.values[name], generator, sizes, dtype, device)
            if p.is_tensor and self.values[name] is not None
            else self.values[name]
            for name, p in self.op.parameters.items()
        )


def _tensor(
    p: Parameter, filler: str, generator: torch.Generator, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> Tensor:
    batch = () if sizes.batch is None else (sizes.batch,)
    shape = (*batch, *(sizes.of(axis) for axis in p.tail))
    if device.type == "meta":
        is_float = filler in ("normal", "positive", "uniform")
        kind = dtype if is_float else torch.bool if filler == "bool" else torch.int64
        return torch.empty(shape, dtype=kind, device=device)
    value = FILLERS[filler](generator, shape, sizes)
    if not value.is_floating_point():
        return value.to(device)
    scale = 1.0 if p.feature is None or not shape[-1] else (LOGIT / shape[-1] ** 0.5) ** 0.5
    return (value * scale).to(device, dtype).requires_grad_()


def recipe(op: Op, settings: Mapping[str, str]) -> Recipe:
    """What to give each parameter: what was set, else its default, else what its declaration and the body suggest."""
    unknown = [name for name in settings if name not in op.parameters]
    if unknown:
        raise CommandError(f"--set {unknown[0]}: there is no such parameter. {op!r}")
    values = {name: _value(op, p, settings.get(name)) for name, p in op.parameters.items()}
    open_ = [n for n, v in values.items() if v is Ellipsis]
    return Recipe(op, _suggested(op, values, open_))


def _value(op: Op, p: Parameter, given: str | None) -> Any:
    """One parameter's value; Ellipsis where the body must be read."""
    if p.is_tensor:
        if given is None:
            return None if p.optional else Ellipsis if p.feature is None else "normal"
        if given not in FILLERS:
            raise CommandError(f"--set {p.name}={given}: {p.name} is a {p}. Fill it with one of {', '.join(FILLERS)}")
        return given
    if given is None:
        if p.default is not ...:
            return p.default
        if p.python is None:
            raise CommandError(f"{p.name} is a fixed choice without a default. Give it with --set {p.name}=…")
        return NUMBERS[p.python]
    return _number(p, given) if p.python else given


def _number(p: Parameter, given: str) -> float | int | bool:
    try:
        return _TRUTHS[given.lower()] if p.python is bool else p.python(given)  # type: ignore[misc]
    except (ValueError, KeyError):
        raise CommandError(f"--set {p.name}={given}: {p.name} is declared {p}") from None


def _suggested(op: Op, values: dict[str, Any], open_: list[str]) -> dict[str, Any]:
    """The first of the ways to fill what is open that the body can be traced with, numbers before truth values."""
    first: MonoidReduceError | None = None
    for kinds in itertools.product(("normal", "bool", "int"), repeat=len(open_)):
        filled = values | dict(zip(open_, kinds, strict=True))
        try:
            outputs = _traced(op, filled)
        except MonoidReduceError as error:
            first = first or error
            continue
        return filled | {n: f for n, f in _compared(outputs) if n in open_ and filled[n] != "bool"}
    assert first is not None
    raise first


def _traced(op: Op, values: Mapping[str, Any]) -> tuple[Expr, ...]:
    """The body's outputs, with these values: traced on a small call, which is never run."""
    sizes = Sizes(rows=1 << 20, cols=1 << 20)  # enough for any top-k; nothing is allocated
    given = Recipe(op, values).draw(sizes, torch.float32, torch.device("meta"))
    return op._prepare(given, {})[0].outputs


def _compared(outputs: tuple[Expr, ...]) -> Iterator[tuple[str, str]]:
    """The inputs that the program compares for equality, and what to fill them with."""
    for e in topological(outputs):
        if e.op in ("eq", "ne"):
            one, other = (_bare(a) for a in e.args)
            names = [x.attrs[0] for x in (one, other) if x.op == "input"]
            axes = [x.op.removesuffix("_index") + "s" for x in (one, other) if x.op in ("row_index", "col_index")]
            if len(names) == 2:
                yield from ((name, "sorted") for name in names)
            elif names and axes:
                yield names[0], axes[0]


def _bare(e: Expr) -> Expr:
    while e.op == "cast":
        e = e.args[0]
    return e
