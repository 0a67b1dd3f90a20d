"""Kernels that walk lists of columns, in Triton's interpreter, against dense matrices with the lists as a mask."""

import contextlib
import gc
import weakref

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines import eager, listed
from monoidreduce.engines.common.bounded_cache import BoundedCache
from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.kernels import histogram, listed_fold, listed_launch, topk
from monoidreduce.engines.triton.schedules.kernel_plan import KernelPlan, Rendering, use_plan
from monoidreduce.reductions import softmax as softmax_kind
from tests.support import gluon_simulator, internals, listed_cases, own_monoids

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.3, v)


@mr.op
def several(q: Row["f"], k: Col["f"], label: Row, b: Col):
    s = q @ k + b
    picked = mr.sum(torch.where(mr.col_index == label, s, 0.0))
    return mr.logsumexp(s), mr.max(s), mr.argmax(s), picked, mr.sum(torch.tanh(s), over="rows")


@mr.op
def kernel(x: Row["f"], y: Col["f"], w: Col["d"]):
    return mr.sum(torch.exp(-0.1 * (x - y).square().sum()) * w)


@mr.op
def local(q: Row["f"], k: Col["f"], v: Col["d"]):
    seen = (mr.col_index <= mr.row_index) & (mr.col_index > mr.row_index - 40)
    return mr.softmax_mean(torch.where(seen, q @ k * 0.3, -torch.inf), v)


@mr.op
def weighted(q: Row["f"], k: Col["f"], e: mr.Pair):
    return mr.logsumexp(q @ k + e), mr.sum(torch.sin(q @ k) * e, over="rows")


@pytest.fixture
def run(monkeypatch):
    """Calls with ``cols=`` run in kernels that walk the lists, by these plans; nothing is gathered."""
    monkeypatch.setattr(listed_fold, "_PREPARED", BoundedCache(64))

    gather = listed.run

    def gathers(fold, leaves, sizes, inner, walk=None):
        many = all(map(topk.is_large, fold.reductions))  # best, which are selected from gathered pieces
        if inner is eager.run or many:  # or the check of a table's indices, on a CPU
            return gather(fold, leaves, sizes, inner, walk)
        raise AssertionError(f"no kernel over lists: {fold.reductions}")

    @contextlib.contextmanager
    def by(plans=None):
        with monkeypatch.context() as patch, mr.use(engine="triton"), use_plan(plans or {}):
            patch.setattr("monoidreduce.engines.listed.run", gathers)
            yield

    return by


def launches():
    return [one for ready in listed_fold._PREPARED.values() for one in ready.launches]


def softmax(s, times):
    """Logarithm of the total and weights of logits that count ``times``; nothing seen: -inf and 0."""
    top = torch.where(times > 0, s, -torch.inf).amax(-1, keepdim=True).detach()
    top = torch.where(top.isinf(), 0.0, top)
    weight = torch.where(times > 0, (torch.where(times > 0, s, 0.0) - top).exp() * times, 0.0)
    total = weight.sum(-1, keepdim=True)
    seen = torch.where(total > 0, total, 1.0)
    return torch.where(total > 0, seen.log() + top, -torch.inf).squeeze(-1), weight / seen


def dense_several(q, k, label, b, times):
    s = q @ k.mT + b.unsqueeze(-2)
    best, place = torch.where(times > 0, s, -torch.inf).max(-1)
    hit = (torch.arange(k.shape[-2]) == label.unsqueeze(-1)) * times
    return softmax(s, times)[0], best, place, (s * hit).sum(-1), (torch.tanh(s) * times).sum(-2)


