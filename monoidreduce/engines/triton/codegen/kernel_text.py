"""The parts of kernel text that every generated kernel shares, and what a generated kernel is.

``compiler.py`` writes a whole kernel from a fold; schedules and panel kernels fill their own templates with these
parts. Equal specs have equal texts, in every process.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....program.expression import Expr
from ....reductions import outputs_of
from ....reductions.base import Lines
from . import device_functions, k_loop, listed, random_functions, special_functions, tile_ranges
from .expressions import ExpressionWriter
from .kernel_spec import TINY, Spec, name_descriptor
from .reductions import substitute_truths

# The constexpr parameters of every kernel, after its arguments; ``kernels/fold_kernel.py`` gives them
CONSTANTS = ("KEPT", "FOLDED", "INT", "PRECISION", "RAGGED")

IMPORTS = """import triton
import triton.language as tl
"""

_HEADER = '''"""{title}

{leaves}

Written by monoidreduce; the same program always gives the same text.
"""

'''


@dataclass(frozen=True)
class BlockWidths:
    """How many features a kernel holds at a time: what a tile must leave room for."""

    kept: int = 0  # of the blocks that stay for the whole loop
    kept_blocks: int = 0  # how many of these there are
    folded: int = 0  # of the blocks that are loaded in each tile
    state: int = 0  # of the accumulators
    each_kept: int = 0  # of the kept blocks, those loaded for each of several vectors
    each_folded: int = 0  # and of the folded blocks
    stored: int = 0  # of sums that are kept in memory, one vector at a time


@dataclass(frozen=True)
class Traits:
    """What a kernel computes, as far as the choice of a tile depends on it (``schedules/kernel_plan.py``)."""

    exact: bool = True  # float32 products are as exact as float32 allows
    exponentials: bool = False  # pairs are exponentiated
    guesses: bool = False  # whole tiles use a guessed maximum, which may prove wrong
    bounds: bool = False  # it is told which tiles to visit
    few_tiles: bool = False  # few tiles per row are computed: several masks, or a data-dependent one
    data_masks: bool = False  # a mask depends on data, which the tiles that it cuts load
    k_loop: bool = False  # products have more features than a block
    draws: bool = False  # pairs draw random numbers
    sums_other_block: bool = False  # a block is summed that is in no other product
    pieces: int = 0  # 16-bit parts into which float32 vectors are split; 0: not split
    close_pairs: bool = False  # squared distances of close points are recomputed
    several: bool = False  # a loop over several vectors is inside that over tiles
    pair_features: int = 0  # features of the vectors that are held for every pair of a tile
    held_pairs: int = 0  # floats per pair that are held at the same time, at most


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: its text, and what it is launched with."""

    name: str  # of the function in the text
    text: str
    leaves: tuple[Expr, ...]  # in the order of the arguments
    folded: tuple[Expr, ...] = ()  # leaves whose blocks are loaded in each tile
    shifts: tuple[tuple[Expr, Expr], ...] = ()  # of exponents, computed from two leaves before the launch
    hand_scheduled: bool = False  # hand-scheduled, written in Gluon
    single_warpgroup: bool = False  # hand-scheduled for one warp group: all warps do the same
    consumers: int = 0  # consumer warp groups beside a producer warp, in a warp-specialised kernel
    transposed: Expr | None = None  # the leaf that is copied with its features first (``spec_from_tensors.py``)
    functions: tuple[tuple[str, Any], ...] = ()  # by name, what the text calls and does not hold
    coefficients: tuple[tuple[float, tuple], ...] = ()  # arguments after all others: ``logit_forms.Coefficient``
    widths: BlockWidths = field(default_factory=BlockWidths)
    traits: Traits = field(default_factory=Traits)


