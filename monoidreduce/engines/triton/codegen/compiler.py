"""The compiler: from one direction of a fold to the text of one Triton kernel.

A program instance owns ``KEPT`` indices of the kept axis of one batch element and loops over the folded axis in tiles
of ``FOLDED``, its state in registers: no atomics, one fixed order. Two loops share the state. The first visits whole
tiles, on which the value of every condition is known; the second visits the others: tiles that a condition cuts, and
the ragged end. The same text serves every length, plan and batch size, and equal specs have equal texts, in every
process.

:func:`run_passes` lists the passes; ``print(run_passes(spec))`` shows what each of them made. The parts of a text that
they put together (header, arguments, prologue, range of tiles, body of a loop, stores, device functions) also fill the
templates of schedules and panel kernels.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....program.expression import Expr, are_several, letters, topological
from ....reductions import outputs_of
from ....reductions.base import Lines
from ....reductions.softmax import SoftmaxLines
from . import device_functions, few_rows, kernel_spec, listed, special_functions, tile_ranges
from .expressions import ExpressionWriter, product_key, write_product
from .kernel_spec import TINY, WIDEST, LoopBodies, Spec, list_k_loop_operands, name_descriptor, pad_width
from .reductions import is_stored, make_lines, substitute_truths

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

# Numbers of a pair, beside sums of vectors, with which no registers are left for what a sine and a cosine share. H200,
# the logsumexp of cos(softsign(x · y + b)) with gradients: 1.52 ms, 1.95 where it is shared (468 bytes spilled)
CROWDED = 5


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


@dataclass(frozen=True)
class Passes:
    """What each pass made, in the order in which they run."""

    spec: Spec  # the fold, and what else its kernel depends on
    conditions: dict[Expr, bool]  # their value in whole tiles, which the first loop is written for
    tile_range: list[str]  # which tiles are visited
    loops: list[str]  # what a tile adds to each accumulator, without and with masks
    results: list[str]  # what is stored after the loops
    accumulators: list[str]  # their first values
    invariants: list[str]  # expressions that do not vary along the folded axis: computed before the loops
    kernel: Kernel  # the whole text, and what its tile is chosen by

    def __str__(self) -> str:
        spec, conditions = self.spec, [f"{c!r}: {value}" for c, value in self.conditions.items()]
        shown = {
            "spec": [f"over {spec.over}, {spec.compute}: {r!r}" for r in spec.fold.reductions],
            "conditions": conditions,
            "tile range": self.tile_range,
            "loops": self.loops,
            "results": self.results,
            "accumulators": self.accumulators,
            "invariants": self.invariants,
            "kernel": self.kernel.text.splitlines(),
        }
        return "\n\n".join("\n".join([f"== {name} ==", *lines]) for name, lines in shown.items())


@functools.lru_cache(maxsize=1024)
def compile_fold(spec: Spec) -> Kernel:
    """The kernel of a spec; raises Unsupported where there is none."""
    return run_passes(spec).kernel


def run_passes(spec: Spec) -> Passes:
    """Run the passes of the compiler; raises Unsupported where a fold has no kernel."""
    writer = listed.ListedWriter(spec) if spec.listed else ExpressionWriter(spec)
    reductions = [make_lines(place, r, scale, writer) for place, (r, scale) in enumerate(spec.fold.scaled)]
    conditions = kernel_spec.whole_tile_conditions(spec.fold) if spec.bounds else {}
    if spec.listed and not listed.walks_twice(spec):
        tile_range = listed.write_tile_range(writer)
        loops = listed.join_loop(spec, write_tile_body(writer, reductions, {}, masked=True))
    elif spec.few_rows:
        tile_range = few_rows.write_tile_range(writer)
        loops = few_rows.join_loop(write_tile_body(writer, reductions, {}, masked=True))
    else:
        tile_range = listed.write_tile_range(writer) if spec.listed else write_tile_range(spec)
        loops = write_loops(writer, reductions, conditions)
    if writer.state_width and count_held("\n".join(loops), writer.pair_names) >= CROWDED:
        loops = [re.sub(r"(native|quick)_cos\(", r"\1_cos_apart(", line) for line in loops]
    writer.loop(False)
    stores = write_stores(reductions, writer)
    results = [*writer.inside, *stores]  # what is computed of the accumulators, and its stores
    accumulators = [line for r in reductions for line in r.start()]  # after the loops, which decide what they hold
    invariants = list(writer.before)
    steps = [["", "# running values", *accumulators], ["", *tile_range]]
    steps = steps[::-1] if any(r.skipped for r in reductions) else steps
    body = [*write_prologue(spec), *invariants, *itertools.chain(*steps), *loops]
    body += ["", "# results", *results]
    helpers = [line for r in reductions for line in ([*r.helpers, ""] if r.helpers else [])]
    text = write_function(spec, body, len(writer.shifts), helpers)
    kernel = describe_kernel(writer, text, conditions, bool(_list_guessing(reductions)))
    return Passes(spec, conditions, tile_range, loops, results, accumulators, invariants, kernel)


def write_function(spec: Spec, body: list[str], shifts: int = 0, helpers: Sequence[str] = ()) -> str:
    """The text of a kernel with this body."""
    used = _list_used_leaves(spec)
    return write_kernel_function(spec, _name(spec), used, list_arguments(spec, used, shifts), body, helpers)


def describe_kernel(writer: ExpressionWriter, text: str, conditions: dict[Expr, bool], guesses: bool) -> Kernel:
    """A text as a kernel, with what its tile is chosen by."""
    spec = writer.spec
    kept = [e for e in writer.blocks if not spec.folds(e)]
    folded = [e for e in writer.blocks if spec.folds(e)]

    def width(leaves: Iterable[Expr]) -> int:
        slices = (each for e in leaves for each in spec.slices(letters(e.feature)[-1]))
        return sum(size for _, size in slices) * max(spec.pieces, 1)

    stored = [r for r in spec.fold.reductions if is_stored(r)]
    data = any(e.op == "leaf" and spec.folds(e) for e in topological(conditions))
    return Kernel(
        name=_name(spec),
        text=text,
        leaves=tuple(_list_used_leaves(spec)),
        folded=tuple(folded),
        shifts=tuple(writer.shifts),
        widths=BlockWidths(
            kept=width(kept),
            kept_blocks=len(kept),
            folded=width(folded),
            state=writer.state_width,
            each_kept=width(filter(are_several, kept)),
            each_folded=width(filter(are_several, folded)),
            stored=sum(pad_width(spec.width(letters(r.args[0].feature)[1])) for r in stored),
        ),
        traits=Traits(
            exact=spec.exact,
            exponentials="tl.exp2(" in text,
            guesses=guesses,
            bounds=spec.bounds,
            few_tiles=data or any(e.op == "logical_and" for e in topological(conditions)),
            data_masks=data,
            k_loop=spec.k_loop,
            draws=spec.draws_numbers,
            sums_other_block=not writer.factors.issuperset(folded),
            pieces=spec.pieces,
            close_pairs=bool(spec.close_pairs),
            several=any(map(are_several, writer.blocks)),
            pair_features=writer.pair_features,
            held_pairs=count_held(text, writer.pair_names),
        ),
    )


def _name(spec: Spec) -> str:
    return f"fold_over_{spec.over}"


def _list_used_leaves(spec: Spec) -> list[Expr]:
    """The leaves that a kernel reads, in the order of its arguments."""
    under = {
        *topological([*spec.fold.reductions, *spec.fold.scales]),
        *(e for _, pair in spec.close_pairs for e in pair),
    }
    return [e for e in spec.fold.leaves if e in under]


# The loops, and the guessed maximum that whole tiles use in place of the running one


def _list_guessing(reductions: list[Lines]) -> list[SoftmaxLines]:
    """The softmaxes that need no running maximum in whole tiles."""
    return [r for r in reductions if isinstance(r, SoftmaxLines) and r.guesses]


def write_loops(v: ExpressionWriter, reductions: list[Lines], truths: dict[Expr, bool]) -> list[str]:
    """The two loops. In whole tiles a softmax uses a guessed maximum; the second loop keeps a running one (online
    softmax), and visits all tiles again where the guess proved too far off."""
    soft = _list_guessing(reductions)
    guess = _write_guess(v, soft, truths)
    for r in soft:
        r.guessing = True
    v.delays_products = bool(v.spec.descriptors)
    whole_tile = write_tile_body(v, reductions, truths, masked=False)
    v.delays_products = False
    for r in soft:
        r.guessing = False
    delayed, check_guess = _finish_delayed(reductions), _check_guess(v.spec, reductions, soft)
    cut_tile = write_tile_body(v, reductions, {}, masked=True)
    return [*guess, *_join_loops(v.spec, LoopBodies(whole_tile, delayed, check_guess, cut_tile))]


def _write_guess(v: ExpressionWriter, soft: list[SoftmaxLines], truths: dict[Expr, bool]) -> list[str]:
    """Guess each softmax's maximum from one whole tile: the first, or with ALiBi the one nearest to the diagonal."""
    if not soft:
        return []
    v.loop(False)
    for r in soft:
        r.guess(tuple(substitute_truths(f, truths) for f in r.reduction.args[:1]))
    runs = _has_two_runs(v.spec)
    some = "whole + again > 0" if runs else "whole_last > whole_first"
    first = "(whole_first + tl.where(whole > 0, 0, between))" if runs else "whole_first"
    what = "the first whole tile"
    if any(r.sloped for r in soft):
        what = "the whole tile nearest to the rows' own indices"
        last = "tl.where(whole > 0, whole_last, again_last)" if runs else "whole_last"
        first = f"tl.maximum({first}, tl.minimum(tile * KEPT // FOLDED, {last} - 1))"
    place = [f"start = {first} * FOLDED", "folded_at = start + tl.arange(0, FOLDED)"]
    place = ["t = whole_first", *listed.write_place(v.spec)] if v.spec.listed else place
    return [
        *(line for r in soft for line in r.before_whole_tiles()),
        f"# the maximum of {what} stands in for the running one in all of them",
        *(listed.write_first(v.spec, "whole_first") if v.spec.listed else []),
        f"if {some}:",
        *(f"    {line}" for line in place),
        *(f"    {line}" for line in v.inside),
    ]


