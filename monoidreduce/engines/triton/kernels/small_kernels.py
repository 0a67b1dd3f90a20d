"""Combines the partial results of splits in one kernel, where torch takes up to twenty operations.

The arithmetic, and the kernels, are those of the kinds of reduction (``combine_text``, ``combine_launches``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....program.expression import Expr
from ....reductions import KINDS
from ....reductions.base import CombineLaunch
from ...common.evaluate import Form
from ..launch import hardware
from ..launch.jit_module import Kernels, Relaunch
from ..launch.launch_recipes import Leaf, Recipe

_PARTS = 1024
_SMALL = 2**20  # bytes of parts that are held until a call is done
FEW_ROWS = 2**24  # the same of few rows, whose steps are so short that recording them counts more
_WIDE = 4096  # numbers at a time from which on an instance has eight warps
_kernels = Kernels(
    "The results of a whole from those of its parts.", "".join(kind.combine_text for kind in KINDS.values())
)


class CombiningLaunch(NamedTuple):
    """A launch that makes these of a reduction's results; its leaves are those of the parts."""

    recipe: Recipe
    written: tuple[int, ...]

    def offset(self, first: int) -> CombiningLaunch:
        """The same where the reduction's results are not the first."""
        given = (v._replace(at=v.at + first) if isinstance(v, Leaf) else v for v in self.recipe.arguments)
        return CombiningLaunch(self.recipe._replace(arguments=tuple(given)), tuple(first + k for k in self.written))


def combine_splits(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """A reduction's results from those of its parts ``[parts, *batch, length(, features)]``; None where there is no
    kernel for it."""
    made = allocate_results(r, stacked)
    if made is None:
        return None
    for task in _find_launches(r, stacked) or ():
        _launch(task, task.given(made, stacked))
    return made


def _launch(task: CombineLaunch, given: tuple) -> Relaunch | None:
    constants = dict(task.constants)
    if "SOME" not in constants:
        return _kernels(task.name, task.grid, given, constants)
    chained = hardware.chains_launches(given[0].device)
    options = {"num_warps": 8 if constants["ROWS"] * constants["SOME"] * constants["LANES"] > _WIDE else 4}
    options |= {"launch_pdl": True} if chained else {}
    return _kernels(task.name, task.grid, given, {**constants, "WAIT": chained}, options)


def allocate_results(r: Expr, stacked: Sequence[Tensor]) -> list[Tensor] | None:
    """Tensors for a reduction's results; None where there is no kernel for it."""
    if _find_launches(r, stacked) is None or not all([t.is_contiguous() for t in stacked]):
        return None
    return [torch.empty_like(t[0]) for t in stacked]


def recipes(
    r: Expr, stacked: Sequence[Form], held: Sequence[torch.dtype], device: torch.device, most: int = 0
) -> list[CombiningLaunch] | None:
    """How the launches are made again that write results in these types; they are made once on the way. None where
    parts are so large (more than ``most`` bytes) that they should be let go as soon as they were read."""
    if sum(math.prod(shape) * kind.itemsize for shape, kind in stacked) > (most or _SMALL):
        return None
    parts = [torch.empty(shape, dtype=kind, device=device) for shape, kind in stacked]
    todo, found = _find_launches(r, parts), []
    if todo is None:
        return None
    made = [torch.empty_like(t[0], dtype=kind) for t, kind in zip(parts, held, strict=True)]
    for task in todo:
        relaunch = _launch(task, task.given(made, parts))
        if relaunch is None:
            return None
        forms = tuple((tuple(made[k].shape), made[k].dtype) for k in task.written)
        arguments = (*(Leaf(k, True) for k in task.read), task.parts, task.rows)
        found.append(CombiningLaunch(Recipe(relaunch, forms, arguments), task.written))
    return found


def can_hold_splits(r: Expr, stacked: Sequence[Form]) -> bool:
    """True when there is a kernel for parts of these forms, and they may stay until a call is done."""
    small = sum(math.prod(shape) * kind.itemsize for shape, kind in stacked) <= _SMALL
    return small and find_launches(r.attrs[0], r.attrs[2], tuple(stacked)) is not None


def _find_launches(r: Expr, stacked: Sequence[Tensor]) -> list[CombineLaunch] | None:
    return find_launches(r.attrs[0], r.attrs[2], tuple([(tuple(t.shape), t.dtype) for t in stacked]))


@functools.lru_cache(maxsize=1024)
def find_launches(kind: str, params: tuple, stacked: tuple[Form, ...]) -> list[CombineLaunch] | None:
    """The launches for parts of these forms; None where there is no kernel for them."""
    parts = stacked[0][0][0]
    if not 0 < parts <= _PARTS or not all(math.prod(shape) for shape, _ in stacked):
        return None
    return KINDS[kind].combine_launches(params, stacked, parts)
