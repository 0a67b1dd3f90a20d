"""What was asked of a forward holds in its backward.

``mr.budget`` and ``mr.use(precision=, strict=)`` are context variables, and torch runs a backward on a GPU in a thread
of its own, where no block of the caller's is open. What the forward was asked is kept with it; what is asked around
the backward itself goes first, where that is seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..plan import budget
from . import hardware

Asked = tuple[int | None, tuple[str | None, bool]]  # a budget; precision, strict
NOTHING: Asked = (None, (None, False))


def now() -> Asked:
    """What is asked here."""
    return budget.asked(), hardware.asked.get()


@contextlib.contextmanager
def again(then: Asked) -> Iterator[None]:
    """Ask the same once more, but for what is asked here already."""
    here = now()
    token = hardware.asked.set(here[1] if here[1] != NOTHING[1] else then[1])
    try:
        if then[0] is None or here[0] is not None:
            yield
        else:
            with budget.budget(then[0]):
                yield
    finally:
        hardware.asked.reset(token)
