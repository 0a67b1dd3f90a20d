"""From one direction of a fold to the text of one kernel.

A program instance owns ``KEPT`` indices of the kept axis of one batch element and walks the folded axis in tiles of
``FOLDED``, its state in registers: no atomics, one fixed order. Two loops share the state. The first meets whole tiles
on which every condition is known; the second meets the others: tiles that a condition cuts, and the ragged end.
The same text serves every length, plan and batch size, and equal programs have equal texts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from ....program.expression import Expr, topological
from ....reductions import outputs_of
from ....reductions.kernel_lines import Lines
from ....reductions.softmax import SoftmaxLines
from . import device_functions, philox, tile_ranges
from . import float32_split_functions as pieces
from . import k_loop as deep
from . import reductions as kinds
from .expressions import Values
from .kernel_spec import TINY, Spec, padded
from .reductions import known

CONSTANTS = ("KEPT", "FOLDED", "INT", "PRECISION", "RAGGED")  # what ``launch.execute`` fixes when it compiles

_IMPORTS = """import triton
import triton.language as tl
"""

_HEADER = '''"""{title}

{leaves}

Written by monoidreduce; the same program always gives the same text.
"""

'''


@dataclass(frozen=True)
class Kernel:
    """A kernel's text, what to call it with, and what decides its best tiles."""

    name: str
    text: str
    leaves: tuple[Expr, ...]  # in the order of the arguments
    guesses: bool = False  # whether whole tiles do with a guess, which may prove wrong
    folded: tuple[Expr, ...] = ()  # leaves whose blocks are met in each tile
    shifts: tuple[tuple[Expr, Expr], ...] = ()  # of exponents, made from two leaves before the launch
    kept_width: int = 0  # features of the blocks held from the kept side
    folded_width: int = 0  # features of the blocks met in each tile
    state_width: int = 0  # features of the running sums
    kept_blocks: int = 0
    exact: bool = True  # whether its float32 products are
    powers: bool = False  # whether it raises powers
    bounds: bool = False  # whether it is told which tiles to visit
    short: bool = False  # whether walks are: several conditions, or data, say what is seen
    reads: bool = False  # whether it is data, which cut tiles read
    deep: bool = False  # whether a product's features are walked
    draws: bool = False  # whether pairs draw random numbers
    apart: bool = False  # whether a block is summed, and in no other product
    staged: bool = False  # whether its copies and products take turns as the text says
    alone: bool = False  # whether all of its warps do the same
    consumers: int = 0  # consumer warp groups beside a producer warp, in a warp-specialised kernel
    pieces: int = 0  # in how many pieces float32 vectors are multiplied
    near: bool = False  # whether distances of close points are computed anew
    functions: tuple[tuple[str, Any], ...] = ()  # by name, what the text calls and does not hold
    made: tuple[tuple[float, tuple], ...] = ()  # arguments after all others: ``logit_forms.Coefficient``


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec) -> Kernel:
    """Write the kernel of a spec; raises Unsupported where there is none."""
    v = Values(spec)
    reductions = [kinds.make(place, r, scale, v) for place, (r, scale) in enumerate(spec.fold.scaled)]
    truths = tile_ranges.preferred(spec.fold) if spec.bounds else {}
    walk = _walk(v, reductions, truths)
    v.loop(False)
    stores = _stores(reductions, v)
    name = f"fold_over_{spec.over}"
    under = {*topological([*spec.fold.reductions, *spec.fold.scales]), *(e for _, pair in spec.near for e in pair)}
    used = [e for e in spec.fold.leaves if e in under]
    body = [
        *_opening(spec),
        *v.before,
        "",
        "# running values",
        *(line for r in reductions for line in r.start()),
        "",
        *_range(spec),
        *walk,
        "",
        "# results",
        *v.inside,
        *stores,
    ]
    helpers = [line for r in reductions for line in ([*r.helpers, ""] if r.helpers else [])]
    names, unspecialized = _arguments(spec, used, len(v.shifts))
    lines = [
        f"@triton.jit(do_not_specialize={unspecialized!r})",
        f"def {name}(",
        *textwrap.wrap(", ".join(names) + ",", 110, initial_indent="    ", subsequent_indent="    "),
        f"    {', '.join(f'{c}: tl.constexpr' for c in CONSTANTS)},",
        "):",
        *(f"    {line}" if line else "" for line in body),
    ]
    own = _own("\n".join(helpers))
    text = "\n".join([_header(spec, used), *_copied(own + "\n".join(lines)), own + "\n".join(lines), ""])
    width = lambda chosen: sum(padded(spec.width(e.feature)) for e in chosen) * max(spec.pieces, 1)
    kept = [e for e in v.blocks if not spec.folds(e)]
    folded = [e for e in v.blocks if spec.folds(e)]
    return Kernel(
        name,
        text,
        tuple(used),
        bool(_guessing(reductions)),
        tuple(folded),
        tuple(v.shifts),
        width(kept),
        width(folded),
        v.state_width,
        len(kept),
        spec.exact,
        "tl.exp2(" in text,
        spec.bounds,
        any(e.op == "logical_and" or (e.op == "leaf" and spec.folds(e)) for e in topological(truths)),
        any(e.op == "leaf" and spec.folds(e) for e in topological(truths)),
        spec.deep,
        deep.draws(spec),
        not v.factors.issuperset(folded),
        pieces=spec.pieces,
        near=bool(spec.near),
    )