def write_header(spec: Spec, used: list[Expr], imports: str = IMPORTS) -> str:
    """The docstring of a kernel's text (its reductions and leaves) and its imports."""
    title = f"A fold over {spec.over}: {', '.join(r.attrs[0] for r in spec.fold.reductions)}."
    lines = []
    for e in used:
        side = "row" if e.rows else "column" if e.cols else "batch element"
        what = "a number" if e.feature is None else f'a vector over "{e.feature}" ({spec.width(e.feature)})'
        kind = spec.type_of[e]
        lines.append(f"{e.attrs[0]}: {what} {'given at the call' if spec.is_number(e) else f'per {side}, {kind}'}")
    return _HEADER.format(title=title, leaves="\n".join(lines) or "No leaves.") + imports


def list_arguments(spec: Spec, used: list[Expr], shifts: int) -> tuple[list[str], list[str]]:
    """The run-time parameters of a kernel, in the order in which ``fold_kernel.py`` gives them, and those that Triton
    must not specialize on."""
    count = sum(len(outputs_of(r)) for r in spec.fold.reductions)
    names = [f"out{k}" for k in range(count + (spec.diagonals is not None))]
    names += [name for k in spec.strided for name in name_strides(spec, k)]
    numbers = []
    for e in used:
        x = str(e.attrs[0])
        if spec.is_number(e):
            numbers.append(f"{x}_number")
            names.append(f"{x}_number")
            continue
        names.append(f"{x}_ptr")
        names += [f"{x}_b{k}" for k in range(spec.rank)]
        names += [f"{x}_g"] if spec.grouped and spec.keeps(e) else []
        pair = e.is_pair and not spec.is_per_entry(e)
        names += [f"{x}_r", f"{x}_c"] if pair else [f"{x}_s"] if e.rows or e.cols else []
        names += [f"{x}_f"] if e.feature is not None else []
        if e in spec.fold.tables:
            names.append(f"{x}_n")
            numbers.append(f"{x}_n")
    sizes = ["kept_size", "folded_size", "tiles", *(f"n{k}" for k in range(1, spec.rank))]
    sizes += ["period"] if spec.grouped else []
    sizes += ["group"] if spec.folded_batch_dim is not None and not spec.folded_batch_size else []
    sizes += ["parts", "batches", *(["beside"] if spec.k_loop else [])] if spec.split else []
    lists, numbered = listed.list_arguments(spec) if spec.listed else ([], [])
    names += [*sizes, *lists, *(["bounds", "bounds_b", "turns", "flip"] if spec.bounds else [])]
    names += [f"shift{k}_{'box' if spec.shift_descriptors else 'ptr'}" for k in range(shifts)]
    copied = [e for e in used if e in spec.descriptor_dims]
    names += [name_descriptor(str(e.attrs[0]), k) for e in copied for k in range(len(spec.descriptor_slices(e)))]
    joint = ["joint_start", "joint_batches", "joint_beside"] if spec.joint else []
    names += ["joint_ptr", "joint_first", *joint, "joint_box"] if joint else []
    return names, [*numbers, *sizes, *numbered, *(["turns", "flip"] if spec.bounds else []), *joint]


def write_function(
    spec: Spec,
    name: str,
    used: list[Expr],
    signature: tuple[list[str], list[str]],
    body: Sequence[str],
    helpers: Sequence[str] = (),
) -> str:
    """The text of a kernel: a header, the device functions that it calls, functions of its own, and its body.

    ``used``: the leaves that it reads; ``signature``: its arguments, and those not to specialize on; ``helpers``: the
    lines of its own functions."""
    names, unspecialized = signature
    lines = [
        f"@triton.jit(do_not_specialize={unspecialized!r})",
        f"def {name}(",
        *textwrap.wrap(", ".join(names) + ",", 110, initial_indent="    ", subsequent_indent="    "),
        f"    {', '.join(f'{c}: tl.constexpr' for c in CONSTANTS)},",
        "):",
        *(f"    {line}" if line else "" for line in body),
    ]
    own = re.sub(r"(?m)^def ", "@triton.jit\ndef ", "\n".join(helpers))
    functions = (f"{own}\n\n" if own else "\n") + "\n".join(lines)
    return "\n".join([write_header(spec, used), *copy_device_functions(functions), functions, ""])


