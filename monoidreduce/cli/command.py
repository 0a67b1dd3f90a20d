"""What a command is made of: its row in the table, the options that commands share, its answer and its files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch


class CommandError(Exception):
    """A request that cannot be carried out; the message says what to do instead. Shown without a traceback."""


@dataclass(frozen=True)
class Answer:
    """The result of a command: ``data`` for ``--json``, or ``show(console)`` for the terminal, and the exit code.

    The code is 0, or 1 if the answer to the question asked is no.
    """

    data: Mapping[str, Any]
    show: Callable[[Any], None]
    code: int = 0


@dataclass(frozen=True)
class Command:
    """A subcommand: ``params`` are click's arguments and options, which ``run`` takes by name."""

    name: str
    run: Callable[..., Answer]
    params: Sequence[click.Parameter]
    help: str


def command(name: str, *params: click.Parameter, **words: str) -> Callable[[Callable[..., Answer]], Command]:
    """Decorator: make a function a subcommand. Its docstring is the help; ``words`` fill its ``{placeholders}``."""
    return lambda run: Command(name, run, params, (run.__doc__ or "").format(**words))


# Values of options ------------------------------------------------------------------------------------------------

DTYPES = {
    "float64": torch.float64, "f64": torch.float64, "fp64": torch.float64, "double": torch.float64,
    "float32": torch.float32, "f32": torch.float32, "fp32": torch.float32, "float": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "f16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip
LARGEST_COUNT = 10**15  # a larger number is a typing mistake, and torch counts in 64 bits


class ParsedType(click.ParamType):
    """A click type that calls ``parse(text)``; the message of a ValueError becomes click's error message."""

    def __init__(self, name: str, parse: Callable[[str], Any]):
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default that is already a value
            return value
        try:
            return self.parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_count(text: str) -> int | None:
    """A whole number from 1 to LARGEST_COUNT, or None if the text is not one."""
    text = text.strip()
    if not text.isdecimal() or len(text) > len(str(LARGEST_COUNT)):  # int() refuses thousands of digits
        return None
    return number if 1 <= (number := int(text)) <= LARGEST_COUNT else None


def parse_number(text: str) -> int:
    """A whole number from 1 to LARGEST_COUNT, also written as 1e5 or 100_000."""
    plain = re.fullmatch(r"([1-9]\d{0,2})[eE]\+?(\d{1,2})", text.strip())
    found = int(plain[1]) * 10 ** int(plain[2]) if plain else parse_count(text.replace("_", ""))
    if found is None or found > LARGEST_COUNT:
        raise ValueError(f"{text!r:.80} is no whole number from 1 to 10^15, such as 4096 or 1e5")
    return found


def parse_dtype(text: str) -> torch.dtype:
    if text not in DTYPES:
        raise ValueError(f"{text!r} is no floating type here. Use float64, float32, bf16 or fp16")
    return DTYPES[text]


def parse_size(text: str) -> tuple[int, int]:
    """``1024x4096`` is rows and columns; ``1024`` is both."""
    parts = text.lower().replace("×", "x").split("x")
    found = [n for n in map(parse_count, parts) if n is not None]
    if len(parts) > 2 or len(found) < len(parts):
        raise ValueError(f"{text!r:.80} is no size. Give ROWSxCOLS, such as 1024x4096, or one number for both")
    return found[0], found[-1]


def parse_features(text: str) -> dict[str, int]:
    """``64`` is the size of every feature axis (under the key ""); ``f=64,d=32`` names the axes."""
    found = {}
    for part in text.split(","):
        letter, _, count = part.rpartition("=")
        size = parse_count(count)
        if size is None or (not letter.strip() and "=" in part):
            raise ValueError(
                f"{part!r:.80} is no size of features. Give one number from 1 to 10^15, or letters as in f=64,d=32"
            )
        found[letter.strip()] = size
    return found


def parse_setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise ValueError(f"{text!r} sets nothing. Give a parameter and its value, as in window=256")
    return name.strip(), value.strip()


def parse_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"{text!r} is no device. Use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{device.type} is a device that nothing is measured on here. Use cpu or cuda")
    if (device.index or 0) >= (torch.cuda.device_count() if device.type == "cuda" else 1):
        raise ValueError(f"there is no {text} here. Use --device cpu; monoidreduce doctor says why")
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


