"""The row kernel: all that is done to a row of a panel but GEMMs; and how kernels on a panel are launched.

A program instance owns a row. It makes one pass over the columns for every stage that folds scalars, does the
arithmetic on rows that stands between stages, and last writes the weights of the sums over the inner products that they
were computed from. Every pass runs in the opposite direction of the one before, so that what was read last, and may
still be in cache, is read first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.constructors import Contraction, apply, contractions, rebuild, substitute
from ....program.expression import Expr, index, node, reduce_node, size, topological
from ....program.lower import Fold
from ....program.primitives import PRIMITIVES
from ....program.several import OF_VECTORS
from ....reductions import outputs_of
from ....reductions.base import Lines
from ....reductions.softmax import SoftmaxLaneLines, walk_again_if_far
from ...common.evaluate import Sizes
from ...panel import PanelLoop, Stage, group_by_reduction
from ..codegen import compiler
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import K_LOOP_DEPTH, Spec, Unsupported, power_of_two
from ..codegen.reductions import make_row_lines
from ..kernels import fold_kernel
from ..kernels.fold_kernel import KernelCall
from ..launch import descriptors
from ..launch.driver import LaunchCache, Relaunch, launch_on_grid, specialize
from ..schedules import spec_from_tensors
from ..schedules.kernel_plan import KernelPlan

# Stages fused into one kernel, from the first fold of scalars to the weights of the last sum of vectors.
#
# Between two stages of a loop stands a little arithmetic on rows (a logsumexp, its reciprocal). Done by torch it would
# end the kernel and read the panel again; here it becomes part of the kernel, between its passes over columns. What a
# kernel cannot do there (vectors, results of GEMMs) ends the group of stages.


def _make_leaf(name: str, rows: bool = False, dtype: str = "int") -> Expr:
    return node("leaf", (), (name,), rows=rows, cols=False, feature=None, dtype=dtype)


# arguments of every kernel: where its panel begins, and how many rows and columns there are in all
FIRST = {axis: _make_leaf(f"first_{axis}") for axis in ("row", "col")}
COUNT = {axis: _make_leaf(f"count_{axis}") for axis in ("rows", "cols")}
OFFSETS = (*FIRST.values(), *COUNT.values())


class VectorSum(NamedTuple):
    """A sum of vectors: its place among the stage's reductions, the axis folded over, and the GEMMs that add up to it,
    each of a weight per pair and a vector."""

    place: int
    over: str
    products: tuple[Contraction, ...]


@dataclass(frozen=True)
class StageSplit:
    """A stage's reductions by what computes them. Places are those among the stage's reductions."""

    folds: Mapping[str, tuple[Expr, ...]]  # per axis folded over, the scalars that a kernel folds
    places: Mapping[str, tuple[int, ...]]  # of these
    sums: tuple[VectorSum, ...]
    topk: tuple[tuple[int, Expr], ...]  # place, and the scalar per pair whose best are found by sorting
    weights: tuple[Expr, ...]  # scalars per pair that must lie in memory


@functools.lru_cache(maxsize=1024)
def split_stage(stage: Stage) -> StageSplit:
    """Split a stage; raises Unsupported where one of its reductions has neither a kernel nor a GEMM."""
    folds: dict[str, list[Expr]] = {"cols": [], "rows": []}
    places: dict[str, list[int]] = {"cols": [], "rows": []}
    sums, topk = [], []
    for place, r in enumerate(stage.fold.reductions):
        kind, over, _ = r.attrs
        if kind == "topk" and over == "cols":
            topk.append((place, r.args[0]))
        elif kind == "sum" and r.args[0].feature is not None:
            sums.append(VectorSum(place, over, _list_products(r)))
        elif any(a.feature is not None for a in r.args):
            raise Unsupported(f"{kind} of vectors")
        else:
            folds[over].append(r)
            places[over].append(place)
    weights = [c.weight for one in sums for c in one.products] + [e for _, e in topk]
    used = [n for over in folds.values() for r in over for n in r.args] + weights
    if any(e.op in (*OF_VECTORS, "component") and e.is_pair for e in topological(used)):
        raise Unsupported("vectors per pair")
    return StageSplit(
        {over: tuple(rs) for over, rs in folds.items()},
        {over: tuple(ps) for over, ps in places.items()},
        tuple(sums),
        tuple(topk),
        tuple(dict.fromkeys(weights)),
    )


def _list_products(r: Expr) -> tuple[Contraction, ...]:
    found = contractions(r.args[0], r.attrs[1])
    if any(c.walk or c.minus is not None or c.vector is None or c.vector.op != "leaf" for c in found):
        raise Unsupported("a sum of vectors that is no product")
    return found


@dataclass(frozen=True)
class FusedStages:
    """Stages as one kernel does them: folds of scalars over columns, one stage after the other, then weights."""

    leaves: tuple[Expr, ...]
    feeds: tuple[Expr, ...]  # of the leaves, as the program has them; inner products are themselves
    folds: tuple[tuple[Expr, ...], ...]  # per stage, its reductions
    names: tuple[tuple[Expr, ...], ...]  # per stage, what later stages call its results
    weights: tuple[Expr, ...]  # of the last stage


@functools.lru_cache(maxsize=1024)
def group_stages(loop: PanelLoop) -> tuple[range, ...]:
    """The stages of each kernel: as many in a row as can be, all but the last folding only scalars."""
    found: list[range] = []
    for at, stage in enumerate(loop.stages):
        last, split = found[-1] if found else range(0), split_stage(stage)
        if last and _folds_only_scalars(loop.stages[at - 1]) and not split.topk and not split.folds["rows"]:
            group = range(last.start, at + 1)
            if _try_fuse(loop, group) is not None:
                found[-1] = group
                continue
        found.append(range(at, at + 1))
    return tuple(found)


def _folds_only_scalars(stage: Stage) -> bool:
    split = split_stage(stage)
    return not split.weights and not split.folds["rows"]


@functools.lru_cache(maxsize=1024)
def fuse_stages(loop: PanelLoop, group: range, shifted: bool) -> FusedStages:
    """The stages of a group (of :func:`group_stages`) as one kernel. ``shifted``: its panel may begin at another column
    than 0."""
    found = _try_fuse(loop, group)
    assert found is not None
    here = shift_indices(*(("row", "col") if shifted else ("row",))) | _WHOLE_SIZES
    folds = tuple(tuple(shift_reduction(r, here) for r in fold) for fold in found.folds)
    return FusedStages(found.leaves, found.feeds, folds, found.names, substitute(found.weights, here))


@functools.lru_cache(maxsize=1024)
def _try_fuse(loop: PanelLoop, group: range) -> FusedStages | None:
    """None where a stage is fed something that only torch can compute from the results before it."""
    scope = _KernelScope()
    folds: list[tuple[Expr, ...]] = []
    names: list[tuple[Expr, ...]] = []
    weights: tuple[Expr, ...] = ()
    for at in group:
        stage, split = loop.stages[at], split_stage(loop.stages[at])
        wanted = set(topological([*split.folds["cols"], *split.weights]))
        fed = [(e, f) for e, f in zip(stage.fold.leaves, stage.feeds, strict=True) if e in wanted]
        if not all(scope.add_feed(f) for _, f in fed):
            return None
        replace = {e: scope.values[f] for e, f in fed}
        folds.append(substitute(split.folds["cols"], replace))
        weights = substitute(split.weights, replace)
        names.append(scope.name_results(stage, split, at))
    return FusedStages(tuple(scope.leaves), tuple(scope.leaves.values()), tuple(folds), tuple(names), weights)


class _KernelScope:
    """The program's expressions as a fused kernel has them: leaves, results of its earlier stages, arithmetic on
    both."""

    def __init__(self) -> None:
        self.values: dict[Expr, Expr] = {}
        self.dependent: set[Expr] = set()  # on results; all else is a leaf, computed once by torch
        self.leaves: dict[Expr, Expr] = {}

    def add_feed(self, feed: Expr) -> bool:
        """Express a feed; False where a kernel cannot."""
        for e in topological([feed], stop=self.values.__contains__):
            if e not in self.values and not self.dependent.isdisjoint(e.args):
                self.dependent.add(e)
        for e in topological([feed], stop=lambda e: e in self.values or e not in self.dependent):
            if e in self.values:
                continue
            if e not in self.dependent:
                self.values[e] = self._add_leaf(e)
            elif e.feature is not None or e.op not in PRIMITIVES or not PRIMITIVES[e.op].triton:
                return False
            else:
                self.values[e] = rebuild(e, tuple(self.values[a] for a in e.args))
        return True

    def _add_leaf(self, feed: Expr) -> Expr:
        if feed.op in ("const", "nan", "size", "row_index", "col_index"):
            return feed
        name = f"{'s' if feed.op == 'dot' else 'x'}{len(self.leaves)}"
        leaf = node("leaf", (), (name,), rows=feed.rows, cols=feed.cols, feature=feed.feature, dtype=feed.dtype)
        self.leaves[leaf] = feed
        return leaf

    def name_results(self, stage: Stage, split: StageSplit, at: int) -> tuple[Expr, ...]:
        """A name for each result of a stage's folds, under which later stages find it."""
        own = group_by_reduction(stage.fold.reductions, stage.results)
        found: list[Expr] = []
        for r in split.folds["cols"]:
            for k, (_, dtype) in enumerate(outputs_of(r)):
                found.append(_make_leaf(f"result{at}_{len(found)}", True, dtype))
                self.values |= dict.fromkeys(own[r][k], found[-1])
                self.dependent |= set(own[r][k])
        return tuple(found)


