"""The table of commands, and what they share: ``--json``, error messages and exit codes.

What a layer prints while a command runs goes to stderr with the progress bar, so stdout holds the answer alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import click

from .._version import __version__
from ..engines.common.oom_retry import is_out_of_memory
from ..errors import MonoidReduceError
from . import terminal
from .bench import bench
from .check import check
from .command import Command, CommandError
from .demo import demo
from .doctor import doctor
from .plans import cache, explain, tune
from .profile import profile

COMMANDS: tuple[Command, ...] = (demo, check, explain, bench, profile, tune, cache, doctor)
_IGNORED_WARNINGS = ("mkldnn_matmul failed",)  # thirty lines of addresses on CPUs without bfloat16; the result is right
_TOO_LARGE = ("Storage size calculation overflowed", "numel: integer multiplication overflow", "invalid size")
PIPE = 141  # 128 + SIGPIPE, as a shell reports it


def run(argv: Sequence[str]) -> int:
    """Run the command line with these arguments and return its exit code."""
    try:
        code = _invoke(list(argv))
        sys.stdout.flush()  # raises BrokenPipeError here, not at exit
        return code
    except click.ClickException as error:
        return _print_error(error.format_message())
    except (CommandError, MonoidReduceError) as error:
        return _print_error(str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        return _print_error(f"out of memory{f' (of {size[1]})' if size else ''}. Give smaller sizes, or fewer features")
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
    """Lists its commands in the order of the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


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
        commands=[_make_click_command(command) for command in COMMANDS],
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(__version__, prog_name="monoidreduce", message="%(prog)s %(version)s")(group)


def _make_click_command(command: Command) -> click.Command:
    def run_and_print(as_json: bool, **options: Any) -> int:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            for message in _IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            answer = command.run(**options)
        if as_json:
            print(json.dumps(to_json(answer.data), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            answer.show(terminal.make_console())
        return answer.code

    as_json = click.Option(["--json", "as_json"], is_flag=True, help="print the answer as JSON, and nothing else")
    return click.Command(
        command.name,
        params=[*command.params, as_json],
        callback=run_and_print,
        help=command.help,
        short_help=command.help.splitlines()[0],
    )


def to_json(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN become null, paths and other objects become text.

    >>> to_json({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def _print_error(message: str) -> int:
    print(f"monoidreduce: error: {message}", file=sys.stderr)
    return 2
