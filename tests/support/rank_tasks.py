"""What the ranks are asked to do. Each function runs on every rank of a world and returns something picklable."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from benchmarks.ranks import bytes_sent, context_parallel, megatron_vocabulary, our_grid, our_ring
from monoidreduce.engines.ranks import agreement
from monoidreduce.runtime import dispatch
from tests.support import (
    label_arithmetic_cases,
    large_topk_cases,
    listed_cases,
    new_kinds,
    own_monoids,
    scaled_cases,
    table_cases,
)
from tests.support import several_vectors as several_vectors_cases
from tests.support.allocations import Watch
from tests.support.comparison import flatten, is_float, use_small_tiles
from tests.support.layers import BY_NAME
from tests.support.rank_cases import Case, part

use_small_tiles(pytest.MonkeyPatch(), 16, 32)  # never undone: set once, for the life of the process


def sharded(group: Any, case: Case) -> dict[str, Tensor]:
    """One layer, on this rank's part: its values and gradients, and what was sent."""
    layer = BY_NAME[case.layer]
    args = layer.args(case.rows, case.cols, case.seed, case.dtype)
    mine = [part(a, p, case, group.rank(), group.size()) for a, p in zip(args, layer.parameters, strict=False)]
    given = [a.detach().clone().requires_grad_() if is_float(a) else a for a in mine]
    axes = {name: group for name in ("rows", "cols") if name in case.divided}
    with mr.shard(**axes, order=case.order, slices=case.slices):
        values = flatten(layer.op(*given))
    cotangents = [
        part(g, s, case, group.rank(), group.size()) for g, s in zip(case.cotangents, case.sides, strict=True)
    ]
    pulled = [(v, g.to(v.dtype)) for v, g in zip(values, cotangents, strict=True) if v.requires_grad]
    inputs = [a for a in given if is_float(a)]
    found = [None] * len(inputs)
    if pulled and inputs:
        found = torch.autograd.grad([v for v, _ in pulled], inputs, [g for _, g in pulled], allow_unused=True)
    grads = [torch.zeros_like(a) if g is None else g for a, g in zip(inputs, found, strict=True)]
    return {"values": [v.detach() for v in values], "grads": grads}


def sharded_many(group: Any, cases: list[Case]) -> list[Any]:
    return [sharded(group, case) for case in cases]


def changed(group: Any, rows: int) -> list[Tensor]:
    """Gradients of this rank's columns: as they are, of results that were changed in place, and of a checkpoint."""
    layer = BY_NAME["value_and_lse"]
    q, *_ = layer.args(rows, 5, 3)  # the same on all ranks
    _, k, v = layer.args(rows, 5 + group.rank(), 4 + group.rank())
    k.requires_grad_()

    def gradients(call: Any, change: bool) -> Tensor:
        results = flatten(call(q, k, v))
        for y in results if change else ():
            y.mul_(2)
        loss = sum((y / 2 if change else y).sin().sum() for y in results)
        return torch.autograd.grad(loss, k)[0]

    with mr.shard(cols=group):
        first = gradients(lambda *given: checkpoint(layer.op, *given, use_reentrant=False), False)
        return [first, gradients(layer.op, True), gradients(layer.op, False)]


def causal_pairs(group: Any, length: int, order: str) -> int:
    """How many pairs this rank computed of causal attention in a ring."""
    each = length // group.size()
    q = torch.randn(each, 4)
    with mr.tally() as count, mr.shard(rows=group, cols=group, order=order):
        BY_NAME["causal_attention"].op(q, q, q[:, :3])
    return count.pairs_computed


@mr.op
def _mixed(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], slope: mr.Batch, seed: int, bias: mr.Pair):
    """A bit of everything: indices, random numbers, both directions, numbers per batch element and per pair, one-sided
    folds."""
    s = q @ k - slope * (mr.row_index - mr.col_index).abs() + bias
    kept = mr.dropout(s, 0.2, seed)
    total = mr.logsumexp(s)
    return (
        mr.softmax_mean(s, v) * slope,
        mr.sum(torch.tanh(kept), over="rows"),
        mr.mean(total, over="rows") * mr.num_cols,
        mr.argmax(s),
        mr.topk(kept, 3).values,
    )


def _inputs(batch: int = 4, rows: int = 13, cols: int = 17) -> list[Any]:
    gen = torch.Generator().manual_seed(5)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    return [make(batch, rows, 5), make(batch, cols, 5), make(cols, 3), make(batch).abs(), 99, make(rows, cols)]


def _whole(function: Any, args: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    floats = [a.clone().requires_grad_() if is_float(a) else a for a in args]
    values = flatten(function(*floats))
    weights = [torch.linspace(-1, 1, v.numel(), dtype=torch.float64).view(v.shape) for v in values]
    total = sum((v * w).sum() for v, w in zip(values, weights, strict=True) if v.requires_grad)
    return [v.detach() for v in values], list(torch.autograd.grad(total, [a for a in floats if is_float(a)]))


def _compare(got: list[Tensor], expected: list[Tensor]) -> str:
    for k, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-9):
            return f"tensor {k}: {tuple(a.shape)} {tuple(b.shape)} {(a.double() - b.double()).abs().max():.2e}"
    return "same"


