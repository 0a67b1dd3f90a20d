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
    """The results in the roomiest shape that fits the window, and notes under them."""
    screen = console()
    screen.print()
    if screen.width >= _LEAST_WIDE:
        screen.print(_table(results, _WIDE, _wide_cells))
    elif screen.width >= _LEAST_NARROW:
        screen.print(_table(results, _NARROW, _narrow_cells))
    else:
        for result in results:
            screen.print(_title(result), style="bold")
            screen.print("\n".join(_lines(result)))
    for note in footnotes:
        screen.print(note, style="dim")


_LEAST_WIDE, _LEAST_NARROW = 112, 72  # columns from which a table of this shape is not squeezed
_WIDE = ("ms, ours", "naive", "ratio", "MB, ours", "naive", "ratio", "error, ours", "naive")
_NARROW = ("ms, ours\nnaive", "ratio", "MB, ours\nnaive", "ratio", "error, ours\nnaive")


def _table(results: Sequence[Result], headings: Sequence[str], cells: Callable[[Result], list[str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    table.add_column("layer", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(_title(result), *cells(result))
    return table


def _title(r: Result) -> str:
    return r.layer.name + ("" if r.layer.backward else " (forward)")


def _wide_cells(r: Result) -> list[str]:
    times, sizes, errors = _numbers(r)
    return [*times, _gain(r.faster), *sizes, _gain(r.smaller), *errors]


def _narrow_cells(r: Result) -> list[str]:
    times, sizes, errors = _numbers(r)
    return ["\n".join(times), _gain(r.faster), "\n".join(sizes), _gain(r.smaller), "\n".join(errors)]


def _lines(r: Result) -> list[str]:
    times, sizes, errors = _numbers(r)
    return [
        f"  ms {times[0]}, naive {times[1]}, {_gain(r.faster)}",
        f"  MB {sizes[0]}, naive {sizes[1]}, {_gain(r.smaller)}",
        f"  error {errors[0]}, naive {errors[1]}",
    ]


def _numbers(r: Result) -> tuple[list[str], list[str], list[str]]:
    """Times, memory and errors, each as ours and naive."""
    sides = (r.ours, r.naive)
    times, sizes = [short(s.total_ms) for s in sides], [short(s.extra_mb) for s in sides]
    return times, sizes, [f"{s.error:.1e}" for s in sides]


def _gain(ratio: float) -> str:
    return f"[{'green' if ratio >= 1 else 'yellow'}]{factor(ratio)}[/]"
