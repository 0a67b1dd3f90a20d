"""Which road a call takes under the engine ``auto``: by passes over the pairs, or whole where that is small and faster.

Decided once for a call's shapes, types and budget. Never silently: a matrix of pairs is built only up to a fixed size
(``costs.DENSE``), or up to the budget that was given, and ``op.explain`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..plan import budget, choice
from ..program.lower import Lowered
from . import autograd, costs, recover, whole
from .evaluate import Sizes


@dataclass
class Roads:
    """One program on arguments of one kind; ``names`` are those of its inputs, in order."""

    program: Lowered
    names: tuple[str, ...]
    sizes: Sizes
    numbers: frozenset[str]  # the inputs that are Python numbers
    passes: Callable[..., list[Any]]  # runs by passes
    decided: dict[tuple, bool] = field(default_factory=dict)

    def __call__(self, *given: Any) -> list[Any]:
        asks = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in given)
        if not self._is_dense(given, asks):
            return self.passes(*given)
        try:
            return whole.whole(self.program, self.numbers).run(self.sizes, *given)
        except Exception as error:
            if not recover.ran_out(error):
                raise
        recover.release(self.sizes.device)
        return self.passes(*given)

    def _is_dense(self, given: Sequence[Any], asks: bool) -> bool:
        told = choice.followed.get()
        key = (asks, budget.asked(), budget.parts())
        found = self.decided.get(key)
        if found is None or told is not None:
            found = is_dense(self.program, dict(zip(self.names, given, strict=True)), self.sizes, asks)
            if told is None:
                self.decided[key] = found
        return found and _untouched(given)


def is_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """Whether a call runs whole: as followed, else where it is allowed to and the model finds it faster."""
    if choice.followed.get() is not None:
        told = choice.told("call")
        return told is not None and told.schedule == "dense" and whole.has_form(program)
    size = costs.matrix(sizes)
    if not 0 < size <= (budget.asked() or costs.DENSE) or budget.parts() > 1 or not whole.has_form(program):
        return False
    found = costs.of_program(program, inputs, sizes, backward)
    return found.chosen.schedule == "dense"


def _untouched(given: Sequence[Any]) -> bool:
    """Whether these are plain tensors and nothing transforms them: compilers and transforms see folds."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return not transformed and all(type(v) in autograd.PLAIN for v in given if isinstance(v, Tensor))