def blocks(batch, rows, cols, each, most, twice=False):
    """Random lists of at most so many blocks; ``each``: rows and columns of one."""
    make = torch.Generator().manual_seed(rows)
    lists, count = torch.Size(batch).numel() * -(-rows // each[0]), -(-cols // each[1])
    if twice:
        index = torch.randint(0, count, (lists, most), generator=make)
    else:
        index = torch.stack([torch.randperm(count, generator=make)[:most] for _ in range(lists)])
    sizes = torch.randint(0, index.shape[1] + 1, (lists,), generator=make)
    return mr.blocks(index.view(*batch, -1, index.shape[1]), sizes.view(*batch, -1), rows=each[0], cols=each[1])


def edges(rows, cols, most, long=0):
    make = torch.Generator().manual_seed(rows)
    degree = torch.randint(0, most, (rows,), generator=make)
    degree[1], degree[2] = 0, long or most
    pointer = torch.cat([torch.zeros(1, dtype=torch.long), degree.cumsum(0)])
    return mr.edges(pointer, torch.randint(0, cols, (int(pointer[-1]),), generator=make))


TILES = {"cols": KernelPlan(16, 32), "rows": KernelPlan(16, 16)}
SPLIT = {"cols": KernelPlan(16, 16, splits=3), "rows": KernelPlan(16, 32, splits=2)}
CASES = {
    "tiles divide blocks, the last is cut": (lambda: blocks((), 40, 80, (32, 32), 3), (), (), 40, 80, TILES),
    "whole blocks, named twice, of each batch element": (
        lambda: blocks((2,), 32, 128, (16, 64), 3, True),
        (2,),
        (2,),
        32,
        128,
        TILES,
    ),
    "odd blocks, shared heads": (lambda: blocks((2, 1), 24, 72, (20, 24), 3), (2, 2), (2, 1), 24, 72, TILES),
    "splits": (lambda: blocks((), 24, 160, (20, 40), 4), (), (), 24, 160, SPLIT),
    "one long list": (lambda: blocks((), 16, 150, (16, 16), 20, True), (), (), 16, 150, SPLIT),
    "default plans": (lambda: blocks((2,), 40, 90, (40, 30), 3), (2,), (1,), 40, 90, {}),
    "edges": (lambda: edges(9, 12, 9, 50), (), (), 9, 12, {}),
    "edges, shared heads": (lambda: edges(5, 12, 9), (2,), (1,), 5, 12, {}),
    "edges, heads": (lambda: edges(5, 7, 9), (2,), (2,), 5, 7, {}),
    "split edges": (
        lambda: edges(5, 7, 20),
        (),
        (),
        5,
        7,
        {"cols": KernelPlan(1, 4, splits=2), "rows": KernelPlan(1, 4)},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(run, name):
    make, batch, shared, rows, cols, plans = CASES[name]
    domain, seed = make(), torch.Generator().manual_seed(0)
    times = domain.mask(rows, cols)
    q, k, v, w = (
        torch.randn(*b, n, f, generator=seed, requires_grad=True)
        for b, n, f in ((batch, rows, 16), (shared, cols, 16), (shared, cols, 24), (shared, cols, 5))
    )
    b = torch.randn(*shared, cols, generator=seed, requires_grad=True)
    label = torch.randint(0, cols, (*batch, rows), generator=seed)
    with run(plans):
        y = attention(q, k, v, cols=domain)
        cotangent = torch.randn(y.shape, generator=seed)
        found = [y, *torch.autograd.grad(y, (q, k, v), cotangent)]
        total, best, place, picked, sums = several(q, k, label, b, cols=domain)
        loss = picked.sum() + sums.sin().sum() + torch.where(total.isfinite(), total, 0.0).cos().sum()
        found += [total, best, picked, sums, *torch.autograd.grad(loss, (q, k, b))]
        if "edges" in name or "odd" in name:
            z = kernel(q, k, w, cols=domain)
            found += [z, *torch.autograd.grad(z.sin().sum(), (q, k, w))]
    y = softmax(q @ k.mT * 0.3, times)[1] @ v
    wanted = [y, *torch.autograd.grad(y, (q, k, v), cotangent)]
    total, best, places, picked, sums = dense_several(q, k, label, b, times)
    loss = picked.sum() + sums.sin().sum() + torch.where(total.isfinite(), total, 0.0).cos().sum()
    wanted += [total, best, picked, sums, *torch.autograd.grad(loss, (q, k, b))]
    if "edges" in name or "odd" in name:
        z = (torch.exp(-0.1 * torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square()) * times) @ w
        wanted += [z, *torch.autograd.grad(z.sin().sum(), (q, k, w))]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    seen = best.isfinite()
    assert torch.equal(place[seen], places[seen])


@pytest.mark.parametrize("copied", [False, True], ids=["loaded", "copied by descriptors"])
def test_guessed_maximum_and_delayed_products(run, monkeypatch, copied):
    internals.guess_maximum_for(monkeypatch, torch.float16)  # whose range is narrower than bfloat16's
    monkeypatch.setattr(softmax_kind, "_MOST", 2.0**14)
    monkeypatch.setattr(softmax_kind, "_ABOVE", 0)
    compiler.compile_fold.cache_clear()
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0 if copied else 2**62)
    domain, seed = blocks((2,), 64, 256, (32, 64), 3), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 32, generator=seed).half().requires_grad_() for n in (64, 256, 256))
    far = k.detach().clone()
    far[:, 64:128] *= 9  # a later block's logits lie beyond what a guess can bear
    plans = {w: KernelPlan(16, 32, rendering=Rendering(copied)) for w in ("cols", "rows")}
    for keys in (k, far.requires_grad_()):
        with run(plans):
            y = attention(q, keys, v, cols=domain)
            found = [y, *torch.autograd.grad(y, (q, keys, v), torch.ones_like(y))]
        given = [t.detach().double().requires_grad_() for t in (q, keys, v)]
        y = softmax(given[0] @ given[1].mT * 0.3, domain.mask(64, 256))[1] @ given[2]
        for one, other in zip(found, [y, *torch.autograd.grad(y, given, torch.ones_like(y))], strict=True):
            error = (one.double() - other).norm() / other.norm()
            assert error < 4e-3, error
    assert all(not one.spec.listed.gathered and bool(one.spec.descriptors) == copied for one in launches())
    assert any(one.spec.guess for one in launches())
    compiler.compile_fold.cache_clear()


