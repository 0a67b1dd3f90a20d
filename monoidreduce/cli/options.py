"""The commands: their names, help, arguments and options, and what values options take. Imports no torch.

So help, and a mistake in an option, are answered at once. A device and a floating type are texts here; ``execute``
makes torch's of them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

# Values of options ------------------------------------------------------------------------------------------------

DTYPES = {
    "float64": "float64", "f64": "float64", "fp64": "float64", "double": "float64",
    "float32": "float32", "f32": "float32", "fp32": "float32", "float": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "f16": "float16", "fp16": "float16", "half": "float16",
}  # fmt: skip
READY_MADE = (  # the keys of ``layers.EXPLAINED``
    "attention",
    "cross-entropy-rows",
    "cross-entropy-given",
    "cross-entropy-two",
    "entropy",
    "mlp",
    "gated-mlp",
    "sample",
    "max-pool",
    "contrastive",
    "cross-entropy",
    "kernel-sum",
    "window-attention",
    "knn",
)
LARGEST_COUNT = 10**15  # a larger number is a typing mistake, and torch counts in 64 bits
RAGGED_SIZES = ((1, 1), (1, 59), (59, 1), (111, 257), (7, 0), (0, 7))
LARGE_SIZE = (2048, 8192)  # where ``check`` measures memory, and at half the rows and columns


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


def parse_dtype(text: str) -> str:
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


def parse_device(text: str) -> str:
    if not re.fullmatch(r"cpu(:0)?|cuda(:\d{1,3})?", text):
        raise ValueError(f"{text!r:.80} is no device that anything is measured on here. Use cpu or cuda")
    return text


def parse_target(text: str) -> str:
    """``FILE.py:NAME``, whose file exists, or the name of a layer."""
    if ":" not in text and not text.endswith(".py"):
        public = (Path(__file__).parents[1] / "ops" / "__init__.py").read_text()  # importing it takes torch
        known = [*READY_MADE, *re.findall(r'^    "(\w+)",$', public, re.MULTILINE), "all"]
        if text not in known:
            near = difflib.get_close_matches(text, known, 1)
            advice = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(
                f"there is no layer {text:.80}.{advice} Give FILE.py:NAME, or one of {', '.join(READY_MADE)}"
            )
        return text
    file = text.rpartition(":")[0]
    if file.endswith(".py") and len(file) < 4096 and "\0" not in file and not os.path.exists(file):
        raise click.UsageError(f"the file {file} does not exist. Give FILE.py:NAME, such as layers.py:attention")
    return text


# Options ----------------------------------------------------------------------------------------------------------

COUNT = ParsedType("COUNT", parse_number)
SIZE = ParsedType("SIZE", parse_size)
DEVICES = ParsedType("DEVICE", parse_device)
LAYER = ParsedType("LAYER", parse_target)

TARGET = click.Argument(["target"], metavar="FILE.py:NAME", type=LAYER)
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
DEVICE = click.Option(["--device"], type=DEVICES, default="cpu", show_default=True, help="where to run")
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
JSON = click.Option(["--json", "as_json"], is_flag=True, help="print the answer as JSON, and nothing else")
OP_OPTIONS = (SETTINGS, FEATURES, BATCH, DEVICE)  # how an op's arguments are drawn
LAYER_OPTIONS = (SETTINGS, FEATURES, BATCH, INPUTS, DENSE, DEVICE)  # how a layer's arguments and dense form are found


def dtype_option(default: str) -> click.Option:
    kind = ParsedType("TYPE", parse_dtype)
    return click.Option(["--dtype"], type=kind, default=default, show_default=True, help="the floating type")


# Commands ---------------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """A row of the table: a command's name, the module that has a function of that name, its help (whose first line
    stands in the list of commands), what it takes, and whether it measures: then it says what it is doing, from the
    first second on. The function takes the parameters by name and returns an ``Answer``."""

    name: str
    module: str
    help: str
    params: Sequence[click.Parameter] = ()
    measures: bool = False


COMMANDS: tuple[Entry, ...] = (
    Entry(
        "demo", "demo",
        """Show what fits in a given memory, and how fast.

        Problems are made larger until they no longer fit, ours and plain torch; then layers are measured beside their
        dense forms: time, peak extra memory, error against float64. Writes a page, index.html.
        """,
        (
            click.Option(["--memory"], metavar="SIZE", help="what must suffice; 256MiB, 1GiB on a GPU"),
            click.Option(["--device"], type=DEVICES, help="cpu or cuda; a GPU where there is one"),
            click.Option(
                ["--quick"], is_flag=True,
                help="tiny sizes, seconds; on a GPU up to two minutes. The numbers mean little",
            ),
            OUT,
        ),
        measures=True,
    ),
    Entry(
        "check", "check",
        """Check a monoid's laws, or a layer's mathematics and memory.

        A monoid: associativity, commutativity, identity and the gradient condition, on hundreds of cases; a broken law
        comes with the smallest counterexample. An op, or a ready-made layer ({explained}): its values, gradients and
        second gradients against the dense form in float64, whether it repeats to the last bit, whether its memory grows
        with the pairs, and its error in each type beside plain torch's. Exit code 1 if anything fails.
        """,
        (
            TARGET,
            click.Option(
                ["--size", "sizes"], type=SIZE, multiple=True,
                help="ROWSxCOLS to try; may be given again "
                f"[default: {', '.join(f'{r}x{c}' for r, c in RAGGED_SIZES)}]",
            ),
            click.Option(
                ["--large"], type=SIZE, default="x".join(map(str, LARGE_SIZE)), show_default=True,
                help="ROWSxCOLS at which memory is measured, and at half of both",
            ),
            click.Option(["--cases"], type=COUNT, default=200, show_default=True, help="cases for each law"),
            *LAYER_OPTIONS,
        ),
        measures=True,
    ),
    Entry(
        "explain", "plans",
        """Say what would run at a size, and why.

        Passes, schedules and tiles, with the time and memory that are predicted for each, of an op, of a ready-made
        layer ({explained}), or of the ops that a function in a file calls. No pair is computed, and on a CPU nothing is
        allocated, so the size may be any; with --measure the call is run a few times, and measured beside.
        """,
        (
            TARGET, ROWS, COLS, dtype_option("bf16"), FORWARD,
            click.Option(["--measure"], is_flag=True, help="run it too, and measure beside what is predicted"),
            *OP_OPTIONS,
        ),
    ),
    Entry(
        "bench", "bench",
        """Measure layers beside every peer that is installed.

        LAYER is FILE.py:NAME or a ready-made layer: {layers}; or "all" of these.

        Naive torch, torch.compile, SDPA, FlexAttention, F.linear_cross_entropy, Liger, Cut Cross-Entropy and KeOps are
        measured where they have a function for the layer, at every size: the best time of several, forward and both
        ways, the peak of the extra memory, and the error against float64 at the smallest size. A PEER is one of
        {peers}; or none. Writes bench.html, bench.md, bench.png and bench.json.
        """,
        (
            click.Argument(["layers"], nargs=-1, metavar="[LAYER]...", type=LAYER),
            click.Option(["--size", "sizes"], type=SIZE, multiple=True, help="ROWSxCOLS; may be given again"),
            click.Option(
                ["--peer", "peers"], multiple=True, metavar="PEER",
                help="measure beside this one only; may be given again",
            ),
            dtype_option("float32"),
            click.Option(
                ["--seconds"], type=click.FloatRange(min=0), default=1.0, show_default=True,
                help="time to spend on the runs of each contender at each size",
            ),
            OUT, *LAYER_OPTIONS,
        ),
        measures=True,
    ),
    Entry(
        "profile", "profile",
        """Draw a layer's memory over time, ours and the dense form's.

        Every allocation and release of torch's allocator during one forward and backward. The layer is FILE.py:NAME or
        a ready-made one (see bench --help). Writes profile.html, profile.png and profile.json.
        """,
        (TARGET, ROWS, COLS, dtype_option("float32"), OUT, *LAYER_OPTIONS),
        measures=True,
    ),
    Entry(
        "tune", "plans",
        """Find the fastest plans for a size, and remember them.

        Every fold is run with each plan that the cost model leaves close; one whose result is wrong is refused. Winners
        serve all lengths up to the next power of two, in later processes too: see cache.
        """,
        (TARGET, ROWS, COLS, dtype_option("float32"), FORWARD, *LAYER_OPTIONS),
    ),
    Entry(
        "cache", "plans",
        """Show, clear or share the plans kept on disk.

        show lists them (the default), path prints the folder, clear removes plans and kernels, export FILE writes all
        plans to one file, import FILE reads such a file, and checks it first.
        """,
        (
            click.Argument(
                ["action"], type=click.Choice(["show", "path", "clear", "export", "import"]), required=False,
                default="show",
            ),
            click.Argument(["file"], type=click.Path(path_type=Path), required=False),
        ),
    ),
    Entry("doctor", "doctor", "Say what is here, what runs where, and what to install."),
)  # fmt: skip
