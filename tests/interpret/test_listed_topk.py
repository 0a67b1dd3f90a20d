"""Top-k of more than a kernel keeps, over lists of columns: round after round, against sorted lists of the pairs."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.kernels import listed_fold, topk
from monoidreduce.engines.triton.schedules.kernel_plan import KernelPlan, use_plan
from tests.interpret.test_listed_kernels import blocks, edges, paged, run  # noqa: F401

K = 10


@mr.op
def best(x: Row["f"], y: Col["f"], b: Col):
    return mr.topk(x @ y + b, K)


@mr.op
def least(x: Row["f"], y: Col["f"], b: Col):
    return mr.topk(x @ y + b, K, largest=False)


@mr.op
def best_rows(x: Row["f"], y: Col["f"], b: Col):
    return mr.topk(x @ y + b, K, over="rows")


@mr.op
def whole_numbers(x: Row, y: Col):
    return mr.topk((x * y) % 7 - 3, K)


@pytest.fixture(autouse=True)
def few_in_registers(monkeypatch):
    """A launch keeps four, so that ten take three; and nothing is gathered."""
    monkeypatch.setattr(topk, "MOST_IN_REGISTERS", 4)
    gather_from(monkeypatch, 99)


def gather_from(monkeypatch, rounds):
    """Lists that would take more launches are gathered."""
    for name in ("_MOST_ROUNDS", "_MOST_LONE_ROUNDS"):
        monkeypatch.setattr(topk, name, rounds)


def sort_pairs(s, times, largest):
    """Numbers and places ``[kept, K]`` of the best pairs of a matrix that counts so many times each."""
    nothing = -math.inf if largest else math.inf
    values, places = torch.full((len(s), K), nothing, dtype=s.dtype), torch.full((len(s), K), -1)
    for i, (numbers, own) in enumerate(zip(s.detach(), times.long(), strict=True)):
        absent = [(nothing, -1)] * max(0, len(own) - int(own.sum()))  # of the whole axis: others are infinities
        pairs = [(float(v), j) for j, v in enumerate(numbers) for _ in range(own[j])] + absent
        order = lambda p: (math.isnan(p[0]) != largest, -p[0] if largest else p[0], p[1])
        for k, (v, j) in enumerate(sorted(pairs, key=order)[:K]):
            values[i, k], places[i, k] = v, -1 if v == nothing else j
    return values, places


def draw(rows, cols, seed):
    """Small whole numbers, so that there are many ties, and infinities and NaN among the columns' own."""
    make = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(-1, 2, (n, 16), generator=make).float() for n in (rows, cols))
    b = torch.zeros(cols)
    b[1], b[3], b[5], b[8] = math.nan, -math.inf, math.inf, math.nan
    return x, y, b


DOMAINS = {
    "blocks": (lambda: blocks((), 20, 40, (16, 8), 6, True), 20, 40, {"cols": KernelPlan(16, 16)}),
    "blocks that tiles divide": (lambda: blocks((), 20, 40, (16, 16), 4, True), 20, 40, {"cols": KernelPlan(16, 16)}),
    "edges": (lambda: edges(12, 12, 9, 40), 12, 12, {"cols": KernelPlan(1, 16)}),
}


@pytest.mark.parametrize("rounds", [99, 2], ids=["launch after launch", "gathered"])
@pytest.mark.parametrize("op", [best, least, best_rows], ids=["largest", "smallest", "over rows"])
@pytest.mark.parametrize("name", DOMAINS)
def test_values_places_and_gradients(run, name, op, rounds, monkeypatch):  # noqa: F811
    """Empty and short lists, columns named again, ties, infinities and NaN."""
    gather_from(monkeypatch, rounds)
    make, rows, cols, plans = DOMAINS[name]
    domain, args = make(), draw(rows, cols, 0)
    given = [t.clone().requires_grad_() for t in args]
    weight = torch.randn(rows if op is not best_rows else cols, K, generator=torch.Generator().manual_seed(1))
    with run(plans):
        values, places = op(*given, cols=domain)
        finite = values.isfinite()
        grads = torch.autograd.grad((torch.where(finite, values, 0.0) * weight).sum(), given)
    twin = [t.double().requires_grad_() for t in args]
    s, times = twin[0] @ twin[1].T + twin[2], domain.mask(rows, cols)
    s, times = (s, times) if op is not best_rows else (s.T, times.T)
    expected, at = sort_pairs(s, times, op is not least)
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(places, at)
    own = torch.where(finite, s.gather(1, at.clamp(min=0)), 0.0)
    wanted = torch.autograd.grad((own * weight).sum(), twin)
    for one, other in zip(grads, wanted, strict=True):
        finite = other.isfinite()  # an infinite number's gradient by the dense product is 0 × inf
        torch.testing.assert_close(one.double()[finite], other[finite], rtol=1e-5, atol=1e-5)


