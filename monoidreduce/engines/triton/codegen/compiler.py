"""The compiler: from one direction of a fold to the text of one Triton kernel.

A program instance owns ``KEPT`` indices of the kept axis of one batch element and loops over the folded axis in tiles
of ``FOLDED``, its state in registers: no atomics, one fixed order. Two loops share the state. The first visits whole
tiles, on which the value of every condition is known; the second visits the others: tiles that a condition cuts, and
the ragged end. The same text serves every length, plan and batch size, and equal programs have equal texts.

:func:`run_passes` lists the passes; ``print(run_passes(spec))`` shows what each of them made.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....program.expression import Expr, are_several, letters, topological
from ....reductions.base import Lines
from ....reductions.softmax import SoftmaxLines
from . import few_rows, k_loop, kernel_spec, kernel_text, listed
from .expressions import ExpressionWriter
from .kernel_spec import LoopBodies, Spec, pad_width
from .kernel_text import (
    BlockWidths,
    Kernel,
    Traits,
    count_held,
    list_arguments,
    write_prologue,
    write_stores,
    write_tile_body,
    write_tile_range,
)
from .reductions import is_stored, make_lines, substitute_truths

# Numbers of a pair, beside sums of vectors, with which no registers are left for what a sine and a cosine share. H200,
# the logsumexp of cos(softsign(x · y + b)) with gradients: 1.52 ms, 1.95 where it is shared (468 bytes spilled)
CROWDED = 5


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
    return kernel_text.write_function(spec, _name(spec), used, list_arguments(spec, used, shifts), body, helpers)


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
    loop, before = k_loop.write_tile_loop(spec) if spec.k_loop else "range({}, {})", at.format("(t - 1)")
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