def _has_two_runs(spec: Spec) -> bool:
    """True when whole tiles come in two runs, with other tiles before, between and after them."""
    return spec.listed is None and (spec.bounds or spec.split)


def _check_guess(spec: Spec, reductions: list[Lines], soft: list[SoftmaxLines]) -> list[str]:
    """Where a guess was too far off, reset all accumulators and leave every tile to the second loop."""
    if not soft:
        return []
    state = [line.split(" = ", 1) for r in reductions for line in r.start() if "_late = " not in line]
    return [
        *(line for r in soft for line in r.after_whole_tiles()),
        f"near = {' & '.join(f'({r.guessed()})' for r in soft)}",
        *(f"{name} = tl.where(near, {name}, {value})" for name, value in state),
        *_NO_WHOLE_TILES[_has_two_runs(spec)],
    ]


_NO_WHOLE_TILES = {  # lines that leave every tile to the second loop, by whether whole tiles come in two runs
    False: ["whole_last = tl.where(near, whole_last, whole_first)"],
    True: [
        "before = tl.where(near, before, last - first)",
        *(f"{name} = tl.where(near, {name}, 0)" for name in ("between", "whole", "again")),
        "again_last = tl.where(near, again_last, last)",
    ],
}


def _finish_delayed(reductions: list[Lines]) -> list[str]:
    """The products that the last whole tile left to the next (``reductions.py``)."""
    delayed = [total for r in reductions for total in r.totals if total.delayed_vector is not None]
    return [line for total in delayed for line in total.add_delayed_product()]