def dtensors(group: Any, placement: tuple[str, ...], slices: int | str | None = None) -> str:
    """The op on DTensors: values and gradients, gathered, are those of one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    shape = (group.size(),) if len(placement) == 1 else (2, group.size() // 2)
    mesh = DeviceMesh("cpu", torch.arange(group.size()).view(shape))
    args = _inputs()

    def placed(dims: dict[str, int], batched: bool) -> list[Any]:
        found = []
        for what in placement:
            mine = [dims[axis] for axis in what.split("+") if axis in dims]
            found.append(Shard(mine[-1]) if mine else Shard(0) if what == "batch" and batched else Replicate())
        return found

    where = [placed({"rows": 1}, True), placed({"cols": 1}, True), placed({"cols": 0}, False), placed({}, True)]
    where.append(placed({"rows": 0, "cols": 1}, False))  # in a ring by columns, which is not how it is needed
    tensors = [*args[:4], args[5]]
    given = [distribute_tensor(a, mesh, p).requires_grad_() for a, p in zip(tensors, where, strict=True)]
    with mr.shard(slices=slices):
        values = flatten(_mixed(*given[:4], args[4], given[4]))
    if not all(isinstance(v, DTensor) for v in values):
        return "not DTensors"
    full = [v.full_tensor() for v in values]
    weights = [torch.linspace(-1, 1, v.numel(), dtype=torch.float64).view(v.shape) for v in full]
    total = sum((v * w).sum() for v, w in zip(full, weights, strict=True) if v.requires_grad)
    grads = torch.autograd.grad(total, given)
    expected = _whole(_mixed, args)
    answer = _compare([v.detach() for v in full], expected[0])
    return answer if answer != "same" else _compare([g.full_tensor() for g in grads], expected[1])


def _split(t: Tensor, dim: int, rank: int, world: int) -> Tensor:
    return t.tensor_split(world, dim)[rank]


def _local(function: Any, args: list[Any], cuts: list[Any], outs: list[Any]) -> str:
    """Run on cut arguments and compare with the cut of the whole: cuts are (dimension, rank, world), or lists of it."""

    def cut(t: Any, c: Any) -> Any:
        for one in [] if c is None or not isinstance(t, Tensor) else c if isinstance(c, list) else [c]:
            t = _split(t, *one)
        return t

    given = [cut(a, c) for a, c in zip(args, cuts, strict=True)]
    given = [a.clone().requires_grad_() if is_float(a) else a for a in given]
    values = flatten(function(*given))
    plain, grads = _whole(_plain_of[function], args)
    weights = [torch.linspace(-1, 1, v.numel(), dtype=torch.float64).view(v.shape) for v in plain]
    total = sum((v * cut(w, c)).sum() for v, w, c in zip(values, weights, outs, strict=True) if v.requires_grad)
    found = torch.autograd.grad(total, [a for a in given if is_float(a)])
    floats = [c for a, c in zip(args, cuts, strict=True) if is_float(a)]
    answer = _compare([v.detach() for v in values], [cut(v, c) for v, c in zip(plain, outs, strict=True)])
    if answer != "same":
        return f"value {answer}"
    return _compare(list(found), [cut(g, c) for g, c in zip(grads, floats, strict=True)])


_plain_of: dict[Any, Any] = {}


def two_groups(group: Any) -> str:
    """Rows over one dimension of a mesh, columns over the other."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("r", "c"))

    def op(*args: Any) -> Any:
        with mr.shard(rows=mesh["r"], cols=mesh["c"]):
            return _mixed(*args)

    _plain_of[op] = _mixed
    r, c = (1, mesh.get_local_rank("r"), 2), (1, mesh.get_local_rank("c"), 4)
    return _local(op, _inputs(), [r, c, (0, *c[1:]), None, None, [(0, *r[1:]), (1, *c[1:])]], [r, c, None, r, r])


def groups_that_overlap(group: Any) -> list[str]:
    """The same ranks in two groups are a ring; groups that share some ranks are refused."""
    x = torch.arange(12.0).view(6, 2) / 7
    mine = _split(x, 0, *(group.rank(), group.size()))
    twin = dist.new_group(list(range(8)))
    some = dist.new_group(list(range(4)))
    with mr.shard(rows=group, cols=twin):
        y = _tanh(mine, mine)
    same = torch.allclose(y, _split(_tanh(x, x), 0, group.rank(), group.size()))
    found = ["same" if same else "different"]
    if group.rank() < 4:
        try:
            with mr.shard(rows=group, cols=some):
                found.append("taken")
        except mr.ArgumentError as error:
            found.append("refused" if "share the ranks [0, 1, 2, 3]" in str(error) else str(error))
    return found


