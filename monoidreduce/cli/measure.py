"""One layer measured twice, ours and naive: time, peak extra memory, and the error against float64."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import memory
from .layers import SEED, Layer, Size
from .memory import Profile, Tensors

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


class _Trial:
    """One implementation with its inputs: runs forward and backward, and keeps the best times."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Any, ...], backward: bool):
        self.function, self.inputs, self.backward = function, inputs, backward
        self.learned = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        self.forward_s = self.total_s = float("inf")
        self.cotangents: Tensors = ()

    def forward(self) -> Tensors:
        outputs = self.function(*self.inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def gradients(self, outputs: Tensors) -> Tensors:
        if not self.cotangents:
            generator = torch.Generator().manual_seed(SEED)
            self.cotangents = tuple(torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs)
        return torch.autograd.grad(outputs, self.learned, self.cotangents)

    def once(self) -> tuple[Tensors, Tensors]:
        outputs = self.forward()
        return tuple(y.detach() for y in outputs), self.gradients(outputs) if self.backward else ()

    def timed(self) -> None:
        start = time.perf_counter()
        outputs = self.forward()
        middle = time.perf_counter()
        if self.backward:
            self.gradients(outputs)
        end = time.perf_counter()
        self.forward_s, self.total_s = min(self.forward_s, middle - start), min(self.total_s, end - start)

    def profiled(self) -> Profile:
        tensors = [t for t in (*self.inputs, *self.cotangents) if isinstance(t, Tensor)]
        return memory.record(self.forward, self.gradients if self.backward else None, tensors)

    def side(self, error: float) -> Side:
        return Side(self.forward_s * 1e3, self.total_s * 1e3, self.profiled(), error)


def measure(layer: Layer, size: Size, seconds: float = 2.5, tell: Callable[[str], None] = lambda stage: None) -> Result:
    """Measure a layer at a size. ``tell`` is called as each of the STAGES begins.

    No timed run begins after so many ``seconds`` of them, but each side gets at least LEAST; one, if there are none.
    """
    inputs = layer.inputs(size)
    ours, naive = (_Trial(f, inputs, layer.backward) for f in (layer.ours, layer.naive))
    tell(STAGES[0])
    errors = _errors(layer, ours, naive)  # also the first call of both, which may trace or allocate for good
    tell(STAGES[1])
    rounds, least, start = 0, LEAST if seconds > 0 else 1, time.perf_counter()
    while rounds < least or (rounds < MOST and time.perf_counter() - start < seconds):
        ours.timed()  # in turns: a busy moment of the machine meets both
        naive.timed()
        rounds += 1
    tell(STAGES[2])
    return Result(layer, size, ours.side(errors[0]), naive.side(errors[1]), rounds)


def _errors(layer: Layer, *trials: _Trial) -> list[float]:
    """The largest relative error (‖x − truth‖ / ‖truth‖) of any output or gradient, for each trial."""
    exact = tuple(_double(x) for x in trials[0].inputs)
    truth: Tensors = ()
    if layer.judge is None:
        outputs, gradients = _Trial(layer.naive, exact, layer.backward).once()
        truth = outputs + gradients
    found = []
    for trial in trials:
        outputs, gradients = trial.once()
        pairs = (
            list(zip(outputs + gradients, truth, strict=True)) if layer.judge is None else layer.judge(exact, outputs)
        )
        found.append(max(_relative(value, true) for value, true in pairs))
    return found


def _double(x: Any) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().double().requires_grad_(x.requires_grad)
    return x


def _relative(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm().clamp_min(torch.finfo(torch.float64).tiny))