def test_whole_numbers(run):  # noqa: F811
    domain, make = edges(5, 12, 9, 30), torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 9, (n,), generator=make) for n in (5, 12))
    with run():
        values, places = whole_numbers(x, y, cols=domain)
    expected, at = sort_pairs(((x[:, None] * y) % 7 - 3).double(), domain.mask(5, 12), True)
    seen = at >= 0
    assert torch.equal(values[seen], expected[seen].long()) and torch.equal(places, at)


@mr.op
def causal(x: Row["f"], y: Col["f"]):
    return mr.topk(torch.where(mr.col_index <= mr.row_index, x @ y, math.inf), K, largest=False)


def test_pages_behind_a_condition(run):  # noqa: F811
    """Infinities of tiles that are skipped stand before NaN, however many launches there are."""
    domain, k, _ = paged(16, 3, torch.tensor([24, 6, 41]))
    make = torch.Generator().manual_seed(2)
    k = torch.randint(-1, 2, k.shape, generator=make).float()
    q = torch.randint(-1, 2, (3, 2, 5, 16), generator=make).float()
    k.view(-1, 2, 16)[int(domain.table[1, 0]) * 16 + 1] = math.nan  # position 1 of the shortest sequence
    with run({"cols": KernelPlan(16, 16)}), torch.no_grad():
        values, places = causal(q, k, cols=domain)
    for s in range(3):
        length = int(domain.lengths[s])
        keys = domain.gather(k)[s, :, :length]
        at, col = length - 5 + torch.arange(5), torch.arange(length)
        numbers = torch.where(col <= at[:, None], (q[s].unsqueeze(2) * keys.unsqueeze(1)).sum(-1), math.inf)
        for head in range(2):
            whole = torch.full((5, 128 * 16), math.inf)
            whole[:, :length] = numbers[head]
            expected, place = sort_pairs(whole, torch.ones(whole.shape), False)
            assert torch.equal(values[s, head].nan_to_num(7.5), expected.nan_to_num(7.5))
            assert torch.equal(places[s, head], place)


def test_one_kernel_and_little_memory(run):  # noqa: F811
    """All launches are of one kernel, and nothing is allocated that grows with the lists."""
    domain, make = mr.blocks(torch.arange(32).expand(2, 32), rows=16, cols=16), torch.Generator().manual_seed(0)
    x, y, b = torch.randn(32, 16, generator=make), torch.randn(512, 16, generator=make), torch.zeros(512)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor))
            return found

    with run({"cols": KernelPlan(16, 64)}), torch.no_grad():
        with Sizes():
            values, places = best(x, y, b, cols=domain)
        launches = [one for ready in listed_fold._PREPARED.values() for one in ready.launches]
    (prepared,) = {id(one.kernel): one for one in launches}.values()
    assert max(sizes) <= y.numel() < 32 * 512
    assert "next_best" in prepared.kernel.text and prepared.kernel is compiler.compile_fold(prepared.spec)
    truth = (x.double() @ y.double().T).topk(K)
    assert torch.equal(places, truth.indices)
    torch.testing.assert_close(values.double(), truth.values, rtol=1e-5, atol=1e-5)


@mr.op
def many_best(x: Row["f"], y: Col["f"]):
    return mr.topk(x @ y, 65)


@mr.op
def mean_of_best(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.topk_mean(x @ y, v, 65)


def test_65_of_more(run, monkeypatch):  # noqa: F811
    """At the size that kernels keep, with strict."""
    monkeypatch.undo()
    domain, make = edges(3, 70, 80, 90), torch.Generator().manual_seed(0)
    x, y, v = (torch.randn(n, 16, generator=make) for n in (3, 70, 70))
    found = []
    for options in (dict(engine="triton", strict=True), dict(engine="reference")):
        with mr.use(**options), use_plan({"cols": KernelPlan(1, 32)}), torch.no_grad():
            found.append([*many_best(x, y, cols=domain), mean_of_best(x, y, v, cols=domain)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
