"""``monoidreduce tune FILE.py:NAME``: find the fastest plans for a size, and remember them; by ``mr.tune``."""

from __future__ import annotations

from typing import Any

import torch

from ..autotune import tune
from . import options, subject
from .command import Answer, Command
from .target import users_code


def run(
    target: str, rows: int, cols: int, dtype: torch.dtype, forward: bool, device: torch.device, **given: Any
) -> Answer:
    """Find the fastest plans for a size, and remember them.

    Every fold is run with each plan that the cost model leaves close; one whose result is wrong is refused. Winners
    serve all lengths up to the next power of two, in later processes too: see cache.
    """
    layer = subject.resolved(target, **given)
    args = layer.inputs(rows, cols, dtype, device)
    with users_code(layer.file):
        found = tune(layer.call, *args, backward=not forward)
    data = {"target": target, "rows": rows, "cols": cols, "dtype": str(dtype)[6:], **found.as_dict()}
    return Answer(data, lambda console: console.print(str(found), markup=False, soft_wrap=True))


COMMAND = Command(
    "tune",
    run,
    (options.TARGET, options.ROWS, options.COLS, options.dtype("float32"), options.FORWARD, *options.SUBJECT),
)