# Indices of a panel that does not begin at the first row and column -----------------------------------------------

_WHOLE_SIZES = {size(axis): count for axis, count in COUNT.items()}


@functools.lru_cache(maxsize=16)
def shift_indices(*axes: str) -> dict[Expr, Expr]:
    """Substitutions of the indices along some axes: the panel's own index, and where the panel begins."""
    return {index(axis): apply("add", index(axis), FIRST[axis]) for axis in axes}


def shift_reduction(r: Expr, here: dict[Expr, Expr] | None = None) -> Expr:
    """A reduction on a panel, by the substitutions ``here``, those of both axes if left out."""
    here = shift_indices(*FIRST) | _WHOLE_SIZES if here is None else here
    (found,) = substitute((r,), here)
    kind, over, params = found.attrs
    if kind != "pick" or index(params[0]) not in here:
        return found
    target = apply("sub", found.args[0], FIRST[params[0]])  # compared with the panel's own index
    return reduce_node(kind, over, params, (target, *found.args[1:]))


# By the axis folded over: a row at a time, in tiles as long as registers allow; columns 128 at a time.
PLANS = {"cols": KernelPlan(1, 2048, 8, 2), "rows": KernelPlan(128, 32, 4, 2)}


@dataclass(frozen=True)
class RowWork:
    """What is done to a row, from some leaves: folds one after the other, then scalars per pair to write."""

    leaves: tuple[Expr, ...]
    folds: tuple[tuple[Expr, ...], ...]
    names: tuple[tuple[Expr, ...], ...]  # per fold, what later ones call its results
    weights: tuple[Expr, ...]

    @property
    def fold(self) -> Fold:
        """All of it as one fold: a spec says of its leaves what kernels need."""
        numbers = tuple(r for fold in self.folds for r in fold)
        written = tuple(reduce_node("sum", "cols", (), (w,)) for w in self.weights)
        return Fold((*self.leaves, *OFFSETS), (*numbers, *written))

    def write(self, spec: Spec) -> compiler.Kernel:
        return write_kernel(self, spec)