def _guessing(reductions: list[Lines]) -> list[SoftmaxLines]:
    """The softmaxes that need no running maximum in whole tiles."""
    return [r for r in reductions if isinstance(r, SoftmaxLines) and r.guesses]


def _walk(v: Values, reductions: list[Lines], truths: dict[Expr, bool]) -> list[str]:
    """The loops. In whole tiles a guess stands in for a softmax's running maximum. The second loop has one, and takes
    all tiles where the guess proved too far off."""
    soft = _guessing(reductions)
    guess = _guess(v, soft, truths)
    for r in soft:
        r.guessing = True
    v.late = bool(v.spec.boxes)
    plain = _turn(v, reductions, truths, masked=False)
    v.late = False
    for r in soft:
        r.guessing = False
    after = _waiting(reductions), _judged(v.spec, reductions, soft)
    return [*guess, *_loops(v.spec, plain, *after, _turn(v, reductions, {}, masked=True))]


def _guess(v: Values, soft: list[SoftmaxLines], truths: dict[Expr, bool]) -> list[str]:
    if not soft:
        return []
    v.loop(False)
    for r in soft:
        r.guess(tuple(known(f, truths) for f in r.reduction.args[:1]))
    runs = v.spec.bounds or v.spec.split
    some = "whole + again > 0" if runs else "whole_last > whole_first"
    first = "(whole_first + tl.where(whole > 0, 0, between))" if runs else "whole_first"
    what = "the first whole tile"
    if any(r.sloped for r in soft):
        what = "the whole tile nearest to the rows' own indices"
        last = "tl.where(whole > 0, whole_last, again_last)" if runs else "whole_last"
        first = f"tl.maximum({first}, tl.minimum(tile * KEPT // FOLDED, {last} - 1))"
    return [
        *(line for r in soft for line in r.before_whole_tiles()),
        f"# the maximum of {what} stands in for the running one in all of them",
        f"if {some}:",
        f"    start = {first} * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        *(f"    {line}" for line in v.inside),
    ]


def _judged(spec: Spec, reductions: list[Lines], soft: list[SoftmaxLines]) -> list[str]:
    """Where a guess was too far off, everything begins again, and all tiles are for the second loop."""
    if not soft:
        return []
    state = [line.split(" = ", 1) for r in reductions for line in r.start() if "_late = " not in line]
    return [
        *(line for r in soft for line in r.after_whole_tiles()),
        f"near = {' & '.join(f'({r.guessed()})' for r in soft)}",
        *(f"{name} = tl.where(near, {name}, {value})" for name, value in state),
        *_FAR[spec.bounds or spec.split],
    ]


_FAR = {  # no tile was for the first loop
    False: ["whole_last = tl.where(near, whole_last, whole_first)"],
    True: [
        "before = tl.where(near, before, last - first)",
        *(f"{name} = tl.where(near, {name}, 0)" for name in ("between", "whole", "again")),
        "again_last = tl.where(near, again_last, last)",
    ],
}


