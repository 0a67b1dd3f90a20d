"""Kernels whose copies, products and arithmetic take turns as written here, not as a compiler finds: Gluon, on Hopper.

A softmax-weighted sum of vectors takes half as long to raise its powers as to multiply, so the two must run side by
side. One warp copies blocks of the folded side into rings in shared memory. Two groups of four warps own half a kept
tile each: a group starts a tile's scores and the sums of the tile before, and weighs the scores while the sums run.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import dataclass, replace

import torch

from ....plan.default_tiles import STAGED, Tile
from ....program.contract import contractions
from ....program.expression import Expr, topological
from ....reductions.softmax import SoftmaxLines
from ..codegen import compiler, kernel_text, tile_ranges
from ..codegen.accumulators import move_factors_to_weight
from ..codegen.dropout import DropoutFactor, match_dropout_factor
from ..codegen.exponents import literal
from ..codegen.expressions import ExpressionWriter, is_one
from ..codegen.kernel_spec import Spec
from ..codegen.reductions import known, make
from ..launch import jit_module
from . import attention_template
from .alibi import Slant, slant
from .kernel_plan import KernelPlan
from .softcap import NAMES, Bend, bend
from .spec_from_tensors import asked, processors
from .template_lines import fetched, in_gluon, inside, scalars, visits

_OWNED = 64  # indices of a group of four warps
_RINGS = 2  # of numbers, at most: shared memory has room for no more
_LEAST = 2.0**-80  # totals above this were not rounded to nothing
_GROUPS = 2  # consumer warp groups of an instance
_RING = 2  # tiles of each operand in flight
_MOST = 168  # registers of a thread when the kernel starts
_REGISTERS = "232, 40"  # then: of the second consumer group, and of the copying warp; the first group has the rest
_WIDTH = 128  # of all vectors: of 64, tiles that the compiler schedules are 7 % faster (H200)


def options() -> dict[str, int]:
    """What the compiler is told of such a kernel."""
    return {"maxnreg": _MOST}


@functools.cache
def on(device: torch.device) -> bool:
    """Whether the device has these matrix units, and this Triton these words."""
    if device.type != "cuda" or jit_module.triton_version() < (3, 6) or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    return plan.boxes == 2 and plan.block_kept == _GROUPS * _OWNED and plan.num_warps == 4 and on(device)


def tile(spec: Spec, device: torch.device, length: int, count: int) -> Tile | None:
    """The tile of so many folds of this many kept indices each; None where they have no such kernel, leave the device
    idle, or do not gain by it.

    Measured on an H200: walks as short as those within documents end before they pay for their beginning (0.44 ms,
    else 0.28)."""
    gains, many = not (spec.bounds and asked(spec.fold)), processors(device)
    if not on(device) or not gains or count * length < 2 * _OWNED * many or kernel(spec) is None:
        return None
    return STAGED


@dataclass(frozen=True)
class Leaves:
    """What is multiplied: vectors of the kept and the folded side to scores, weights with vectors to sums."""

    kept: Expr
    folded: Expr
    summed: Expr


@functools.lru_cache(maxsize=1024)
def leaves(spec: Spec) -> Leaves | None:
    """The vectors of a fold that is one softmax-weighted sum, its logits made of one product; None for any other."""
    (r, *others) = spec.fold.reductions
    if others or r.attrs[0] != "soft" or len(r.args) != 2 or spec.narrow is None or spec.split or spec.deep:
        return None
    sums = [move_factors_to_weight(c) for c in contractions(r.args[1], spec.over)]
    dots = [e for e in topological(r.args) if e.op in ("dot", "sqdist", "fsum")]
    if [e.op for e in dots] != ["dot"] or len(sums) != 1 or sums[0].walk or sums[0].minus is not None:
        return None
    kept, folded = dots[0].args[::-1] if spec.folds(dots[0].args[0]) else dots[0].args
    summed = sums[0].vector
    vectors = {e for e in topological(r.args) if e.op == "leaf" and e.feature is not None}
    if summed is None or summed is folded or vectors != {kept, folded, summed} or spec.folds(kept):
        return None
    copied = folded in spec.box_of and summed in spec.box_of and spec.type_of[kept] == spec.narrow
    fits = copied and all(spec.width(e.feature) == _WIDTH for e in vectors)
    return Leaves(kept, folded, summed) if fits else None


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec, even: bool = True, aligned: bool = True) -> kernel_text.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether folded indices come two by two, so that coins can; ``aligned``: whether one folded tile has the
    nearest of all of an instance's kept indices, so that the diagonal runs through no other."""
    found = leaves(spec)
    if found is None:
        return None
    plain = compiler.compile_fold(spec)
    if plain.shifts:
        return None
    v = _Values(spec)
    (part,) = contractions(spec.fold.reductions[0].args[1], spec.over)
    weight = move_factors_to_weight(part).weight
    v.ringed, v.toss = _ringed(spec), match_dropout_factor(weight, spec) if even and spec.over == "cols" else None
    soft = make(0, *spec.fold.scaled[0], v)
    assert isinstance(soft, SoftmaxLines)
    truths, near = tile_ranges.whole_tile_conditions(spec.fold) if spec.bounds else {}, soft.level
    soft.rounded = [soft.rounded[0] or v.toss is not None]  # dropout masks weights when they are rounded
    soft.compensates = near and soft.rounded[0]
    whole = known(soft.reduction.args[0], truths)
    bent, tilted = bend(soft, whole) if near else None, slant(soft, whole) if near and aligned else None
    turns = {
        "first": (8, _turn(soft, {}, True, near, first=True)),
        "first_whole": (8, _turn(soft, truths, False, near, first=True)),
        "whole": (12 if bent else 8, _turn(soft, truths, False, near, by=tilted)),
        "other": (12, _turn(soft, {}, True, near)),
        "again": (12, _turn(soft, {}, True, near=False, alone=True)),
        "bent": (12, _turn(soft, truths, False, near, by=bent) if bent else []),
    }
    at = v.pointer(found.kept)
    arithmetic = "\n".join([*v.before, *(line for _, lines in turns.values() for line in lines)])
    fields = _fields(spec, found, near and soft.sloped) | _state(soft, bent) | _rings(spec, v)
    names, unspecialized = kernel_text.list_arguments(spec, list(plain.leaves), 0)
    names += NAMES if bent else ()
    fields |= {name: inside(lines, by) for name, (by, lines) in turns.items()}
    fields |= {
        "names": textwrap.fill(", ".join(names), 110, initial_indent="    ", subsequent_indent="    "),
        "unspecialized": repr(unspecialized),
        "name": plain.name,
        "at": at,
        "before": inside(v.before, 4),
        "results": inside(_results(soft, spec), 4),
    }
    fields["held"] = "" if spec.bounds else f"\n        {soft.name}_total = weighed({soft.name}_total)"
    fields |= _carried(f"{soft.name}_part.to(tl.{spec.narrow})", bool(spec.bounds or bent), bool(v.toss))
    fields["loop"] = _loop(soft, bent, bool(bent or tilted), bool(v.toss), fields)
    used = "".join([*(fields[k] for k in ("held", "weights", "last", "loop")), arithmetic])
    own = "\n".join(text for name, text in attention_template.OWN.items() if f"{name}(" in used)
    pair = {"bfloat16": "bf16x2", "float16": "f16x2"}[spec.narrow or "bfloat16"]
    least = (v.toss.least if v.toss else 0) * 0x10001
    fields["own"] = own.format(least=least, narrow=spec.narrow, pair=pair, ring=_RING)
    fields["sides"] = "\n".join(attention_template.SIDE.format(**fields, side=k) for k in range(_GROUPS))
    fields["judged"] = attention_template.JUDGED.format(**fields) if near else ""
    body = attention_template.KERNEL.format(**fields)
    helpers = kernel_text.copy_device_functions(body)
    if re.search(r"tl\.(philox|PropagateNan)", "\n".join([body, *helpers])):  # words that Gluon has not
        return None
    text = "\n".join(
        [kernel_text.write_header(spec, list(plain.leaves), attention_template.IMPORTS), *in_gluon(helpers), body]
    )
    return replace(plain, text=text, staged=True, made=bent.made() if bent else ())