@dataclass(frozen=True)
class RowFold:
    """A fold over rows, by the general fold kernel."""

    fold: Fold

    def write(self, spec: Spec) -> compiler.Kernel:
        return compiler.compile_fold(spec)


KernelWork = RowWork | RowFold


class RowValues(ExpressionWriter):
    """Compares a row's integer with the column index in the index's type (int32): half the work of int64."""

    def _text(self, e: Expr) -> str:
        for here, there in (e.args, e.args[::-1]) if e.op == "eq" else ():
            first = FIRST["col"] if here.op == "add" and here.args == (index("col"), FIRST["col"]) else None
            if (here.op == "col_index" or first) and there.dtype == "int" and not there.cols and there.rows:
                t = self.number(there if first is None else apply("sub", there, first))
                text = f"tl.where(({t} >= 0) & ({t} < folded_size), {t}, -1).to(tl.int32)"
                return f"folded_at[None, :] == {self.bind((there, 'index'), text, False)}"
        return super()._text(e)


@functools.lru_cache(maxsize=1024)
def write_kernel(work: RowWork, spec: Spec) -> compiler.Kernel:
    """Write the row kernel of some work."""
    writer = _KernelWriter(spec)
    for fold, names in zip(work.folds, work.names, strict=True):
        if fold:
            writer.add_fold(fold, names)
    if work.weights:
        writer.add_store(work.weights)
    return writer.finish()


