"""The table of commands, their help, and exit codes. Imports no torch: ``--help`` and a typo are answered at once.

A command's module is imported when the command is named; ``execute`` then runs it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from .._version import __version__
from . import progress


class Entry(NamedTuple):
    """A row of the table: a command's name, the module that has it under that name, the first line of its help, whether
    it is about a layer of a file, and whether it measures (then it says what it is doing, from the first second on)."""

    name: str
    module: str
    summary: str
    of_file: bool = False
    measures: bool = False


COMMANDS: tuple[Entry, ...] = (
    Entry("demo", "demo", "Show what fits in a given memory, and how fast.", measures=True),
    Entry("check", "check", "Check a monoid's laws, or a layer's mathematics and memory.", of_file=True, measures=True),
    Entry("explain", "plans", "Say what would run at a size, and why.", of_file=True),
    Entry("bench", "bench", "Measure layers beside every peer that is installed.", measures=True),
    Entry("profile", "profile", "Draw a layer's memory over time, ours and the dense form's.", measures=True),
    Entry("tune", "plans", "Find the fastest plans for a size, and remember them.", of_file=True),
    Entry("cache", "plans", "Show, clear or share the plans kept on disk."),
    Entry("doctor", "doctor", "Say what is here, what runs where, and what to install."),
)
PIPE = 141  # 128 + SIGPIPE, as a shell reports it


def run(argv: Sequence[str]) -> int:
    """Run the command line with these arguments and return its exit code."""
    progress.start_clock()
    try:
        code = _invoke(list(argv))
        sys.stdout.flush()  # raises BrokenPipeError here, not at exit
        return code
    except click.ClickException as error:
        print(f"monoidreduce: error: {error.format_message()}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("monoidreduce: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # so that the flush at exit does not fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE


def _invoke(argv: list[str]) -> int:
    """As click's own ``main``, which cannot be used: it exits with 1 on a broken pipe."""
    group = make_group()
    try:
        with group.make_context("monoidreduce", argv) as context:
            return int(group.invoke(context) or 0)
    except click.exceptions.Exit as stop:  # --help and --version
        return stop.exit_code


class _Group(click.Group):
    """Lists its commands from the table and imports one when it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = next((e for e in COMMANDS if e.name == cmd_name), None)
        if entry is None:
            return None
        execute = importlib.import_module(".execute", __package__)
        command: click.Command = execute.load_command(entry.module, entry.name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        entry = next((e for e in COMMANDS if e.name == args[0]), None)
        if entry is not None and entry.of_file:
            _check_target(args[1:], ctx)
        if entry is not None and entry.measures and "torch" not in sys.modules and not {"-h", "--help"} & set(args):
            progress.print_line("importing torch")
        if entry is not None or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], names, 1)
        advice = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}"
        raise click.UsageError(f"No such command {args[0]!r:.80}. {advice}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS])


def _check_target(args: Sequence[str], ctx: click.Context) -> None:
    """Raise click's errors of a layer that is not named, or is in no file, before torch is imported (seconds)."""
    if {"-h", "--help"} & set(args):
        return
    if all(a.startswith("-") for a in args):
        raise click.UsageError("Missing argument 'FILE.py:NAME', such as layers.py:attention", ctx)
    file = args[0].rpartition(":")[0]
    if file.endswith(".py") and len(file) < 4096 and "\0" not in file and not os.path.exists(file):
        raise click.UsageError(f"the file {file} does not exist. Give FILE.py:NAME, such as layers.py:attention", ctx)


def make_group() -> click.Group:
    """The command line as a click group."""

    def print_help(context: click.Context) -> None:
        if context.invoked_subcommand is None:
            click.echo(context.get_help())

    group = _Group(
        "monoidreduce",
        callback=click.pass_context(print_help),
        invoke_without_command=True,
        help="Differentiable layers as folds over commutative monoids: the M × N matrix is never built.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(__version__, prog_name="monoidreduce", message="%(prog)s %(version)s")(group)