def paged(page, most, lengths, heads=2, widths=(16, 24)):
    """Keys and values in pages, of which what nobody reads is NaN; the domain."""
    make, sequences = torch.Generator().manual_seed(0), len(lengths)
    count = sequences * most + 2
    table = torch.randperm(count, generator=make)[: sequences * most].view(sequences, most)
    domain = mr.pages(table, lengths, page=page)
    stores = [torch.randn(count, page, heads, f, generator=make) for f in widths]
    unread = domain.mask(1, count * page).sum((0, 1)) == 0
    for store in stores:
        store.view(count * page, heads, -1)[unread] = torch.nan
    return domain, *stores


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows, page, plan", [
    (1, 16, None),
    (3, 64, None),
    (5, 16, KernelPlan(16, 16, splits=3)),
    (4, 32, KernelPlan(16, 32, splits=2)),
])  # fmt: skip
@pytest.mark.parametrize("groups", [1, 4])
def test_pages(run, rows, page, plan, groups):
    lengths = torch.tensor([rows, 128, 77])
    domain, k, v = paged(page, 128 // page, lengths)
    q = torch.randn(3, 2 * groups, rows, 16, generator=torch.Generator().manual_seed(1))
    with run({} if plan is None else {"cols": plan}), torch.no_grad():
        windowed, whole = local(q, k, v, cols=domain), attention(q, k, v, cols=domain)
    keys, values = (domain.gather(t).repeat_interleave(groups, 1) for t in (k, v))
    at, col = (lengths - rows)[:, None] + torch.arange(rows), torch.arange(128)
    near = (col <= at[..., None]) & (col > at[..., None] - 40)
    inside = (col < lengths[:, None])[:, None].expand(-1, rows, -1)
    for found, seen in ((windowed, near), (whole, inside)):
        expected = softmax(q @ keys.mT * 0.3, seen[:, None].long())[1] @ values
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(one.spec.grouped == (groups > 1) for one in launches())
    assert plan is None or all(one.splits == plan.splits for one in launches())


@mr.op
def scaled_by_length(q: Row["f"], k: Col["f"], v: Col["d"], scale: mr.Batch, seed: int):
    s = torch.where(mr.col_index <= mr.row_index, q @ k * scale, -torch.inf)
    return mr.softmax_mean(s, mr.dropout(v, 0.3, seed)), mr.logsumexp(s)


PAGED = {
    "one row": (attention, 1, 16, 1, {}),
    "one row, shared keys, small tiles": (attention, 1, 16, 3, {"rows": KernelPlan(16, 16, splits=2)}),
    "rows of a chunk": (local, 5, 16, 1, {}),
    "tiles divide a sequence's rows": (local, 32, 32, 2, {"rows": KernelPlan(16, 32)}),
    "page wider than a tile": (local, 3, 64, 2, {"rows": KernelPlan(16, 16)}),
    "numbers of sequences, dropout": (scaled_by_length, 5, 16, 2, {}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PAGED)
def test_gradients_of_pages(run, by_address, name):
    """Along the transposed table: shared pages, an empty sequence, NaN in what nobody reads; run, and as replayed."""
    op, rows, page, groups, plans = PAGED[name]
    most = 128 // page
    domain, k, v = paged(page, most, torch.tensor([max(rows, 70), 128, 0, 77]))
    domain.table[1, 0] = domain.table[0, 0]
    unread = domain.mask(1, k.shape[0] * page).sum((0, 1)).view(-1, page) == 0
    seed = torch.Generator().manual_seed(1)
    q = torch.randn(4, rows, 2 * groups, 16, generator=seed).transpose(1, 2)
    more = (torch.rand(4, 2 * groups, generator=seed), 7) if op is scaled_by_length else ()
    found = []
    for kernels in (False, True, True):
        given = [t.detach().clone().requires_grad_() for t in (q, k, v, *more[:1])]
        with run(plans) if kernels else mr.use(engine="eager"):
            y = op(*given, *more[1:], cols=domain)
            y = y if isinstance(y, tuple) else (y,)
            grads = listed_cases.gradients([torch.where(t.isfinite(), t, 0.0) for t in y], given)
        found.append([*y, *grads])
    wanted, *own = found
    for one, again, other in zip(*own, wanted, strict=True):
        assert torch.equal(one, again)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not wanted[len(y) + 1][unread].any() and not own[0][len(y) + 1][unread].any()


@mr.op
def best_of(q: Row["f"], k: Col["f"], v: Col["d"]):
    s = q @ k
    return mr.max(s), mr.topk_mean(s, v, 2), mr.sum(torch.where(mr.col_index == mr.argmin(s), s, 0.0))


def test_gradients_of_the_best_in_pages(run):
    """What they add to a column asks nothing of it but its position."""
    domain, k, v = paged(16, 3, torch.tensor([20, 0, 33]))
    args = torch.randn(3, 2, 1, 16, generator=torch.Generator().manual_seed(1)), k, v
    for one, other in by_engine(run, best_of, args, domain):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_pages_copy_no_pages(run):
    """Sixteen sequences share all pages: nothing that is allocated is larger than the pages are."""
    domain = mr.pages(torch.arange(8).expand(16, 8).contiguous(), torch.full((16,), 120), page=16)
    q = torch.randn(16, 2, 1, 16, requires_grad=True)
    k, v = (torch.randn(8, 16, 2, 16, requires_grad=True) for _ in range(2))
    with run():
        y = attention(q, k, v, cols=domain)
        with LargestResult() as seen:
            torch.autograd.grad(y, (q, k, v), torch.ones_like(y))
    assert 0 < seen.numel <= k.numel()


@mr.op
def near_bias(x: Row["f"], y: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(x @ y + mr.lookup(bias, (mr.row_index - mr.col_index).clamp(-9, 9) + 9), v)


TABLES = {
    "blocks": (lambda: blocks((), 24, 72, (16, 24), 3), (), (), 24, 72),
    "blocks named twice, a table and lists for each head": (
        lambda: blocks((2,), 40, 80, (32, 32), 4, True),
        (3, 2),
        (2,),
        40,
        80,
    ),
    "lists shared by heads, of one row each": (lambda: blocks((), 7, 40, (1, 16), 2), (2,), (), 7, 40),
    "narrow blocks, whole rows": (lambda: blocks((), 20, 50, (32, 8), 4), (2,), (2,), 20, 50),
    "no list has a block": (lambda: mr.blocks.from_mask(torch.zeros(2, 2).bool(), rows=16, cols=16), (), (), 32, 32),
}


@pytest.mark.parametrize("entries, instances", [(1024, 4), (16, 0)], ids=["", "in parts, one instance for all rows"])
@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables_over_blocks(run, monkeypatch, name, entries, instances):
    monkeypatch.setattr(histogram, "MOST_ENTRIES", entries)
    monkeypatch.setattr(histogram, "_INSTANCES", instances)
    make, batch, own, rows, cols = TABLES[name]
    draw = torch.Generator().manual_seed(0)
    shapes = (*batch, rows, 16), (*batch, cols, 16), (*batch, cols, 8), (*own, 19)
    args = [torch.randn(*shape, generator=draw) for shape in shapes]
    for one, other in by_engine(run, near_bias, args, make(), TILES):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 4], ids=["", "a table for each query head"])
@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_of_tables_over_pages(run, heads, rows):
    draw = torch.Generator().manual_seed(0)
    domain, *stores = paged(16, 4, torch.tensor([20, 64, 33]))
    table = torch.randn(*((heads, 19) if heads > 1 else (19,)), generator=draw)
    args = torch.randn(3, 4, rows, 16, generator=draw), *stores, table
    for one, other in by_engine(run, near_bias, args, domain):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@mr.op
def two_tables(x: Row["f"], y: Col["f"], v: Col["d"], near: mr.Table["n"], far: mr.Table["m"]):
    back = mr.row_index - mr.col_index
    seen = (back >= 0) & (back < 12)  # beyond the tables nothing is seen
    s = x @ y + mr.lookup(near, back // 2) + mr.lookup(far, mr.col_index % 5)
    return mr.softmax_mean(torch.where(seen, s, -torch.inf), v), mr.logsumexp(torch.where(seen, s, -torch.inf))


def test_gradients_of_several_tables_behind_a_condition(run):
    """The same bits in every run."""
    domain, draw = blocks((), 48, 48, (16, 16), 3), torch.Generator().manual_seed(0)
    args = [torch.randn(*s, generator=draw) for s in ((2, 48, 16), (2, 48, 16), (2, 48, 8), (6,), (2, 5))]
    pairs = by_engine(run, two_tables, args, domain)
    for (one, other), (again, _) in zip(pairs, by_engine(run, two_tables, args, domain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert torch.equal(one, again)


class LargestResult(TorchDispatchMode):
    """The most numbers of a tensor that an operator returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor))])
        return found


def test_numbers_per_edge(run):
    domain, seed = edges(6, 9, 8), torch.Generator().manual_seed(0)
    owner = torch.repeat_interleave(torch.arange(6), domain.rowptr.diff())
    q, k = torch.randn(6, 16, generator=seed), torch.randn(9, 16, generator=seed)
    e = torch.randn(len(owner), generator=seed)
    with run(), torch.no_grad():
        total, sums = weighted(q, k, e, cols=domain)
    s = (q[owner] * k[domain.index]).sum(-1)
    for i in range(6):
        torch.testing.assert_close(total[i], (s + e)[owner == i].logsumexp(0))  # -inf of an empty row
    expected = torch.zeros(9).index_add(0, domain.index, s.sin() * e)
    torch.testing.assert_close(sums, expected)


def test_lists_without_entries_and_empty_axes(run):
    nothing = mr.edges(torch.zeros(5, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    with run(), torch.no_grad():
        q, k, b = torch.ones(4, 16), torch.ones(3, 16), torch.ones(3)
        total, best, _, picked, sums = several(q, k, torch.zeros(4).long(), b, cols=nothing)
    assert (total == -torch.inf).all() and (best == -torch.inf).all()
    assert not picked.any() and not sums.any() and sums.shape == (3,)
    none = mr.edges(torch.zeros(1, dtype=torch.long), torch.zeros(0, dtype=torch.long))
    with run(), torch.no_grad():
        assert attention(torch.ones(0, 16), torch.ones(3, 16), torch.ones(3, 8), cols=none).shape == (0, 8)


@pytest.mark.parametrize("strict", [False, True])
def test_what_has_no_kernel(monkeypatch, strict):
    """It is said, like any fold that another engine runs, and refused with ``strict``."""
    monkeypatch.setattr("monoidreduce.engines.triton.engine._warned", set())

    @mr.op
    def wide(x: Row["f"], y: Col["f"], v: Col["d"]):
        return mr.reduce(own_monoids.Attention, z=x @ y, v=v).v

    args = torch.ones(6, 16), torch.ones(80, 16), torch.ones(80, 300)
    refused = pytest.raises(mr.EngineError, match="features")
    said = pytest.warns(mr.FallbackWarning, match="features")
    with mr.use(engine="triton", strict=strict), refused if strict else said:
        wide(*args, cols=edges(6, 80, 8))
    monkeypatch.delenv("TRITON_INTERPRET")  # no kernels run here then: lists and sequences too
    for domain in (edges(6, 80, 8), mr.jagged(torch.tensor([0, 6]), torch.tensor([0, 80]))):
        refused = pytest.raises(mr.EngineError, match="on a CPU")
        said = pytest.warns(mr.FallbackWarning, match="on a CPU")
        with mr.use(engine="triton", strict=strict), refused if strict else said:
            attention(*args, cols=domain)


def by_engine(run, op, args, domain, plans=None):
    """Results and gradients by kernels alone, and by the eager engine's gathered pieces."""
    found = []
    for kernels in (False, True):
        given = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
        with run(plans) if kernels else mr.use(engine="eager"):
            results = op(*given, cols=domain)
            results = results if isinstance(results, tuple) else (results,)
            grads = listed_cases.gradients(results, [a for a in given if a.requires_grad])
        found.append([*results, *grads])
    return zip(*found, strict=True)


@mr.op
def graph_mean(t: Row, s: Col, v: Col["d"]):
    return mr.softmax_mean(torch.where(t + s > 0, t + s, 0.2 * (t + s)), v)


@mr.op
def edge_means(x: Row["f"], y: Col["f"], e: mr.Pair, v: Col["d"]):
    s = x @ y + e
    return mr.softmax_mean(s, v), mr.sum(torch.sin(s), over="rows")


@mr.op
def extremes(x: Row["f"], y: Col["f"]):
    s = x @ y
    return mr.max(s), mr.topk(s, 3)[0], mr.min(s, over="rows")


@mr.op
def relative(x: Row["f"], y: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(x @ y + mr.lookup(bias, mr.row_index - mr.col_index + 11), v)


@mr.op
def best_edges(x: Row["f"], y: Col["f"]):
    s = x @ y
    return mr.max(s), mr.argmax(s), mr.argmin(s), mr.max(s, over="rows")


@mr.op
def best_three(x: Row["f"], y: Col["f"]):
    return mr.topk(x @ y, 3).values, mr.topk(x @ y, 3, over="rows").indices


@mr.op
def own_monoid(x: Row["f"], y: Col["f"]):
    s = (x @ y).abs()
    return mr.reduce(own_monoids.Norm, n=s).n, mr.reduce(own_monoids.Norm, over="rows", n=s).n


ONE_LIST = {"cols": KernelPlan(1, 16), "rows": KernelPlan(1, 16)}


@pytest.mark.parametrize("batch, plans", [((2,), {}), ((), ONE_LIST)], ids=["several in a tile", "one"])
def test_long_lists(run, monkeypatch, batch, plans):
    """Lists of more than two windows are folded window by window, in both directions, and combined."""
    monkeypatch.setattr(listed_launch, "LEAST_WINDOW", 4)
    monkeypatch.setattr(listed_launch, "_TIMES_AVERAGE", 0)
    monkeypatch.setattr(listed_fold, "UNEVEN_WAVES", 1)  # few lists are all split alike
    domain, make = edges(21, 5, 4, 57), torch.Generator().manual_seed(0)
    count = len(domain.index)
    draw = lambda *shape: torch.randn(*batch, *shape, generator=make)
    calls = [
        (graph_mean, (draw(21), draw(5), draw(5, 24))),
        (edge_means, (draw(21, 16), draw(5, 16), draw(count), draw(5, 12))),
        *((op, (draw(21, 16), draw(5, 16))) for op in (best_edges, best_three, own_monoid)),
    ]
    for k, (op, args) in enumerate(calls):
        for one, other in by_engine(run, op, args, domain, plans):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        prepared = listed_fold._PREPARED.values()
        assert all(long is not None and long.windows.tiles > 8 for ready in prepared for long in ready.long)
        if k == 1:  # sums and softmaxes of products and numbers
            assert {one.spec.listed.each for ready in prepared for one in ready.launches} == {not plans}


@pytest.mark.parametrize("make, rows, cols, batch", [
    (lambda: edges(9, 12, 5, 20), 9, 12, ()),
    (lambda: blocks((), 24, 72, (20, 24), 3, True), 24, 72, ()),
    (lambda: blocks((2,), 32, 128, (16, 64), 3, True), 32, 128, (2,)),
], ids=["edges", "narrow blocks", "blocks"])  # fmt: skip
def test_gradients_of_extremes(run, make, rows, cols, batch):
    """Of equal entries of a list, the first has the gradient."""
    x, y = (torch.randn(*batch, n, 16, generator=torch.Generator().manual_seed(n)) for n in (rows, cols))
    for one, other in by_engine(run, extremes, (x, y), make()):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (2,), (1,)], ids=["", "per head", "shared by heads"])
def test_gradients_of_numbers_per_edge(run, shape):
    """The last edge is in no list: its number has no gradient."""
    domain, make = edges(6, 9, 8), torch.Generator().manual_seed(0)
    domain = mr.edges(domain.rowptr, torch.cat([domain.index, domain.index[:1]]))
    heads, count = (2,) if shape else (), len(domain.index)
    args = [torch.randn(*s, generator=make) for s in ((*heads, 6, 16), (*heads, 9, 16), (*shape, count), (9, 12))]
    for one, other in by_engine(run, edge_means, args, domain):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", [edge_means, extremes], ids=["numbers", "extremes"])
def test_lists_of_each_batch_element(run, op):
    pointer = torch.tensor([0, 2, 5, 5]).expand(2, -1)
    domain = mr.edges(pointer, torch.tensor([[0, 1, 2, 3, 0], [1, 1, 0, 3, 2]]))
    make = torch.Generator().manual_seed(0)
    args = [torch.randn(*s, generator=make) for s in ((2, 3, 16), (2, 4, 16), (2, 5), (4, 12))]
    for one, other in by_engine(run, op, args if op is edge_means else args[:2], domain):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_tables(run):
    domain, make = edges(6, 12, 8), torch.Generator().manual_seed(0)
    args = [torch.randn(*s, generator=make) for s in ((6, 16), (12, 16), (12, 8), (20,))]
    for one, other in by_engine(run, relative, args, domain):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@mr.op
def shifted(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index + 100, q @ k * 0.1, -torch.inf), v)


@mr.op
def plain(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.1, v)


@pytest.mark.parametrize("op", [plain, shifted], ids=["plain", "with a condition"])
def test_warp_specialised_kernels(run, monkeypatch, op):
    """Forward, row and column gradients on the simulator; a list is empty, and one names a block twice."""
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0)
    index = torch.tensor([[2, 0], [1, 1], [1, 0]])
    domain, make = mr.blocks(index, torch.tensor([2, 2, 0]), rows=128, cols=128), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 128, generator=make).bfloat16().requires_grad_() for n in (384, 384, 384))
    with run():
        y = op(q, k, v, cols=domain)
        found = [y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))]
    given = [t.detach().double().requires_grad_() for t in (q, k, v)]
    times = domain.mask(384, 384)
    if op is shifted:
        times = times * (torch.arange(384) <= torch.arange(384)[:, None] + 100)
    y = softmax(given[0] @ given[1].mT * 0.1, times)[1] @ given[2]
    for one, other in zip(found, [y, *torch.autograd.grad(y, given, torch.ones_like(y))], strict=True):
        assert (one.double() - other).norm() < 6e-3 * other.norm()
    assert len(seen) == 3 and all(call.kernel.hand_scheduled for call in seen)