class _KernelWriter:
    """The lines of a kernel, pass after pass. Scalars per row are bound between passes, once."""

    def __init__(self, spec: Spec):
        self.spec, self.v = spec, RowValues(spec)
        self.body = [
            *compiler.write_prologue(spec),
            "whole = folded_size // FOLDED",
            "out_at = tl.cast(tile * KEPT, tl.int64)",
        ]
        self.outs: list[str] = []
        self.helpers: list[str] = []
        self.made, self.passes = 0, 0

    def add_fold(self, reductions: tuple[Expr, ...], names: tuple[Expr, ...]) -> None:
        """A pass that folds scalars; their results are stored, and named for what comes later."""
        v, self.v.before = self.v, []
        lines = [make_row_lines(self.made + k, r, v) for k, r in enumerate(reductions)]
        self.made += len(lines)
        guessing = [kind for kind in lines if isinstance(kind, SoftmaxLaneLines)]
        guess = self._read_first_tile(guessing)
        loops = walk_again_if_far(guessing, self._fold_tiles(lines), self._fold_tiles(guessing))
        v.loop(False)
        texts = [texts[0] for kind in lines for texts, _ in kind.finish()]
        results = v.inside
        for name, text in zip(names, texts, strict=True):
            x, out = str(name.attrs[0]), f"out{len(self.outs)}"
            results += [f"{x} = {text}", f"tl.store({out} + out_at + kept_lane, {x}, mask=kept_in)"]
            v.outer[name] = f"{x}[:, None]"
            self.outs.append(out)
        self.helpers += [line for kind in lines for line in ([*kind.helpers, ""] if kind.helpers else [])]
        begin = [line for kind in lines for line in kind.start()]
        self.body += ["", *v.before, *begin, *guess, *loops, *results]
        self.passes += 1

    def _read_first_tile(self, guessing: list[SoftmaxLaneLines]) -> list[str]:
        """Read the first tile, from whose maximum softmaxes are measured."""
        if not guessing:
            return []
        self.v.loop(True)
        for kind in guessing:
            kind.peek(kind.reduction.args)
        return [
            "start = 0",
            "folded_at = start + tl.arange(0, FOLDED)",
            "folded_in = folded_at < folded_size",
            *self.v.inside,
        ]

    def _fold_tiles(self, kinds: Sequence[Lines]) -> list[str]:
        return self._loops(
            *(list(compiler.write_tile_body(self.v, list(kinds), {}, masked)) for masked in (False, True))
        )

    def add_store(self, weights: tuple[Expr, ...]) -> None:
        """A pass that writes scalars per pair. Every tile is read whole before any of it is overwritten."""
        v, self.v.before = self.v, []
        turns = []
        first = len(self.outs)
        for masked in (False, True):
            v.loop(masked)
            texts = [v.full(w) for w in weights]
            mask = "kept_in[:, None]" + (" & folded_in[None, :]" if masked else "")
            v.inside.append("tl.debug_barrier()")
            for k, text in enumerate(texts, first):
                at = f"(out_at + kept_lane[:, None]) * out{k}_r + start + folded_lane[None, :]"
                v.inside.append(f"tl.store(out{k} + {at}, {text}, mask={mask})")
            turns.append(v.inside)
        self.outs += [name for k in range(first, first + len(weights)) for name in (f"out{k}", f"out{k}_r")]
        self.body += ["", *v.before, *self._loops(*turns)]

    def _loops(self, whole: list[str], ragged: list[str]) -> list[str]:
        """The loop over whole tiles, and the ragged last tile: after the loop, or before it in a backward pass."""
        backward = self.passes % 2 == 1
        at = "folded_at = start + tl.arange(0, FOLDED)"
        loop = [
            "for t in range(0, whole):",
            f"    start = {'(whole - 1 - t)' if backward else 't'} * FOLDED",
            f"    {at}",
        ]
        loop += [f"    {line}" for line in whole]
        rest = ["if RAGGED:", "    start = whole * FOLDED", f"    {at}", "    folded_in = folded_at < folded_size"]
        rest += [f"    {line}" for line in ragged]
        return [*rest, *loop] if backward else [*loop, *rest]

    def finish(self) -> compiler.Kernel:
        """The whole kernel."""
        return assemble_kernel("sweep_rows", self.spec, self.outs, self.body, self.helpers)


