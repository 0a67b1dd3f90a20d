"""The ready-made layers by generated kernels, in the interpreter: values and gradients are plain torch's in float64."""

from functools import partial

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support.comparison import assert_equal, run
from tests.support.ready_made_layers import READY
from tests.unit.ops.test_attention import FACTORS, B, dense, ours, problem, shown

SMALL = KernelPlan(16, 32, 4, 1)

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")

PLAIN = {name: values[0] for name, values in FACTORS.items()}
ATTENTION = [
    PLAIN | {"causal": "lower_right", "lengths": "padded", "window": (9, None)},
    PLAIN | {"alibi_slopes": "heads", "sinks": "heads", "softcap": 2.0, "return_lse": True},
    PLAIN | {"documents": "ids", "causal": True, "enable_gqa": True, "scale": "tensor"},
    PLAIN | {"dropout_p": 0.3, "window": 5},
    PLAIN | {"attn_mask": "bool row", "bias": "head", "sinks": "batch and heads"},
]


def by_kernels(function, args):
    with mr.use(engine="triton"), use_plan({"cols": SMALL, "rows": SMALL}):
        return run(function, args)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sample", ATTENTION, ids=shown)
def test_attention_by_kernels_is_its_dense_form(sample):
    args, options = problem(sample, 3)
    first = lambda t: (
        t[:1] if isinstance(t, torch.Tensor) and t.dim() and len(t) == B else t
    )  # one of the batch will do
    args = tuple(map(first, args))
    options = {n: tuple(map(first, v)) if n == "documents" else first(v) for n, v in options.items()}
    assert_equal(by_kernels(partial(ours, options=options), args), run(partial(dense, options=options), args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ready", READY, ids=repr)
def test_a_layer_by_kernels_is_plain_torch(ready):
    sample = {name: values[-1] for name, values in ready.factors.items()} | {"size": (19, 37), "batch": ()}
    sample |= {"kind": "clip", "features": 3, "k": 2, "all_pairs": False, "activation": "silu"}
    args, options = ready.make(sample, 5)
    assert_equal(by_kernels(partial(ready.ours, **options), args), run(partial(ready.dense, **options), args))