def _turn(v: Values, reductions: list[Lines], truths: dict[Expr, bool], masked: bool) -> list[str]:
    """The body of a loop: what one tile adds to every reduction."""

    def step() -> None:
        for r in reductions:
            fields = tuple(known(f, truths) for f in r.reduction.args)
            v.inside.append(f"# {_described(r.reduction)}")
            if v.spec.pieces:  # before numbers that would be held while they are computed
                v.products(*fields)
            r.step(fields)

    v.loop(masked)
    if v.spec.deep and deep.draws(v.spec):
        return deep.in_strips(v, step)
    step()
    return v.inside


def _described(r: Expr) -> str:
    kind, over, _ = r.attrs
    text = f"{kind} over {over} of {', '.join(map(repr, r.args))}"
    return text if len(text) <= 110 else f"{text[:107]}..."


def _header(spec: Spec, used: list[Expr], imports: str = _IMPORTS) -> str:
    title = f"A fold over {spec.over}: {', '.join(r.attrs[0] for r in spec.fold.reductions)}."
    lines = []
    for e in used:
        side = "row" if e.rows else "column" if e.cols else "batch element"
        what = "a number" if e.feature is None else f'a vector over "{e.feature}" ({spec.width(e.feature)})'
        kind = spec.type_of[e]
        lines.append(f"{e.attrs[0]}: {what} {'given at the call' if spec.is_number(e) else f'per {side}, {kind}'}")
    return _HEADER.format(title=title, leaves="\n".join(lines) or "No leaves.") + imports


def _arguments(spec: Spec, used: list[Expr], shifts: int) -> tuple[list[str], list[str]]:
    """The kernel's run-time parameters, in the order in which ``fold_kernel.py`` gives them; those not to specialize
    on."""
    count = sum(len(outputs_of(r)) for r in spec.fold.reductions)
    names = [f"out{k}" for k in range(count)]
    numbers = []
    for e in used:
        x = str(e.attrs[0])
        if spec.is_number(e):
            numbers.append(f"{x}_number")
            names.append(f"{x}_number")
            continue
        names.append(f"{x}_ptr")
        names += [f"{x}_b{k}" for k in range(spec.rank)]
        names += [f"{x}_r", f"{x}_c"] if e.is_pair else [f"{x}_s"] if e.rows or e.cols else []
        names += [f"{x}_f"] if e.feature is not None else []
    sizes = ["kept_size", "folded_size", "tiles", *(f"n{k}" for k in range(1, spec.rank))]
    sizes += ["parts", "batches", *(["beside"] if spec.deep else [])] if spec.split else []
    names += sizes + (["bounds", "bounds_b", "turns", "flip"] if spec.bounds else [])
    names += [f"shift{k}_{'box' if spec.line else 'ptr'}" for k in range(shifts)]
    names += [f"{e.attrs[0]}_box" for e in used if e in spec.box_of]
    return names, [*numbers, *sizes, *(["turns", "flip"] if spec.bounds else [])]


def _opening(spec: Spec) -> list[str]:
    lines = ["tile = tl.program_id(0) % tiles", "batch = tl.program_id(0) // tiles"]
    if spec.bounds:
        lines = ["tile, batch = longest_first(tl.program_id(0), tiles, turns, flip)"]
    if spec.split:
        lines = [*deep.OPENING] if spec.deep else [*lines, "part = batch // batches", "batch = batch % batches"]
    rest = "batch"
    for k in range(spec.rank - 1, 0, -1):
        lines.append(f"b{k} = tl.cast({rest} % n{k}, tl.int64)")
        lines.append(f"rest{k} = {rest} // n{k}")
        rest = f"rest{k}"
    lines.append(f"b0 = tl.cast({rest}, tl.int64)")
    return [
        *lines,
        "kept_at = tile * KEPT + tl.arange(0, KEPT)",
        "kept_in = kept_at < kept_size",
        "kept_lane = tl.arange(0, KEPT).to(INT)",
        "folded_lane = tl.arange(0, FOLDED).to(INT)",
    ]


def _range(spec: Spec) -> list[str]:
    """Which tiles are walked."""
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
            *tile_ranges.PART,
            *(f"{n} = tl.minimum(tl.maximum({n}, begin), end)" for n in tile_ranges.EDGES),
        ]
    return [
        *lines,
        "whole = whole_last - whole_first",
        "before = whole_first - first",
        "between = again_first - whole_last",
        "again = again_last - again_first",
    ]


