"""Dense or tiled: whether a call under the engine ``auto`` builds its matrix of pairs or runs by passes over tiles.

Decided once for a call's shapes, types and budget. A matrix of pairs is built only up to a fixed size
(``call_cost.DENSE_LIMIT``), or up to the budget that was given, and ``op.explain`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..engines import dense, triton
from ..engines.auto import planner
from ..engines.common import oom_retry
from ..engines.common.evaluate import Sizes
from ..plan import budget, plan_records, schedule
from ..program.lower import Lowered
from ..tuning import tuner
from . import call_context, call_cost


@dataclass
class DenseOrTiled:
    """A call of one program on arguments of one kind, by either path; ``names``: those of its inputs, in order."""

    program: Lowered
    names: tuple[str, ...]
    sizes: Sizes
    numbers: frozenset[str]  # inputs that are Python numbers
    passes: Callable[..., list[Any]]  # runs by passes over tiles
    frozen: bool  # the passes are recorded launches: dense then runs only if a followed choice says so
    decided: dict[tuple, bool] = field(default_factory=dict)

    def __call__(self, *given: Any) -> list[Any]:
        if self.frozen and not schedule.is_following() and not tuner.is_recording():
            return self.passes(*given)
        asks = torch.is_grad_enabled() and call_context.need_gradient(given)
        tuner.note_call(self, given, asks)
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
        if not _are_plain(given):
            return False
        key = (asks, budget.requested(), budget.shrink_factor(), plan_records.generation())
        found = self.decided.get(key)
        if found is None or schedule.is_following():
            found = runs_dense(self.program, dict(zip(self.names, given, strict=True)), self.sizes, asks)
            if not schedule.is_following():
                self.decided[key] = found
        return found


def may_be_dense(program: Lowered, sizes: Sizes) -> bool:
    """True if the matrix of pairs is small enough to be built, and the program has a dense form.

    Never on a GPU with kernels: at small sizes launches dominate, and a fold is one launch, the dense form many."""
    if triton.launches_on(sizes.device):
        return False
    size = call_cost.count_matrix_bytes(sizes)
    return (
        0 < size <= (budget.requested() or call_cost.DENSE_LIMIT)
        and budget.shrink_factor() == 1
        and dense.has_dense_form(program)
    )


def runs_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """True if a call runs dense: as followed, else if that is allowed and was tuned, or is predicted, to be faster."""
    if schedule.is_following():
        followed = schedule.get_followed("call")
        return followed is not None and followed.schedule == "dense" and dense.has_dense_form(program)
    if not may_be_dense(program, sizes):
        return False
    tuned = plan_records.recall_choice(planner.call_key(program, inputs.values(), sizes, backward))
    if tuned is not None:
        return tuned.schedule == "dense"
    found = call_cost.estimate_program(program, inputs, sizes, backward, closely=False)
    return found.chosen.schedule == "dense"


def _are_plain(given: Sequence[Any]) -> bool:
    """True if these are plain tensors and no transform or tracer is active, which must see folds."""
    if call_context.is_transformed() or call_context.is_traced():
        return False
    return all(type(v) in call_context.PLAIN for v in given if isinstance(v, Tensor))
