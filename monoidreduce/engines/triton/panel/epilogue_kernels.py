"""The kernels of a product that writes weights (``epilogue.py`` launches them). Each meets a tile of pairs at a time.

``write_known``: all numbers of rows are given, and a tile's weights are complete.
``guess_peaks``: the greatest logit of each row among a few columns.
``write_guessed``: weights measured from that guess, every tile's greatest logit and sum of exponentials. A tile whose
greatest lies far from the guess is summed from its own, so that totals are exact whatever was guessed.
``sum_guessed``: the same of weights that nobody keeps.
``close_rows``: the totals of rows and what is made of them (``label_corrections.py`` takes it from there). Rows whose
weights the
guess could not bear are marked.
``write_spare``: ``write_known`` for marked rows; where there are none, a look at the marks is all it does.
Those that meet each row's own column alone are in ``label_kernels.py``.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable

from ....program.expression import Expr, topological
from ....program.reductions import KINDS
from ..codegen import k_loop, kernel_text, reductions
from ..codegen.exponents import LOG2E, literal
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec
from ..codegen.label_gather import LabelColumnWriter
from . import label_kernels as own
from .epilogue_task import PLACES, Task, cut, product, sides
from .row_kernel import RowValues

FAR = 60  # in powers of two: up to here from what was guessed, weights and sums neither overflow nor lose digits
# A tile is weighed and written in halves: the first is on its way to memory while the powers of the second are raised.
# Beside a ring of four blocks of features there is room for one half, and none for a condition among the products:
# picking labels there took 40 % more time (H200, 2048 rows of 2304 features).
HALVES = 2
BY_ROWS = ("pick_own", "match_own", "weigh_own", "close_rows")  # kernels that multiply no tiles
_MOST = 2.0**100  # factors of rows lie below this


class _TileSoft(reductions.Soft):
    """A softmax whose exponents are measured from a guess."""

    def prepare(self) -> None:
        self.fast, self.guesses, self.means = True, False, []


@functools.lru_cache(maxsize=1024)
def kernel(name: str, task: Task, spec: Spec, masked: bool) -> kernel_text.Kernel:
    """Write one of the kernels; ``masked``: whether tiles may reach beyond the last column."""
    v = RowValues(spec)
    v.loop(masked)
    if name not in BY_ROWS:  # first of all: what else is read waits until it is there
        v.number(product(task))
    first, v.before, v.inside = [*v.before, *v.inside], [], []
    outs, lines = _WRITERS[name](v, task, first)
    under = set(topological(spec.fold.reductions))
    used = [e for e in spec.fold.leaves if e in under]
    names, unspecialized = _signature(spec, outs, used)
    text = [
        f"@triton.jit(do_not_specialize={unspecialized!r})",
        f"def {name}(",
        *textwrap.wrap(", ".join(names) + ",", 110, initial_indent="    ", subsequent_indent="    "),
        f"    {', '.join(f'{c}: tl.constexpr' for c in kernel_text.CONSTANTS)},",
        "):",
        *(f"    {line}" if line else "" for line in lines),
    ]
    whole = "\n".join(text)
    return kernel_text.Kernel(
        name,
        "\n".join([kernel_text.write_header(spec, used), *kernel_text.copy_device_functions(whole), "", whole, ""]),
        tuple(used),
    )


def _signature(spec: Spec, outs: list[str], used: list[Expr]) -> tuple[list[str], list[str]]:
    """A kernel's arguments, and those not to specialize on."""
    names, unspecialized = kernel_text.list_arguments(spec, used, 0)
    count = sum(len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])) for r in spec.fold.reductions)
    return [*outs, *names[count:]], unspecialized


def reads(name: str, task: Task) -> tuple[Expr, ...]:
    """The expressions that a kernel reads leaves for."""
    late, own = task.late, task.own
    if name == "weigh_own" and own is not None:
        return own.weight, own.target
    if name in ("write_known", "write_spare") or late is None:
        return (task.weight,)
    if name == "close_rows":
        return (*task.folds[1:], task.weight, late.late)
    if name in ("pick_own", "match_own"):
        return (product(task), *(() if late.target is None else (late.target,)))
    return (task.folds[0].args[0], late.early) if name == "write_guessed" else (task.folds[0].args[0],)


