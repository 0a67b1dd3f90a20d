"""GEMMs with an epilogue that writes weights in place of inner products: no pass over the panel afterwards.

Where all scalars of rows are known, the epilogue writes the weights of the sums at once. Where they wait for a softmax
it writes exp(s - guess), the guessed maximum being the greatest of a few logits of the row, and sums exponentials tile
by tile; the row's factor, known late, multiplies the sums' other operands (``row_factor.py``). A guess is checked on
the device: rows whose guessed maximum was too far off are recomputed there, exactly, without a host sync.

The kernels. These compute one tile of pairs at a time:

``write_weights``: all scalars of rows are known, and the epilogue writes a tile's weights.
``guess_maxima``: the guessed maximum of each row, the greatest of its logits in a few columns.
``write_guessed``: weights measured from the guessed maximum, and every tile's maximum and sum of exponentials. A tile
whose maximum lies far from the guess is summed from its own, so that totals are exact whatever was guessed.
``sum_guessed``: the same without storing the weights.
``recompute_rows``: ``write_weights`` for rows that are marked; where there are none it only reads the marks.

These compute some rows at a time:

``finish_rows``: the totals of rows and what is computed from them (``row_factor.py`` applies it to the sums). Rows
whose guessed maximum was too far off are marked.
``gather_label_logits``: the inner product in each row's label column, on the CUDA cores.
``multiply_labels``: the same on the tensor cores, for many rows at once.
``weigh_labels``: the weight in the label column, where all scalars of rows are known. Among the other pairs it would
take registers that they need.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.constructors import ONE, dot, substitute
from ....program.expression import Expr, node, reduce_node, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....reductions import kind_of
from ....reductions.softmax import SoftmaxLines
from ...common.evaluate import Sizes
from ...panel import PanelLoop
from ..codegen import compiler
from ..codegen.expressions import ExpressionWriter, product_key, write_dot, write_rounding
from ..codegen.kernel_spec import K_LOOP_DEPTH, LOG2E, WIDEST, Spec, literal, rounds_products
from ..codegen.reductions import TOOLS, LabelColumnWriter
from ..launch import descriptors, driver
from ..schedules import spec_from_tensors
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong import DEEPEST, EXTRA, TILE, WRITES, holds_label, write_gemm
from . import row_kernel
from .row_factor import (
    FactoredWeight,
    LabelTerm,
    RowCorrections,
    has_distinct_labels,
    split_label_column,
    split_row_factor,
)
from .row_kernel import RowValues, assemble_kernel, fuse_stages, list_arguments, shift_indices, split_stage

# In powers of two: up to here from the guessed maximum, weights and sums neither overflow nor lose digits.
MAX_DISTANCE = 60
# A tile is weighed and written in halves: the first is on its way to memory while the exponentials of the second are
# computed. Beside a ring of four blocks of features there is shared memory for one half, and there are no registers for
# a condition among the products: gathering labels there took 40 % more time (H200, 2048 rows of 2304 features).
HALVES = 2
ROW_KERNELS = ("gather_label_logits", "multiply_labels", "weigh_labels", "finish_rows")  # they compute no tiles
_MAX_FACTOR = 2.0**100  # factors of rows lie below this

_Lines = tuple[list[str], list[str]]  # a kernel's output arguments, and its body
# Writers are given ``product_lines``: those of the K loop, which come before all other loads of a tile.


@dataclass(frozen=True)
class Epilogue:
    """What a GEMM's epilogue computes: a weight per pair."""

    folds: tuple[Expr, ...]  # a softmax and label gathers, where the weight needs them
    names: tuple[Expr, ...]  # the leaves that stand for the results of these folds
    weight: Expr
    factored: FactoredWeight | None = None  # the weight in parts, where a factor of it is known late
    label: LabelTerm | None = None  # the label column, where it is left out of the weight


def find_product(epilogue: Epilogue) -> Expr:
    """The inner product that the GEMM computes."""
    return next(e for e in topological([epilogue.weight]) if e.op == "dot")


def find_operands(product: Expr) -> tuple[Expr, Expr]:
    """The operands of an inner product, the rows' vector first."""
    x, y = product.args
    return (x, y) if x.rows else (y, x)


class _TileSoft(SoftmaxLines):
    """A softmax whose exponents are measured from a guessed maximum."""

    def prepare(self) -> None:
        self.fast, self.guesses, self.means = True, False, []


@functools.lru_cache(maxsize=1024)
def write_kernel(name: str, epilogue: Epilogue, spec: Spec, masked: bool) -> compiler.Kernel:
    """Write one of the kernels; ``masked``: whether tiles may reach beyond the last column."""
    v = RowValues(spec)
    v.loop(masked)
    if name not in ROW_KERNELS:  # the K loop comes first: all other loads wait until it is done
        v.number(find_product(epilogue))
    product_lines, v.before, v.inside = [*v.before, *v.inside], [], []
    outs, lines = _WRITERS[name](v, epilogue, product_lines)
    return assemble_kernel(name, spec, outs, lines)


def list_reads(name: str, epilogue: Epilogue) -> tuple[Expr, ...]:
    """The expressions that a kernel computes, and so reads the leaves of."""
    factored, label = epilogue.factored, epilogue.label
    if name == "weigh_labels" and label is not None:
        return label.weight, label.label
    if name in ("write_weights", "recompute_rows") or factored is None:
        return (epilogue.weight,)
    if name == "finish_rows":
        return (*epilogue.folds[1:], epilogue.weight, factored.factor)
    if name in ("gather_label_logits", "multiply_labels"):
        return (find_product(epilogue), *(() if factored.label is None else (factored.label,)))
    return (
        (epilogue.folds[0].args[0], factored.pair_weight) if name == "write_guessed" else (epilogue.folds[0].args[0],)
    )


