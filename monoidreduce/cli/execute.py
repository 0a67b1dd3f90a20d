"""Run one command: its click form, ``--json``, and errors of requests as messages. Imports torch; ``app`` does not.

What a layer prints while a command runs goes to stderr with the progress bar, so stdout holds the answer alone.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import click

from ..engines.common.oom_retry import is_out_of_memory
from ..errors import MonoidReduceError
from . import report
from .command import Command, CommandError

_IGNORED_WARNINGS = ("mkldnn_matmul failed",)  # thirty lines of addresses on CPUs without bfloat16; the result is right
_TOO_LARGE = ("Storage size calculation overflowed", "numel: integer multiplication overflow", "invalid size")


def load_command(module: str, name: str) -> click.Command:
    """The click command of a function under ``@command`` in a module of this package."""
    return make_click_command(getattr(importlib.import_module(f".{module}", __package__), name))


def make_click_command(command: Command) -> click.Command:
    def run_and_print(as_json: bool, **options: Any) -> int:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            for message in _IGNORED_WARNINGS:
                warnings.filterwarnings("ignore", message)
            answer = _run(command, options)
        if as_json:
            print(json.dumps(to_json(answer.data), indent=2, ensure_ascii=False, allow_nan=False))
        else:
            answer.show(report.make_console())
        return answer.code

    as_json = click.Option(["--json", "as_json"], is_flag=True, help="print the answer as JSON, and nothing else")
    return click.Command(
        command.name,
        params=[*command.params, as_json],
        callback=run_and_print,
        help=command.help,
        short_help=command.help.splitlines()[0],
    )


def _run(command: Command, options: Mapping[str, Any]) -> Any:
    """The command's answer. Errors that a request caused become click's, which are shown without a traceback."""
    try:
        return command.run(**options)
    except (CommandError, MonoidReduceError) as error:
        raise click.ClickException(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        words = f"out of memory{f' (of {size[1]})' if size else ''}. Give smaller sizes, or fewer features"
        raise click.ClickException(words) from error


def to_json(value: Any) -> Any:
    """A value that JSON can hold: infinities and NaN become null, paths and other objects become text.

    >>> to_json({"a": (1, float("inf")), 2: None})
    {'a': [1, None], '2': None}
    """
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, (int, str, type(None))) else str(value)