def _join_loops(spec: Spec, bodies: LoopBodies) -> list[str]:
    """Both loops as lines: whole tiles, then those before, between and after them."""
    if spec.listed:
        return listed.join_loops(spec, bodies)
    begin, stop, at = "whole_first", "whole_last", "{}"
    count, turn = "tl.cdiv(folded_size, FOLDED) - whole_last", "whole_last + t"
    if spec.bounds or spec.split:
        begin, stop, at = "0", "whole + again", "(whole_first + {0} + tl.where({0} < whole, 0, between))"
        count = "before + between + last - again_last"
        turn = "first + t + tl.where(t < before, 0, whole) + tl.where(t < before + between, 0, again)"
    if spec.folded_batch_dim is not None:
        return _join_group_loops(spec, (begin, stop, at), (count, turn), bodies)
    second = [
        f"for t in range(0, {count}):",
        f"    start = ({turn}) * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = within(folded_at, folded_size, RAGGED)",
        *(f"    {line}" for line in bodies.cut_tile),
    ]
    loop, before = _write_k_loop(spec) if spec.k_loop else "range({}, {})", at.format("(t - 1)")
    after = [f"gone = {at.format(f'({stop} - 1)')} * FOLDED", *bodies.delayed]  # what the last whole tile left
    always = spec.bounds or spec.split or bool(bodies.check_guess)  # else it is for the ragged end alone
    return [
        f"for t in {loop}:".format(begin, stop),
        f"    start = {at.format('t')} * FOLDED",
        *([f"    gone = tl.where(t > {begin}, {before} * FOLDED, folded_size)"] if bodies.delayed else []),
        "    folded_at = start + tl.arange(0, FOLDED)",
        *(f"    {line}" for line in bodies.whole_tile),
        *([f"if {stop} > {begin}:", *(f"    {line}" for line in after)] if bodies.delayed else []),
        *bodies.check_guess,
        *(second if always else ["if RAGGED:", *(f"    {line}" for line in second)]),
    ]