def second_derivatives(group: Any) -> str:
    """Gradients of gradients, by rows, by columns and round the ring."""
    args = [a.clone() for k, a in enumerate(_inputs()) if k in (0, 1, 2, 5)]

    @mr.op
    def layer(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Pair):
        s = q @ k + bias
        return mr.softmax_mean(s, v) * mr.mean(mr.logsumexp(s), over="rows")

    def twice(*given: Any) -> list[Tensor]:
        given = [g if g.requires_grad else g.clone().requires_grad_() for g in given]
        y = layer(*given)
        return list(torch.autograd.grad(y.square().sum() if y.requires_grad else y, given, create_graph=True))

    for axes in ({"rows": group}, {"cols": group}, {"rows": group, "cols": group}):
        row = (1, group.rank(), group.size()) if "rows" in axes else None
        col = (1, group.rank(), group.size()) if "cols" in axes else None
        pairs = (0, *row[1:]) if row else (1, *col[1:]) if col else None  # in a ring its rows, and all columns
        cuts = [row, col, None if col is None else (0, *col[1:]), pairs]

        def op(*given: Any, axes: Any = axes) -> list[Tensor]:
            with mr.shard(**axes):
                return twice(*given)

        _plain_of[op] = twice
        answer = _local(op, args, cuts, cuts)
        if answer != "same":
            return f"{list(axes)}: {answer}"
    return "same"


