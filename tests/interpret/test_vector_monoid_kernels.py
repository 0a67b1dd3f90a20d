"""Monoids with vector fields are kernels: values and gradients, whole, split, over rows, masked, in three types."""

import functools

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common.bounded_cache import BoundedCache
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.kernels import listed_fold, listed_launch
from monoidreduce.engines.triton.launch import driver
from tests.support import own_monoids as own

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("op", ["attention", "pooled"])
def test_kernels(op, splits):
    args, plan = own.problem(19, 53), KernelPlan(16, 16, 4, 1, splits)
    expected = own.with_gradients(lambda *given: own.plain(op, *given), args)
    with mr.use(engine="triton"), use_plan({"cols": plan, "rows": plan}):
        found = own.with_gradients(getattr(own, op), args)
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right)


def test_over_rows_with_masks_and_batches():
    """Folded over rows, hidden pairs, vectors of rows times numbers of pairs, a letter of a full block."""
    gen = torch.Generator().manual_seed(1)
    x, v, y = (torch.randn(shape, generator=gen) for shape in ((2, 37, 5), (2, 37, 16), (21, 5)))

    @mr.op
    def seen(x: mr.Row["d"], v: mr.Row["e"], y: mr.Col["d"]):
        near = mr.col_index <= mr.row_index
        found = mr.reduce(own.Pooled, s=torch.where(near, x @ y, 0.0) * v, q=0.0, over="rows")
        return found.s, found.q

    plan = KernelPlan(16, 16, 4, 1)
    results = []
    for engine in ("triton", "reference"):
        with mr.use(engine=engine), use_plan({"cols": plan, "rows": plan}):
            results.append(own.with_gradients(seen, (x, v, y)))
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-3)


@mr.op
def weighed(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"], u: mr.Row["e"]):
    s = x @ y
    kept = mr.reduce(own.Attention, z=s, v=u)
    found = mr.reduce(own.Attention, z=s, v=v * u), kept, mr.reduce(own.Attention, z=s, v=u * s, over="rows")
    return tuple(t for one in found for t in (one.z, one.v))


@mr.op
def weighed_by_softmaxes(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"], u: mr.Row["e"]):
    s = x @ y
    z, means = mr.logsumexp(s), (mr.softmax_mean(s, v * u), mr.softmax_mean(s, u))
    return z, means[0], z, means[1], mr.logsumexp(s, over="rows"), mr.softmax_mean(s, u * s, over="rows")


LISTS = {
    "blocks": lambda: mr.blocks(torch.tensor([[0, 2, 2], [1, 3, 0], [0, 0, 0]]), torch.tensor([3, 2, 0]), 16, 16),
    "one row each": lambda: mr.blocks(torch.randint(0, 4, (37, 3)), rows=1, cols=16),
    "edges": lambda: mr.edges(torch.arange(38) * 3 - torch.tensor([*[0] * 5, *[3] * 33]), torch.randint(0, 53, (108,))),
    "one long list": lambda: mr.edges(torch.tensor([*[0] * 30, *[90] * 8]), torch.randint(0, 53, (90,))),
}


@pytest.mark.parametrize("name", LISTS)
def test_over_lists(name, monkeypatch):
    """Columns named again, empty lists and rows, lists that are split; kept vectors, and folds over rows."""
    monkeypatch.setattr(listed_fold, "_PREPARED", BoundedCache(64))
    monkeypatch.setattr(listed_launch, "LEAST_WINDOW", 4)
    monkeypatch.setattr(listed_launch, "_TIMES_AVERAGE", 0)
    monkeypatch.setattr(listed_fold, "UNEVEN_WAVES", 1)
    gen, domain = torch.Generator().manual_seed(1), LISTS[name]()
    args = [torch.randn(n, f, generator=gen) for n, f in ((37, 5), (53, 5), (53, 12), (37, 12))]
    with mr.use(engine="triton", strict=True):
        found = own.with_gradients(functools.partial(weighed, cols=domain), args)
    with mr.use(engine="reference"):
        twin = functools.partial(weighed_by_softmaxes, cols=domain)
        truth = own.with_gradients(twin, [a.double() for a in args])
    for got, right in zip(found, truth, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-4)
    launches = [one for ready in listed_fold._PREPARED.values() for one in ready.long if one is not None]
    assert launches or name in ("blocks", "one row each")


@pytest.mark.parametrize(("f", "d"), [(5, 80), (100, 200)])
def test_wide_vectors(f, d):
    gen = torch.Generator().manual_seed(2)
    args = [torch.randn(shape, generator=gen) for shape in ((5, f), (37, f), (37, d))]
    results = []
    for engine in ("triton", "reference"):
        with mr.use(engine=engine):
            results.append(own.with_gradients(own.attention, args))
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "small"), [(300, True), (80, False)])
def test_more_features_than_registers_hold_fall_back(width, small, monkeypatch):
    monkeypatch.setattr(driver, "has_small_products", lambda: small)
    args = own.problem(5, 9)
    wide = torch.randn(9, width, dtype=torch.float64)
    with mr.use(engine="triton"), pytest.warns(mr.errors.FallbackWarning, match="features"):
        found = own.attention(args[0], args[1], wide)[0]
    torch.testing.assert_close(found, (args[0] @ args[1].T).softmax(1) @ wide)
