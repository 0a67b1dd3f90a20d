"""The command line and its exit codes. Imports no torch: help and a typo, also in an option, are answered at once.

``options`` has the commands and what they take; a command's module is imported by ``execute``, which runs it.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from .._version import __version__
from . import progress
from .options import COMMANDS, JSON, Entry

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
        return next((_make_command(entry) for entry in COMMANDS if entry.name == cmd_name), None)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        names = self.list_commands(ctx)
        if args[0] in names or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], names, 1)
        advice = f"Did you mean {close[0]}?" if close else f"There are {', '.join(names)}"
        raise click.UsageError(f"No such command {args[0]!r:.80}. {advice}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.help.splitlines()[0]) for entry in COMMANDS])


class _Command(click.Command):
    """Fills the names of layers and peers into its help when that is asked for: they are in modules that need torch."""

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.help and "{" in self.help:
            self.help = importlib.import_module(".execute", __package__).fill_names(self.help)
        super().format_help_text(ctx, formatter)


def _make_command(entry: Entry) -> click.Command:
    def run(**options: Any) -> int:
        if entry.measures and "torch" not in sys.modules:
            progress.print_line("importing torch")
        code: int = importlib.import_module(".execute", __package__).run_command(entry, **options)
        return code

    return _Command(entry.name, params=[*entry.params, JSON], callback=run, help=entry.help)


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