def _carried(part: str, packs: bool, tosses: bool) -> dict[str, str]:
    """How weights get from one turn to the next: as they are multiplied; or as words, where coins made two at once.

    Of two with 16 bits each the compiler would make 64 values, and put them together anew in every turn."""
    if tosses:
        taken = "operand = parted(weights, WEIGHTS)\n"
        lines = {"taken": f"{' ' * 8}{taken}", "taken_other": f"{' ' * 12}{taken}"}
        return {"weights": f"joined({part})", "operand": "operand", "last": "parted(weights, WEIGHTS)"} | lines
    weights = f"tl.convert_layout({part}, WEIGHTS)"
    weights = f"packed({weights})" if packs else weights
    return {"weights": weights, "operand": "weights", "last": "weights", "taken": "", "taken_other": ""}


def _loop(soft: SoftmaxLines, bent: Bend | None, spares: bool, tosses: bool, fields: dict[str, str]) -> str:
    """The walk through whole tiles: where a polynomial may stand in for tanh, by it, if that was chosen.

    ``spares``: the registers of kept vectors are worth more to what is done to pairs."""
    n, lines = soft.name, fields["whole"].splitlines()
    if bent:
        lines = [f"        if {n}_bends > 0:", *fields["bent"].splitlines(), "        else:", *lines]
    ahead = dict.fromkeys(line.strip() for line in lines if tosses and " = numbers(" in line)
    found = {
        "ahead": "".join(f"\n        {line}" for line in ahead),
        "whole": "\n".join(line for line in lines if line.strip() not in ahead),
        "kept_block": "room" if spares else f"{fields['x0']}_block",
    }
    before = [f"    {n}_bends = {bent.chosen()}"] if bent else []
    before += [] if spares else [attention_template.LOADED.format(**fields)]
    return "\n".join([attention_template.WHOLE, *before, attention_template.LOOP.format(**fields | found)])