def name_strides(spec: Spec, out: int) -> list[str]:
    """The parameters that say where an output's batch elements, and its rows or columns, begin."""
    return [*(f"out{out}_b{k}" for k in spec.kept_batch), f"out{out}_s"]


def write_output_base(spec: Spec, out: int) -> str:
    """A line that finds where the kept tile of an output with strides begins."""
    batch = "".join(f" + b{k} * out{out}_b{k}" for k in spec.kept_batch)
    return f"out{out}_base = out{out}{batch} + tl.cast({spec.kept_start}, tl.int64) * out{out}_s"


def write_prologue(spec: Spec) -> list[str]:
    """The first lines of a kernel: its tile, split and batch element from the program id, and its kept indices."""
    lines = ["tile = tl.program_id(0) % tiles", "batch = tl.program_id(0) // tiles"]
    if spec.bounds:
        lines = ["tile, batch = longest_first(tl.program_id(0), tiles, turns, flip)"]
    if spec.split:
        lines = [*k_loop.PROLOGUE] if spec.k_loop else [*lines, "part = batch // batches", "batch = batch % batches"]
    rest = "batch"
    for k in reversed(spec.kept_batch[1:]):
        lines.append(f"b{k} = tl.cast({rest} % n{k}, tl.int64)")
        lines.append(f"rest{k} = {rest} // n{k}")
        rest = f"rest{k}"
    lines += [f"b{k} = tl.cast({rest}, tl.int64)" for k in spec.kept_batch[:1]]
    if spec.listed:
        return [*lines, *listed.write_kept(spec)]
    return [
        *lines,
        "kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "kept_in = kept_at < kept_size",
        "kept_lane = tl.arange(0, KEPT).to(INT)",
        "folded_lane = tl.arange(0, FOLDED).to(INT)",
        *(["kept_row = kept_at % period", "kept_group = kept_at // period"] if spec.grouped else []),
    ]


def write_tile_range(spec: Spec) -> list[str]:
    """Lines that say which tiles are visited: given bounds, clamped to this program instance's split."""
    if spec.bounds:
        lines = [
            "# the tiles to visit, from first to last: whole ones in two runs, and those around; others are idle",
            f"edges = bounds + batch * bounds_b + tile * {len(tile_ranges.EDGES)}",
            *(f"{n} = tl.load(edges + {k})" for k, n in enumerate(tile_ranges.EDGES)),
        ]
    elif spec.split:
        lines = ["first = 0", "whole_first = 0", "whole_last = folded_size // FOLDED"]
        lines += ["last = tl.cdiv(folded_size, FOLDED)", "again_first = last", "again_last = last"]
    else:
        return ["whole_first = 0", "whole_last = folded_size // FOLDED"]
    if spec.split:
        lines += [
            *tile_ranges.SPLIT_RANGE,
            *(f"{n} = tl.minimum(tl.maximum({n}, begin), end)" for n in tile_ranges.EDGES),
        ]
    return [
        *lines,
        "whole = whole_last - whole_first",
        "before = whole_first - first",
        "between = again_first - whole_last",
        "again = again_last - again_first",
    ]


def write_tile_body(v: ExpressionWriter, reductions: list[Lines], truths: dict[Expr, bool], masked: bool) -> list[str]:
    """The body of a loop over tiles: what one tile adds to every reduction.

    ``truths``: conditions whose value is known in this loop; ``masked``: tiles may reach beyond the folded axis."""

    def step() -> None:
        for r in reductions:
            fields = tuple(substitute_truths(f, truths) for f in r.reduction.args)
            v.inside.append(f"# {describe_reduction(r.reduction)}")
            if v.spec.pieces:  # first: other numbers would take registers meanwhile
                v.products(*fields)
            r.step(fields)

    v.loop(masked)
    if v.spec.k_loop and v.spec.draws_numbers:
        return k_loop.write_tile_in_strips(v, step)
    step()
    return v.inside


