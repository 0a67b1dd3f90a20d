"""Options that several commands share, and the kinds of values they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch

DTYPES = {
    "float64": torch.float64, "f64": torch.float64, "fp64": torch.float64, "double": torch.float64,
    "float32": torch.float32, "f32": torch.float32, "fp32": torch.float32, "float": torch.float32,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "f16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip


MOST = 10**15  # of anything that is counted: more is a slip of the finger, and torch counts in 64 bits


def whole(text: str) -> int | None:
    """A whole number from 1 to MOST, None where the text is none."""
    text = text.strip()
    if not text.isdecimal() or len(text) > len(str(MOST)):  # before int, which refuses thousands of digits
        return None
    return number if 1 <= (number := int(text)) <= MOST else None


class DTypeType(click.ParamType):
    """The name of a floating type."""

    name = "TYPE"

    def convert(self, value: Any, param: Any, ctx: Any) -> torch.dtype:
        if isinstance(value, torch.dtype):
            return value
        if value not in DTYPES:
            self.fail(f"{value!r} is no floating type here. Use float64, float32, bf16 or fp16", param, ctx)
        return DTYPES[value]


class SizeType(click.ParamType):
    """``1024x4096``, rows and columns; ``1024`` for both."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        parts = value.lower().replace("×", "x").split("x")
        found = [n for n in map(whole, parts) if n is not None]
        if len(parts) > 2 or len(found) < len(parts):
            shown = f"{value!r:.80} is no size"
            self.fail(f"{shown}. Give ROWSxCOLS, such as 1024x4096, or one number for both", param, ctx)
        return found[0], found[-1]


class FeaturesType(click.ParamType):
    """``64`` for every letter, or ``f=64,d=32``."""

    name = "SIZES"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        found = {}
        for part in value.split(","):
            letter, _, count = part.rpartition("=")
            size = whole(count)
            if size is None or (not letter.strip() and "=" in part):
                shown = f"{part!r:.80} is no size of features"
                self.fail(f"{shown}. Give one number from 1 to 10^15, or letters as in f=64,d=32", param, ctx)
            found[letter.strip()] = size
        return found


class SettingType(click.ParamType):
    """``name=value``."""

    name = "NAME=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, equals, given = value.partition("=")
        if not equals or not name or not given:
            self.fail(f"{value!r} sets nothing. Give a parameter and its value, as in window=256", param, ctx)
        return name.strip(), given.strip()


class DeviceType(click.ParamType):
    """``cpu``, or ``cuda`` where there is one."""

    name = "DEVICE"

    def convert(self, value: Any, param: Any, ctx: Any) -> torch.device:
        try:
            device = torch.device(value)
        except RuntimeError:
            self.fail(f"{value!r} is no device. Use cpu or cuda", param, ctx)
        if device.type not in ("cpu", "cuda"):
            self.fail(f"{device.type} is a device that nothing is measured on here. Use cpu or cuda", param, ctx)
        count = torch.cuda.device_count() if device.type == "cuda" else 1
        if (device.index or 0) >= count:
            self.fail(f"there is no {value} here. Use --device cpu; monoidreduce doctor says why", param, ctx)
        return device


COUNT = click.IntRange(min=1, max=MOST)

TARGET = click.Argument(["target"], metavar="FILE.py:NAME")
SETTINGS = click.Option(
    ["--set", "settings"], type=SettingType(), multiple=True, metavar="NAME=VALUE",
    help="a parameter's number, or what a tensor is filled with: normal, positive, uniform, rows, cols, sorted, int, "
    "bool; may be given again",
)  # fmt: skip
FEATURES = click.Option(
    ["--features"], type=FeaturesType(), default=None, help="sizes of the letters: 64, or f=64,d=32"
)
DEVICE = click.Option(["--device"], type=DeviceType(), default="cpu", show_default=True, help="where to run")
BATCH = click.Option(["--batch"], type=COUNT, default=None, help="a leading batch dimension of this size")
INPUTS = click.Option(
    ["--inputs", "inputs_name"], metavar="NAME",
    help="a function of the file that makes the arguments from (rows, cols); NAME_inputs if it is there",
)  # fmt: skip
DENSE = click.Option(
    ["--dense", "dense_name"], metavar="NAME",
    help="a function of the file that computes the same in plain torch; NAME_dense if it is there",
)  # fmt: skip
FORWARD = click.Option(["--forward"], is_flag=True, help="the forward alone, without gradients")
DRAWN = (SETTINGS, FEATURES, BATCH, DEVICE)  # what an op's arguments are drawn by
SUBJECT = (SETTINGS, FEATURES, BATCH, INPUTS, DENSE, DEVICE)  # what a layer is given, apart from its size and type
ROWS, COLS = (
    click.Option([f"--{name}"], type=COUNT, default=4096, show_default=True, help=f"how many {words}")
    for name, words in (("rows", "rows"), ("cols", "columns"))
)


def dtype(default: str) -> click.Option:
    return click.Option(["--dtype"], type=DTypeType(), default=default, show_default=True, help="the floating type")


def out(default: str = "report") -> click.Option:
    return click.Option(
        ["--out"], type=click.Path(path_type=Path), default=default, show_default=True, metavar="DIR",
        help="the folder that files are written to",
    )  # fmt: skip
