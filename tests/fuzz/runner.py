"""Checks programs by number, and words a failure: what differs, and the smallest program that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .compare import Failure, check
from .generate import generate
from .programs import Program, with_run
from .shrink import shrink


@dataclass(frozen=True)
class Outcome:
    seed: int
    program: Program
    failure: Failure | None


def outcomes(seeds: Iterable[int], share: str = "unit", mode: str | None = None) -> Iterator[Outcome]:
    """Run the programs with these numbers; ``mode``: through this transform instead of the drawn one."""
    for seed in seeds:
        program = generate(seed, share)
        if mode is not None:
            program = with_run(program, mode=mode, second=False)
        failure = check(program)
        yield Outcome(seed, program, failure)


def report(outcome: Outcome, seconds: float = 20.0) -> str:
    """A failure in words, with the shrunk program as Python source."""
    assert outcome.failure is not None
    program, failure = shrink(outcome.program, outcome.failure, seconds)
    return f"program {outcome.seed}: {failure.kind}\n\n{failure.detail}\n\nTo reproduce, run:\n\n{program.script()}"


def assert_programs(seeds: Iterable[int], share: str = "unit", mode: str | None = None) -> None:
    """Every program gives what plain torch gives; else an AssertionError that shows the first that does not."""
    failed = [o for o in outcomes(seeds, share, mode) if o.failure is not None]
    if failed:
        numbers = ", ".join(f"{o.seed} ({o.failure.kind})" for o in failed if o.failure)
        raise AssertionError(f"{len(failed)} programs failed: {numbers}\n\n{report(failed[0])}")
