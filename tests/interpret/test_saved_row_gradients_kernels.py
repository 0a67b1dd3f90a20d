"""Row gradients that a forward kernel keeps, in the interpreter: whole tiles, ragged ones, those that hold a target."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support import internals
from tests.support import saved_row_gradient_cases as cases
from tests.support.comparison import assert_equal, assert_error_rule, cast, run

SMALL = KernelPlan(16, 32, 4, 1)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    cases.keep_always(monkeypatch)
    with mr.use(engine="triton", strict=True), use_plan({"cols": SMALL, "rows": SMALL}):
        yield


def drawn(name, dtype, seed=0):
    op, dense, make = cases.LOSSES[name]
    return op, dense, make(torch.Generator().manual_seed(seed), dtype)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", cases.LOSSES)
def test_kept_gradients_in_float64(name, monkeypatch):
    op, _, args = drawn(name, torch.float64)
    got = run(op, args)
    internals.replace_saved_row_gradients(monkeypatch, lambda *_: None)
    assert_equal(got, run(op, args))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["contrastive", "contrastive, confident", "contrastive, batch", "labelled"])
def test_the_error_rule(name, dtype):
    op, dense, args = drawn(name, dtype)
    trial = tuple(run(f, a, asked=[0]) for f, a in ((op, args), (dense, args), (dense, cast(args, torch.float64))))
    assert_error_rule([trial], ulps=8.0)


def test_one_walk_in_the_forward_and_one_in_the_backward(monkeypatch):
    """What is kept is added up, and returned, in float32; kernels of one side walk over nothing."""
    made = internals.watch_launches(monkeypatch)
    walks = lambda: [c for c in made if c.kernel.name.startswith("fold")]
    x, y = (torch.randn(40, 16).half().requires_grad_() for _ in range(2))
    out = cases.contrastive(x, y)
    (forward,) = walks()
    assert forward.kernel.name == "fold_over_cols"
    vectors = [a.dtype for a in forward.arguments if isinstance(a, torch.Tensor) and a.shape[-1] == 16]
    assert sorted(map(str, vectors)) == ["torch.float16", "torch.float16", "torch.float32"]
    gx, _ = torch.autograd.grad(out.sum(), (x, y))
    assert [c.kernel.name for c in walks()] == ["fold_over_cols", "fold_over_rows"] and gx.dtype is torch.float16
