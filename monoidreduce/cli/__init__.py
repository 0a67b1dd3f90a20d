"""The command line: ``monoidreduce demo``. A subcommand is a module here and a row of COMMANDS.

Exit codes: 0 done, 1 the reader of a pipe went away, 2 a mistake in the request (with a message and no traceback), 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .._version import __version__
from ..errors import MonoidReduceError
from .command import Command, CommandError
from .demo import COMMAND as DEMO

__all__ = ["main"]

COMMANDS: tuple[Command, ...] = (DEMO,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line with these arguments (the process's own by default) and return the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without × gets a question mark, not a crash
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has already said why
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    if arguments.run is None:
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except (CommandError, MonoidReduceError) as error:
        print(f"monoidreduce: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("monoidreduce: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit fails no more
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="monoidreduce",
        description="Differentiable layers as folds over commutative monoids: the M × N matrix is never built.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"monoidreduce {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        inner = commands.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        command.configure(inner)
        inner.set_defaults(run=command.run)
    return parser
