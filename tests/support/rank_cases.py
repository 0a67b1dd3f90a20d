"""A layer of the zoo divided over ranks: each rank's shard, and how the shards' results are joined to be compared."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from monoidreduce.engines.ranks.agreement import _shard_ranges
from tests.support.comparison import Result, is_float, run
from tests.support.layers import BY_NAME, ZOO

PER_PAIR = [layer for layer in ZOO if any(p.axis == "pairs" for p in layer.parameters)]
DIVISIONS = [("rows",), ("cols",), ("rows", "cols")]


@dataclass(frozen=True)
class Side:
    """Which axis a tensor has, and whether it is a vector: enough to cut it."""

    axis: str | None
    feature: str | None


@dataclass(frozen=True)
class Case:
    layer: str
    divided: tuple[str, ...]
    world: int
    rows: int = 29
    cols: int = 41
    seed: int = 0
    dtype: torch.dtype = torch.float64
    order: str = "contiguous"
    slices: int | str | None = None
    empty: bool = True  # some ranks may have nothing
    cotangents: list[Tensor] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)

    @property
    def args(self) -> tuple:
        return BY_NAME[self.layer].args(self.rows, self.cols, self.seed, self.dtype)

    def __repr__(self) -> str:
        return f"{self.layer}-{'+'.join(self.divided)}-{self.world}-{self.order}-{self.slices}"


def lengths(total: int, case: Case) -> list[int]:
    """Ragged: random cuts, so that some ranks have little and, where allowed, one has nothing."""
    chance = random.Random(f"{case.seed} {total} {case.world}")
    least = 0 if case.empty else 1
    free = total - least * case.world
    ends = sorted(chance.randint(0, free) for _ in range(case.world - 1))
    found = [b - a + least for a, b in zip([0, *ends], [*ends, free], strict=True)]
    if case.empty and case.world > 2:
        found[1] += found[case.world - 1]
        found[case.world - 1] = 0
    return found


def index(total: int, case: Case, rank: int) -> Tensor:
    return torch.cat([torch.arange(a, b) for a, b in _shard_ranges(lengths(total, case), case.order)[rank]])


def cuts(value: Tensor, side: Any, case: Case) -> list[int]:
    """The axes of a tensor that are divided; of what is given per pair only the rows, in a ring, and none of size 1."""
    last = value.dim() - 1 - (side.feature is not None)
    if side.axis != "pairs":
        return [last] if side.axis in case.divided else []
    axes = ["rows"] if case.divided == ("rows", "cols") else list(case.divided)
    found = [last - 1 if axis == "rows" else last for axis in axes]
    return [at for at in found if value.shape[at] != 1]


def part(value: Any, side: Any, case: Case, rank: int, world: int) -> Any:
    """A rank's part of an argument, a cotangent or a result."""
    if isinstance(value, Tensor):
        for axis in cuts(value, side, case):
            value = value.index_select(axis, index(value.shape[axis], case, rank))
    return value


def prepared(case: Case) -> Case:
    """With the cotangents of its results, rounded to the type of the case."""
    layer = BY_NAME[case.layer]
    args = case.args
    outputs = layer.op._prepare(args, {})[0].outputs
    sides = [Side("rows" if e.rows else "cols" if e.cols else None, e.feature) for e in outputs]
    values = run(layer.op, args).values.values()
    gen = torch.Generator().manual_seed(11)
    cotangents = [torch.randn(v.shape, generator=gen, dtype=torch.float64).to(case.dtype) for v in values]
    return replace(case, cotangents=cotangents, sides=sides)


def joined(case: Case, answers: list[dict[str, list[Tensor]]]) -> Result:
    """The whole result from all ranks' parts; what is not divided must be the same on all of them, to the bit."""
    floats = [(k, p, a) for k, (p, a) in enumerate(zip(BY_NAME[case.layer].parameters, case.args, strict=False))]
    floats = [(k, Side(p.axis, p.feature), a) for k, p, a in floats if is_float(a)]
    values = [_join([a["values"][k] for a in answers], side, case) for k, side in enumerate(case.sides)]
    grads = [_join([a["grads"][n] for a in answers], side, case, a) for n, (_, side, a) in enumerate(floats)]
    return Result(
        {f"value {k}": v for k, v in enumerate(values)},
        {f"gradient {k}": g for (k, _, _), g in zip(floats, grads, strict=True)},
    )


def _join(parts: list[Tensor], side: Side, case: Case, whole: Tensor | None = None) -> Tensor:
    axes = cuts(parts[0] if whole is None else whole, side, case)
    if not axes:
        for other in parts[1:]:
            assert torch.equal(parts[0].nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)), "ranks differ"
        return parts[0]
    (axis,) = axes
    together = torch.cat(parts, axis)
    order = torch.cat([index(together.shape[axis], case, r) for r in range(case.world)])
    return torch.empty_like(together).index_copy_(axis, order, together)
