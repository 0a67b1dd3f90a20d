"""What the terminal shows: the only file that knows rich.

rich looks at the terminal for us: no colour with NO_COLOR or into a pipe, no moving bar into a pipe, tables as narrow
as the window. Progress goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .measure import Result
from .numbers import factor, short

if TYPE_CHECKING:
    from .checks import Verdict

COLOURS = {"ok": "green", "FAILED": "bold red", "not tried": "dim", "missing": "yellow"}


class _Console(Console):
    """Leaves a reader that went away to ``app.run``: rich would exit with 1, which says that a check failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout, or on stderr."""
    return _Console(stderr=stderr, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A bar of so many steps on stderr; call what it gives as each step begins, with its name."""
    screen = console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.description}"), console=screen, transient=True, disable=not screen.is_terminal
    )
    task = bar.add_task("", total=steps, completed=-1)  # a step counts as done when the next begins

    def begin(name: str) -> None:
        bar.update(task, description=escape(name), advance=1)

    with bar:
        yield begin


def table(screen: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """A plain table, as wide as what it holds or as the window; ``right`` are the columns of numbers."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for k, heading in enumerate(headings):
        made.add_column(heading, justify="right" if k in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))
    screen.print(made)


def named(screen: Console, lines: Sequence[tuple[str, str, str]]) -> None:
    """Lines of (a name, a word of COLOURS or none, what there is to say), the words under each other if they fit."""
    width = max(len(name) for name, _, _ in lines)
    marks = max(len(mark) for _, mark, _ in lines)
    indent = width + marks + 4
    for name, mark, words in lines:
        if screen.width >= indent + 32:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(width=width, no_wrap=True)
            grid.add_column(width=marks, no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(escape(name), _coloured(mark), escape(words))
            screen.print(grid)
        else:  # too narrow for columns: the words below
            screen.print(f"{escape(name)}  {_coloured(mark)}")
            screen.print(Padding(escape(words), (0, 0, 0, 2)))


def _coloured(mark: str) -> str:
    return f"[{COLOURS[mark]}]{mark}[/]" if mark in COLOURS else mark


def verdicts(screen: Console, title: str, found: Sequence[Verdict]) -> None:
    """Verdicts, one under the other, and what they come to."""
    screen.print(escape(title), style="bold")
    named(screen, [(v.name, v.answer, v.words) for v in found])
    failed = sum(v.answer == "FAILED" for v in found)
    tried = sum(v.answer != "not tried" for v in found)
    screen.print(
        f"[bold red]{failed} of {tried} failed[/]" if failed else f"[green]nothing wrong was found[/] ({tried} checks)"
    )


def show(screen: Console, results: Sequence[Result], footnotes: Sequence[str]) -> None:
    """The demo's results in the roomiest shape that fits the window, and notes under them."""
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


def _table(results: Sequence[Result], headings: Sequence[str], cells: Callable[[Result], list[str]]) -> Table:
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    made.add_column("layer", overflow="fold")
    for heading in headings:
        made.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        made.add_row(_title(result), *cells(result))
    return made


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
