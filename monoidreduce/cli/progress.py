"""Lines on stderr that say how far a command is, from its first second on.

Imports the standard library alone, so that a command can say something before torch is imported.
"""

from __future__ import annotations

import sys
import time

_started = time.perf_counter()


def start_clock() -> None:
    """Count seconds from now on; called when a command begins."""
    global _started
    _started = time.perf_counter()


def print_line(words: str) -> None:
    """One line on stderr: the seconds since the command began, then ``words``. Written at once, also into a pipe."""
    print(f"{time.perf_counter() - _started:4.0f} s  {words}", file=sys.stderr, flush=True)