def _write_k_loop(spec: Spec) -> str:
    """The loop over whole tiles of a K loop's fold, from one number to another.

    Where tensor descriptors copy, it is flattened with the loop over features: the next tile's first blocks are then on
    their way while this one is folded. (H200, 1024 × 128256 of 4096 features: an argmax 1.49 ms, else 1.54. Two folds
    at once have no registers for it.)"""
    walked = set(list_k_loop_operands(spec))
    flat = walked and walked <= spec.descriptor_dims.keys() and len(spec.fold.reductions) == 1
    return "tl.range({}, {}, flatten=True)" if flat else "range({}, {})"


def _join_group_loops(
    spec: Spec, whole: tuple[str, str, str], others: tuple[str, str], bodies: LoopBodies
) -> list[str]:
    """Both loops where a batch dimension is folded too: a tile of each of its elements, then the next tile of each.

    ``whole``: the first whole tile, the one after the last, and where one lies; ``others``: how many other tiles there
    are, and where one lies."""
    (begin, stop, at), (count, place), size = whole, others, spec.folded_batch_text
    first = "" if begin == "0" else f"{begin} + "
    tile_of = f"({first}{{}} // {size})".format
    group = f"    b{spec.folded_batch_dim} = tl.cast(turn % {size}, tl.int64)"
    second = [
        f"for turn in range(0, ({count}) * {size}):",
        group,
        f"    t = turn // {size}",
        f"    start = ({place}) * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = within(folded_at, folded_size, RAGGED)",
        *(f"    {line}" for line in bodies.cut_tile),
    ]
    before = [
        f"    gone = tl.where(turn > 0, {at.format(tile_of('(turn - 1)'))} * FOLDED, folded_size)",
        f"    gone_group = tl.where(turn > 0, turn - 1, 0) % {size}",
    ]
    after = [f"gone = {at.format(tile_of('(whole_turns - 1)'))} * FOLDED", f"gone_group = {size} - 1", *bodies.delayed]
    return [
        f"whole_turns = ({stop}{'' if begin == '0' else f' - {begin}'}) * {size}",
        "for turn in range(0, whole_turns):",
        group,
        f"    start = {at.format(tile_of('turn'))} * FOLDED",
        *(before if bodies.delayed else []),
        "    folded_at = start + tl.arange(0, FOLDED)",
        *(f"    {line}" for line in bodies.whole_tile),
        *(["if whole_turns > 0:", *(f"    {line}" for line in after)] if bodies.delayed else []),
        *(second if spec.bounds else ["if RAGGED:", *(f"    {line}" for line in second)]),
    ]


