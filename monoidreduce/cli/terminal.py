"""What the terminal shows. The only place that imports rich, an optional dependency.

rich looks at the terminal for us: no colour with NO_COLOR or into a pipe, no moving bar into a pipe, tables as narrow
as the window. Progress goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .command import CommandError
from .measure import Result
from .numbers import factor, short

_WIDE = 112  # columns from which every number gets a column of its own


def require() -> None:
    """Say what to install, before any work is done."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise CommandError("this command needs rich, which is not installed: pip install monoidreduce[demo]") from None


def console(*, stderr: bool = False) -> Any:
    """A rich console on stdout, or on stderr."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps on stderr; call what it gives as each step begins, with its name."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.description}"), console=screen, transient=True, disable=not screen.is_terminal
    )
    task = bar.add_task("", total=steps, completed=-1)  # a step counts as done when the next begins

    def begin(name: str) -> None:
        bar.update(task, description=name, advance=1)

    with bar:
        yield begin


def show(results: Sequence[Result], footnotes: Sequence[str]) -> None:
    """The table of results, in one of two shapes by the width of the window, and notes under it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    wide = screen.width >= _WIDE
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("layer", ratio=None, overflow="fold")
    for heading in _WIDE_HEADINGS if wide else _NARROW_HEADINGS:
        table.add_column(heading, justify="right", no_wrap=wide, overflow="fold")
    for result in results:
        name = result.layer.name + ("" if result.layer.backward else " (forward)")
        table.add_row(name, *(_wide_cells(result) if wide else _narrow_cells(result)))
    screen.print()
    screen.print(table)
    for note in footnotes:
        screen.print(note, style="dim")


_WIDE_HEADINGS = ("ms, ours", "naive", "ratio", "MB, ours", "naive", "ratio", "error, ours", "naive")
_NARROW_HEADINGS = ("ms, ours\nnaive", "ratio", "MB, ours\nnaive", "ratio", "error, ours\nnaive")


def _wide_cells(r: Result) -> list[str]:
    times, sizes, errors = _numbers(r)
    return [*times, _gain(r.faster), *sizes, _gain(r.smaller), *errors]


def _narrow_cells(r: Result) -> list[str]:
    times, sizes, errors = _numbers(r)
    return ["\n".join(times), _gain(r.faster), "\n".join(sizes), _gain(r.smaller), "\n".join(errors)]


def _numbers(r: Result) -> tuple[list[str], list[str], list[str]]:
    sides = (r.ours, r.naive)
    times, sizes = [short(s.total_ms) for s in sides], [short(s.extra_mb) for s in sides]
    return times, sizes, [f"{s.error:.1e}" for s in sides]


def _gain(ratio: float) -> str:
    return f"[{'green' if ratio >= 1 else 'yellow'}]{factor(ratio)}[/]"
