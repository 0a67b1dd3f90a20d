"""One layer measured twice, ours and naive: time, peak extra memory, and the error against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import trial
from .contest import take_turns
from .layers import Layer, Size
from .memory import Profile
from .trial import Trial

STAGES = ("float64 truth", "time", "memory")  # what ``measure`` tells of, in this order
LEAST, MOST = 2, 5  # timed runs of each


@dataclass(frozen=True)
class Side:
    """What was measured of one implementation. Times are the best of the rounds; the error is the worst of all."""

    forward_ms: float
    total_ms: float
    profile: Profile
    error: float

    @property
    def extra_mb(self) -> float:
        return self.profile.extra / 1e6


@dataclass(frozen=True)
class Result:
    """A layer, its size, and both sides."""

    layer: Layer
    size: Size
    ours: Side
    naive: Side
    rounds: int

    @property
    def faster(self) -> float:
        """How many times the naive form's time is ours."""
        return self.naive.total_ms / self.ours.total_ms

    @property
    def smaller(self) -> float:
        """How many times the naive form's extra memory is ours."""
        return self.naive.profile.extra / max(1, self.ours.profile.extra)


def measure(layer: Layer, size: Size, seconds: float = 2.5, tell: Callable[[str], None] = lambda stage: None) -> Result:
    """Measure a layer at a size. ``tell`` is called as each of the STAGES begins.

    No timed run begins after so many ``seconds`` of them, but each side gets at least LEAST; one, if there are none.
    """
    inputs = layer.inputs(size)
    ours, naive = (Trial(f, inputs, backward=layer.backward) for f in (layer.ours, layer.naive))
    tell(STAGES[0])
    errors = _errors(layer, ours, naive)  # also the first call of both, which may trace or allocate for good
    tell(STAGES[1])
    rounds = take_turns((ours, naive), seconds, LEAST if seconds > 0 else 1, MOST)
    tell(STAGES[2])
    return Result(layer, size, _side(ours, errors[0]), _side(naive, errors[1]), rounds)


def _side(runner: Trial, error: float) -> Side:
    return Side(runner.forward_seconds * 1e3, runner.seconds * 1e3, runner.profiled(), error)


def _errors(layer: Layer, *runners: Trial) -> list[float]:
    """The largest relative error of any output or gradient against the dense form in float64, for each of them."""
    exact = trial.double(runners[0].args)
    truth = None if layer.judge else trial.run(layer.naive, exact, layer.backward)
    found = []
    for runner in runners:
        outcome = runner.once()
        if truth is not None:
            pairs = [(outcome.values, truth.values), (outcome.gradients, truth.gradients)]
        elif layer.judge is not None:
            judged = layer.judge(exact, (*outcome.choices, *outcome.values))
            pairs = [((value,), (true,)) for value, true in judged]
        found.append(max(trial.apart(value, true) for value, true in pairs))
    return found
