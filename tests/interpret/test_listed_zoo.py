"""Some layers of the zoo over each domain by kernels, against the dense call with the same mask."""

import itertools

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support import listed_cases
from tests.support.comparison import Result, assert_equal, run
from tests.support.layers import BY_NAME
from tests.support.masked_twin import Case, make_domain

LAYERS = ("causal_attention", "tsallis_entropy", "pooling")
KINDS = ("edges", "blocks", "jagged", "pages")
# second passes read what the first gave a row without columns: -inf, and NaN
SEVERAL_PASSES = [("jensen_shannon", "jagged"), ("normalized_mlp", "jagged"), ("normalized_mlp", "blocks")]


@mr.op
def quotients(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    z, total = mr.logsumexp(s), mr.sum(torch.exp(s))
    return mr.sum(torch.exp(s - z) * v), mr.sum(torch.exp(s) / total * v), torch.where(z > -9, mr.sum(s * z), 0.0)


@pytest.mark.parametrize("engine", ["triton", "eager", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_rows_without_columns(kind, engine):
    """Second passes divide by sums of nothing: 1 / 0 and -inf are factors of sums that are 0."""
    (domain, rows, cols), draw = make_domain(kind), torch.Generator().manual_seed(0)
    shapes = ((4, 2, rows, 4), (8, 4, 2, 4)) if kind == "pages" else ((rows, 4), (cols, 4))
    args, found = [torch.randn(shapes[k], generator=draw) for k in (0, 1, 1)], []
    for name, dtype in ((engine, torch.float32), ("reference", torch.float64)):
        given = [t.to(dtype).requires_grad_() for t in args]
        with mr.use(engine=name):
            results = quotients(*given, cols=domain)
            found.append([*results, *(grads := listed_cases.gradients(results, given))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
        assert other.isfinite().all()
    unseen = domain.lengths == 0 if kind == "pages" else domain.mask(rows, cols).sum(-1) == 0
    assert unseen.any() and not grads[0][unseen].any()


@pytest.mark.filterwarnings("ignore:gathered pieces.* gradient of a column:monoidreduce.errors.FallbackWarning")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name, kind", [*itertools.product(LAYERS, KINDS), *SEVERAL_PASSES])
def test_zoo(name, kind, seed):
    """A pair that does not exist is nowhere: gradients are finite also where a row has none, which is inf × 0 in the
    dense call."""
    case = Case(BY_NAME[name], *make_domain(kind))
    args = case.args(seed, torch.float32)
    truth = run(case.dense, [a.double() if a.is_floating_point() else a for a in args])
    with mr.use(engine="triton"):
        found = run(case.listed, args)
    assert all(g.isfinite().all() for g in found.grads.values())
    grads = {n: torch.where(truth.grads[n].isnan(), torch.nan, g) for n, g in found.grads.items()}
    assert_equal(Result(found.values, grads), truth, rtol=1e-4, atol=1e-5)
