"""The kernels of a GEMM whose epilogue writes weights (``epilogue.py`` launches them).

Each computes one tile of pairs at a time:

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
from collections.abc import Callable
from dataclasses import dataclass

from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ....reductions import kind_of
from ....reductions.softmax import SoftmaxLines
from ..codegen import compiler
from ..codegen.expressions import ExpressionWriter, product_key, write_dot, write_rounding
from ..codegen.kernel_spec import K_LOOP_DEPTH, LOG2E, Spec, literal, rounds_products
from ..codegen.reductions import TOOLS, LabelColumnWriter
from .row_factor import FactoredWeight, LabelTerm
from .row_kernel import RowValues, assemble_kernel

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
