"""The vocabulary heads by generated kernels, in the interpreter: values and gradients are plain torch's in float64."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support.comparison import assert_equal, is_float, run
from tests.support.vocabulary_heads import FUNCTIONS, RICH, by_name, draw, split

SMALL = KernelPlan(16, 32, 4, 1)
EAGER = {"linear_logprobs", "linear_topk", "probabilities"}  # a top-k, or what is given per pair, has no kernel

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("name", "sample"), [pytest.param(*RICH[i], id=i) for i in RICH if i not in EAGER])
def test_a_head_by_kernels_is_plain_torch(name, sample):
    f = FUNCTIONS[name]
    names, args = split(draw(f, sample | {"rows": (19,), "classes": 37, "features": 8}, torch.float64, seed=1))
    asked = [k for k, a in enumerate(args) if is_float(a) and names[k] != "class_weights"]
    with mr.use(engine="triton"), use_plan({"cols": SMALL, "rows": SMALL}):
        ours = run(by_name(f.ours, names), args, asked=asked)
    assert_equal(ours, run(by_name(f.plain, names), args, asked=asked))