# Options that several commands share ------------------------------------------------------------------------------

COUNT = ParsedType("COUNT", parse_number)
SIZE = ParsedType("SIZE", parse_size)

TARGET = click.Argument(["target"], metavar="FILE.py:NAME")
SETTINGS = click.Option(
    ["--set", "settings"], type=ParsedType("NAME=VALUE", parse_setting), multiple=True, metavar="NAME=VALUE",
    help="a parameter's number, or what a tensor is filled with: normal, positive, uniform, rows, cols, sorted, int, "
    "bool; may be given again",
)  # fmt: skip
FEATURES = click.Option(
    ["--features"],
    type=ParsedType("SIZES", parse_features),
    default=None,
    help="sizes of the letters: 64, or f=64,d=32",
)
BATCH = click.Option(["--batch"], type=COUNT, default=None, help="a leading batch dimension of this size")
DEVICE = click.Option(
    ["--device"], type=ParsedType("DEVICE", parse_device), default="cpu", show_default=True, help="where to run"
)
INPUTS = click.Option(
    ["--inputs", "inputs_name"], metavar="NAME",
    help="a function of the file that makes the arguments from (rows, cols); NAME_inputs if it is there",
)  # fmt: skip
DENSE = click.Option(
    ["--dense", "dense_name"], metavar="NAME",
    help="a function of the file that computes the same in plain torch; NAME_dense if it is there",
)  # fmt: skip
FORWARD = click.Option(["--forward"], is_flag=True, help="the forward alone, without gradients")
ROWS, COLS = (
    click.Option([f"--{name}"], type=COUNT, default=4096, show_default=True, help=f"how many {words}")
    for name, words in (("rows", "rows"), ("cols", "columns"))
)
OUT = click.Option(
    ["--out"], type=click.Path(path_type=Path), default="report", show_default=True, metavar="DIR",
    help="the folder that files are written to",
)  # fmt: skip
OP_OPTIONS = (SETTINGS, FEATURES, BATCH, DEVICE)  # how an op's arguments are drawn
LAYER_OPTIONS = (SETTINGS, FEATURES, BATCH, INPUTS, DENSE, DEVICE)  # how a layer's arguments and dense form are found


def dtype_option(default: str) -> click.Option:
    kind = ParsedType("TYPE", parse_dtype)
    return click.Option(["--dtype"], type=kind, default=default, show_default=True, help="the floating type")


def target_at_a_size(dtype: str) -> tuple[click.Parameter, ...]:
    """The parameters ``target``, ``rows``, ``cols`` and ``dtype`` with this default dtype."""
    return TARGET, ROWS, COLS, dtype_option(dtype)


# Files ------------------------------------------------------------------------------------------------------------


class OutputFolder:
    """The folder that --out names. Make this before any long measurement: it fails if nothing can be written there."""

    def __init__(self, path: Path):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CommandError(f"--out {path} is a file. Give a folder") from None
        except OSError as error:
            raise CommandError(
                f"cannot make the folder {path}: {error.strerror}. Give another one with --out"
            ) from None
        if not os.access(path, os.W_OK | os.X_OK):
            raise CommandError(f"cannot write into the folder {path}. Give another one with --out")
        self.path = path

    def write(self, contents: Mapping[str, str | bytes]) -> list[Path]:
        """Write each file and return the paths."""
        paths = [self.path / name for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            try:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            except OSError as error:
                raise CommandError(f"cannot write {path}: {error.strerror}. Give another folder with --out") from None
        return paths
