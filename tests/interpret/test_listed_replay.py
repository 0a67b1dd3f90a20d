"""Calls over lists are recorded and replayed: with other tensors, other lists of the same form, and lists that change
in place."""

import functools
import sys

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common.bounded_cache import BoundedCache
from monoidreduce.engines.triton.kernels import listed_fold, listed_launch

attention_layer = sys.modules["monoidreduce.ops.attention"]

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.3, v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.3, -torch.inf), v)


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"):
        yield


def drawn(seed, *shapes):
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=make).requires_grad_() for s in shapes]


def expected(op, args, domain, cotangent):
    given = [t.detach().clone().requires_grad_() for t in args]
    with mr.use(engine="reference"):
        y = op(*given, cols=domain)
        return [y, *torch.autograd.grad(y, given, cotangent)]


DOMAINS = {
    "blocks": [
        mr.blocks(torch.tensor([[2, 0], [1, 1], [0, 3]]), torch.tensor(n), 16, 16) for n in ([2, 2, 0], [0, 1, 2])
    ],
    "edges": [mr.edges(torch.tensor([0, n, 5, *[9] * 46]), torch.arange(9) * n) for n in (1, 4)],
    "jagged": [mr.jagged(torch.tensor([0, n, 40])) for n in (7, 20)],
}


