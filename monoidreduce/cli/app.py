"""The table of commands, and the frame they all run in: options, JSON, mistakes, exit codes.

A command returns an :class:`Answer`; what its layers print while it works goes to stderr with the progress bar, so that
stdout holds the answer alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from .._version import __version__
from ..engines.common.oom_retry import ran_out
from ..errors import MonoidReduceError
from . import terminal
from .bench import COMMAND as BENCH
from .caching import COMMAND as CACHE
from .check import COMMAND as CHECK
from .command import Command, CommandError
from .demo import COMMAND as DEMO
from .doctor import COMMAND as DOCTOR
from .explain import COMMAND as EXPLAIN
from .profile import COMMAND as PROFILE
from .tune import COMMAND as TUNE

COMMANDS: tuple[Command, ...] = (DEMO, CHECK, EXPLAIN, BENCH, PROFILE, TUNE, CACHE, DOCTOR)
_NOISE = (
    "mkldnn_matmul failed",  # said with thirty lines of addresses on CPUs without bfloat16; the result is right
)
_TOO_LARGE = ("Storage size calculation overflowed", "numel: integer multiplication overflow", "invalid size")
PIPE = 141  # 128 + SIGPIPE, as a shell reports it


def run(argv: Sequence[str]) -> int:
    """Run these arguments; every exit code of the command line comes from here."""
    try:
        code = _invoke(list(argv))
        sys.stdout.flush()  # here, where a reader that went away is told apart
        return code
    except click.ClickException as error:
        return _mistake(error.format_message())
    except (CommandError, MonoidReduceError) as error:
        return _mistake(str(error))
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        return _mistake(f"out of memory{f' (of {asked[1]})' if asked else ''}. Give smaller sizes, or fewer features")
    except (KeyboardInterrupt, click.Abort):
        print("monoidreduce: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # so that flushing at exit fails no more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE


def _invoke(argv: list[str]) -> int:
    """What click's own ``main`` does, but that it exits with 1 where a pipe breaks."""
    made = group()
    try:
        with made.make_context("monoidreduce", argv) as context:
            return int(made.invoke(context) or 0)
    except click.exceptions.Exit as stop:  # --help and --version
        return stop.exit_code


class _Group(click.Group):
    """Lists its commands in the order of the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def group() -> click.Group:
    """The command line as click sees it."""

    def bare(context: click.Context) -> None:
        if context.invoked_subcommand is None:
            click.echo(context.get_help())

    made = _Group(
        "monoidreduce",
        callback=click.pass_context(bare),
        invoke_without_command=True,
        help="Differentiable layers as folds over commutative monoids: the M × N matrix is never built.",
        commands=[_framed(command) for command in COMMANDS],
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    return click.version_option(__version__, prog_name="monoidreduce", message="%(prog)s %(version)s")(made)


def _framed(command: Command) -> click.Command:
    as_json = click.Option(["--json", "as_json"], is_flag=True, help="print the answer as JSON, and nothing else")
    return click.Command(
        command.name,
        params=[*command.params, as_json],
        callback=_answering(command),
        help=command.help,
        short_help=command.help.splitlines()[0],
    )


def _answering(command: Command) -> Callable[..., int]:
    def answer(as_json: bool, **options: Any) -> int:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            for message in _NOISE:
                warnings.filterwarnings("ignore", message)
            found = command.run(**options)
        if as_json:
            print(json.dumps(plain(found.data), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            found.show(terminal.console())
        return found.code

    return answer


def plain(value: Any) -> Any:
    """A value as JSON has it: no infinities, no NaN (they become null), paths and the like as text.

    >>> plain({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str | None) else str(value)


def _mistake(message: str) -> int:
    print(f"monoidreduce: error: {message}", file=sys.stderr)
    return 2
