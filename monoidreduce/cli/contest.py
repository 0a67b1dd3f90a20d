"""Contenders on one layer, measured side by side: time, memory, and how far they are from float64.

All take turns, so that a busy moment of the machine meets all of them; a first run of each is not counted. One that
fails, or cannot do the backward, is told of and does not stop the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import trial
from .subject import Subject
from .target import described

LEAST, MOST = 2, 20  # timed runs of each
Call = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One contender at one size. None: not measured; ``note`` says why, or what to know."""

    layer: str
    rows: int
    cols: int
    who: str
    forward_ms: float | None = None
    total_ms: float | None = None
    extra_bytes: int | None = None
    error: float | None = None
    note: str = ""

    @property
    def pairs(self) -> int:
        return self.rows * self.cols

    @property
    def ms(self) -> float | None:
        """What one compares: both ways if that was measured."""
        return self.forward_ms if self.total_ms is None else self.total_ms


class _Clock:
    """One contender's best times, in seconds."""

    def __init__(self, call: Call, args: tuple[Any, ...], device: torch.device, backward: bool):
        self.call, self.args, self.device, self.backward = call, args, device, backward
        self.forward = self.total = float("inf")

    def once(self) -> None:
        start = self._now()
        found = trial.results(self.call, self.args)
        middle = self._now()
        if self.backward:
            trial.gradients(found, self.args)
        self.forward, self.total = min(self.forward, middle - start), min(self.total, self._now() - start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def measure(
    layer: Subject,
    contenders: Mapping[str, Call],
    size: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    judge: bool,
    tell: Callable[[str], None],
) -> list[Row]:
    """Every contender at one size; ``judge`` compares them with the dense form in float64."""
    args = layer.inputs(*size, dtype, device)
    dense_is = trial.too_large(size[0] * size[1], args, device)
    truth = None
    if judge and layer.dense is not None and not dense_is:
        tell("the truth in float64")
        truth = trial.run(layer.dense, trial.double(args))
    rows: dict[str, Row] = {}
    clocks: dict[str, _Clock] = {}
    for who, call in contenders.items():
        tell(f"{who}: first run")
        row = Row(layer.name, *size, who)
        if dense_is and who in ("naive torch", "torch.compile"):
            rows[who] = replace(row, note=dense_is)
            continue
        rows[who], backward = _first(row, call, args, truth)
        if backward is not None:
            clocks[who] = _Clock(call, args, device, backward)
    tell("time")
    _take_turns(clocks, seconds)
    for who, clock in clocks.items():
        tell(f"{who}: memory")
        rows[who] = replace(
            rows[who],
            forward_ms=clock.forward * 1e3,
            total_ms=clock.total * 1e3 if clock.backward else None,
            extra_bytes=trial.extra(clock.call, args, device, clock.backward),
        )
    return list(rows.values())


def _first(row: Row, call: Call, args: tuple[Any, ...], truth: trial.Outcome | None) -> tuple[Row, bool | None]:
    """A first run, both ways or else forward: the row with its error; whether a backward ran, None if nothing did."""
    problem = ""
    for backward in (True, False):
        try:
            outcome = trial.run(call, args, backward)
        except Exception as error:  # a peer's own failure, of whatever kind
            problem = problem or described(error)[:160]
            continue
        both = bool(outcome.gradients)
        note = f"forward only: {problem}" if problem else ""
        return replace(row, error=_error(outcome, truth), note=note), both
    return replace(row, note=f"failed: {problem}"), None


def _error(outcome: trial.Outcome, truth: trial.Outcome | None) -> float | None:
    if truth is None or outcome.choices:  # two samplers draw differently
        return None
    found = trial.apart(outcome.values, truth.values)
    return max(found, trial.apart(outcome.gradients, truth.gradients)) if outcome.gradients else found


def _take_turns(clocks: Mapping[str, _Clock], seconds: float) -> None:
    start, rounds = time.perf_counter(), 0
    allowed = seconds * len(clocks)
    while rounds < LEAST or (rounds < MOST and time.perf_counter() - start < allowed):
        for clock in clocks.values():
            clock.once()
        rounds += 1
