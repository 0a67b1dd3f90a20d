"""``monoidreduce explain FILE.py:NAME``: what would run at this size, and why; nothing is allocated or run."""

from __future__ import annotations

from typing import Any

import torch

from . import options, subject
from .command import Answer, Command, CommandError
from .target import load, users_code


def run(target: str, rows: int, cols: int, dtype: torch.dtype, device: torch.device, **given: Any) -> Answer:
    """Say what would run at a size, and why.

    Passes, tiles, time and memory as they are predicted. Nothing is allocated and nothing runs, so the size may be any.
    """
    found = subject.of(load(target), **given)
    if found.op is None:
        raise CommandError(f"{target} is no op, so there is no plan to explain. Write it with @mr.op")
    args = found.inputs(rows, cols, dtype, torch.device("meta"))
    with users_code(found.file):
        text = found.op.explain(*args)
    return Answer({"target": target, "rows": rows, "cols": cols, "text": text}, lambda c: c.print(text, markup=False))


_SHAPE = (options.SETTINGS, options.FEATURES, options.BATCH, options.DEVICE)
COMMAND = Command("explain", run, (options.TARGET, options.ROWS, options.COLS, options.dtype("bf16"), *_SHAPE))
