"""``mr.tune``: records the folds of a call, tries every candidate plan on each, and stores the fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from . import tuning
from .arrays import Border
from .errors import ArgumentError
from .plan.schedule import Choice, follow
from .runtime import dispatch
from .runtime.recorder import tensors_in
from .sources import progress
from .tuning import Tuned


@dataclass(frozen=True)
class Tuning:
    """The result of tuning a call; ``print`` shows it.

    ``folds``: one entry per fold, the forward's first, and one for a call that is small enough to run dense.

    >>> import torch, monoidreduce as mr
    >>> found = mr.tune(mr.ops.maxsim, torch.randn(30, 8), torch.randn(40, 8), quiet=True)
    >>> isinstance(found, mr.Tuning) and sorted(found.as_dict())
    ['folds']
    """

    folds: tuple[Tuned, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        return {"folds": [self._plain(t) for t in self.folds]}

    @staticmethod
    def _plain(t: Tuned) -> dict[str, Any]:
        trials = [{"plan": c.choice.as_dict(), "seconds": c.seconds, "refused": c.refused} for c in t.trials]
        plain = {"fold": t.fold, "seconds": t.seconds, "safe_seconds": t.safe_seconds, "lasting": t.lasting}
        plans = {"winner": t.winner.as_dict(), "safe": t.safe.as_dict()}
        return {**plain, **plans, "key": asdict(t.key), "trials": trials}

    def __str__(self) -> str:
        return "\n".join(map(str, self.folds)) or "nothing to tune: the call folds no pairs by the engine auto"


def tune(function: Callable, *args: Any, backward: bool = True, quiet: bool = False, **kwargs: Any) -> Tuning:
    """Find the fastest plans for calls like ``function(*args)``: an op, or anything that calls ops.

    Every fold of the call, and of its gradient if ``backward``, is run with each plan that the cost model leaves close,
    on these tensors. A plan whose result differs from the safe plan's is refused, whatever its speed. Tuned plans are
    stored for all lengths up to the next power of two, on disk too (``mr.cache``). Gradients are those of the tensors
    that require one, or of all if none does. At a terminal a progress bar is shown, unless ``quiet``.

    Raises what the call raises.

    >>> import torch, monoidreduce as mr
    >>> x, w, label = torch.randn(300, 8), torch.randn(400, 8), torch.arange(300)
    >>> found = mr.tune(mr.ops.linear_cross_entropy, x, w, label, quiet=True)
    >>> all(fold.seconds <= fold.safe_seconds for fold in found.folds)
    True
    """
    if not callable(function):
        raise ArgumentError(
            detail=f"mr.tune was given {type(function).__name__}", fix="Give an op, or a function that calls ops"
        )
    border = Border()
    args = tuple(border.take(v, f"argument {k}") for k, v in enumerate(args))
    kwargs = {name: border.take(v, name) for name, v in kwargs.items()}
    recorded = record_call(function, args, kwargs, backward)
    trials = _Trials(recorded)
    for _ in progress(trials, quiet, what="tuning"):
        pass
    return Tuning((*(s.done for s, _ in trials.sessions if s.done is not None), *trials.tuned_calls))


def record_call(function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], backward: bool) -> tuning.Recording:
    """The folds that a call and its gradient run, with their leaves; run by the default plans, nothing dense."""
    given, named = _require_gradients(args, kwargs) if backward else (args, kwargs)
    with dispatch.automatic(), follow({"call": Choice("flash")}), tuning.record() as recorded:
        result = function(*given, **named)
        if backward:
            _run_backward(result, [*given, *named.values()])
    return recorded


class _Trials:
    """All trials of a recording, with a length for the progress bar."""

    def __init__(self, recorded: tuning.Recording):
        self.sessions = list(tuning.make_sessions(recorded.folds))
        self.calls = {id(call[0]): call for call in recorded.calls}.values()
        self.tuned_calls: list[Tuned] = []

    def __len__(self) -> int:
        return sum(len(s) for s, _ in self.sessions) + len(self.calls)

    def __iter__(self) -> Iterator[Any]:
        for session, fold_run in self.sessions:
            yield from tuning.run_trials(session, *fold_run)
        for call in self.calls:
            if (found := tuning.tune_call(*call)) is not None:
                self.tuned_calls.append(found)
            yield found


def _is_float(v: Any) -> bool:
    return isinstance(v, Tensor) and v.is_floating_point()


def _require_gradients(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments detached, requiring the gradients that the caller's require, or all if none does."""
    some = any(_is_float(v) and v.requires_grad for v in (*args, *kwargs.values()))

    def own(v: Any) -> Any:
        return v.detach().requires_grad_(v.requires_grad or not some) if _is_float(v) else v

    return [own(v) for v in args], {n: own(v) for n, v in kwargs.items()}


def _run_backward(result: Any, given: Sequence[Any]) -> None:
    """Compute the gradients of every floating-point result, with random cotangents."""
    values = [v for v in tensors_in(result) if v.requires_grad]
    inputs = [v for v in given if _is_float(v) and v.requires_grad]
    if values and inputs:
        torch.autograd.grad(values, inputs, [torch.randn_like(v) for v in values], allow_unused=True)
