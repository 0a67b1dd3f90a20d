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

from ..engines import dense, triton
from ..engines.auto import tuned_plans
from ..engines.common import oom_retry
from ..engines.common.evaluate import Sizes
from ..plan import budget, plan_records, schedule
from ..program.lower import Lowered
from ..tuning import tuner
from . import call_cost, gradient_programs


@dataclass
class Roads:
    """One program on arguments of one kind; ``names`` are those of its inputs, in order."""

    program: Lowered
    names: tuple[str, ...]
    sizes: Sizes
    numbers: frozenset[str]  # the inputs that are Python numbers
    passes: Callable[..., list[Any]]  # runs by passes
    frozen: bool  # whether passes are launches: a matrix of pairs is then built only where that is asked for
    decided: dict[tuple, bool] = field(default_factory=dict)

    def __call__(self, *given: Any) -> list[Any]:
        if self.frozen and schedule.followed.get() is None and not tuner.recording():
            return self.passes(*given)
        asks = torch.is_grad_enabled() and gradient_programs.asks(given)
        tuner.note(self, given, asks)
        if not self._is_dense(given, asks):
            return self.passes(*given)
        try:
            return dense.write_dense(self.program, self.numbers).run(self.sizes, *given)
        except Exception as error:
            if not oom_retry.is_out_of_memory(error):
                raise
        oom_retry.release_memory(self.sizes.device)
        return self.passes(*given)

    def may_be_dense(self) -> bool:
        return may_be_dense(self.program, self.sizes)

    def _is_dense(self, given: Sequence[Any], asks: bool) -> bool:
        if not _untouched(given):
            return False
        told = schedule.followed.get()
        key = (asks, budget.asked(), budget.parts(), plan_records.generation())
        found = self.decided.get(key)
        if found is None or told is not None:
            found = is_dense(self.program, dict(zip(self.names, given, strict=True)), self.sizes, asks)
            if told is None:
                self.decided[key] = found
        return found


def may_be_dense(program: Lowered, sizes: Sizes) -> bool:
    """Whether the matrix of pairs is small enough to be built, and the program has a dense form. Not where kernels run:
    a fold is one launch there, the dense form many, and at these sizes launches are what is waited for."""
    if triton.launches_on(sizes.device):
        return False
    size = call_cost.matrix(sizes)
    return 0 < size <= (budget.asked() or call_cost.DENSE) and budget.parts() == 1 and dense.has_dense_form(program)


def is_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """Whether a call runs whole: as followed, else where it is allowed to and was measured, or is thought, faster."""
    if schedule.followed.get() is not None:
        told = schedule.told("call")
        return told is not None and told.schedule == "dense" and dense.has_dense_form(program)
    if not may_be_dense(program, sizes):
        return False
    tuned = tuned_plans.found(tuned_plans.key_of_call(program, inputs.values(), sizes, backward))
    if tuned is not None:
        return tuned.schedule == "dense"
    found = call_cost.of_program(program, inputs, sizes, backward, closely=False)
    return found.chosen.schedule == "dense"


_KEYS = torch._C._TorchDispatchModeKey
_TRACERS = (_KEYS.FAKE, _KEYS.PROXY, _KEYS.FUNCTIONAL)


def _untouched(given: Sequence[Any]) -> bool:
    """Whether these are plain tensors and nothing transforms or traces them: compilers and transforms see folds."""
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() and any(torch._C._get_dispatch_mode(k) is not None for k in _TRACERS):
        return False
    return all(type(v) in gradient_programs.PLAIN for v in given if isinstance(v, Tensor))