def _waiting(reductions: list[Lines]) -> list[str]:
    """What is left to do after the last whole tile."""
    return [t.catch_up() for r in reductions for t in r.totals if t.waiting is not None]


def _loops(spec: Spec, plain: list[str], waiting: list[str], judged: list[str], general: list[str]) -> list[str]:
    """The two loops: whole tiles, then those before, between and after them."""
    begin, stop, at = "whole_first", "whole_last", "{}"
    count, turn = "tl.cdiv(folded_size, FOLDED) - whole_last", "whole_last + t"
    if spec.bounds or spec.split:
        begin, stop, at = "0", "whole + again", "(whole_first + {0} + tl.where({0} < whole, 0, between))"
        count = "before + between + last - again_last"
        turn = "first + t + tl.where(t < before, 0, whole) + tl.where(t < before + between, 0, again)"
    second = [
        f"for t in range(0, {count}):",
        f"    start = ({turn}) * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = within(folded_at, folded_size, RAGGED)",
        *(f"    {line}" for line in general),
    ]
    always = spec.bounds or spec.split or bool(judged)  # else it is for the ragged end alone
    return [
        f"for t in {deep.walk(spec)}:".format(begin, stop),
        f"    start = {at.format('t')} * FOLDED",
        *([f"    gone = tl.where(t > {begin}, {at.format('(t - 1)')} * FOLDED, folded_size)"] if waiting else []),
        "    folded_at = start + tl.arange(0, FOLDED)",
        *(f"    {line}" for line in plain),
        *_ended(begin, stop, at, waiting),
        *judged,
        *(second if always else ["if RAGGED:", *(f"    {line}" for line in second)]),
    ]


def _ended(begin: str, stop: str, at: str, waiting: list[str]) -> list[str]:
    """What the last whole tile left to do, where there was one."""
    lines = [f"gone = {at.format(f'({stop} - 1)')} * FOLDED", *waiting]
    return [f"if {stop} > {begin}:", *(f"    {line}" for line in lines)] if waiting else []


def _stores(reductions: list[Lines], v: Values) -> list[str]:
    place = "tl.cast(part, tl.int64) * batches + batch" if v.spec.split else "tl.cast(batch, tl.int64)"
    lines = [f"out_at = ({place}) * kept_size + tile * KEPT"]
    at = 0
    for r in reductions:
        for texts, feature in r.finish():
            out = f"out{at}"
            at += 1
            if feature is None:
                lines.append(f"tl.store({out} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
                continue
            width = v.spec.width(feature)
            if width <= TINY:
                for f, text in enumerate(texts):
                    lines.append(f"tl.store({out} + (out_at + kept_lane) * {width} + {f}, {text}, mask=kept_in)")
                continue
            lane, exists = v.lane(feature)
            mask = "kept_in[:, None]" + (f" & {exists}[None, :]" if exists else "")
            place = f"(out_at + kept_lane[:, None]) * {width} + {lane}[None, :]"
            lines.append(f"tl.store({out} + {place}, {texts[0]}, mask={mask})")
    return lines


@functools.cache
def _library() -> dict[str, str]:
    """The helper functions of ``device_functions.py``, ``philox.py`` and ``float32_split_functions.py``, by name, in
    their order."""
    found: dict[str, str] = {}
    for source in map(inspect.getsource, (device_functions, philox, pieces)):
        lines = source.split("\n")
        functions = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)]
        found |= {f.name: "\n".join(lines[f.lineno - 1 : f.end_lineno]) for f in functions}
    return found


def _copied(text: str) -> list[str]:
    """The helpers that a text uses, and those that they use, callees first."""
    library = _library()
    wanted: set[str] = set()
    stack = [text]
    while stack:
        here = re.sub("#.*", "", stack.pop())
        named = set(re.findall(r"(?<![\w.])(\w+)[()]", here))  # called, or given to a reduction
        new = library.keys() & named - wanted
        wanted |= new
        stack += [library[name] for name in new]
    return [f"\n@triton.jit\n{source}\n" for name, source in library.items() if name in wanted]


def _own(text: str) -> str:
    return re.sub(r"(?m)^def ", "@triton.jit\ndef ", text) + "\n\n" if text else "\n"