def assemble_kernel(
    name: str, spec: Spec, outs: list[str], lines: list[str], helpers: Sequence[str] = ()
) -> compiler.Kernel:
    """A kernel of some lines. ``outs``: its first arguments, before those of the leaves that a spec's fold reads;
    ``helpers``: the lines of functions that it calls."""
    under = set(topological(spec.fold.reductions))
    used = [e for e in spec.fold.leaves if e in under]
    text = compiler.write_kernel_function(spec, name, used, list_arguments(spec, outs, used), lines, helpers)
    return compiler.Kernel(name, text, tuple(used))


def list_arguments(spec: Spec, outs: list[str], used: list[Expr]) -> tuple[list[str], list[str]]:
    """The names of a kernel's arguments, and of those that Triton is not to specialize on."""
    names, unspecialized = compiler.list_arguments(spec, used, 0)
    count = sum(len(outputs_of(r)) for r in spec.fold.reductions)
    return [*outs, *names[count:]], unspecialized


# Launching ----------------------------------------------------------------------------------------------------


Compiled = dict[tuple, Relaunch]  # what launches a kernel, by what Triton specializes it on


class PreparedKernel:
    """A kernel on panels of given lengths; from the second launch on without Triton's look-up."""

    def __init__(
        self,
        kernel: compiler.Kernel,
        plan: KernelPlan,
        lengths: tuple[int, int],
        wide: bool,
        tiles: int = 0,
        grid: int = 0,
        copied: tuple[tuple[Expr, int], ...] = (),
        compiled: Compiled | None = None,
    ):
        """``tiles``: of the kept axis; ``grid``: the number of program instances, ``tiles`` if left out. ``copied``:
        the leaves that tensor descriptors copy, and how many of their vectors a block has. ``wide``: offsets need 64
        bits. ``compiled``: what launches the same kernel on panels of other lengths."""
        self.kernel, self.plan, self.lengths, self.wide = kernel, plan, lengths, wide
        self.tiles = tiles or -(-lengths[0] // plan.block_kept)
        self.grid, self.copied = grid or self.tiles, copied
        self.compiled: Compiled = {} if compiled is None else compiled
        self.launch_cache = LaunchCache()  # by the alignment of what is pointed to
        self.templates: list[Any] = []

    def __call__(
        self, outputs: list[Any], values: Mapping[Expr, Any], device: torch.device, alike: bool = False
    ) -> None:
        """Launch. ``outputs``: the first arguments; ``alike``: all calls have arguments of the same types, strides and
        alignment, so one launcher serves them."""
        arguments = list(outputs)
        for e in self.kernel.leaves:
            v = values[e]
            arguments.append(v)
            if isinstance(v, Tensor):
                arguments += [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
        arguments += [*self.lengths, self.tiles]
        if self.copied:
            make = functools.partial(descriptors.make_descriptor, dims=(), with_layout=self.kernel.hand_scheduled)
            self.templates = self.templates or [make(values[e], block=(n, K_LOOP_DEPTH)) for e, n in self.copied]
            arguments += [
                descriptors.replace_base(one, values[e])
                for one, (e, _) in zip(self.templates, self.copied, strict=True)
            ]
        key = () if alike else tuple(map(specialization, arguments))
        self.launch_cache(key, functools.partial(self._first, arguments, device), arguments)

    def _first(self, arguments: list[Any], device: torch.device) -> Relaunch | None:
        ragged = self.lengths[1] % self.plan.block_folded != 0
        key = (self.wide, ragged, *specialize(arguments))
        found = launch_on_grid(self.compiled.get(key), self.grid, arguments)
        if found is None:
            call = KernelCall(self.kernel, self.plan, self.grid, tuple(arguments), self.wide, "ieee", ragged, device)
            found = fold_kernel.execute(call)
            if found is not None:
                self.compiled[key] = found
        return found


def specialization(v: Any) -> Any:
    """What Triton specializes a kernel on, of one argument."""
    if isinstance(v, Tensor):
        return v.data_ptr() & 15, v.dtype, v.stride()
    return v.bit_length() > 31 if isinstance(v, int) else type(v)


def prepare_kernel(work: KernelWork, over: str, values: Mapping[Expr, Any], here: Sizes) -> PreparedKernel:
    """The kernel of some work for a panel of these sizes. ``values``: leaves as numbers or tensors
    ``[1, length(, length)]``."""
    fold = work.fold
    given = [values[e] for e in fold.leaves]
    sixteen = any(e.is_pair and v.dtype is torch.bfloat16 for e, v in zip(fold.leaves, given, strict=True))
    narrow = "bfloat16" if sixteen else None
    spec = spec_from_tensors.describe_as_given(fold, over, given, here, narrow=narrow, lanes=over == "cols")
    lengths = (here.rows, here.cols) if over == "cols" else (here.cols, here.rows)
    plan = replace(PLANS[over], block_folded=round_to_power(lengths[1], PLANS[over].block_folded))
    written = work.write(spec)
    blocks = (plan.block_kept, plan.block_folded)
    wide = need_64_bits(written.leaves, values, blocks if over == "cols" else blocks[::-1])
    return PreparedKernel(written, plan, lengths, wide)


def round_to_power(length: int, most: int) -> int:
    """The least power of two that is not below a length; at least 16, at most ``most``."""
    return max(16, min(most, power_of_two(length)))


def need_64_bits(leaves: Iterable[Expr], values: Mapping[Expr, Any], blocks: tuple[int, int]) -> bool:
    """True when one of these leaves needs 64 bits."""
    return True in [_needs_64_bits(e, values[e], blocks) for e in leaves]


def _needs_64_bits(e: Expr, v: Any, blocks: tuple[int, int]) -> bool:
    """True when offsets inside a tile, or a number, need 64 bits."""
    if not isinstance(v, Tensor):
        return isinstance(v, int) and abs(v) >= fold_kernel.SMALL
    return e.is_pair and any(s * b >= 2**31 for s, b in zip(v.stride()[1:], blocks, strict=True))
