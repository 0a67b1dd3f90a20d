"""Some layers of the zoo over each domain by kernels, against the dense call with the same mask."""

import itertools

import pytest
import torch

import monoidreduce as mr
from tests.support.comparison import Result, assert_equal, run
from tests.support.layers import BY_NAME
from tests.support.masked_twin import Case, make_domain

LAYERS = ("causal_attention", "tsallis_entropy", "pooling")
KINDS = ("edges", "blocks", "jagged", "pages")
# second passes read what the first gave a row without columns: -inf, and NaN
SEVERAL_PASSES = [("jensen_shannon", "jagged"), ("normalized_mlp", "jagged"), ("normalized_mlp", "blocks")]


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
