"""What was asked of a forward holds in its backward.

``mr.budget``, ``mr.skip_below``, ``mr.use(precision=, strict=, tune=)`` and the plans that are followed are context
variables, and torch runs a backward on a GPU in a thread of its own, where no block of the caller's is open. So what
the forward was asked is kept with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..engines.common import matmul, skip_small_tiles
from ..plan import budget, schedule

Asked = tuple[int | None, tuple, Any, Any]


def now() -> Asked:
    """What is asked here."""
    return budget.asked(), matmul.asked.get(), schedule.followed.get(), skip_small_tiles.requested()


@contextlib.contextmanager
def again(then: Asked) -> Iterator[None]:
    """Ask the same once more."""
    limit, settings, followed, skipped = then
    before, token = matmul.asked.set(settings), schedule.followed.set(followed)
    try:
        with budget.kept(limit), skip_small_tiles.restore(skipped):
            yield
    finally:
        matmul.asked.reset(before)
        schedule.followed.reset(token)