def describe_reduction(r: Expr) -> str:
    """A reduction as a comment of the kernel's text."""
    kind, over, _ = r.attrs
    text = f"{kind} over {over} of {', '.join(map(repr, r.args))}"
    return text if len(text) <= 110 else f"{text[:107]}..."


def write_stores(reductions: list[Lines], v: ExpressionWriter) -> list[str]:
    """Store each reduction's results; with splits, each split's partial results."""
    place = "tl.cast(part, tl.int64) * batches + batch" if v.spec.split else "tl.cast(batch, tl.int64)"
    lines = ["tl.extra.cuda.gdc_launch_dependents()"] if v.spec.split and v.spec.launches_dependents else []
    count, first = v.spec.result_place
    lines.append(f"out_at = ({place}) * {count} + {first}")
    at = 0
    for r in reductions:
        for texts, feature in r.finish():
            out = f"out{at}"
            at += 1
            if not texts:  # it is there (``reductions.py``)
                continue
            if feature is None:
                lines.append(f"tl.store({out} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
                continue
            width = v.spec.width(feature)
            place = f"{out} + (out_at + {{}}) * {width}"
            if at - 1 in v.spec.strided:
                lines.append(write_output_base(v.spec, at - 1))
                place = f"{out}_base + {{}} * {out}_s"
            if width <= TINY:
                for f, text in enumerate(texts):
                    lines.append(f"tl.store({place.format('kept_lane')} + {f}, {text}, mask=kept_in)")
                continue
            for text, (begin, size) in zip(texts, v.spec.slices(feature), strict=True):
                lane, exists = v.slice_lane(size, width - begin)
                mask = "kept_in[:, None]" + (f" & {exists}[None, :]" if exists else "")
                row = place.format("kept_lane[:, None]") + (f" + {begin}" if begin else "")
                lines.append(f"tl.store({row} + {lane}[None, :], {text}, mask={mask})")
    return lines


def count_held(text: str, names: set[str]) -> int:
    """How many of these names have been bound, and are yet to be read, where they are most."""
    found: dict[str, tuple[int, int]] = {}  # the first and the last line that has a name
    for at, line in enumerate(text.splitlines()):
        found |= {name: (found.get(name, (at,))[0], at) for name in re.findall(r"\w+", line) if name in names}
    changes = sorted(change for first, last in found.values() for change in ((first, 1), (last, -1)))
    return max([0, *itertools.accumulate(step for _, step in changes)])


@functools.cache
def device_function_sources() -> dict[str, str]:
    """The functions of ``device_functions.py`` and the two files beside it, by name, in their order; a quick form
    without a native one is followed by the same function with native forms inside."""
    written: dict[str, str] = {}
    for module in (device_functions, special_functions, random_functions):
        source = inspect.getsource(module)
        lines = source.split("\n")
        functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        written |= {f.name: "\n".join(lines[f.lineno - 1 : f.end_lineno]) for f in functions}
    found = {}
    for name, text in written.items():
        found[name] = text
        native = name.replace("quick_", "native_")
        if native not in written:
            found[native] = text.replace("quick_", "native_")
    return found


def copy_device_functions(text: str) -> list[str]:
    """The device functions that a text calls and does not hold, and those that these call, callees first."""
    library = device_function_sources()
    held = set(re.findall(r"(?m)^def (\w+)", text))
    wanted: set[str] = set()
    stack = [text]
    while stack:
        here = re.sub("#.*", "", stack.pop())
        named = set(re.findall(r"(?<![\w.])(\w+)[()]", here))  # called, or given to a reduction
        new = library.keys() & named - wanted - held
        wanted |= new
        stack += [library[name] for name in new]
    return [f"\n@triton.jit\n{source}\n" for name, source in library.items() if name in wanted]