@mr.op
def _biased(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"], bias: mr.Pair, seen: mr.Pair):
    s = torch.where(seen, q @ k + bias, -torch.inf)
    return mr.softmax_mean(s, v), mr.sum(torch.tanh(s), over="rows")


def shared_pairs(group: Any) -> str:
    """What is given per pair with axes of size 1, which all ranks share, and with few or many batch dimensions."""
    rows, cols = 11, 14
    q, k, v = (a.clone() for a in _inputs(2, rows, cols)[:3])
    seen = torch.rand(rows, cols, generator=torch.Generator().manual_seed(2)) > 0.3
    me = (group.rank(), group.size())
    for axes in ({"rows": group}, {"cols": group}, {"rows": group, "cols": group}):
        row, col = ((1, *me) if axis in axes else None for axis in ("rows", "cols"))

        def op(*given: Any, axes: Any = axes) -> Any:
            with mr.shard(**axes):
                return _biased(*given)

        _plain_of[op] = _biased
        for shape in ((rows, cols), (1, cols), (rows, 1), (1, 1), (2, rows, cols), (2, 1, 1), (1, rows, 1)):
            bias = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

            def pairs(shape: tuple[int, ...], row: Any = row, col: Any = col) -> Any:
                found = [(len(shape) - 2, *me)] if row and shape[-2] > 1 else []
                return found + ([(len(shape) - 1, *me)] if col and not row and shape[-1] > 1 else [])

            cuts = [row, col, col and (0, *me), pairs(shape), pairs((rows, cols))]
            answer = _local(op, [q, k, v, bias, seen], cuts, [row, col])
            if answer != "same":
                return f"{list(axes)} {shape}: {answer}"
    return "same"


def odd_pairs(group: Any, fault: str) -> tuple[str, str, bool]:
    """One rank brings what is given per pair in another form; then the group is used again."""
    guilty = group.rank() == group.size() - 1
    q, k = torch.randn(3, 4), torch.randn(5, 4)
    wide = 5 * group.size()
    axes, bias = {"rows": group}, torch.zeros(3, 5)
    if fault == "shared by one":
        bias = bias[:1] if guilty else bias
    elif fault == "rows":
        bias = torch.zeros(4, 5) if guilty else bias
    elif fault == "columns of one":
        axes, bias = {"rows": group, "cols": group}, torch.zeros(3, 5 if guilty else wide)
    elif fault == "own columns":
        axes = {"rows": group, "cols": group}
    kind, text = "nothing", ""
    try:
        with mr.shard(**axes):
            _biased(q, k, k, bias, bias == 0)
    except mr.MonoidReduceError as error:
        kind, text = type(error).__name__, str(error)
    with mr.shard(rows=group, cols=group):
        y, _ = _biased(q, k, k, torch.zeros(3, wide), torch.ones(1, 1, dtype=torch.bool))
    return kind, text, y.shape == (3, 4)


def losses(group: Any, divided: tuple[str, ...]) -> str:
    """The ready-made losses with their means: one number, the same on every rank, and its gradients."""
    gen = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    x, w, bias = make(12, 5), make(19, 5), make(19)
    target = torch.randint(0, 19, (12,), generator=gen)
    target[4] = -100
    axes = {name: group for name in divided}
    row = (0, group.rank(), group.size()) if "rows" in divided else None
    col = (0, group.rank(), group.size()) if "cols" in divided else None
    plain = lambda x, w, t, b: mr.ops.cross_entropy(x, w, t, bias=b)

    def op(*given: Any) -> Any:
        with mr.shard(**axes):
            return plain(*given)

    _plain_of[op] = plain
    answer = _local(op, [x, w, target, bias], [row, col, row, col], [None])
    if answer != "same" or divided != ("rows", "cols"):
        return answer

    def ring(*given: Any) -> Any:
        with mr.shard(**axes):
            return mr.ops.contrastive_loss(*given, temperature=0.5)

    _plain_of[ring] = lambda x, y: mr.ops.contrastive_loss(x, y, temperature=0.5)
    return _local(ring, [x, make(12, 5)], [row, col], [None])


@mr.op
def _clip(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y
    own = torch.where(mr.row_index == mr.col_index, s, 0.0)
    image = mr.mean(mr.logsumexp(s) - mr.sum(own), over="rows")
    return image + mr.mean(mr.logsumexp(s, over="rows") - mr.sum(own, over="rows"))


def usual_names(group: Any) -> dict[str, str]:
    """What docs/ranks.md lists by its usual name, on this rank's part: values and gradients of one process."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"))
    dp, tp, all_ = (0, mesh.get_local_rank("dp"), 2), (0, mesh.get_local_rank("tp"), 4), (0, group.rank(), 8)
    gen = torch.Generator().manual_seed(8)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    x, y, w, q = make(18, 5), make(18, 5), make(23, 5), make(23, 3)
    target = torch.randint(0, 23, (18,), generator=gen)
    loss = lambda x, w, t: mr.ops.cross_entropy(x, w, t)
    search = lambda x, w: (*mr.ops.knn(x, w, 3), mr.ops.linear_argmax(x, w))
    ring, none = {"rows": group, "cols": group}, None
    attention = lambda q, k, v: mr.ops.attention(q, k, v, causal=True)
    contrastive = lambda x, y: mr.ops.contrastive_loss(x, y, temperature=0.5)
    bias, seen = make(18, 18), torch.rand(18, 18, generator=gen) > 0.3
    masked = lambda q, k, v, b, m: mr.ops.attention(q, k, v, bias=b, attn_mask=m)
    probabilities = torch.softmax(make(18, 23), -1)
    soft = lambda x, w, p: mr.ops.linear_cross_entropy(x, w, p, return_accuracy=True)[::2]
    names: dict[str, tuple] = {
        "attention with a bias and a mask, ring": (ring, masked, [x, y, y, bias, seen], [all_] * 5, [all_]),
        "cross-entropy with probabilities": ({"rows": group}, loss, [x, w, probabilities], [all_, none, all_], [none]),
        "... classes divided": ({"cols": group}, soft, [x, w, probabilities], [none, all_, (1, *all_[1:])], [none] * 2),
        "... ring": (ring, soft, [x, w, probabilities], [all_] * 3, [none] * 2),
        "context-parallel attention": (ring, attention, [x, y, y * 2], [all_] * 3, [all_]),
        "vocabulary-parallel cross-entropy": ({"cols": mesh["tp"]}, loss, [x, w, target], [none, tp, none], [none]),
        "... and tokens": ({"rows": mesh["dp"], "cols": mesh["tp"]}, loss, [x, w, target], [dp, tp, dp], [none]),
        "tensor-parallel MLP": ({"cols": mesh["tp"]}, mr.ops.mlp, [x, w, q], [none, tp, tp], [none]),
        "contrastive, ring": (ring, contrastive, [x, y], [all_, all_], [none]),
        "contrastive, gathered": ({"rows": group}, _clip, [x, y], [all_, none], [none]),
        "sampling": ({"cols": group}, lambda x, w: mr.ops.sample(x, w, seed=3), [x, w], [none, all_], [none] * 2),
        "nearest neighbours, argmax": ({"cols": group}, search, [x, w], [none, all_], [none] * 3),
    }
    labels, ids = torch.arange(18) % 4, torch.randint(0, 23, (18, 4), generator=gen)
    ids[::4, 1] = -100
    some = lambda x, w, t, i, m: tuple(
        y for y in mr.ops.linear_logprobs(x, w, t, ids=i, mask=m, return_entropy=True, return_lse=True) if y is not None
    )
    supervised = lambda x, y, a, b: mr.ops.contrastive_loss(x, y, labels=(a, b), temperature=0.5)
    transport = lambda x, y: mr.ops.sinkhorn(x, y, eps=4.0, iterations=90, tolerance=1e-3, scaling=0.5)[:3]
    for axes in ({"rows": group}, {"cols": group}, ring):
        row, col = (all_ if axis in axes else none for axis in ("rows", "cols"))
        names |= {
            f"supervised contrastive {list(axes)}": (
                axes,
                supervised,
                [x, y, labels, torch.arange(18) % 5],
                [row, col, row, col],
                [none],
            ),
            f"chamfer {list(axes)}": (axes, mr.ops.chamfer, [x, w], [row, col], [none]),
            f"Sinkhorn {list(axes)}": (axes, transport, [x, w], [row, col], [none, row, col]),
            f"log-probabilities of ids {list(axes)}": (
                axes,
                some,
                [x, w, target, ids, torch.arange(18) % 5 > 0],
                [row, col, row, row, row],
                [row] * 4,
            ),
            f"distillation {list(axes)}": (axes, mr.ops.linear_kl, [x, w, y, w + 1], [row, col, row, col], [none]),
        }
    found = {}
    for name, (axes, function, args, cuts, outs) in names.items():

        def op(*given: Any, axes: Any = axes, function: Any = function) -> Any:
            with mr.shard(**axes):
                return function(*given)

        _plain_of[op] = function
        found[name] = _local(op, args, cuts, outs)
    return found


def pair_memory(group: Any, rows: int, cols: int) -> dict[str, int]:
    """What the gradient of a bias takes on this rank, in a ring: the largest storage, and all that live at once."""
    each = rows // group.size()
    q, k = torch.randn(each, 4, requires_grad=True), torch.randn(cols // group.size(), 4, requires_grad=True)
    bias = torch.randn(each, cols, requires_grad=True)
    with Watch([q, k, bias]) as watch:
        with mr.shard(rows=group, cols=group):
            y, _ = _biased(q, k, k, bias, torch.ones(1, 1, dtype=torch.bool))
        y.sum().backward()
    return {"largest": watch.largest, "peak": watch.peak, "bias": bias.nbytes}


@mr.op
def _relu(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.sum(torch.relu(x @ w))


@mr.op
def _tanh(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.sum(torch.tanh(x @ w))


def refused(group: Any, fault: str) -> tuple[str, str, bool]:
    """One rank brings something else; then the group is used again."""
    guilty = group.rank() == group.size() - 1
    x, w, target = torch.randn(6, 5), torch.randn(7, 5), torch.randint(0, 7, (6,))
    tau = 0.5
    axes = {"rows": group}
    call = lambda: mr.ops.cross_entropy(x, w, target)
    if fault == "number":
        call = lambda: BY_NAME["info_nce"].op(x, w[:6], 0.25 if guilty else tau)
    elif fault == "op":
        call = lambda: (_relu if guilty else _tanh)(x, w)
    elif guilty and fault == "label":
        target[0] = 99
    elif guilty and fault == "features":
        x = x[:, :4]
    elif guilty and fault == "dtype":
        x, w = x.double(), w.double()
    elif guilty and fault == "rank":
        w = w[0]
    elif guilty and fault == "uneven":
        w = torch.randn(8, 5)
    elif fault == "batch":
        call = lambda: _relu(x[None] if guilty else x, w)
    kind, text = "nothing", ""
    try:
        with mr.shard(**axes):
            call()
    except mr.MonoidReduceError as error:
        kind, text = type(error).__name__, str(error)
    alone = agreement.current_layout() is None
    with mr.shard(cols=group):
        total = mr.ops.cross_entropy(torch.ones(1, 2), torch.zeros(3, 2), torch.tensor([0]))
    return kind, text, alone and bool(torch.isclose(total.exp(), torch.tensor(3.0 * group.size())))


def label_of_nobody(group: Any) -> list[tuple[str, str]]:
    """A label past all classes of all ranks, on every rank: classes divided, and in a ring."""
    found = []
    for axes in ({"cols": group}, {"rows": group, "cols": group}):
        try:
            with mr.shard(**axes):
                mr.ops.cross_entropy(torch.ones(1, 2), torch.zeros(5, 2), torch.tensor([41]))
            found.append(("nothing", ""))
        except mr.MonoidReduceError as error:
            found.append((type(error).__name__, str(error)))
    return found


def left_alone(group: Any) -> bool:
    """Threads, default types, random numbers and the layout are as before."""
    before = torch.get_num_threads(), torch.get_default_dtype(), torch.random.get_rng_state()
    x = torch.ones(3, 5)
    with mr.shard(rows=group, cols=group):
        _relu(x, x)
    after = torch.get_num_threads(), torch.get_default_dtype(), torch.random.get_rng_state()
    alone = _relu(x, x)
    return (
        before[:2] == after[:2]
        and torch.equal(before[2], after[2])
        and alone.shape == (3,)
        and agreement.current_layout() is None
    )


def warm(group: Any) -> None:
    """The first call of everything, so that what follows is the work itself."""
    _worked(group, ("rows", "cols"))


def _worked(group: Any, divided: tuple[str, ...], slices: int | None = None) -> None:
    q = torch.ones(40, 8, requires_grad=True)
    with mr.shard(**{name: group for name in divided}, slices=slices):
        y = BY_NAME["causal_attention"].op(q, q, q)
    y.sum().backward()


def work(group: Any, divided: tuple[str, ...], slices: int | None = None) -> None:
    """Forward and backward without end; only an error gets out."""
    while True:
        _worked(group, divided, slices)


def fail_inside(group: Any, divided: tuple[str, ...]) -> None:
    def engine(*args: Any) -> Any:
        raise MemoryError("no memory left on this rank")

    if group.rank() == 1:
        dispatch.FOLDERS["eager"] = engine
    _worked(group, divided)


# Bytes


def traffic(
    group: Any, which: str, rows: int, cols: int, features: int, slices: int | str | None = None, heads: int = 1
) -> dict[str, float]:
    """Bytes that this rank sent for one forward and one backward, as the kernel counts them, and what they held."""
    gen = torch.Generator().manual_seed(1)
    make = lambda n: torch.randn(heads, n, features, generator=gen)
    me, world = group.rank(), group.size()
    q, k = (_split(make(n), 1, me, world).clone().requires_grad_() for n in (rows, cols))
    axes: dict[str, Any] = {"rows": group, "cols": group} if which == "ring" else {which: group}
    if which == "rows":
        k = make(cols).requires_grad_()
    elif which == "cols":
        q = make(rows).requires_grad_()
    elif which == "mesh":  # of two rows and as many columns as it takes
        from torch.distributed.device_mesh import DeviceMesh

        mesh = DeviceMesh("cpu", torch.arange(world).view(2, -1), mesh_dim_names=("r", "c"))
        axes = {"rows": mesh["r"], "cols": mesh["c"]}
        q = _split(make(rows), 1, mesh.get_local_rank("r"), 2).clone().requires_grad_()
        k = _split(make(cols), 1, mesh.get_local_rank("c"), world // 2).clone().requires_grad_()
    with mr.shard(**axes, slices=slices):
        _scores(q, k, k).sum().backward()  # connections are made
        dist.barrier(group)
        start = bytes_sent()
        y = _scores(q, k, k)
        dist.barrier(group)
        middle = bytes_sent()
    y.sum().backward()
    dist.barrier(group)
    return {"forward": middle - start, "backward": bytes_sent() - middle}


@mr.op
def _scores(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["f"]):
    return mr.softmax_mean(q @ k, v)


def megatron(group: Any, rows: int, cols: int, features: int) -> dict[str, Any]:
    """Vocabulary-parallel cross-entropy with plain collectives on local logits, beside ours: results and bytes."""
    gen = torch.Generator().manual_seed(1)
    x, w = torch.randn(rows, features, generator=gen), torch.randn(cols, features, generator=gen)
    target = torch.randint(0, cols, (rows,), generator=gen)
    me, world = group.rank(), group.size()
    part = _split(w, 0, me, world)
    start = sum(len(_split(w, 0, r, world)) for r in range(me))
    found = {}
    for name in ("ours", "theirs"):
        mine, local = x.clone().requires_grad_(), part.clone().requires_grad_()
        dist.barrier(group)
        before = bytes_sent()
        if name == "ours":
            with mr.shard(cols=group):
                loss = mr.ops.cross_entropy(mine, local, target)
            loss.backward()
            grad = mine.grad
        else:
            loss, grad, local.grad = megatron_vocabulary(mine.detach(), local.detach(), target, start, group)
        dist.barrier(group)
        found[name] = {"loss": loss.item(), "x": grad, "w": local.grad, "bytes": bytes_sent() - before}
    return found


def torch_loss_parallel(group: Any, rows: int, cols: int) -> str:
    """The same loss by torch's loss_parallel on sharded logits."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    gen = torch.Generator().manual_seed(2)
    x, w = torch.randn(rows, 6, generator=gen), torch.randn(cols, 6, generator=gen)
    target = torch.randint(0, cols, (rows,), generator=gen)
    mesh = DeviceMesh("cpu", torch.arange(group.size()))
    logits = distribute_tensor(x @ w.T, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        theirs = torch.nn.functional.cross_entropy(logits, distribute_tensor(target, mesh, [Replicate()]))
        theirs.backward()
    dx = logits.grad.full_tensor() @ w
    mine = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    heads = distribute_tensor(w, mesh, [Shard(0)]).requires_grad_()

    @mr.op
    def loss(x: mr.Row["d"], w: mr.Col["d"], t: mr.Row):
        s = x @ w
        return mr.mean(mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == t, s, 0.0)), over="rows")

    ours = loss(mine, heads, distribute_tensor(target, mesh, [Replicate()]))
    ours.backward()
    assert isinstance(ours, DTensor)
    pairs = [(ours.full_tensor(), theirs.full_tensor()), (mine.grad.full_tensor(), dx)]
    return "same" if all(torch.allclose(a, b, atol=1e-6) for a, b in pairs) else f"{pairs}"


def rings(group: Any, tokens: int, features: int) -> dict[str, Any]:
    """Attention round our ring, in our grid, and by torch's context_parallel: output, gradients and bytes sent."""
    gen = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(1, 2, tokens, features, generator=gen) for _ in range(3))
    mine = [t.chunk(group.size(), 2)[group.rank()].contiguous() for t in (q, k, v)]
    ways = {
        "ring": our_ring,
        "grid": our_grid,
        "alltoall": lambda *a: context_parallel(*a, rotate="alltoall"),
        "allgather": lambda *a: context_parallel(*a, rotate="allgather"),
    }
    found = {}
    for name, way in ways.items():
        way(*mine, group)  # connections are made
        dist.barrier(group)
        before = bytes_sent()
        outcome = way(*mine, group)
        dist.barrier(group)
        found[name] = {"outcome": outcome, "bytes": bytes_sent() - before}
    return found