def test_lists_are_not_kept_alive(run):
    """Lists of one step are freed with it: sampled negatives are new ones in every step."""
    q, k = torch.randn(4, 16), torch.randn(9, 16)
    with run(), torch.no_grad():
        domain = edges(4, 9, 5)
        held = weakref.ref(domain.index)
        weighted(q, k, torch.zeros(len(domain.index)), cols=domain)
        del domain
        gc.collect()
    assert held() is None


@pytest.mark.parametrize("seed", [4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 3, 6, 7, 9, 10))])
def test_random_lists(seed):
    """Of all kinds of reductions, in float64; gradients of maxima are gathered."""
    listed_cases.check_random_lists(seed, "triton")


@mr.op
def scaled_weights(q: Row["f"], k: Col["f"], v: Col["d"], factor: float):
    return mr.softmax_mean(factor * (q @ k), v)


def test_numbers_in_float64(run):
    """A Python number is a tensor in a kernel of float64."""
    domain, make = edges(5, 7, 6), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=make, dtype=torch.float64) for n in (5, 7, 7))
    with run(), torch.no_grad():
        found = scaled_weights(q, k, v, 0.3, cols=domain)
    torch.testing.assert_close(found, softmax(0.3 * (q @ k.mT), domain.mask(5, 7))[1] @ v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.1, -torch.inf), v)


