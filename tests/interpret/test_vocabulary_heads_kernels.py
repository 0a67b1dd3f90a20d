"""The vocabulary heads by generated kernels, in the interpreter: values and gradients are plain torch's in float64."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support.comparison import assert_equal, is_float, run
from tests.support.vocabulary_heads import FUNCTIONS, RICH, by_name, draw, split

SMALL = KernelPlan(16, 32, 4, 1)
EAGER = {"linear_logprobs", "linear_topk", "probabilities"}  # a top-k, or what is given per pair, has no kernel

IDS = ("linear_logprobs", RICH["linear_logprobs"][1] | {"top_k": 0, "return_entropy": False})
SAMPLES = [pytest.param(*RICH[i], id=i) for i in RICH if i not in EAGER] + [pytest.param(*IDS, id="ids")]

# the interpreter computes both sides of a where, and NumPy tells of each infinity met there
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_a_head_by_kernels_is_plain_torch(name, sample):
    f = FUNCTIONS[name]
    names, args = split(draw(f, sample | {"rows": (19,), "classes": 37, "features": 8}, torch.float64, seed=1))
    asked = [k for k, a in enumerate(args) if is_float(a) and names[k] != "class_weights"]
    with mr.use(engine="triton"), use_plan({"cols": SMALL, "rows": SMALL}):
        ours = run(by_name(f.ours, names), args, asked=asked)
    assert_equal(ours, run(by_name(f.plain, names), args, asked=asked))


def test_given_ids_are_gathered_and_scattered_by_kernels():
    """In float32 the gradients of ids go through kernels of their own, which add up in a fixed order."""
    f = FUNCTIONS["linear_logprobs"]
    sample = f.default(rows=(7,), classes=21, features=4, ids=3)
    names, args = split(draw(f, sample, torch.float32, seed=2))
    exact = [a.double() if is_float(a) else a for a in args]
    asked = [k for k, a in enumerate(args) if is_float(a)]
    with mr.use(engine="triton"), use_plan({"cols": SMALL, "rows": SMALL}):
        ours, again = (run(by_name(f.ours, names), args, asked=asked) for _ in range(2))
    assert_equal(again, ours, rtol=0, atol=0)
    assert_equal(ours, run(by_name(f.plain, names), exact, asked=asked), rtol=1e-4, atol=1e-4)


def test_a_low_rank_term_by_kernels():
    """A second product in the logits, of another number of features, beside a frozen weight."""
    x, weight, rows, cols = (torch.randn(n, d) for n, d in ((19, 8), (37, 8), (19, 3), (37, 3)))
    given = [x.requires_grad_(), rows.requires_grad_(), cols.requires_grad_()]
    target = torch.randint(0, 37, (19,))
    found = []
    for engine in ("triton", "reference"):
        with mr.use(engine=engine), use_plan({"cols": SMALL, "rows": SMALL}):
            loss = mr.ops.linear_cross_entropy(x, weight, target, low_rank=(rows, cols), softcap=3.0)
            found.append([loss.detach(), *torch.autograd.grad(loss, given)])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
