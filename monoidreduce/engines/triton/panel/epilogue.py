"""GEMMs with an epilogue that writes weights in place of inner products: no pass over the panel afterwards.

Where all scalars of rows are known, the epilogue writes the weights of the sums at once. Where they wait for a softmax
it writes exp(s - guess), the guessed maximum being the greatest of a few logits of the row, and sums exponentials tile
by tile; the row's factor, known late, multiplies the sums' other operands (``row_factor.py``). A guess is checked on
the device: rows whose guessed maximum was too far off are recomputed there, exactly, without a host sync.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....program.constructors import dot, substitute
from ....program.expression import Expr, node, reduce_node, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ...common.evaluate import Sizes
from ...panel.panel_program import PanelLoop
from ..codegen import compiler
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import WIDEST, Spec
from ..launch import descriptors, driver
from ..schedules import spec_from_tensors
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong import DEEPEST, EXTRA, TILE, WRITES, holds_label, write_gemm
from . import epilogue_kernels, row_kernel
from .epilogue_kernels import HALVES, ROW_KERNELS, Epilogue, find_operands, find_product, list_reads, write_kernel
from .row_factor import (
    FactoredWeight,
    LabelTerm,
    RowCorrections,
    has_distinct_labels,
    split_label_column,
    split_row_factor,
)
from .row_kernel import RowValues, fuse_stages, list_arguments, shift_indices, split_stage

# GEMMs whose epilogue writes weights, as ping-pong kernels: two warp groups alternate, in Gluon, on Hopper.
#
# The kernels of ``epilogue_kernels.py`` with the same arguments and the same arithmetic of pairs; ``tl`` is Gluon's
# language here. The template is ``engines/triton/schedules/pingpong.py``.


@functools.lru_cache(maxsize=1024)
def write_pingpong_kernel(
    name: str, epilogue: Epilogue, spec: Spec, masked: bool, wide: bool = False
) -> compiler.Kernel | None:
    """Write one of the kernels; None where it reads scalars per column, for which there are no registers, where
    features are too many, or where Gluon lacks an operation or would need its layout.

    ``wide``: with tiles of more columns, and one more argument: the descriptor of their blocks."""
    multiplied = find_operands(find_product(epilogue))
    if epilogue_kernels.has_column_scalars(spec) or (spec.width(multiplied[0].feature) > DEEPEST and not wide):
        return None
    plain = epilogue_kernels.write_kernel(name, epilogue, spec, masked)
    v = RowValues(spec)
    v.loop(masked)
    outs, lines = _WRITERS[name](v, epilogue, WRITES[wide].folded // EXTRA)
    signature = list_arguments(spec, outs, list(plain.leaves))
    generated = {"before": v.before, "epilogue": lines}
    return write_gemm(True, wide, plain, spec, multiplied, signature, generated)


_HALF = ["half_at = start + tl.arange(0, HALF, tl.SliceLayout(0, PAIRS))"]
_STORE = "store_tile(out_box, staging, tile * KEPT, start, {}.to(tl.bfloat16))"


def _write_weights(v: ExpressionWriter, epilogue: Epilogue, strips: int) -> tuple[list[str], list[str]]:
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

    return ["out_box"], epilogue_kernels.write_strips(v, epilogue, weigh, _STORE, _HALF, strips)


def _write_guessed(v: ExpressionWriter, epilogue: Epilogue, strips: int, store: str) -> tuple[list[str], list[str]]:
    made: list[tuple[str, str]] = []

    def logits(k: int) -> str:
        n, s, factor = epilogue_kernels.bind_softmax(v, epilogue)
        made.append((n, factor))
        v.inside.append(f"{n}_half{k} = {s}")
        return ""

    def weigh(k: int) -> str:
        weighed = epilogue_kernels.weigh_exponentials if store else epilogue_kernels.add_exponentials
        return weighed(v, epilogue, n, f"{n}_half{k}{factor}", "+=" if k else "=")

    lines = epilogue_kernels.write_strips(v, epilogue, logits, "", _HALF, strips)
    (n, factor), v.inside = made[0], []
    most = functools.reduce("tl.maximum({}, {})".format, (f"tl.max({n}_half{k}, 1)" for k in range(strips)))
    epilogue_kernels.bind_reference(v, n, f"{most}{factor}")
    lines += [*v.inside, *epilogue_kernels.write_strips(v, epilogue, weigh, store, _HALF, strips)]
    return epilogue_kernels.GUESSED_OUTPUTS, [*lines, f"tl.store(sums + place, {n}_total, mask=kept_in)"]


_WRITERS: dict[str, Callable[[ExpressionWriter, Epilogue, int], tuple[list[str], list[str]]]] = {
    "write_weights": _write_weights,
    "write_guessed": functools.partial(_write_guessed, store=_STORE),
    "sum_guessed": functools.partial(_write_guessed, store=""),
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