def picked_labels(group: Any, name: str, over: str, divided: tuple[str, ...]) -> list[Tensor]:
    """A label that is arithmetic on the other index, on this rank's part: its values and gradients."""
    x, y, step, own, shift = label_arithmetic_cases.arguments(torch.float64)
    cut = lambda t, axis: _split(t, 1, group.rank(), group.size()) if axis in divided else t
    given = [cut(x, "rows").clone().requires_grad_(), cut(y, "cols").clone().requires_grad_()]
    with mr.shard(**{axis: group for axis in divided}):
        value = label_arithmetic_cases.op(name, over)(*given, step, cut(own, "rows"), shift)
        total = (value * value.detach().cos()).sum()
        return [value.detach(), *torch.autograd.grad(total, given)]


def new_kind(group: Any, name: str, op: str, divided: tuple[str, ...], args: list[Tensor]) -> list[Tensor]:
    """A kind of reduction that the library does not have, on this rank's part: its values and gradients."""
    cut = lambda t, axis: t.chunk(group.size())[group.rank()] if axis in divided else t
    given = [cut(t, a).clone().requires_grad_() for t, a in zip(args, ("rows", "cols", "cols"), strict=True)]
    with new_kinds.planted(), mr.shard(**{axis: group for axis in divided}):
        case, lengths = new_kinds.CASES[name], {"rows": len(args[0]), "cols": len(args[1])}
        values = list(case.OPS[op](*given))
        cotangents = [cut(new_kinds.cotangent(lengths[axis]), axis) for axis in case.AXES[op]]
        return [*(v.detach() for v in values), *torch.autograd.grad(values, given, cotangents)]


