"""What the terminal shows: tables, lines with a status, a progress bar, and how numbers are written.

This is the only file that imports rich. rich drops colours with NO_COLOR or in a pipe, hides the progress bar in a
pipe, and makes tables as narrow as the window. Progress goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

OK, FAILED, NOT_TRIED, MISSING = "ok", "FAILED", "not tried", "missing"
_COLOURS = {OK: "green", FAILED: "bold red", NOT_TRIED: "dim", MISSING: "yellow"}


class _Console(Console):
    """Raises BrokenPipeError for ``app.run``. rich itself would exit with 1, which means that a check failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """A rich console on stdout, or on stderr."""
    return _Console(stderr=stderr, highlight=False, soft_wrap=False)


@contextlib.contextmanager
def show_progress(steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr. Yields a function to call with a step's name as the step begins."""
    console = make_console(stderr=True)
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
    )
    task = bar.add_task("", total=steps, completed=-1)  # a step counts as done when the next one begins
    with bar:
        yield lambda name: bar.update(task, description=escape(name), advance=1)


def print_table(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    right: Sequence[int] = (),
    markup: bool = False,
) -> None:
    """A table as wide as its content, or as the window. ``right``: the columns to align on the right.

    With ``markup``, cells may hold rich's markup; without, they are printed as they are.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="right" if k in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row if markup else map(escape, row)))
    console.print(table)


def print_statuses(console: Console, lines: Sequence[tuple[str, str, str]]) -> None:
    """Print (name, status, words) lines in columns, or with the words below where the window is too narrow."""
    width, status_width = (max(len(line[k]) for line in lines) for k in (0, 1))
    for name, status, words in lines:
        mark = f"[{_COLOURS[status]}]{status}[/]" if status in _COLOURS else status
        if console.width >= width + status_width + 36:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(width=width, no_wrap=True)
            grid.add_column(width=status_width, no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(escape(name), mark, escape(words))
            console.print(grid)
        else:
            console.print(f"{escape(name)}  {mark}")
            console.print(Padding(escape(words), (0, 0, 0, 2)))


def print_paths(console: Console, paths: Iterable[Path]) -> None:
    """Print the files that were written, one a line and never wrapped, so that they can be copied."""
    for path in paths:
        console.print(str(path), soft_wrap=True, markup=False)


# Numbers, written alike in the terminal and on pages ----------------------------------------------------------------


def format_number(number: float) -> str:
    """A number with about three digits.

    >>> [format_number(x) for x in (1234.5, 123.4, 12.34, 1.234, 0.1234)]
    ['1234', '123', '12.3', '1.23', '0.12']
    """
    return f"{number:.0f}" if number >= 99.95 else f"{number:.1f}" if number >= 9.995 else f"{number:.2f}"


def format_mb(size: float) -> str:
    """Bytes as megabytes (1 MB is 10⁶ bytes).

    >>> format_mb(2_500_000)
    '2.50'
    """
    return format_number(size / 1e6)


def format_size(size: int) -> str:
    """Bytes in the largest binary unit, with one decimal where it says something.

    >>> format_size(2**28), format_size(3 * 2**29), format_size(2**23 + 1)
    ('256 MiB', '1.5 GiB', '8 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} B"


def format_ratio(ratio: float) -> str:
    """A ratio with a times sign.

    >>> [format_ratio(x) for x in (0.5, 1.25, 14.26, 140.4)]
    ['0.50×', '1.25×', '14.3×', '140×']
    """
    return f"{format_number(ratio)}×"


def geometric_mean(ratios: Sequence[float]) -> float:
    """The geometric mean, the right average for ratios.

    >>> geometric_mean([1.0, 4.0])
    2.0
    """
    return math.exp(sum(math.log(max(r, 1e-9)) for r in ratios) / len(ratios))
