"""Run one command: ``--json``, and errors of requests as messages. Imports torch; ``app`` and ``options`` do not.

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
from collections.abc import Callable, Mapping
from typing import Any

import click
import torch

from ..engines.common.oom_retry import is_out_of_memory
from ..errors import MonoidReduceError
from . import report
from .command import Answer, CommandError
from .layers import EXPLAINED, LAYERS
from .options import Entry

_IGNORED_WARNINGS = ("mkldnn_matmul failed",)  # thirty lines of addresses on CPUs without bfloat16; the result is right
_TOO_LARGE = ("Storage size calculation overflowed", "numel: integer multiplication overflow", "invalid size")


def run_command(entry: Entry, as_json: bool, **options: Any) -> int:
    """Run a command with what was parsed, print its answer, and return the exit code."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        for message in _IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        answer = _run(find_function(entry), options)
    if as_json:
        print(json.dumps(to_json(answer.data), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        answer.show(report.make_console())
    return answer.code


def find_function(entry: Entry) -> Callable[..., Answer]:
    """What runs for a row of the table of commands."""
    function: Callable[..., Answer] = getattr(importlib.import_module(f".{entry.module}", __package__), entry.name)
    return function


def fill_names(text: str) -> str:
    """A command's help with the names of layers and peers."""
    peers = importlib.import_module(".bench", __package__).PEERS
    return text.format(layers=", ".join(LAYERS), explained=", ".join(EXPLAINED), peers=", ".join(p.key for p in peers))


def _run(function: Callable[..., Answer], options: dict[str, Any]) -> Answer:
    """The command's answer. Errors that a request caused become click's, which are shown without a traceback."""
    try:
        if options.get("dtype"):
            options["dtype"] = getattr(torch, options["dtype"])
        if options.get("device"):
            options["device"] = _find_device(options["device"])
        return function(**options)
    except (CommandError, MonoidReduceError) as error:
        raise click.ClickException(str(error)) from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error) and not any(words in str(error) for words in _TOO_LARGE):
            raise
        size = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        words = f"out of memory{f' (of {size[1]})' if size else ''}. Give smaller sizes, or fewer features"
        raise click.ClickException(words) from error


def _find_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise CommandError(f"there is no {name} here. Use --device cpu; monoidreduce doctor says why")
    return device


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
