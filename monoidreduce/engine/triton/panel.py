"""What is done to a panel of pairs on a GPU: generated kernels for the arithmetic, the vendor's products for the rest.

A stage becomes at most three kernels and its products: one folds numbers over columns (a program instance owns a row of
the panel and walks its columns), one folds numbers over rows, and one writes the weights of every sum of vectors over
the products they were made from, which are then contracted. Numbers come from the generator of the other kernels, a
product being a leaf given per pair.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...plan import panels
from ...program.build import substitute
from ...program.expr import Expr, index, node, reduce_node, size, topological
from ...program.lower import Fold
from ...program.reductions import KINDS
from .. import combine, hardware
from ..evaluate import Sizes
from ..panel import ALIGN, Stage, Walk
from ..tilecode import Contraction, contractions
from . import emit, launch
from .launch import Call
from .plan import KernelPlan
from .spec import Spec, Unsupported
from .values import Values

# A row of numbers at a time, in blocks as long as the registers of eight warps allow; columns in strips of 128.
PLANS = {"cols": KernelPlan(1, 4096, 8, 2), "rows": KernelPlan(128, 32, 4, 2), "weights": KernelPlan(1, 4096, 8, 2)}

_ROWS = node("leaf", (), ("row_place",), rows=True, cols=False, feature=None, dtype="int")
_COUNT = node("leaf", (), ("row_count",), rows=False, cols=False, feature=None, dtype="int")


@dataclass(frozen=True)
class Parts:
    """A stage cut by who does it. Places are those of the stage's reductions."""

    numbers: Mapping[str, Fold]  # per direction, what one kernel folds
    places: Mapping[str, tuple[int, ...]]
    sums: tuple[tuple[int, str, tuple[Contraction, ...]], ...]  # place, direction, products to add
    tops: tuple[tuple[int, Expr], ...]  # place, the number per pair whose best are found by sorting
    weights: tuple[Expr, ...]  # numbers per pair that must lie in memory


@functools.lru_cache(maxsize=1024)
def parts(fold: Fold) -> Parts:
    """Cut a stage; raises Unsupported where one of its reductions has neither a kernel nor a product."""
    reductions = substitute(fold.reductions, {index("row"): _ROWS, size("rows"): _COUNT})
    leaves = (*fold.leaves, _ROWS, _COUNT)
    numbers: dict[str, list[Expr]] = {"cols": [], "rows": []}
    places: dict[str, list[int]] = {"cols": [], "rows": []}
    sums, tops = [], []
    for place, r in enumerate(reductions):
        kind, over, _ = r.attrs
        if kind == "topk" and over == "cols":
            tops.append((place, r.args[0]))
        elif kind == "sum" and r.args[0].feature is not None:
            sums.append((place, over, _products(r)))
        elif any(a.feature is not None for a in r.args) or (kind == "pick" and over == "rows"):
            raise Unsupported(f"{kind} over {over} of vectors or places")
        else:
            numbers[over].append(r)
            places[over].append(place)
    weights = [c.weight for _, _, cs in sums for c in cs] + [e for _, e in tops]
    used = [n for over in numbers.values() for r in over for n in r.args] + weights
    if any(e.op in ("dot", "sqdist", "fsum", "component") and e.is_pair for e in topological(used)):
        raise Unsupported("vectors per pair")
    folds = {over: Fold(leaves, tuple(rs)) for over, rs in numbers.items() if rs}
    return Parts(
        folds,
        {o: tuple(p) for o, p in places.items()},
        tuple(sums),
        tuple(tops),
        tuple(dict.fromkeys(weights)),
    )


def _products(r: Expr) -> tuple[Contraction, ...]:
    found = contractions(r.args[0], r.attrs[1])
    if any(c.walk or c.minus is not None or c.vector is None or c.vector.op != "leaf" for c in found):
        raise Unsupported("a sum of vectors that is no product")
    return found