def _ringed(spec: Spec) -> tuple[Expr, ...]:
    """The numbers of folded indices that the copying warp fetches: every thread of a group needs a quarter of them."""
    numbers = [e for e in spec.fold.leaves if e.feature is None and spec.folds(e) and not spec.keeps(e)]
    return tuple(e for e in numbers if spec.type_of[e] in ("float32", "int32"))[:_RINGS]


class _Values(ExpressionWriter):
    """Numbers of pairs whose product was made before them."""

    ringed: tuple[Expr, ...] = ()
    toss: DropoutFactor | None = None  # what decides on weights; its factor is left to the end
    alone = False  # whether this turn is of a group that fetches its tiles by itself

    def _leaf(self, e: Expr) -> str:
        if e not in self.ringed or self.alone:
            return f"({super()._leaf(e)} >> 1)" if self.toss and e is self.toss.mark else super()._leaf(e)
        x = e.attrs[0]
        return f"numbers({x}_ring, {x}_full, turn, tl.SliceLayout(0, SCORES))[None, :]"

    def apart(self, at: str) -> str:
        return f"apart(tl.sum({at}, 1), start, score)"

    def product(self, x: Expr, y: Expr) -> str:
        return "score"

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        return "wide_lane", None

    def divided(self, block: str, name: str) -> str:
        left = literal(self.toss.factor if self.toss else 1.0)
        return f"{block} * tl.convert_layout({left} / {name}, tl.SliceLayout(1, SUMS))[:, None]"


def _turn(
    soft: SoftmaxLines,
    truths: dict[Expr, bool],
    masked: bool,
    near: bool,
    first: bool = False,
    alone: bool = False,
    by: Bend | Slant | None = None,
) -> list[str]:
    """The arithmetic of a tile, from its scores to its weights. ``near``: by a guess of the maximum, in the first;
    ``alone``: of a group that fetches its tiles by itself; ``by``: what weighs in place of the softmax's own words."""
    v, n = soft.v, soft.name
    assert isinstance(v, _Values)
    v.loop(masked)
    v.alone = alone
    soft.guessing, soft.restarted = near, alone
    logit, value = (known(a, truths) for a in soft.reduction.args)
    if near and first:
        soft.guess((logit,))
    v.inside.append(f"# {kernel_text.describe_reduction(soft.reduction)}")
    by.weigh() if by else soft.weigh(logit)
    (c,) = contractions(value, soft.over)
    weight = move_factors_to_weight(c).weight
    if v.toss:
        turned = f"blended({v.number(v.toss.row)}, {v.block_of(v.toss.col)}).to(tl.int32)"
        part = v.seen(f"tossed({n}_weight, {turned}, {v.number(v.toss.mark)})", "0.0")
    else:
        part = f"{n}_weight" if is_one(weight) else v.seen(f"{n}_weight * {v.number(weight)}", "0.0")
    return [*v.inside, f"{n}_part = {part}"]


def _state(soft: SoftmaxLines, bent: Bend | None) -> dict[str, str]:
    """What a softmax begins with, what its sums shrink by where its maximum runs, and when a guess of it holds."""
    n, rows = soft.name, "tl.SliceLayout(1, SCORES)"
    running = [
        f'{n}_top = tl.full([KEPT], float("-inf"), tl.float32, {rows})',
        f"{n}_total = tl.zeros([KEPT], tl.float32, {rows})",
    ]
    largest = [f"{n}_largest = lane_largest(blank)"] if soft.compensates else []
    rounding = [
        f"{n}_rounding = rounding(tl.cast({n}_largest, tl.float32, bitcast=True), tl.{soft.v.spec.narrow})",
        f"{n}_rounding = tl.convert_layout(tl.sum({n}_rounding, 1), {rows})",
    ]
    held = f" & {bent.held()}" if bent else ""
    shrunk = f"{n}_mean0 = {n}_mean0 * tl.convert_layout({n}_shrink, tl.SliceLayout(1, SUMS))[:, None]"
    return {
        "n": n,
        "begin": inside([f"{n}_total = lanes(blank)", *largest] if soft.level else running, 4),
        "shrunk": "" if soft.level else f"\n{inside([shrunk], 8)}",
        "shrunk_other": "" if soft.level else f"\n{inside([shrunk], 12)}",
        "compensated": f"{inside(rounding, 4)}\n" if soft.compensates else "",
        "exact": f"{' ' * 8}{n}_rounding = tl.zeros([KEPT], tl.float32, {rows})\n" if soft.compensates else "",
        "near": soft.guessed(f" & ({n}_total > {literal(_LEAST)}){held} | (kept_at >= kept_size)"),
    }