def large_topk(group: Any, divided: tuple[str, ...]) -> list[Tensor]:
    """Lists of many columns, what is gathered at their winners, and the gradients of x, y and c."""
    cut = lambda t, axis: _split(t, 0, group.rank(), group.size()) if axis in divided else t
    x, *others = large_topk_cases.arguments()
    with mr.shard(**{axis: group for axis in divided}):
        found, gradients = large_topk_cases.derive(
            large_topk_cases.winners, [cut(x, "rows"), *(cut(t, "cols") for t in others)]
        )
    return [*found, *gradients]


def tables(group: Any, name: str, divided: tuple[str, ...], args: list[Tensor]) -> list[Tensor]:
    """A layer that looks up a table, on this rank's part: its values and gradients."""
    case = next(c for c in table_cases.CASES if c.name == name)
    axes = ["rows", "cols", *(("rows", "cols") if len(args) == 7 else ("cols",)), *[None] * 3]
    cut = lambda t, axis, dim: t.chunk(group.size(), dim)[group.rank()] if axis in divided else t
    given = [
        cut(t, axis, -2 if t.is_floating_point() else -1).clone().requires_grad_(t.is_floating_point())
        for t, axis in zip(args, axes[: len(args)], strict=True)
    ]
    with mr.shard(**{axis: group for axis in divided}):
        found = case.op(*given)
        values = [found] if isinstance(found, Tensor) else list(found)
        grads = torch.autograd.grad([v.sum() for v in values], [a for a in given if a.requires_grad])
        return [*(v.detach() for v in values), *grads]