@mr.op
def near(q: Row["f"], k: Col["f"], v: Col["d"]):
    seen = (mr.col_index <= mr.row_index) & (mr.col_index > mr.row_index - 70)
    return mr.softmax_mean(torch.where(seen, q @ k * 0.1, -torch.inf), v)


@pytest.mark.parametrize("op, page", [(causal, 64), (plain, 64), (near, 64), (causal, 128)])
def test_warp_specialised_pages(run, monkeypatch, op, page):
    """A chunk of prompts: the last page of a sequence ends somewhere, one has just begun, one is empty."""
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0)
    lengths, rows, make = torch.tensor([300, 150, 256, 0]), 150, torch.Generator().manual_seed(1)
    domain, *stores = paged(page, 384 // page, lengths, widths=(128, 128))
    k, v = (t.bfloat16() for t in stores)
    q = torch.randn(4, 4, rows, 128, generator=make).bfloat16()
    with run(), torch.no_grad():
        found = op(q, k, v, cols=domain)
    keys, values = (domain.gather(t.double()).repeat_interleave(2, 1) for t in (k, v))
    at, col = (lengths - rows)[:, None, None] + torch.arange(rows)[:, None], torch.arange(keys.shape[-2])
    inside = (col < lengths[:, None, None]).expand(-1, rows, -1)
    shown = {causal: col <= at, near: (col <= at) & (col > at - 70), plain: inside}[op] & inside
    expected = softmax(q.double() @ keys.mT * 0.1, shown[:, None].long())[1] @ values
    assert (found.double() - expected).norm() < 6e-3 * expected.norm()
    assert [call.kernel.hand_scheduled for call in seen] == [True]


@mr.op
def masked(q: Row["f"], k: Col["f"], v: Col["d"], e: mr.Pair):
    s = torch.where(e > 0, q @ k, -torch.inf)
    return mr.softmax_mean(s, v), mr.max(s), mr.argmax(s), mr.sum(torch.sin(q @ k) * e, over="rows")


PAIRS_OVER = {
    "tiles divide blocks": (lambda: blocks((), 40, 80, (32, 32), 3), (2,), 40, 80),
    "blocks named twice, lists for each element": (lambda: blocks((2,), 40, 80, (32, 16), 4, True), (2,), 40, 80),
    "narrow blocks": (lambda: blocks((), 20, 50, (16, 4), 5, True), (2,), 20, 50),
    "one row each": (lambda: blocks((), 7, 40, (1, 16), 2), (2,), 7, 40),
    "single pairs": (lambda: blocks((), 9, 12, (1, 1), 5), (), 9, 12),
}
PAIR_FORMS = {
    "of each element": lambda draw, batch, m, n: draw(*batch, m, n),
    "for all, transposed": lambda draw, batch, m, n: draw(n, m).mT,
    "one column for all": lambda draw, batch, m, n: draw(*batch, m, 1),
    "one row for all": lambda draw, batch, m, n: draw(n).expand(m, n),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", PAIR_FORMS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.int32], ids=str)
@pytest.mark.parametrize("name", PAIRS_OVER)
def test_numbers_per_pair_over_blocks(run, name, kind, form):
    """They are of the whole axes; all gradients are kernels too."""
    make, batch, rows, cols = PAIRS_OVER[name]
    chance = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=chance)
    e = (PAIR_FORMS[form](draw, batch, rows, cols) * 2).to(kind)
    q, k, v = draw(*batch, rows, 16), draw(*batch, cols, 16), draw(*batch, cols, 8)
    found, domain = [], make()
    for kernels in (False, True):
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in (q, k, v, e)]
        with run(TILES) if kernels else mr.use(engine="reference"):
            results = masked(*given, cols=domain)
            found.append([*results, *listed_cases.gradients(results, [t for t in given if t.requires_grad])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@mr.op
def biased(q: Row["f"], k: Col["f"], e: mr.Pair):
    s = q @ k + e
    return mr.logsumexp(s), mr.max(s), mr.topk(s, 2).values, mr.sum(torch.sin(s) * e)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", PAIR_FORMS)
@pytest.mark.parametrize("name", ["blocks named twice, lists for each element", "narrow blocks", "single pairs"])
def test_gradients_of_numbers_per_pair_over_blocks(run, name, form):
    """What goes to the first of equal pairs alone goes there once; the same bits in every run."""
    make, batch, rows, cols = PAIRS_OVER[name]
    chance, domain = torch.Generator().manual_seed(0), make()
    draw = lambda *shape: torch.randn(*shape, generator=chance)
    args = draw(*batch, rows, 16), draw(*batch, cols, 16), PAIR_FORMS[form](draw, batch, rows, cols)
    pairs = [*by_engine(run, biased, args, domain, TILES)]
    for (one, other), (again, _) in zip(pairs, by_engine(run, biased, args, domain, TILES), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert torch.equal(one, again)


def test_gradients_of_numbers_per_pair_hold_one_matrix(run):
    """A bias that eight heads share has one gradient of its size: their gradients are added one after the other."""
    domain, make = mr.blocks(torch.tensor([[0, 2], [1, 1]]), rows=16, cols=32), torch.Generator().manual_seed(0)
    q, k, e = (torch.randn(*s, generator=make).requires_grad_() for s in ((8, 32, 2), (8, 96, 2), (32, 96)))
    with run():
        total = weighted(q, k, e, cols=domain)[0]
        with LargestResult() as seen:
            (found,) = torch.autograd.grad(total.sum(), e)
    assert e.numel() == found.numel() >= seen.numel
    logits = (q @ k.mT + e).double()
    weight = softmax(logits, domain.mask(32, 96))[1]
    torch.testing.assert_close(found.double(), weight.sum(0), rtol=1e-4, atol=1e-5)