@pytest.mark.parametrize("name", DOMAINS)
def test_forward_and_backward(by_address, name):
    counts = []
    for seed, domain in enumerate((*DOMAINS[name], DOMAINS[name][0])):
        args = drawn(seed, *([(40, 16)] * 3 if name == "jagged" else [(48, 16), (64, 16), (64, 8)]))
        y = attention(*args, cols=domain)
        found = [y, *torch.autograd.grad(y, args, torch.cos(y.detach()))]
        for one, other in zip(found, expected(attention, args, domain, torch.cos(y.detach())), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
        counts.append(len(by_address))
    assert counts[2] - counts[1] == counts[1] - counts[0] > 2  # all kernels of a call


@mr.op
def weighted(q: Row["f"], k: Col["f"], v: Col["d"], e: mr.Pair):
    return mr.softmax_mean(q @ k * 0.3 + e, v)


@pytest.mark.parametrize("numbers", [False, True], ids=["split lists", "split lists with numbers of edges"])
def test_split_lists_and_numbers_of_edges(monkeypatch, by_address, numbers):
    """A list of 30 is split into windows of four; the last three edges are in no list, and have no gradient."""
    monkeypatch.setattr(listed_fold, "UNEVEN_WAVES", 0)
    monkeypatch.setattr(listed_fold, "_PREPARED", BoundedCache(64))
    monkeypatch.setattr(listed_launch, "LEAST_WINDOW", 4)
    monkeypatch.setattr(listed_launch, "_TIMES_AVERAGE", 1)
    counts = []
    for seed in range(3):
        make = torch.Generator().manual_seed(seed)
        rowptr, index = torch.tensor([0, 2, 32, 32, *[36] * 20]), torch.randperm(64, generator=make)[:39]
        domain, args = mr.edges(rowptr, index), drawn(seed, (23, 16), (64, 16), (64, 8), (39,))[: 3 + numbers]
        op = weighted if numbers else attention
        y = op(*args, cols=domain)
        found = [y, *torch.autograd.grad(y, args, torch.cos(y.detach()))]
        for one, other in zip(found, expected(op, args, domain, torch.cos(y.detach())), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
        assert not numbers or not found[-1][36:].any()
        counts.append(len(by_address))
    assert counts[2] - counts[1] == counts[1] - counts[0] > 8  # all kernels of a call, of split lists three each
    assert any(long is not None for ready in listed_fold._PREPARED.values() for long in ready.long)


@pytest.mark.parametrize("groups", [1, 2])
def test_decoding(by_address, groups):
    """Lengths grow in place, pages are other ones; the forward is one recorded program."""
    lengths, make = torch.tensor([20, 33]), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 8, 16, 2, 16, generator=make)
    table = torch.arange(8).view(2, 4)
    for step in range(3):
        domain = mr.pages(table.flip(1) if step == 2 else table, lengths, page=16)
        q = torch.randn(2, 2 * groups, 1, 16, generator=make)
        before = len(by_address)
        with torch.no_grad():
            found = causal(q, k, v, cols=domain)
        assert len(by_address) > before
        with mr.use(engine="reference"), torch.no_grad():
            torch.testing.assert_close(found, causal(q, k, v, cols=domain), rtol=1e-5, atol=1e-5)
        lengths += 7


@mr.op
def scaled_causal(q: Row["f"], k: Col["f"], v: Col["d"], scale: mr.Batch):
    s = torch.where(mr.col_index <= mr.row_index, q @ k * scale, -torch.inf)
    return mr.softmax_mean(s, v)


@pytest.mark.parametrize("heads, rows", [(1, 1), (2, 1), (2, 5)])
def test_gradients_of_pages(monkeypatch, by_address, heads, rows):
    """Rows of all sequences are copied by kernels; only the first calls run the engine."""
    asked, counts, make = [], [], torch.Generator().manual_seed(0)
    run = listed_fold.PagedFold.__call__
    monkeypatch.setattr(listed_fold.PagedFold, "__call__", lambda *given: asked.append(1) or run(*given))
    table, lengths = torch.tensor([[3, 1, 0], [3, 2, 5]]), torch.tensor([20, 41])
    for step in range(4):
        domain = mr.pages(table.flip(1) if step == 2 else table, lengths, page=16)
        shapes = (2, 2 * heads, rows, 16), (6, 16, heads, 16), (6, 16, heads, 8)
        args, scale = [torch.randn(s, generator=make).requires_grad_() for s in shapes], torch.rand(2, 2 * heads)
        y = scaled_causal(*args, scale, cols=domain)
        found = [y, *torch.autograd.grad(y, args, torch.cos(y.detach()))]
        scaled = functools.partial(scaled_causal, scale=scale)
        for one, other in zip(found, expected(scaled, args, domain, torch.cos(y.detach())), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
        counts.append((len(asked), len(by_address)))
        lengths += 1
    *_, (some, early), (last, late) = counts
    assert 0 < some == last and late - early > 2 + (heads > 1)  # all kernels, and those that copy


def test_lists_change_in_place(by_address):
    index = torch.tensor([[0], [1], [2]])
    domain, args = mr.blocks(index, rows=16, cols=16), drawn(0, (48, 16), (64, 16), (64, 8))
    for new in (0, 3, 2):
        index[1] = new
        with torch.no_grad():
            found = attention(*args, cols=domain)
            with mr.use(engine="reference"):
                torch.testing.assert_close(found, attention(*args, cols=domain), rtol=1e-5, atol=1e-5)
    assert by_address


@pytest.mark.parametrize("name", ["blocks", "jagged", "pages"])
def test_layers(monkeypatch, by_address, name):
    """A layer's own Python is replayed too: with other tensors and other lists of the same kind, and not where lists
    are looked at."""
    calls = []
    monkeypatch.setattr("monoidreduce.domains.base.can_inspect", lambda *given: False)  # as on a GPU
    check = attention_layer._check_domain
    monkeypatch.setattr(attention_layer, "_check_domain", lambda *a, **k: calls.append(1) or check(*a, **k))
    make = torch.Generator().manual_seed(0)
    for step in range(5):
        if name == "pages":
            domain = mr.pages(torch.randperm(8, generator=make).view(2, 4), torch.tensor([20 + step, 33]), page=16)
            q, k, v = (torch.randn(s, generator=make) for s in ((2, 4, 1, 16), (8, 16, 2, 16), (8, 16, 2, 16)))
        else:
            index = torch.randint(0, 3, (3, 2), generator=make)
            domain = mr.jagged(torch.tensor([0, 9 + step, 48])) if name == "jagged" else mr.blocks(index, None, 16, 16)
            q, k, v = (torch.randn(2, 48, 16, generator=make).requires_grad_() for _ in range(3))
        with mr.use(check=step == 4):
            found = mr.ops.attention(q, k, v, cols=domain)
            grads = () if name == "pages" else torch.autograd.grad(found, (q, k, v), torch.ones_like(found))
        with mr.use(engine="reference", check=True):
            wanted = mr.ops.attention(q, k, v, cols=domain)
            right = () if name == "pages" else torch.autograd.grad(wanted, (q, k, v), torch.ones_like(found))
        calls.pop()
        for one, other in zip((found, *grads), (wanted, *right), strict=True):
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)
    assert len(calls) == 3  # the first is called, the second recorded, the last one checked