# The lines of each kernel

_TILE_INDICES = [
    "b0 = tl.cast(0, tl.int64)",
    "kept_at = tile * KEPT + tl.arange(0, KEPT)",
    "kept_in = kept_at < kept_size",
    "kept_lane = tl.arange(0, KEPT).to(INT)",
    "folded_lane = tl.arange(0, FOLDED).to(INT)",
    "folded_at = start + tl.arange(0, FOLDED)",
    "folded_in = folded_at < folded_size",
]
_ROW_INDICES = ["tile = tl.program_id(0)", "start = 0", *_TILE_INDICES]


def take_bound_lines(v: ExpressionWriter) -> list[str]:
    """The lines bound before the loop since the last time."""
    found, v.before = v.before, []
    return found


def _loop_over_tiles(lines: list[str], flatten: bool) -> list[str]:
    """A persistent loop over tiles. ``flatten``: the K loop of a tile starts before the epilogue of the one before
    ends."""
    return [
        "turns = tl.cdiv(folded_size, FOLDED)",
        f"HALF: tl.constexpr = FOLDED // {HALVES}",
        f"for program in tl.range(tl.program_id(0), tiles * turns, tl.num_programs(0), flatten={flatten}):",
        "    tile, turn = grouped(program, tiles, turns, 16)",
        "    start = turn * FOLDED",
        *(f"    {line}" for line in (*_TILE_INDICES, *lines)),
    ]


def _write_weights(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    return ["out_box"], _write_tiles(v, epilogue, product_lines, lambda k: v.full(epilogue.weight), _STORE)


def _write_tiles(
    v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str], weigh: Callable[[int], str], store: str
) -> list[str]:
    """Every tile's K loop, and its epilogue by halves: ``weigh`` computes one, ``store`` writes it. Scalars of rows are
    read first."""
    name = v.inner[_make_product_key(epilogue)]
    rounding = write_rounding(name) if rounds_products(v.spec) else None  # halves are rounded instead
    product_lines = [line for line in product_lines if line != rounding]
    lines = [*v.inside, f"scores0, scores1 = halved({name})", *write_strips(v, epilogue, weigh, store)]
    return _loop_over_tiles([*v.before, *product_lines, *lines], not has_column_scalars(v.spec))


def has_column_scalars(spec: Spec) -> bool:
    """True when there are scalars per column: these take registers."""
    return any(e.cols and e.feature is None for e in spec.fold.leaves)


_STORE = "out_box.store([tile * KEPT, start], {}.to(tl.bfloat16))"
_HALF = ["half_lane = tl.arange(0, HALF).to(INT)", "half_at = start + tl.arange(0, HALF)"]


def write_strips(
    v: ExpressionWriter,
    epilogue: Epilogue,
    weigh: Callable[[int], str],
    store: str,
    places: list[str] = _HALF,
    count: int = HALVES,
) -> list[str]:
    """The epilogue of each half of a tile, or of each of ``count`` strips: ``weigh(k)`` binds what is computed of strip
    k and returns its name, ``store`` is the line that writes it (empty: nothing is written)."""
    lines = []
    for k in range(count):
        v.loop(v.masked)
        v.inner[_make_product_key(epilogue)] = f"scores{k}"
        weight = weigh(k)
        lines += [
            f"start = turn * FOLDED + {k} * HALF",
            *places,
            *(["half_in = half_at < folded_size"] if v.masked else []),
            *([write_rounding(f"scores{k}")] if rounds_products(v.spec) else []),
            *(_IN_HALF.sub(lambda m: _NAMES[m[0]], line) for line in v.inside),
            *filter(None, [store.format(weight)]),
        ]
    return lines


def _make_product_key(epilogue: Epilogue) -> tuple:
    return product_key(*find_operands(find_product(epilogue)))


_NAMES = {"FOLDED": "HALF", "folded_lane": "half_lane", "folded_at": "half_at", "folded_in": "half_in"}
_IN_HALF = re.compile("|".join(rf"\b{name}\b" for name in _NAMES))