def listed_rows(group: Any, args: list[Tensor], degrees: Tensor, index: Tensor, numbers: Tensor) -> list[Tensor]:
    """An op over edges on this rank's rows with their lists: values, gradients of rows, numbers and columns."""
    rows = listed_cases.cut(len(degrees), group.rank(), group.size())
    first, last = int(degrees[: rows.start].sum()), int(degrees[: rows.stop].sum())
    edges = mr.edges(listed_cases.offsets(degrees[rows]), index[first:last])
    given = [args[0][rows], args[1], args[2], numbers[first:last]]
    given = [t.clone().requires_grad_() for t in given]
    with mr.shard(rows=group):
        by_row, by_col = listed_cases.both_ways(*given, cols=edges)
        grads = torch.autograd.grad(
            [by_row, by_col], given, [listed_cases.cotangent(by_row), listed_cases.ones(by_col)]
        )
    return [by_row.detach(), by_col.detach(), *grads]


def listed_cols(group: Any) -> str:
    """What a call over lists says whose columns are divided."""
    with mr.shard(cols=group):
        try:
            edges = mr.edges(torch.tensor([0, 1, 2]), torch.tensor([0, 0]))
            listed_cases.both_ways(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2), torch.ones(2), cols=edges)
        except mr.ShardError as error:
            return str(error)
    return ""