# The lines of each


def _every_tile(lines: list[str], flatten: bool) -> list[str]:
    """A program instance takes one tile after the other. ``flatten``: the products of one begin before the last of the
    tile before are done with."""
    return [
        "turns = tl.cdiv(folded_size, FOLDED)",
        f"HALF: tl.constexpr = FOLDED // {HALVES}",
        f"for program in tl.range(tl.program_id(0), tiles * turns, tl.num_programs(0), flatten={flatten}):",
        "    tile, turn = grouped(program, tiles, turns, 16)",
        "    start = turn * FOLDED",
        *(f"    {line}" for line in (*PLACES, *lines)),
    ]


def _write_known(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    return ["out_box"], _written(v, task, first, lambda k: v.full(task.weight), _STORE)


def _written(v: ExpressionWriter, task: Task, first: list[str], weigh: Callable[[int], str], store: str) -> list[str]:
    """Every tile's product, and its halves: what ``weigh`` makes of each, to memory. Numbers of rows are read first."""
    name = v.inner[_key(task)]
    first = [
        line for line in first if not (k_loop.rounds_products(v.spec) and line == k_loop.write_rounding(name))
    ]  # but by halves
    lines = [*v.inside, f"scores0, scores1 = halved({name})", *_halves(v, task, weigh, store)]
    return _every_tile([*v.before, *first, *lines], not _numbers(v.spec))


def _numbers(spec: Spec) -> bool:
    """Whether there are numbers per column: these take registers."""
    return any(e.cols and e.feature is None for e in spec.fold.leaves)


_STORE = "out_box.store([tile * KEPT, start], {}.to(tl.bfloat16))"
_HALF = ["half_lane = tl.arange(0, HALF).to(INT)", "half_at = start + tl.arange(0, HALF)"]


def _halves(
    v: ExpressionWriter,
    task: Task,
    weigh: Callable[[int], str],
    store: str,
    places: list[str] = _HALF,
    count: int = HALVES,
) -> list[str]:
    """What is made of each half of a tile's product, or of each strip of ``count``, and how it is written, if it is."""
    lines = []
    for k in range(count):
        v.loop(v.masked)
        v.inner[_key(task)] = f"scores{k}"
        made = weigh(k)
        lines += [
            f"start = turn * FOLDED + {k} * HALF",
            *places,
            *(["half_in = half_at < folded_size"] if v.masked else []),
            *([k_loop.write_rounding(f"scores{k}")] if k_loop.rounds_products(v.spec) else []),
            *(_IN_HALF.sub(lambda m: _NAMES[m[0]], line) for line in v.inside),
            *filter(None, [store.format(made)]),
        ]
    return lines


def _key(task: Task) -> tuple:
    return (*sides(product(task)), "deep")


_NAMES = {"FOLDED": "HALF", "folded_lane": "half_lane", "folded_at": "half_at", "folded_in": "half_in"}
_IN_HALF = re.compile("|".join(rf"\b{name}\b" for name in _NAMES))


def _write_spare(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    weight = v.full(task.weight)
    mask = "(own > 0)[:, None] & folded_in[None, :]"
    place = "out + kept_at.to(tl.int64)[:, None] * out_r + folded_at[None, :]"
    body = [*first, *v.before, *v.inside, f"tl.store({place}, {weight}.to(tl.bfloat16), mask={mask})"]
    turn = ["own = tl.load(marks + kept_at, mask=kept_in, other=0)", "if tl.max(own) > 0:", *(f"    {x}" for x in body)]
    return ["out", "out_r", "marks"], [
        "some = 0",
        "for r in range(0, kept_size, 1024):",
        "    row = r + tl.arange(0, 1024)",
        "    some += tl.max(tl.load(marks + row, mask=row < kept_size, other=0))",
        "if some > 0:",
        *(f"    {line}" for line in _every_tile(turn, False)),
    ]


def _soft(v: ExpressionWriter, task: Task) -> tuple[str, str, str]:
    """The name of the softmax, of its logits, and the text that multiplies them."""
    soft = _TileSoft(0, task.folds[0], reductions.ONE, v)
    return (soft.name, *soft._logit(task.folds[0].args[0]))


def _guess_peaks(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    _, s, factor = _soft(v, task)
    store = f"tl.store(guesses + kept_at, finite(tl.max({s}, 1){factor}), mask=kept_in)"
    return ["guesses"], ["tile = tl.program_id(0)", "start = 0", *PLACES, *first, *v.before, *v.inside, store]


def _guessed(v: ExpressionWriter, task: Task, first: list[str], store: str) -> tuple[list[str], list[str]]:
    """``store``: how weights are written, if they are."""
    n, s, factor = _soft(v, task)
    _measure(v, n, f"tl.max({s}, 1){factor}")
    v.inside += [f"{n}_half0, {n}_half1 = halved({s})", f"{n}_total = tl.zeros([KEPT], tl.float32)"]
    weigh = _early if store else _summed
    lines = _written(v, task, first, lambda k: weigh(v, task, n, f"{n}_half{k}{factor}", "+="), store)
    lines.append(f"    tl.store(sums + place, {n}_total, mask=kept_in)")
    return _GUESSED, lines


_GUESSED = ["out_box", "guesses", "tops", "sums", "tops_r"]


def _measure(v: ExpressionWriter, n: str, most: str) -> None:
    """The greatest logit of a tile's rows, and what its exponents are measured from."""
    guess = v.bind(f"{n} guess", "tl.load(guesses + kept_at, mask=kept_in, other=0.0)", False, f"{n}_guess")
    v.inside += [
        f"{n}_most = ({most}).to(tl.bfloat16)",
        "place = tl.cast(turn, tl.int64) * tops_r + kept_at",
        f"tl.store(tops + place, {n}_most, mask=kept_in)",
        f"{n}_most = {n}_most.to(tl.float32)  # as the totals will know it",
        f"{n}_ref = measured({n}_most, {guess}, {FAR})[:, None]",
        f"{n}_near = tl.where({n}_most < {guess} - {FAR}, 0.0, 1.0)[:, None]  # others are as good as nothing",
    ]


def _summed(v: ExpressionWriter, task: Task, n: str, exponent: str, adds: str) -> str:
    """The exponentials of some columns, which are added to the totals."""
    v.inside += [f"{n}_weight = tl.exp2({exponent} - {n}_ref)", f"{n}_total {adds} tl.sum({n}_weight, 1)"]
    return ""


def _early(v: ExpressionWriter, task: Task, n: str, exponent: str, adds: str) -> str:
    """The same, and the weights."""
    assert task.late is not None
    _summed(v, task, n, exponent, adds)
    v.inner[task.late.power] = v.bind(f"{n} kept", f"{n}_weight * {n}_near", True)
    return v.full(task.late.early)


def _close_rows(v: ExpressionWriter, task: Task, first: list[str]) -> tuple[list[str], list[str]]:
    assert task.late is not None
    late, outs, n = task.late, [f"out{k}" for k in range(len(task.names))], "soft0"
    there = None if late.target is None else LabelColumnWriter(v, "own", late.target)
    if there is not None:
        own = f"tl.load(picked + kept_at, mask=tl.reshape({there.inside_text}, [KEPT]), other=0.0)[:, None]"
        there.outer[product(task)] = there.bind("product", own, False, "own_product")
    texts = [f"{n}_log + {n}_peak", f"{n}_log", f"{n}_peak"]
    for r in task.folds[1:]:
        assert there is not None
        number = f"{there.number(r.args[1])} + tl.zeros([KEPT, 1], {v.float})"
        texts.append(f"tl.reshape(tl.where({there.inside_text}, {number}, 0.0), [KEPT])")
    lines = [*first, *cut(v), *(cut(there) if there else [])]
    for out, name, text in zip(outs, task.names, texts, strict=True):
        x = str(name.attrs[0])
        lines += [f"{x} = {text}", f"tl.store({out} + kept_at, {x}, mask=kept_in)"]
        for values in (v, there) if there else (v,):
            values.outer[name] = f"{x}[:, None]"
    factor = v.number(late.late)
    weight = there.number(task.weight) if there and late.hit is not None else ""
    lines += [
        *cut(v),
        f"factor = tl.reshape({factor} + tl.zeros([KEPT, 1], {v.float}), [KEPT])",
        f"marked = {n}_far | ~(tl.abs(factor) < {_MOST!r})",
        "tl.store(factors + kept_at, tl.where(marked, 1.0, factor), mask=kept_in)",
        "tl.store(marks + kept_at, tl.where(marked, 1, 0), mask=kept_in)",
    ]
    if there and weight:
        lines += [
            *cut(there),
            f"inside = tl.reshape({there.inside_text}, [KEPT]) & ~marked",
            f"hit = tl.reshape({weight} + tl.zeros([KEPT, 1], {v.float}), [KEPT])",
            f"target = tl.reshape({there.place} + tl.zeros([KEPT, 1], tl.int64), [KEPT])",
            "tl.store(hits + kept_at, tl.where(inside, hit, 0.0), mask=kept_in)",
            "tl.store(targets + kept_at, target, mask=kept_in)",
            "nothing = tl.zeros([KEPT], tl.float32).to(tl.bfloat16)",
            "tl.store(pairs + kept_at.to(tl.int64) * pairs_r + target, nothing, mask=inside)",
        ]
    ends = ["picked", "pairs", "pairs_r", "factors", "hits", "targets", "marks"]
    return [*outs, "guesses", "tops", "sums", "tops_r", *ends], [*_TOTAL, *lines]


_PARTS = [
    "part = t + tl.arange(0, FOLDED)",
    "there = kept_in[:, None] & (part < parts)[None, :]",
    "place = part.to(tl.int64)[None, :] * tops_r + kept_at[:, None]",
    'most = tl.load(tops + place, mask=there, other=float("-inf")).to(tl.float32)',
]
_TOTAL = [
    "tile = tl.program_id(0)",
    "start = 0",
    *PLACES,
    "parts = tiles",
    "soft0_guess = tl.load(guesses + kept_at, mask=kept_in, other=0.0)",
    'soft0_tops = tl.full([KEPT, FOLDED], float("-inf"), tl.float32)',
    "for t in range(0, parts, FOLDED):",
    *(f"    {line}" for line in _PARTS),
    "    soft0_tops = tl.maximum(soft0_tops, most)",
    "soft0_top = tl.max(soft0_tops, 1)",
    f'soft0_far = (soft0_top != float("-inf")) & ~(tl.abs(soft0_top - soft0_guess) <= {FAR})',
    f"soft0_ref = measured(soft0_top, soft0_guess, {FAR})",
    "soft0_totals = tl.zeros([KEPT, FOLDED], tl.float32)",
    "for t in range(0, parts, FOLDED):",
    *(f"    {line}" for line in _PARTS),
    "    some = tl.load(sums + place, mask=there, other=0.0)",
    f"    shrink = tl.exp2(measured(most, soft0_guess[:, None], {FAR}) - soft0_ref[:, None])",
    "    soft0_totals += tl.where(some == 0.0, 0.0, some * shrink)",
    "soft0_total = tl.sum(soft0_totals, 1)",
    "soft0_log = tl.log(soft0_total)",
    f"soft0_peak = tl.where(soft0_total == 0.0, 0.0, soft0_ref) * {literal(1 / LOG2E)}",
]

_Writer = Callable[[ExpressionWriter, Task, list[str]], tuple[list[str], list[str]]]
_WRITERS: dict[str, _Writer] = {
    "write_known": _write_known,
    "write_spare": _write_spare,
    "guess_peaks": _guess_peaks,
    "write_guessed": functools.partial(_guessed, store=_STORE),
    "sum_guessed": functools.partial(_guessed, store=""),
    "close_rows": _close_rows,
    **own.WRITERS,
}
