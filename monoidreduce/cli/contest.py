"""Contenders on one layer, measured side by side: time, memory, and how far they are from float64.

All take turns, so that a busy moment of the machine meets all of them; a first run of each is not counted. One that
fails, or cannot do the backward, is told of and does not stop the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import trial
from .subject import Subject
from .target import described
from .trial import Outcome, Trial

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
    trials: dict[str, Trial] = {}
    for who, call in contenders.items():
        tell(f"{who}: first run")
        row = Row(layer.name, *size, who)
        if dense_is and who in ("naive torch", "torch.compile"):
            rows[who] = replace(row, note=dense_is)
            continue
        rows[who], ready = _first(row, call, args, device, truth)
        if ready is not None:
            trials[who] = ready
    tell("time")
    take_turns(list(trials.values()), seconds * len(trials), LEAST, MOST)
    for who, runner in trials.items():
        tell(f"{who}: memory")
        rows[who] = replace(
            rows[who],
            forward_ms=runner.forward_seconds * 1e3,
            total_ms=runner.seconds * 1e3 if runner.backward else None,
            extra_bytes=runner.extra(),
        )
    return list(rows.values())


def _first(
    row: Row, call: Call, args: tuple[Any, ...], device: torch.device, truth: Outcome | None
) -> tuple[Row, Trial | None]:
    """A first run, both ways or else forward: the row with its error, and the trial, None if nothing ran."""
    problem = ""
    for backward in (True, False):
        ready = Trial(call, args, device, backward)
        try:
            outcome = ready.once()
        except Exception as error:  # a peer's own failure, of whatever kind
            problem = problem or described(error)[:160]
            continue
        ready.backward = bool(outcome.gradients)
        return replace(row, error=_error(outcome, truth), note=f"forward only: {problem}" if problem else ""), ready
    return replace(row, note=f"failed: {problem}"), None


def _error(outcome: Outcome, truth: Outcome | None) -> float | None:
    if truth is None or outcome.choices:  # two samplers draw differently
        return None
    found = trial.apart(outcome.values, truth.values)
    return max(found, trial.apart(outcome.gradients, truth.gradients)) if outcome.gradients else found


def take_turns(trials: Sequence[Trial], seconds: float, least: int, most: int) -> int:
    """Time them in turns, a busy moment of the machine meets all, until ``seconds`` have passed; how many rounds."""
    start, rounds = time.perf_counter(), 0
    while rounds < least or (rounds < most and time.perf_counter() - start < seconds):
        for runner in trials:
            runner.timed()
        rounds += 1
    return rounds