class KernelStep:
    """Stages done by kernels; see :class:`monoidreduce.engine.panel.Step`."""

    splits = True  # softmax means of vectors come as a softmax and a sum

    def __init__(self, walk: Walk, sizes: Sizes, fixed: Mapping[Expr, Any]):
        self.walk, self.sizes = walk, sizes
        self.parts = [parts(s.fold) for s in walk.stages]
        vectors = [v for v in fixed.values() if isinstance(v, Tensor) and v.dim() == 2]
        kinds = {v.dtype for v in vectors} & set(hardware.SIXTEEN)
        self.narrow = kinds.pop() if len(kinds) == 1 else None
        # float16 logits may overflow, and what is computed on one side may leave its range: bfloat16 alone is stored
        self.kind = torch.bfloat16 if self.narrow is torch.bfloat16 else sizes.compute
        self.homes = [self._homes(at) for at in range(len(walk.stages))]

    def _homes(self, at: int) -> list[tuple[torch.dtype, Expr | int | None]]:
        """Where each weight of a stage goes: its type and the product it overwrites, else the number of a buffer.

        None for a weight that is a product itself, and is multiplied where it lies.
        """
        stage, cut = self.walk.stages[at], self.parts[at]
        product = dict(stage.products)
        kinds = [self._weight_type(w, cut) for w in cut.weights]
        plain = [w in product and kind == self.kind for w, kind in zip(cut.weights, kinds, strict=True)]
        kept = {product[w] for w, is_plain in zip(cut.weights, plain, strict=True) if is_plain}
        free = [f for f in self.walk.dying(at) if f not in kept]
        found: list[tuple[torch.dtype, Expr | int | None]] = []
        extra = 0
        for kind, is_plain in zip(kinds, plain, strict=True):
            if is_plain:
                found.append((kind, None))
            elif free and kind.itemsize <= self.kind.itemsize:
                found.append((kind, free.pop(0)))
            else:
                found.append((kind, extra))
                extra += 1
        return found

    def _weight_type(self, w: Expr, cut: Parts) -> torch.dtype:
        vectors = [c.vector for _, _, cs in cut.sums for c in cs if c.weight is w]
        return self.narrow if vectors and self.narrow is torch.bfloat16 else self.sizes.compute

    def pair_bytes(self) -> int:
        extra = [sum(kind.itemsize for kind, home in homes if isinstance(home, int)) for homes in self.homes]
        return max(1, len(self.walk.products) * self.kind.itemsize + max([0, *extra]))

    def begin(self, sizes: Sizes, panel: panels.Panels) -> None:
        self.panel = panel
        make = lambda kind: torch.empty(panel.rows, -(-panel.cols // ALIGN) * ALIGN, dtype=kind, device=sizes.device)
        self.panels = {f: make(self.kind) for f in self.walk.products}
        numbered = {(n, kind) for homes in self.homes for kind, n in homes if isinstance(n, int)}
        self.extra = {key: make(key[1]) for key in sorted(numbered, key=str)}
        self.made: tuple[slice | None, set[Expr]] = (None, set())
        self.totals: dict[tuple[int, int], Tensor] = {}
        self.states: list[list[Any]] = [[] for _ in self.walk.stages]
        self.calls: dict[tuple, Any] = {}
        count = -(-sizes.rows // max(1, panel.rows))
        narrow = self.narrow is torch.bfloat16 and count <= panels.ADDS
        self.total_kind = torch.bfloat16 if narrow else sizes.compute

    # One stage of one panel

    def __call__(self, at: int, leaves: dict[Expr, Any], rows: slice) -> list[list[Tensor] | None]:
        stage, cut = self.walk.stages[at], self.parts[at]
        here = replace(self.sizes, rows=rows.stop - rows.start)
        given = {e: v.unsqueeze(0) if isinstance(v, Tensor) else v for e, v in leaves.items()}
        for leaf, f in stage.products:
            given[leaf] = self._product(f, *leaves[leaf], rows).unsqueeze(0)
        given[_ROWS] = torch.arange(rows.start, rows.stop, device=here.device).unsqueeze(0)
        given[_COUNT] = self.sizes.rows
        results: dict[int, list[Tensor]] = {}
        for over, fold in cut.numbers.items():
            flat = self._fold((at, over), fold, over, given, here)
            found = [own for _, own in combine.split(fold, flat)]
            if over == "cols":
                results |= dict(zip(cut.places[over], found, strict=True))
            else:
                self._combine(at, fold, found, here, rows)
        weights = self._weights(at, stage, given, here)
        for place, over, products in cut.sums:
            value = self._contract((at, place), over, products, weights, leaves)
            if value is not None:
                results[place] = [value]
        for place, e in cut.tops:
            results[place] = _top(weights[e], stage.fold.reductions[place], here)
        return [results.get(place) for place in range(len(stage.fold.reductions))]

    def _product(self, f: Expr, x: Tensor, y: Tensor, rows: slice) -> Tensor:
        panel = self.panels[f][: rows.stop - rows.start, : self.sizes.cols]
        if self.made[0] != rows:
            self.made = (rows, set())
        if f not in self.made[1]:
            x, y = (x, y) if f.args[0].rows else (y, x)
            x, y = (t if t.dtype == self.narrow or self.narrow is None else t.to(self.narrow) for t in (x, y))
            hardware.panel_into(panel, x, y)
            self.made[1].add(f)
        return panel

    def _fold(self, key: tuple, fold: Fold, over: str, values: dict[Expr, Any], here: Sizes) -> list[Tensor]:
        lengths = (here.rows, here.cols) if over == "cols" else (here.cols, here.rows)
        outputs = [_output(r, k, lengths[0], here) for r, k in fold.outputs]
        self._launch((*key, here.rows), emit.kernel, fold, over, values, here, outputs)
        return [o[0] for o in outputs]

    def _weights(self, at: int, stage: Stage, values: dict[Expr, Any], here: Sizes) -> dict[Expr, Tensor]:
        """Every weight of a stage as a matrix, in the type in which it is multiplied."""
        cut, product = self.parts[at], dict(stage.products)
        found: dict[Expr, Tensor] = {}
        written, outputs = [], []
        for w, (kind, home) in zip(cut.weights, self.homes[at], strict=True):
            if home is None:
                found[w] = values[w][0]
                continue
            buffer = self.extra[home, kind] if isinstance(home, int) else self.panels[home].view(kind)
            found[w] = buffer[: here.rows, : here.cols]
            written.append(w)
            outputs += [found[w], found[w].stride(0)]
        if written:
            whole = Fold((*stage.fold.leaves, _ROWS, _COUNT), tuple(reduce_node("sum", "cols", (), (w,)) for w in written))
            assert product or not stage.products
            self._launch((at, "weights", here.rows), weights_kernel, whole, "cols", values, here, outputs, "weights")
        return found

    def _contract(
        self, key: tuple[int, int], over: str, products: tuple[Contraction, ...], weights: Any, leaves: Any
    ) -> Tensor | None:
        """Σ weight × vector: over columns complete, over rows added to what the panels before gave."""
        out: Tensor | None = self.totals.get(key) if over == "rows" else None
        for c in products:
            weight, vector = weights[c.weight], leaves[c.vector]
            weight, vector = weight if over == "cols" else weight.mT, vector.to(weight.dtype)
            first = out is None
            if out is None:
                kind = self.total_kind if over == "rows" else self.narrow if self.narrow is torch.bfloat16 else None
                shape = (weight.shape[0], vector.shape[-1])
                out = torch.empty(shape, dtype=kind or self.sizes.compute, device=weight.device)
            hardware.contract_into(out, weight, vector, add=not first)
        if over == "cols":
            return out
        assert out is not None
        self.totals[key] = out
        return None

    def _combine(self, at: int, fold: Fold, found: list[list[Tensor]], here: Sizes, rows: slice) -> None:
        old = self.states[at]
        for k, (r, own) in enumerate(zip(fold.reductions, found, strict=True)):
            new = combine.opened(r, [t.unsqueeze(0) for t in own], [here.rows], [rows.start])
            if k < len(old):
                old[k] = combine.merged(r, [old[k], new])
            else:
                old.append(combine.merged(r, [new]))

    def finish(self, at: int) -> list[list[Tensor] | None]:
        stage, cut = self.walk.stages[at], self.parts[at]
        results: dict[int, list[Tensor]] = {p: [t] for (a, p), t in self.totals.items() if a == at}
        if "rows" in cut.numbers:
            states = zip(cut.numbers["rows"].reductions, self.states[at], strict=True)
            closed = [combine.closed(r, s) for r, s in states]
            results |= dict(zip(cut.places["rows"], closed, strict=True))
        return [results.get(place) for place in range(len(stage.fold.reductions))]

    # Launching

    def _launch(
        self, key: tuple, write: Any, fold: Fold, over: str, values: dict[Expr, Any], here: Sizes, outputs: list, plan: str = ""
    ) -> None:
        values = {e: self._number(e, values[e]) for e in fold.leaves if e in values}
        if key not in self.calls:
            self.calls[key] = _prepare(write, fold, over, values, here, PLANS[plan or over])
        kernel, chosen, grid, sizes, wide = self.calls[key]
        arguments = list(outputs)
        for e in kernel.leaves:
            v = values[e]
            arguments.append(v)
            if isinstance(v, Tensor):
                arguments += [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
        arguments += sizes
        launch.execute(Call(kernel, chosen, grid, tuple(arguments), wide, "ieee", sizes[1] % chosen.block_folded != 0, here.device))

    def _number(self, e: Expr, v: Any) -> Any:
        """A kernel's own numbers are float32: a float64 program gets its numbers as tensors."""
        if isinstance(v, Tensor) or self.sizes.compute is not torch.float64 or e.dtype != "float":
            return v
        return torch.full((1,), v, dtype=torch.float64, device=self.sizes.device)


def _prepare(write: Any, fold: Fold, over: str, values: dict[Expr, Any], here: Sizes, plan: KernelPlan) -> tuple:
    """What of a launch depends on types and lengths only."""
    types = tuple(str(v.dtype)[6:] if isinstance(v, Tensor) else "number" for v in (values[e] for e in fold.leaves))
    letters = tuple(sorted(here.letters.items()))
    spec = Spec(fold, over, types, (0,) * len(types), letters, str(here.compute)[6:], None, 1, False, False)
    kernel = write(spec)
    lengths = (here.rows, here.cols) if over == "cols" else (here.cols, here.rows)
    room = 16
    while room < lengths[1] and room < plan.block_folded:
        room *= 2
    plan = replace(plan, block_folded=room)
    tiles = -(-lengths[0] // plan.block_kept)
    blocks = (plan.block_kept, plan.block_folded) if over == "cols" else (plan.block_folded, plan.block_kept)
    wide = False
    for e in kernel.leaves:
        v = values[e]
        if isinstance(v, Tensor) and e.is_pair:
            wide |= any(s * b >= 2**31 for s, b in zip(v.stride()[1:], blocks, strict=True))
        elif not isinstance(v, Tensor):
            wide |= isinstance(v, int) and abs(v) >= 2**28
    return kernel, plan, tiles, (*lengths, tiles), wide


def _output(r: Expr, k: int, length: int, sizes: Sizes) -> Tensor:
    _, number = KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])[k]
    return torch.empty(1, length, dtype=sizes.compute if number == "float" else torch.int64, device=sizes.device)


def _top(panel: Tensor, r: Expr, sizes: Sizes) -> list[Tensor]:
    """The best of each row, as the eager engine keeps them."""
    k, largest = r.attrs[2]
    values, places = panel.topk(min(k, panel.shape[1]), dim=1, largest=largest)
    worst = -torch.inf if largest else torch.inf
    return [values.to(sizes.compute), torch.where(values == worst, -1, places)]


@functools.lru_cache(maxsize=1024)
def weights_kernel(spec: Spec) -> emit.Kernel:
    """The kernel that writes numbers per pair to memory, each over a product that it may have been made from.

    A row is walked by one program instance, and all of a block is read before any of it is written; a type of half the
    size then only ever overwrites what was read.
    """
    v = Values(spec)
    lines = v.loop(True)
    texts = [v.full(r.args[0]) for r in spec.fold.reductions]
    used = [e for e in spec.fold.leaves if e in set(topological(spec.fold.reductions))]
    names, unspecialized = emit._arguments(spec, used)
    count = len(texts)
    outs = [n for k in range(count) for n in (f"out{k}", f"out{k}_r")]
    stores = []
    for k, text in enumerate(texts):
        place = f"(tl.cast(tile * KEPT, tl.int64) + kept_lane[:, None]) * out{k}_r + start + folded_lane[None, :]"
        stores.append(f"tl.store(out{k} + {place}, {text}, mask=kept_in[:, None] & folded_in[None, :])")
    body = [
        *emit._opening(spec),
        *v.before,
        "",
        "for t in range(0, tl.cdiv(folded_size, FOLDED)):",
        "    start = t * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = folded_at < folded_size",
        *(f"    {line}" for line in lines),
        "    tl.debug_barrier()  # all of the block was read before any of it is overwritten",
        *(f"    {line}" for line in stores),
    ]
    constants = ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)
    function = [
        f"@triton.jit(do_not_specialize={unspecialized!r})",
        "def panel_weights(",
        *textwrap.wrap(", ".join([*outs, *names[count:]]) + ",", 110, initial_indent="    ", subsequent_indent="    "),
        f"    {constants},",
        "):",
        *(f"    {line}" if line else "" for line in body),
    ]
    whole = "\n".join(function)
    text = "\n".join([emit._header(spec, used), *emit._copied(whole), whole, ""])
    return emit.Kernel("panel_weights", text, tuple(used), 0, 0, 0, 0)