def derived_gradients(group: Any, op: str, divided: tuple[str, ...], args: list[Tensor]) -> list[Tensor]:
    """Monoids that bring no gradient, on this rank's part: values, gradients and second gradients."""
    cut = lambda t, axis: t.chunk(group.size())[group.rank()] if axis in divided else t
    given = [cut(t, a).clone().requires_grad_() for t, a in zip(args, ("rows", "cols", "cols"), strict=True)]
    with mr.shard(**{axis: group for axis in divided}):
        values = list(getattr(own_monoids, op)(*given))
        shapes = [own_monoids.cotangent(v) for v in own_monoids.plain(op, *args)]
        cotangents = [cut(g, axis) for g, axis in zip(shapes, own_monoids.axes(op), strict=True)]
        grads = torch.autograd.grad(values, given, cotangents, create_graph=True, materialize_grads=True)
        moving = [k for k, g in enumerate(grads) if g.requires_grad]
        seeds = [cut(own_monoids.cotangent(args[k]), ("rows", "cols", "cols")[k]) for k in moving]
        again = torch.autograd.grad([grads[k] for k in moving], given, seeds, materialize_grads=True)
        return [t.detach() for t in (*values, *grads, *again)]


def refused_gradient(group: Any, args: list[Tensor]) -> str:
    """What is said of a gradient that a ring cannot have."""
    given = [t.chunk(group.size())[group.rank()].clone().requires_grad_() for t in args]
    with mr.shard(rows=group, cols=group):
        total = sum(t.sum() for t in own_monoids.variance(*given))
        try:
            torch.autograd.grad(total, given)
        except mr.NoGradientError as error:
            return str(error)
    return ""


def several_vectors(group: Any, name: str, divided: tuple[str, ...], args: list[Tensor], axes: str) -> list[Tensor]:
    """A body with several vectors a row or column, on this rank's part: its values and gradients."""
    cut = lambda t, axis: _split(t, 1, group.rank(), group.size()) if axis in divided else t
    given = [cut(t, axis).clone().requires_grad_() for t, axis in zip(args, axes.split(), strict=True)]
    with mr.shard(**{axis: group for axis in divided}):
        value = several_vectors_cases.CASES[name].op(*given)
        return [value.detach(), *torch.autograd.grad((value * value.detach().cos()).sum(), given)]


def stored_vectors(group: Any, divided: tuple[str, ...], args: list[Tensor], made: list[Any]) -> list[Tensor]:
    """Attention whose keys and values are stored, on this rank's part: its values, and the gradients of the rows and of
    the keys' master. ``made``: what the keys and the values are stored as, without their master."""
    rank, size = group.rank(), group.size()
    parts = _split(torch.arange(len(args[1])), 0, rank, size) if "cols" in divided else torch.arange(len(args[1]))
    few = slice(int(parts[0]), int(parts[-1]) + 1)
    x = (_split(args[0], 0, rank, size) if "rows" in divided else args[0]).clone().requires_grad_()
    master = args[1][few].clone().requires_grad_()
    k, v = (mr.scaled(t.view(kind), scale, **how)[few] for t, kind, scale, how in made)
    with mr.shard(**{axis: group for axis in divided}):
        value = scaled_cases.attention(x, k, v)
        (gradient,) = torch.autograd.grad((value * value.detach().cos()).sum(), x)
        trained = scaled_cases.attention(x, dataclasses.replace(k, master=master), v)
        return [value.detach(), gradient, *torch.autograd.grad((trained * value.detach().cos()).sum(), master)]


def documents_of_hashes(group: Any, divided: tuple[str, ...]) -> list[Tensor]:
    """Values of documents whose ids differ by one beyond 2**60, summed, and the best of integers."""
    ids, values = 2**60 + torch.arange(48) // 6, torch.arange(48) + 2**55
    cut = lambda t, axis: _split(t, 0, group.rank(), group.size()) if axis in divided else t

    @mr.op
    def inside(mine: mr.Row, theirs: mr.Col, v: mr.Col):
        kept = torch.where(mine == theirs, v, 0)
        return mr.sum(kept), mr.max(kept), mr.argmax(kept), mr.topk(kept, 2).values

    with mr.shard(**{axis: group for axis in divided}):
        return list(inside(cut(ids, "rows"), cut(ids, "cols"), cut(values, "cols")))
