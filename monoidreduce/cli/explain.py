"""``monoidreduce explain FILE.py:NAME``: what would run at this size, and why."""

from __future__ import annotations

from typing import Any

import click
import torch

from . import options, subject
from .command import Answer, Command, CommandError
from .target import load, users_code


def run(
    target: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    forward: bool,
    measure: bool,
    device: torch.device,
    **given: Any,
) -> Answer:
    """Say what would run at a size, and why.

    Passes, schedules and tiles, with the time and memory that are predicted for each. Nothing runs, and on a CPU
    nothing is allocated, so the size may be any; with --measure the call is run a few times, and measured beside.
    """
    found = subject.of(load(target), **given)
    if found.op is None:
        raise CommandError(f"{target} is no op, so there is no plan to explain. Write it with @mr.op")
    nowhere = device.type == "cpu" and not measure
    args = found.inputs(rows, cols, dtype, torch.device("meta") if nowhere else device)
    with users_code(found.file):
        text = found.op.explain(*args, backward=not forward, measure=measure)
    data = {"target": target, "dtype": str(dtype)[6:], **text.as_dict(), "text": str(text)}
    return Answer(data, lambda console: console.print(text, markup=False, soft_wrap=True))


COMMAND = Command(
    "explain",
    run,
    (
        options.TARGET,
        options.ROWS,
        options.COLS,
        options.dtype("bf16"),
        options.FORWARD,
        click.Option(["--measure"], is_flag=True, help="run it too, and measure beside what is predicted"),
        *options.DRAWN,
    ),
)