def _recompute_rows(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    weight = v.full(epilogue.weight)
    mask = "(own > 0)[:, None] & folded_in[None, :]"
    place = "out + kept_at.to(tl.int64)[:, None] * out_r + folded_at[None, :]"
    body = [*product_lines, *v.before, *v.inside, f"tl.store({place}, {weight}.to(tl.bfloat16), mask={mask})"]
    turn = ["own = tl.load(marks + kept_at, mask=kept_in, other=0)", "if tl.max(own) > 0:", *(f"    {x}" for x in body)]
    return ["out", "out_r", "marks"], [
        "some = 0",
        "for r in range(0, kept_size, 1024):",
        "    row = r + tl.arange(0, 1024)",
        "    some += tl.max(tl.load(marks + row, mask=row < kept_size, other=0))",
        "if some > 0:",
        *(f"    {line}" for line in _loop_over_tiles(turn, False)),
    ]


def bind_softmax(v: ExpressionWriter, epilogue: Epilogue) -> tuple[str, str, str]:
    """The name of the softmax, the name of its logits, and the text of the factor that multiplies them."""
    soft = _TileSoft(kind_of(epilogue.folds[0]), 0, epilogue.folds[0], ONE, v, TOOLS)
    return (soft.name, *soft.logit_block(epilogue.folds[0].args[0]))


def _guess_maxima(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    _, s, factor = bind_softmax(v, epilogue)
    store = f"tl.store(guesses + kept_at, finite(tl.max({s}, 1){factor}), mask=kept_in)"
    return ["guesses"], [*_ROW_INDICES, *product_lines, *v.before, *v.inside, store]


def _write_guessed(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str], store: str) -> _Lines:
    """``store``: the line that writes weights; empty where only their sums are wanted."""
    n, s, factor = bind_softmax(v, epilogue)
    bind_reference(v, n, f"tl.max({s}, 1){factor}")
    v.inside += [f"{n}_half0, {n}_half1 = halved({s})", f"{n}_total = tl.zeros([KEPT], tl.float32)"]
    weigh = weigh_exponentials if store else add_exponentials
    lines = _write_tiles(
        v, epilogue, product_lines, lambda k: weigh(v, epilogue, n, f"{n}_half{k}{factor}", "+="), store
    )
    lines.append(f"    tl.store(sums + place, {n}_total, mask=kept_in)")
    return GUESSED_OUTPUTS, lines


GUESSED_OUTPUTS = ["out_box", "guesses", "maxima", "sums", "maxima_r"]


def bind_reference(v: ExpressionWriter, n: str, most: str) -> None:
    """Bind the maximum of each row of a tile, and the reference that its exponents are measured from: the guessed
    maximum, or the tile's own where that is far off."""
    guess = v.bind(f"{n} guess", "tl.load(guesses + kept_at, mask=kept_in, other=0.0)", False, f"{n}_guess")
    v.inside += [
        f"{n}_most = ({most}).to(tl.bfloat16)",
        "place = tl.cast(turn, tl.int64) * maxima_r + kept_at",
        f"tl.store(maxima + place, {n}_most, mask=kept_in)",
        f"{n}_most = {n}_most.to(tl.float32)  # as the totals will know it",
        f"{n}_ref = measured({n}_most, {guess}, {MAX_DISTANCE})[:, None]",
        f"{n}_near = tl.where({n}_most < {guess} - {MAX_DISTANCE}, 0.0, 1.0)[:, None]  # others are as good as nothing",
    ]


def add_exponentials(v: ExpressionWriter, epilogue: Epilogue, n: str, exponent: str, operator: str) -> str:
    """Bind the exponentials of some columns, and add them to the totals, or begin these (``operator``: += or =)."""
    v.inside += [f"{n}_weight = tl.exp2({exponent} - {n}_ref)", f"{n}_total {operator} tl.sum({n}_weight, 1)"]
    return ""


def weigh_exponentials(v: ExpressionWriter, epilogue: Epilogue, n: str, exponent: str, operator: str) -> str:
    """The same; returns the name of the weights."""
    assert epilogue.factored is not None
    add_exponentials(v, epilogue, n, exponent, operator)
    v.inner[epilogue.factored.exponential] = v.bind(f"{n} kept", f"{n}_weight * {n}_near", True)
    return v.full(epilogue.factored.pair_weight)


def _finish_rows(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    assert epilogue.factored is not None
    factored, outs, n = epilogue.factored, [f"out{k}" for k in range(len(epilogue.names))], "soft0"
    at_label = None if factored.label is None else LabelColumnWriter(v, "own", factored.label)
    if at_label is not None:
        own = f"tl.load(label_logits + kept_at, mask=tl.reshape({at_label.inside_text}, [KEPT]), other=0.0)[:, None]"
        at_label.outer[find_product(epilogue)] = at_label.bind("product", own, False, "own_product")
    texts = [f"{n}_log + {n}_peak", f"{n}_log", f"{n}_peak"]
    for r in epilogue.folds[1:]:
        assert at_label is not None
        number = f"{at_label.number(r.args[1])} + tl.zeros([KEPT, 1], {v.float})"
        texts.append(f"tl.reshape(tl.where({at_label.inside_text}, {number}, 0.0), [KEPT])")
    lines = [*product_lines, *take_bound_lines(v), *(take_bound_lines(at_label) if at_label else [])]
    for out, name, text in zip(outs, epilogue.names, texts, strict=True):
        x = str(name.attrs[0])
        lines += [f"{x} = {text}", f"tl.store({out} + kept_at, {x}, mask=kept_in)"]
        for values in (v, at_label) if at_label else (v,):
            values.outer[name] = f"{x}[:, None]"
    factor = v.number(factored.factor)
    weight = at_label.number(epilogue.weight) if at_label and factored.label_weight is not None else ""
    lines += [
        *take_bound_lines(v),
        f"factor = tl.reshape({factor} + tl.zeros([KEPT, 1], {v.float}), [KEPT])",
        f"marked = {n}_far | ~(tl.abs(factor) < {_MAX_FACTOR!r})",
        "tl.store(factors + kept_at, tl.where(marked, 1.0, factor), mask=kept_in)",
        "tl.store(marks + kept_at, tl.where(marked, 1, 0), mask=kept_in)",
    ]
    if at_label and weight:
        lines += [
            *take_bound_lines(at_label),
            f"inside = tl.reshape({at_label.inside_text}, [KEPT]) & ~marked",
            f"hit = tl.reshape({weight} + tl.zeros([KEPT, 1], {v.float}), [KEPT])",
            f"target = tl.reshape({at_label.place} + tl.zeros([KEPT, 1], tl.int64), [KEPT])",
            "tl.store(label_weights + kept_at, tl.where(inside, hit, 0.0), mask=kept_in)",
            "tl.store(labels + kept_at, target, mask=kept_in)",
            "nothing = tl.zeros([KEPT], tl.float32).to(tl.bfloat16)",
            "tl.store(pairs + kept_at.to(tl.int64) * pairs_r + target, nothing, mask=inside)",
        ]
    ends = ["label_logits", "pairs", "pairs_r", "factors", "label_weights", "labels", "marks"]
    return [*outs, "guesses", "maxima", "sums", "maxima_r", *ends], [*_COMBINE_TILES, *lines]


_LOAD_TILE_MAXIMA = [
    "part = t + tl.arange(0, FOLDED)",
    "there = kept_in[:, None] & (part < parts)[None, :]",
    "place = part.to(tl.int64)[None, :] * maxima_r + kept_at[:, None]",
    'most = tl.load(maxima + place, mask=there, other=float("-inf")).to(tl.float32)',
]
_COMBINE_TILES = [
    *_ROW_INDICES,
    "parts = tiles",
    "soft0_guess = tl.load(guesses + kept_at, mask=kept_in, other=0.0)",
    'soft0_maxima = tl.full([KEPT, FOLDED], float("-inf"), tl.float32)',
    "for t in range(0, parts, FOLDED):",
    *(f"    {line}" for line in _LOAD_TILE_MAXIMA),
    "    soft0_maxima = tl.maximum(soft0_maxima, most)",
    "soft0_max = tl.max(soft0_maxima, 1)",
    f'soft0_far = (soft0_max != float("-inf")) & ~(tl.abs(soft0_max - soft0_guess) <= {MAX_DISTANCE})',
    f"soft0_ref = measured(soft0_max, soft0_guess, {MAX_DISTANCE})",
    "soft0_totals = tl.zeros([KEPT, FOLDED], tl.float32)",
    "for t in range(0, parts, FOLDED):",
    *(f"    {line}" for line in _LOAD_TILE_MAXIMA),
    "    some = tl.load(sums + place, mask=there, other=0.0)",
    f"    shrink = tl.exp2(measured(most, soft0_guess[:, None], {MAX_DISTANCE}) - soft0_ref[:, None])",
    "    soft0_totals += tl.where(some == 0.0, 0.0, some * shrink)",
    "soft0_total = tl.sum(soft0_totals, 1)",
    "soft0_log = tl.log(soft0_total)",
    f"soft0_peak = tl.where(soft0_total == 0.0, 0.0, soft0_ref) * {literal(1 / LOG2E)}",
]


# Each row's label column


def _gather_label_logits(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    """The inner product in each row's label column, feature by feature."""
    assert epilogue.factored is not None and epilogue.factored.label is not None
    target = v.number(epilogue.factored.label)
    own = f"own = tl.where(({target} >= 0) & ({target} < folded_size), {target}, 0).to(tl.int64)"
    lines = [
        *v.before,
        own,
        "taken = tl.zeros([KEPT, FOLDED], tl.float32)",
        *_loop_over_features(v, epilogue, "FOLDED"),
    ]
    lines += ["    taken += x.to(tl.float32) * y.to(tl.float32)"]
    lines += ["tl.store(label_logits + kept_at, tl.sum(taken, 1), mask=kept_in)"]
    return ["label_logits"], [*_ROW_INDICES, *lines]


def _multiply_labels(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    """The inner product in each row's label column, on the tensor cores."""
    assert epilogue.factored is not None and epilogue.factored.label is not None
    lines = _multiply_on_diagonal(v, epilogue, LabelColumnWriter(v, "own", epilogue.factored.label))
    lines += ["tl.store(label_logits + kept_at, tl.reshape(product, [KEPT]), mask=kept_in)"]
    return ["label_logits"], [*_ROW_INDICES, *lines]


def _weigh_labels(v: ExpressionWriter, epilogue: Epilogue, product_lines: list[str]) -> _Lines:
    """The weight in each row's label column."""
    assert epilogue.label is not None
    at_label = LabelColumnWriter(v, "own", epilogue.label.label)
    lines = _multiply_on_diagonal(v, epilogue, at_label)
    at_label.outer[find_product(epilogue)] = "product"
    weight = at_label.number(epilogue.label.weight)
    lines += [
        *take_bound_lines(v),
        *take_bound_lines(at_label),
        f"hit = tl.where({at_label.inside_text}, {weight}, 0.0) + tl.zeros([KEPT, 1], {v.float})",
        "tl.store(label_weights + kept_at, tl.reshape(hit, [KEPT]), mask=kept_in)",
        f"place = tl.where({at_label.inside_text}, {at_label.place}, -1) + tl.zeros([KEPT, 1], tl.int64)",
        "tl.store(labels + kept_at, tl.reshape(place, [KEPT]), mask=kept_in)",
    ]
    return ["label_weights", "labels"], [*_ROW_INDICES, *lines]


def _multiply_on_diagonal(v: ExpressionWriter, epilogue: Epilogue, at_label: LabelColumnWriter) -> list[str]:
    """The inner product in each row's label column, on the tensor cores: a tile's rows times the label columns of all
    of them, of which the diagonal is used.

    It must equal the GEMM's to the last bit. Where a row's softmax is almost 1 at its label only the difference from
    the row's total is left, and features added up in another order outweigh it (H200, a contrastive loss of 3e-8:
    gradients were off by 41 times their size, and by 0.07 so, as plain torch's are)."""
    lines = [
        *take_bound_lines(v),
        *take_bound_lines(at_label),
        f"own = {at_label.place}",
        "taken = tl.zeros([KEPT, KEPT], tl.float32)",
    ]
    lines += [*_loop_over_features(v, epilogue, str(K_LOOP_DEPTH)), f"    {write_dot('taken', ['x', 'y'])}"]
    lines += ["product = tl.sum(tl.where(kept_lane[:, None] == kept_lane[None, :], taken, 0.0), 1)[:, None]"]
    return lines + ([write_rounding("product")] if rounds_products(v.spec) else [])


def _loop_over_features(v: ExpressionWriter, epilogue: Epilogue, some: str) -> list[str]:
    """A loop over the features of rows and of the columns ``own``, ``some`` at a time."""
    multiplied = find_operands(find_product(epilogue))
    x, y = (str(e.attrs[0]) for e in multiplied)
    width = v.spec.width(multiplied[0].feature)
    return [
        f"for d in range(0, {width}, {some}):",
        f"    lane = d + tl.arange(0, {some})[None, :]",
        f"    inside = kept_in[:, None] & (lane < {width})",
        f"    x = tl.load({x}_ptr + kept_at.to(tl.int64)[:, None] * {x}_s + lane * {x}_f, mask=inside, other=0)",
        f"    y = tl.load({y}_ptr + own * {y}_s + lane * {y}_f, mask=inside, other=0)",
    ]


# Kernels by their names

_WRITERS: dict[str, Callable[[ExpressionWriter, Epilogue, list[str]], _Lines]] = {
    "write_weights": _write_weights,
    "recompute_rows": _recompute_rows,
    "guess_maxima": _guess_maxima,
    "write_guessed": functools.partial(_write_guessed, store=_STORE),
    "sum_guessed": functools.partial(_write_guessed, store=""),
    "finish_rows": _finish_rows,
    "gather_label_logits": _gather_label_logits,
    "multiply_labels": _multiply_labels,
    "weigh_labels": _weigh_labels,
}


# GEMMs whose epilogue writes weights, as ping-pong kernels: two warp groups alternate, in Gluon, on Hopper.
#
# The same kernels, with the same arguments and the same arithmetic of pairs; ``tl`` is Gluon's
# language here. The template is ``engines/triton/schedules/pingpong.py``.


@functools.lru_cache(maxsize=1024)
def write_pingpong_kernel(
    name: str, epilogue: Epilogue, spec: Spec, masked: bool, wide: bool = False
) -> compiler.Kernel | None:
    """Write one of the kernels; None where it reads scalars per column, for which there are no registers, where
    features are too many, or where Gluon lacks an operation or would need its layout.

    ``wide``: with tiles of more columns, and one more argument: the descriptor of their blocks."""
    multiplied = find_operands(find_product(epilogue))
    if has_column_scalars(spec) or (spec.width(multiplied[0].feature) > DEEPEST and not wide):
        return None
    plain = write_kernel(name, epilogue, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    outs, lines = _PINGPONG_WRITERS[name](v, epilogue, WRITES[wide].folded // EXTRA)
    signature = list_arguments(spec, outs, list(plain.leaves))
    generated = {"before": v.before, "epilogue": lines}
    return write_gemm(True, wide, plain, spec, multiplied, signature, generated)


_PINGPONG_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_PINGPONG_STORE = "store_tile(out_box, staging, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_pingpong_weights(v: ExpressionWriter, epilogue: Epilogue, strips: int) -> tuple[list[str], list[str]]:
    def weigh(k: int) -> str:
        if epilogue.label is None:
            return v.full(epilogue.weight)
        hit, nothing, others = epilogue.weight.args  # each row's own column is left out
        v.inside.append(f"weight = {v.full(others)}")
        before, v.inside = v.inside, []
        lines = [f"weight = tl.where({v.full(hit)}, {v.number(nothing)}, weight)"]
        met = v.bind("met", holds_label(v.outer[(epilogue.label.label, "index")]), False, "met")
        v.inside = [*before, f"if {met}:", *(f"    {line}" for line in (*v.inside, *lines))]
        return "weight"

    return ["out_box"], write_strips(v, epilogue, weigh, _PINGPONG_STORE, _PINGPONG_HALF, strips)


def _write_pingpong_guessed(
    v: ExpressionWriter, epilogue: Epilogue, strips: int, store: str
) -> tuple[list[str], list[str]]:
    made: list[tuple[str, str]] = []

    def logits(k: int) -> str:
        n, s, factor = bind_softmax(v, epilogue)
        made.append((n, factor))
        v.inside.append(f"{n}_half{k} = {s}")
        return ""

    def weigh(k: int) -> str:
        weighed = weigh_exponentials if store else add_exponentials
        return weighed(v, epilogue, n, f"{n}_half{k}{factor}", "+=" if k else "=")

    lines = write_strips(v, epilogue, logits, "", _PINGPONG_HALF, strips)
    (n, factor), v.inside = made[0], []
    most = functools.reduce("tl.maximum({}, {})".format, (f"tl.max({n}_half{k}, 1)" for k in range(strips)))
    bind_reference(v, n, f"{most}{factor}")
    lines += [*v.inside, *write_strips(v, epilogue, weigh, store, _PINGPONG_HALF, strips)]
    return GUESSED_OUTPUTS, [*lines, f"tl.store(sums + place, {n}_total, mask=kept_in)"]


_PINGPONG_WRITERS: dict[str, Callable[[ExpressionWriter, Epilogue, int], tuple[list[str], list[str]]]] = {
    "write_weights": _write_pingpong_weights,
    "write_guessed": functools.partial(_write_pingpong_guessed, store=_PINGPONG_STORE),
    "sum_guessed": functools.partial(_write_pingpong_guessed, store=""),
}


# A guess reads 64 columns. GEMMs of few features end often: with two smaller tiles on an SM, one multiplies while the
# other writes. (On an H200 of 512 and 768 features these took 5 to 12 % less, of 2304 and 4096 13 % more.)
PLANS = {
    "write_weights": KernelPlan(128, 256, 8, 4),
    "recompute_rows": KernelPlan(128, 128, 8, 3),
    "guess_maxima": KernelPlan(64, 64, 4, 8),
    "gather_label_logits": KernelPlan(1, 1024, 4, 1),
    "multiply_labels": KernelPlan(64, 64, 4, 3),
    "weigh_labels": KernelPlan(64, 64, 4, 3),
    "write_guessed": KernelPlan(128, 256, 8, 4),
    "sum_guessed": KernelPlan(128, 256, 8, 4),
    "finish_rows": KernelPlan(16, 256, 8, 1),
}
GEMMS = "write_weights", "write_guessed", "sum_guessed"  # the kernels with a ping-pong form
PINGPONG = {False: KernelPlan(TILE, TILE, 4, 1), True: KernelPlan(TILE, TILE + EXTRA, 4, 1)}  # by is_wide
SHALLOW = dict.fromkeys(GEMMS, KernelPlan(128, 128, 4, 3))  # for few features
_SHALLOW_FEATURES = 1024
# Features above which ping-pong tiles are wide. On an H200, time ÷ GEMMs, heads of 2304 in 1100 MB took 1.03 where they
# took 1.06 in narrow ones (in turns with the GEMMs 1.00, 1.01), of 1536 in 550 MB 1.08 and 1.05 (1.03 both).
_WIDE_FEATURES = 2048
_MIN_COLS = 64  # of a tile: a descriptor's blocks have 16 bytes and more
_MAX_OPERATIONS = 12  # on a pair: more of them need registers that the GEMM has taken


def plan_kernel(name: str, width: int, pingpong: bool = False, wide: bool = False) -> KernelPlan:
    """The tiles of a kernel for ``width`` features; ``pingpong``: in its ping-pong form, with ``wide`` tiles or not."""
    if pingpong and name in GEMMS:
        return PINGPONG[wide]
    return SHALLOW[name] if width <= _SHALLOW_FEATURES and name in SHALLOW else PLANS[name]


def is_wide(width: int) -> bool:
    """True when ping-pong tiles are wide, which read less and end less often: with many features, and a Triton that has
    registers for them."""
    return width > _WIDE_FEATURES and driver.has_registers_for_wide_tiles()


@dataclass(frozen=True)
class EpilogueGemm:
    """A group of stages as one GEMM with an epilogue. ``operands``: the vectors multiplied, as the program has them;
    ``operand_leaves``: the same as kernels call them."""

    epilogue: Epilogue
    product: Expr
    operands: tuple[Expr, Expr]
    operand_leaves: tuple[Expr, Expr]
    feeds: tuple[tuple[Expr, Expr], ...]  # of the other leaves
    exact: bool  # whether logits are not rounded as a panel would hold them
    prepared: dict[tuple, PreparedGemm] = field(default_factory=dict, compare=False)
    written: dict[tuple, dict[str, _Written]] = field(default_factory=dict, compare=False)  # for panels of all lengths
    compiled: set[tuple] = field(default_factory=set, compare=False)  # keys whose kernels were compiled together

    @property
    def guesses(self) -> bool:
        """True when weights are measured from a guessed maximum."""
        return self.epilogue.factored is not None

    def row_bytes(self, sizes: Sizes) -> int:
        """Bytes besides the panel that are held of one row: the maxima and sums of its tiles."""
        return 6 * -(-sizes.cols // self.plan_kernel("write_guessed", sizes).block_folded) if self.guesses else 0

    def plan_kernel(self, name: str, sizes: Sizes) -> KernelPlan:
        """The tiles of a kernel, where a panel is large enough for them."""
        width = sizes.of(str(self.operands[0].feature))
        wide = is_wide(width)
        pingpong = (wide or width <= DEEPEST) and driver.runs_warp_specialized(sizes.device)
        return plan_kernel(name, width, pingpong, wide)

    def write_weights(
        self, out: Tensor, values: Mapping[Expr, Any], results: list[Tensor], here: Sizes
    ) -> RowCorrections | None:
        """Write the weights into ``out`` and the folds' results into ``results``; returns what their sums still need.

        ``values``: of all leaves, numbers or tensors ``[1, length(, features)]``."""
        return self.prepare((out, *results), values, here).write_weights(out, dict(values), results)

    def weigh_labels(self, values: Mapping[Expr, Any], here: Sizes) -> RowCorrections:
        """The weights in the label columns of some rows, which are left out of the others; of all columns."""
        assert self.epilogue.label is not None
        weights = torch.empty(here.rows, dtype=torch.float32, device=here.device)
        labels = torch.empty(here.rows, dtype=torch.int64, device=here.device)
        self.prepare((weights,), values, here).launch("weigh_labels", [weights, labels], values)
        return RowCorrections(None, weights, labels, has_distinct_labels(self.epilogue.label.label))

    def prepare(self, outputs: tuple[Tensor, ...], values: Mapping[Expr, Any], here: Sizes) -> PreparedGemm:
        """The kernels for panels of these lengths, types, strides and alignment."""
        told = tuple(map(row_kernel.specialization, (*values.values(), *outputs)))
        key = (here.rows, here.cols, here.device, *told, *PLANS.values(), *SHALLOW.values())
        found = self.prepared.get(key)
        if found is None:
            found = self.prepared.setdefault(key, PreparedGemm(self, outputs[0], values, here))
        return found


class _Written(NamedTuple):
    """A kernel, whatever the number of rows."""

    kernel: compiler.Kernel
    copied: tuple[tuple[Expr, int], ...]  # by tensor descriptors: leaves, and how many vectors a block has
    compiled: row_kernel.Compiled


class PreparedGemm:
    """The kernels of an :class:`EpilogueGemm` on panels of given lengths, types, strides and alignment; each is written
    when it is first launched."""

    def __init__(self, gemm: EpilogueGemm, out: Tensor, values: Mapping[Expr, Any], here: Sizes):
        self.gemm, self.here, self.lengths = gemm, here, (here.rows, here.cols)
        self.launches: dict[str, row_kernel.PreparedKernel] = {}
        leaves = gemm.operand_leaves
        fits = [values[e].shape[-1] > WIDEST and descriptors.can_copy_vectors(values[e]) for e in leaves]
        self.copied = leaves if all(fits) and driver.has_descriptors(here.device) else ()  # by tensor descriptors
        name = "write_guessed" if gemm.guesses else "write_weights"
        large = here.rows >= TILE and here.cols >= TILE and bool(self.copied)
        large = large and driver.runs_warp_specialized(here.device)
        width = values[leaves[0]].shape[-1]
        self.wide = is_wide(width)
        self.pingpong = large and self._write_pingpong(name, values, PINGPONG[self.wide]) is not None
        self.plans = {name: self._plan_kernel(name, width) for name in PLANS}
        plan = self.plans[name]
        self.tiles = -(-here.cols // plan.block_folded)  # across all columns
        kinds = [v.dtype if isinstance(v, Tensor) else type(v) for v in values.values()]
        how = self.copied, self.pingpong, here.cols, here.compute, here.device
        key = (*values, *kinds, *how, *here.letters.values(), *self.plans.values())
        self.written = gemm.written.setdefault(key, {})
        block = (plan.block_kept, EXTRA if self.pingpong else plan.block_folded // HALVES)
        self.out_descriptor = descriptors.make_descriptor(out, (), block, self.pingpong) if out.dim() == 2 else None

    def _plan_kernel(self, name: str, width: int) -> KernelPlan:
        found = plan_kernel(name, width, self.pingpong, self.wide)
        if name in ("gather_label_logits", "multiply_labels", "weigh_labels") or (self.pingpong and name in GEMMS):
            return found
        kept = row_kernel.round_to_power(self.here.rows, found.block_kept)
        folded = row_kernel.round_to_power(self.here.cols, found.block_folded)
        folded = found.block_folded if name == "finish_rows" else min(found.block_folded, max(_MIN_COLS, folded))
        return replace(found, block_kept=kept, block_folded=folded)

    def write_weights(self, out: Tensor, values: dict[Expr, Any], results: list[Tensor]) -> RowCorrections | None:
        """See :meth:`EpilogueGemm.write_weights`."""
        descriptor, rows, device = self.describe_output(out), self.here.rows, out.device
        if not self.gemm.guesses:
            self.launch("write_weights", [descriptor], values)
            return None
        empty, padded_rows = functools.partial(torch.empty, device=device), -(-rows // 8) * 8  # aligned
        guesses, label_logits, factors, label_weights = empty(4, padded_rows, dtype=torch.float32)[:, :rows]
        marks, labels = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int64)
        maxima, sums = (empty(self.tiles, padded_rows, dtype=t) for t in (torch.bfloat16, torch.float32))
        factored = self.gemm.epilogue.factored
        self.launch("guess_maxima", [guesses], values)
        self.launch("write_guessed", [descriptor, guesses, maxima, sums, padded_rows], values)
        if factored is not None and factored.label is not None:
            self.launch("gather_label_logits", [label_logits], values)
        tiles = [guesses, maxima, sums, padded_rows]
        rest = [label_logits, out, out.stride(0), factors, label_weights, labels, marks]
        self.launch("finish_rows", [*results, *tiles, *rest], values, self.tiles)
        values |= {name: t.unsqueeze(0) for name, t in zip(self.gemm.epilogue.names, results, strict=True)}
        self.launch("recompute_rows", [out, out.stride(0), marks], values)
        if factored is None or factored.label_weight is None:
            return RowCorrections(factors)
        return RowCorrections(factors, label_weights, labels, has_distinct_labels(factored.label))

    def describe_output(self, out: Tensor) -> Any:
        """The descriptor by which kernels write ``out``."""
        return descriptors.replace_base(self.out_descriptor, out)

    def launch(self, name: str, outputs: list[Any], values: Mapping[Expr, Any], tiles: int = 0) -> None:
        """Launch a kernel. ``outputs``: its first arguments; ``tiles``: in place of the number of tiles of rows."""
        found = self.launches.get(name)
        if found is None:
            found = self.launches[name] = self._prepare_kernel(name, values, tiles)
        found(outputs, values, self.here.device, alike=True)

    def _grid(self, name: str) -> int:
        """The number of program instances: one for each tile of rows, or as many as run at a time, in a persistent loop
        over tiles."""
        plan = self.plans[name]
        rows, cols = (-(-n // b) for n, b in zip(self.lengths, (plan.block_kept, plan.block_folded), strict=True))
        shared = self.pingpong and name in GEMMS  # two warp groups are one program instance
        resident = driver.count_processors(self.here.device) * (1 if shared else max(1, 8 // plan.num_warps))
        return min(rows * cols, resident) if name in (*GEMMS, "recompute_rows") else rows

    def _write_pingpong(self, name: str, values: Mapping[Expr, Any], plan: KernelPlan) -> Any:
        spec, masked = self._make_spec(name, values), self.here.cols % plan.block_folded != 0
        return write_pingpong_kernel(name, self.gemm.epilogue, spec, masked, self.wide)

    def _prepare_kernel(self, name: str, values: Mapping[Expr, Any], tiles: int) -> row_kernel.PreparedKernel:
        plan, found = self.plans[name], self.written.get(name)
        if found is None:
            found = self.written[name] = self._write_kernel(name, values)
        wide = row_kernel.need_64_bits(found.kernel.leaves, values, (plan.block_kept, plan.block_folded))
        return row_kernel.PreparedKernel(
            found.kernel, plan, self.lengths, wide, tiles, self._grid(name), found.copied, found.compiled
        )

    def _write_kernel(self, name: str, values: Mapping[Expr, Any]) -> _Written:
        plan, pingpong = self.plans[name], self.pingpong and name in GEMMS
        spec, masked = self._make_spec(name, values), self.here.cols % plan.block_folded != 0
        kernel = self._write_pingpong(name, values, plan) if pingpong else None
        kernel = kernel or write_kernel(name, self.gemm.epilogue, spec, masked)
        order = () if name in ROW_KERNELS else tuple(e for e in kernel.leaves if e in self.copied)
        copied = [(e, plan.block_folded if e.cols else plan.block_kept) for e in order]
        if pingpong and self.wide:
            copied = [(e, TILE) for e in order] + [(e, EXTRA) for e in order if e.cols]
        return _Written(kernel, tuple(copied), {})

    def _make_spec(self, name: str, values: Mapping[Expr, Any]) -> Spec:
        here, fold = self.here, _list_folds(name, self.gemm.epilogue, tuple(values))
        copied = () if name in ROW_KERNELS else self.copied
        how: dict[str, Any] = dict(narrow="bfloat16", k_loop=True, unrounded=self.gemm.exact)
        dims = tuple(() if e in copied else None for e in fold.leaves)
        given = [values[e] for e in fold.leaves]
        return spec_from_tensors.describe_as_given(fold, "cols", given, here, descriptors=dims, **how)


@functools.lru_cache(maxsize=1024)
def _list_folds(name: str, epilogue: Epilogue, given: tuple[Expr, ...]) -> Fold:
    """What a kernel computes, as folds of those of the leaves that it reads."""
    wanted = list_reads(name, epilogue)
    numbers = tuple(r if r.op == "reduce" else reduce_node("sum", "cols", (), (r,)) for r in wanted)
    under = set(topological(numbers))
    return Fold(tuple(e for e in given if e in under), numbers)


@functools.lru_cache(maxsize=1024)
def fuse_epilogue(
    loop: PanelLoop, group: range, shifted: bool, without_labels: bool = False, stored: bool = False
) -> EpilogueGemm | None:
    """A group of stages as one GEMM with an epilogue; None where they have more than one inner product or weight, or
    where their folds cannot be measured from a guessed maximum.

    ``shifted``: the panel may begin at another column than 0. ``without_labels``: each row's label column is left out
    of the weights; None where rows have no label. ``stored``: weights are stored, some columns at a time, until all
    columns are folded; label columns are then taken care of elsewhere."""
    stages, label = fuse_stages(loop, group, shifted), None
    if without_labels:
        found = split_label_column(fuse_stages(loop, group, False).weights[0]) if len(stages.weights) == 1 else None
        if found is None:
            return None
        others, term = found
        weights = substitute((others, term.weight, term.label), shift_indices("col") if shifted else {})
        stages, label = replace(stages, weights=weights[:1]), LabelTerm(*weights[1:])
    splits = [split_stage(loop.stages[at]) for at in group]
    products = [(e, f) for e, f in zip(stages.leaves, stages.feeds, strict=True) if f.op == "dot"]
    if len(products) != 1 or len(stages.weights) != 1 or any(s.topk or s.folds["rows"] for s in splits):
        return None
    operations = [e for e in topological(stages.weights) if e.is_pair and e.op != "leaf"]
    if len(operations) > _MAX_OPERATIONS or any(e.op in DRAWS for e in operations):
        return None
    folds = tuple(r for fold in stages.folds for r in fold)
    factored = split_row_factor(fuse_stages(loop, group, False)) if folds else None
    if folds and (shifted is not stored or without_labels or factored is None):
        return None
    ((leaf, product),) = products
    row, col = product.args if product.args[0].rows else product.args[::-1]
    vectors = _make_vector_leaf("u0", row), _make_vector_leaf("u1", col)
    replaced = {leaf: dot(*vectors)}
    (weight,), folds = substitute(stages.weights, replaced), substitute(folds, replaced)
    if factored is not None and stored:
        factored = _substitute_factored(replace(factored, label_weight=None), shift_indices("col"))
    factored = None if factored is None else _substitute_factored(factored, replaced)
    label = None if label is None else LabelTerm(*substitute((label.weight, label.label), replaced))
    names = tuple(n for own in stages.names for n in own)
    feeds = tuple((e, f) for e, f in zip(stages.leaves, stages.feeds, strict=True) if e is not leaf)
    epilogue = Epilogue(folds, names, weight, factored, label)
    return EpilogueGemm(epilogue, product, (row, col), vectors, feeds, bool(folds) or stored or loop.exact)


def _make_vector_leaf(name: str, operand: Expr) -> Expr:
    return node("leaf", (), (name,), rows=operand.rows, cols=operand.cols, feature=operand.feature, dtype="float")


def _substitute_factored(factored: FactoredWeight, replaced: dict[Expr, Expr]) -> FactoredWeight:
    parts = substitute((factored.pair_weight, factored.exponential, factored.factor), replaced)
    return replace(factored, pair_weight=parts[0], exponential=parts[1], factor=parts[2])