def _rings(spec: Spec, v: _Values) -> dict[str, str]:
    """What a kernel's text says of numbers that are fetched ahead: loaded while others are waited for, then stored."""
    ringed, names, ring = v.ringed, [str(e.attrs[0]) for e in v.ringed], _RING
    kept, made, begun = [], [], []
    for x, e in zip(names, ringed, strict=True):
        kept += [
            f"{x}_ring.index(slot).store({x}{' >> 1' if v.toss and e is v.toss.mark else ''})",
            f"mbarrier.arrive({x}_full.index(slot))",
        ]
        room = f"tl.{spec.type_of[e]}, [{ring}, FOLDED], tl.SwizzledSharedLayout(1, 1, 1, [0])"
        made.append(f"{x}_ring = tl.allocate_shared_memory({room})")
        made.append(f"{x}_full = tl.allocate_shared_memory(tl.int64, [{ring}, 1], mbarrier.MBarrierLayout())")
        begun.append(f"mbarrier.init({x}_full.index(k), count=1)")
    return {
        "rings": "".join(f", {x}_ring, {x}_full" for x in names),
        "fetched": "".join(f"\n        {line}" for line in fetched(spec, ringed, 8 // ring)),
        "kept": "".join(f"\n        {line}" for line in kept),
        "made": "".join(f"    {line}\n" for line in made),
        "begun": "".join(f"\n        {line}" for line in begun),
    }


def _results(soft: SoftmaxLines, spec: Spec) -> list[str]:
    """Numbers are stored from where they are; vectors go through shared memory, so that rows are written whole."""
    v = soft.v
    v.loop(False)
    stores = []
    for k, (texts, feature) in enumerate(soft.finish()):
        if feature is None:
            stores.append(f"tl.store(out{k} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
            continue
        place = f"(out_at + wide_row[:, None]) * {spec.width(feature)} + wide_lane[None, :]"
        stores += [
            f"room.store(({texts[0]}).to(tl.{spec.narrow}))",
            f"tl.store(out{k} + {place}, room.load(WIDE), mask=wide_in[:, None])",
        ]
    return [*v.inside, *stores]


def _fields(spec: Spec, found: Leaves, sloped: bool) -> dict[str, str]:
    """What a kernel's text says of its leaves and of the tiles that it meets.

    ``sloped``: the walk through whole tiles begins at the one nearest to the kept indices; the others follow in order,
    so that many instances ask for the same blocks at the same time."""
    width = spec.width(found.kept.feature)
    place, ranges = visits(spec)
    if sloped:
        away = f"tile * {2 * _OWNED} // FOLDED"
        if spec.bounds:
            ranges.append(f"away = {away} - whole_first")
            away = "away - tl.where(away < whole, 0, between)"
        ranges.append(f"nearest = tl.maximum(tl.minimum({away}, wholes - 1), 0)")
        later = "(turn - tl.where(turn > nearest, 0, 1))"
        whole, met = (
            re.sub(r"\bturn\b", at, place["at_whole"]) for at in (later, f"tl.where(turn > 0, {later}, nearest)")
        )
        place |= {"at_whole": whole, "at_any": f"tl.where(turn < wholes, {met}, {place['at_other']})"}
    boxes = [spec.box_of[e] for e in (found.folded, found.summed)]
    spots = ["".join(f"tl.cast(b{d}, tl.int32), " for d in dims) for dims in boxes]
    return place | {
        "x0": str(found.kept.attrs[0]),
        "x1": str(found.folded.attrs[0]),
        "x2": str(found.summed.attrs[0]),
        "spot1": spots[0],
        "spot2": spots[1],
        "spare2": "spare"
        if len(set(map(len, boxes))) == 1
        else f"spare.reshape({found.summed.attrs[0]}_box.block_type.shape)",
        "width": str(width),
        "across": str(width // 8),
        "down": str(256 // width),
        "narrow": f"tl.{spec.narrow}",
        "groups": str(_GROUPS),
        "own_kept": f"KEPT // {_GROUPS}",
        "fours": "4, " * (_GROUPS - 1),
        "registers": _REGISTERS,
        "ring": str(_RING),
        "opening": inside([*scalars(spec), *ranges], 4),
    }
