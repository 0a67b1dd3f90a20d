"""``monoidreduce check FILE.py:NAME``: is this monoid a monoid, is this layer right, exact, repeatable and small?"""

from __future__ import annotations

from typing import Any

import click
import torch

from ..errors import MonoidLawError, MonoidReduceError
from . import checks, options, subject, terminal
from .checks import BAD, CHECKS, LARGE, RAGGED, Trials, Verdict
from .command import Answer, Command
from .target import Target, load, users_code


def run(
    target: str,
    sizes: tuple[tuple[int, int], ...],
    large: tuple[int, int],
    cases: int,
    device: torch.device,
    **given: Any,
) -> Answer:
    """Check a monoid's laws, or a layer's mathematics and memory.

    A monoid: associativity, commutativity, identity and the gradient condition, on hundreds of cases; a broken law
    comes with the smallest counterexample. An op: its values, gradients and second gradients against the dense form in
    float64, whether it repeats to the last bit, whether its memory grows with the pairs, and its error in each type
    beside plain torch's. Exit code 1 if anything fails.
    """
    found = load(target)
    with users_code(found.file):  # a combine or a layer that raises
        if found.is_monoid:
            verdicts = checks.of_monoid(found.thing, cases)
        else:
            verdicts = _of_layer(found, sizes or RAGGED, large, cases, device, given)
    code = int(any(v.answer == BAD for v in verdicts))
    data = {"target": target, "passed": not code, "checks": [vars(v) for v in verdicts]}
    return Answer(data, lambda console: terminal.verdicts(console, target, verdicts), code)


def _of_layer(
    target: Target, sizes: tuple, large: tuple[int, int], cases: int, device: torch.device, given: dict[str, Any]
) -> list[Verdict]:
    try:
        layer = subject.of(target, **given)
    except MonoidReduceError as error:  # the body cannot be written down as one program for all pairs
        return [Verdict("trace", BAD, str(error))]
    trials = Trials(layer, tuple(sizes), large, device)
    verdicts = []
    try:
        monoids = checks.monoids_of(layer)
    except MonoidLawError as error:  # so plainly broken that the op refuses it
        return [Verdict(f"laws of {error.details['monoid']}", BAD, str(error))]
    with terminal.progress(len(monoids) + len(CHECKS)) as begin:
        for monoid in monoids:
            begin(f"laws of {monoid.__name__}")
            tried = checks.of_monoid(monoid, cases)
            broken = next((v for v in tried if v.answer == BAD), None)
            words = f"holds: {len(tried)} laws looked at" if broken is None else f"{broken.name}: {broken.words}"
            verdicts.append(Verdict(f"laws of {monoid.__name__}", BAD if broken else checks.GOOD, words))
        for check in CHECKS:
            begin(check.name)
            verdicts.append(checks.ask(check, trials))
    return verdicts


COMMAND = Command(
    "check",
    run,
    (
        options.TARGET,
        click.Option(
            ["--size", "sizes"], type=options.SizeType(), multiple=True,
            help=f"ROWSxCOLS to try; may be given again [default: {', '.join(f'{r}x{c}' for r, c in RAGGED)}]",
        ),
        click.Option(
            ["--large"], type=options.SizeType(), default="x".join(map(str, LARGE)), show_default=True,
            help="ROWSxCOLS at which memory is measured, and at half of both",
        ),
        click.Option(["--cases"], type=options.COUNT, default=200, show_default=True, help="cases for each law"),
        *options.SUBJECT,
    ),
)  # fmt: skip