# The parts of a text that every kernel shares: schedules and panel kernels fill their own templates with them


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


def write_kernel_function(
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


_K_LOOP_PROLOGUE = [  # with splits: a few kept tiles (``count_concurrent_tiles``) take all splits before the next few
    "batch = tl.program_id(0) // (tiles * parts)",
    "tile, part = grouped(tl.program_id(0) % (tiles * parts), tiles, parts, beside)",
]


def write_prologue(spec: Spec) -> list[str]:
    """The first lines of a kernel: its tile, split and batch element from the program id, and its kept indices."""
    lines = ["tile = tl.program_id(0) % tiles", "batch = tl.program_id(0) // tiles"]
    if spec.bounds:
        lines = ["tile, batch = longest_first(tl.program_id(0), tiles, turns, flip)"]
    if spec.split:
        lines = [*_K_LOOP_PROLOGUE] if spec.k_loop else [*lines, "part = batch // batches", "batch = batch % batches"]
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
        return _write_tile_in_strips(v, step)
    step()
    return v.inside


_STRIPS = 4  # column strips of a tile whose pairs draw random numbers: all at once would not fit in registers


def _write_tile_in_strips(v: ExpressionWriter, step: Callable[[], None]) -> list[str]:
    """The lines of one tile: its products whole, then a step for each strip of its columns."""
    found = {}
    for e in topological(v.spec.fold.reductions):
        if e.op == "dot" and v.spec.width(e.args[0].feature) > WIDEST:
            kept, folded = e.args[::-1] if v.spec.folds(e.args[0]) else e.args
            found[product_key(kept, folded)] = write_product(v, kept, folded)
    lines = [*v.inside, f"strip_lane = tl.arange(0, FOLDED // {_STRIPS}).to(INT)", "tile_start = start"]
    cuts = {}
    for key, name in found.items():
        cuts[key] = [name]
        while len(cuts[key]) < _STRIPS:
            halves = [(f"{whole}a", f"{whole}b") for whole in cuts[key]]
            lines += [f"{a}, {b} = halved({whole})" for whole, (a, b) in zip(cuts[key], halves, strict=True)]
            cuts[key] = [part for both in halves for part in both]
    for k in range(_STRIPS):
        v.loop(v.masked)
        v.inner |= {key: names[k] for key, names in cuts.items()}
        step()
        lines += [f"start = tile_start + {k} * (FOLDED // {_STRIPS})", "folded_at = start + strip_lane"]
        lines += ["folded_in = folded_at < folded_size"] if v.masked else []
        own = (re.sub(r"\bFOLDED\b", f"FOLDED // {_STRIPS}", line) for line in v.inside)
        lines += [re.sub(r"\bfolded_lane\b", "strip_lane", line) for line in own]
    return lines


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
    """The functions of ``device_functions.py`` and ``special_functions.py``, by name, in their order; a quick form
    without a native one is followed by the same function with native forms inside."""
    written: dict[str, str] = {}
    for module in (device_functions, special_functions):
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
