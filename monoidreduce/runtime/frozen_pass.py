"""A pass, frozen: what an engine finds out for a fold at every run is found out once for leaves of one kind.

Which kernels run is decided by the leaves' types, shapes, strides and alignment (``triton.kind``), by the signs of
numbers, and by what is asked of the process (:func:`situation`): budgets, settings, precision, plans that were tuned
since. A pass whose leaves are known to be of one kind keeps its launches by the rest. Whatever is out of the ordinary
(a plan that is followed or tried, a second attempt with less memory) takes the engine's own road, each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..engines import panel, triton
from ..engines.auto import planner
from ..engines.common import matmul
from ..engines.common.evaluate import Sizes
from ..plan import budget, plan_records, schedule
from ..program.lower import Fold
from ..tuning import tuner
from .registry import ENGINES

_MOST = 64
Results = tuple[list[Tensor], list[Tensor]]  # those asked for, and those kept for a backward
Launches = Callable[[Sequence[Any]], Results]


def situation() -> tuple | None:
    """What was asked that decides how folds run; None where something is out of the ordinary."""
    if schedule.followed.get() is not None or budget.parts() > 1 or not tuner.idle():
        return None
    asked = matmul.asked.get()
    return asked, budget.asked(), plan_records.generation(), matmul.float32_precision(), triton.overrides()


def _kernels(fold: Fold, leaves: list[Any], sizes: Sizes) -> triton.PreparedFold | None:
    return (triton.prepare_k_loop_fold if panel.is_wide(fold, sizes) else triton.prepare)(fold, leaves, sizes)


READY: dict[str, Callable[..., triton.PreparedFold | None]] = {"auto": planner.ready, "triton": _kernels}


class Pass:
    """A fold on leaves of one kind: its launches, by the situation and by the numbers among the leaves.

    ``shown``: the results that are asked for; the others are kept for a backward."""

    def __init__(self, fold: Fold, sizes: Sizes, engine: str, shown: tuple[int, ...]):
        self.fold, self.sizes, self.engine, self.shown = fold, sizes, engine, shown
        self.rest = tuple(k for k in range(len(fold.outputs)) if k not in shown)
        self.numbers: tuple[int, ...] = ()
        self.store: Any = None  # the one that the launches are from
        self.kept: dict[tuple, Launches] = {}

    def __call__(self, leaves: Sequence[Any]) -> Results:
        """The results that are shown, and the others."""
        now = situation()
        if now is None:
            return self._road(leaves)
        if self.store is not triton.prepared_folds():
            return self._first(leaves, now)
        if self.numbers:
            now += triton.describe_numbers([leaves[k] for k in self.numbers])
        kept = self.kept.get(now)
        return self._met(leaves, now) if kept is None else kept(leaves)

    def whole(self, shown: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
        """All results in order; ``rest`` may be one tensor that holds them one behind the other."""
        found: list[Any] = [None] * len(self.fold.outputs)
        for k, t in zip(self.shown, shown, strict=True):
            found[k] = t
        for k, t in zip(self.rest, rest if len(rest) == len(self.rest) else rest[0].unbind(), strict=True):
            found[k] = t
        return found

    def _road(self, leaves: Sequence[Any]) -> Results:
        return self._parted(ENGINES[self.engine](self.fold, list(leaves), self.sizes))

    def _first(self, leaves: Sequence[Any], now: tuple) -> Results:
        self.kept = {}
        self.numbers = tuple(k for k, v in enumerate(leaves) if not isinstance(v, Tensor))
        self.store = triton.prepared_folds()
        return self._met(leaves, now + triton.describe_numbers([leaves[k] for k in self.numbers]))

    def _met(self, leaves: Sequence[Any], now: tuple) -> Results:
        """Run by the engine; if launches are all that it does, they are kept, else that it is not so."""
        found = self._road(leaves)
        ready = READY[self.engine](self.fold, list(leaves), self.sizes)
        if len(self.kept) < _MOST:
            self.kept[now] = self._otherwise(leaves) if ready is None else triton.PartlyShownFold(ready, self.shown)
        return found

    def _otherwise(self, leaves: Sequence[Any]) -> Launches:
        """The engine's road or, where it is known to what it leads, that."""
        run = planner.straight(self.fold, leaves, self.sizes) if self.engine == "auto" else None
        return self._road if run is None else lambda given: self._parted(run(given))

    def _parted(self, found: list[Tensor]) -> Results:
        return [found[k] for k in self.shown], [found[k] for k in self.rest]


def freezes(engine: str, sizes: Sizes) -> bool:
    """Whether an engine's folds are launches on this device."""
    return engine in READY and bool(sizes.rows) and bool(sizes.cols) and triton.runs_on(sizes.device)
