"""Hand-scheduled kernels of relative positions and of attention's statistics, on the simulator and against float64."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from tests.support import gluon_simulator, internals
from tests.support import table_cases as tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")


@pytest.fixture
def seen(monkeypatch):
    """The launches of warp-specialised kernels, which the simulator runs however few pairs there are."""
    found = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0, saved_row_gradients=0, float32_split=2**62)
    return found


def assert_right(op, dense, args, most=2e-2, count=None):
    """Values and gradients, or the first ``count`` of them."""

    def run(call, dtype):
        given = [a.detach().to(dtype or a.dtype).requires_grad_() for a in args]
        values = call(*given)
        values = [values] if isinstance(values, torch.Tensor) else list(values)
        weights = [torch.cos(torch.arange(v.numel(), dtype=torch.float64)).view(v.shape).to(v) for v in values]
        return [*(v.detach() for v in values), *torch.autograd.grad(values, given, weights)]

    with mr.use(engine="triton"):
        found = run(op, None)
    for k, (one, right) in enumerate(zip(found[:count], run(dense, torch.float64)[:count], strict=True)):
        assert float((one.double() - right).norm() / right.norm()) < most, k


def problem(rows, cols, heads=2, features=128):
    draw = torch.Generator().manual_seed(rows)
    vectors = [torch.randn(2, heads, n, features, generator=draw).bfloat16() for n in (rows, cols, cols)]
    vectors[0] = (vectors[0] * 0.1).bfloat16()
    return vectors, draw


@pytest.mark.parametrize(
    "name, rows, cols, features",
    [("relative", 200, 150, 128), ("relative", 64, 257, 64), ("causal", 193, 193, 128), ("t5", 65, 70, 128)],
)
def test_relative_positions(seen, name, rows, cols, features):
    case = next(c for c in tables.CASES if c.name == name)
    vectors, draw = problem(rows, cols, features=features)
    bias = torch.randn(2, case.table(rows, cols), generator=draw)
    assert_right(case.op, case.dense, [*vectors, bias])
    kinds = [call.kernel.name for call in seen]
    assert kinds == ["fold_over_cols", "fold_over_cols", "fold_over_rows"]
    assert "sum_antidiagonals" in seen[1].kernel.text  # the table's gradient beside that of rows
    assert all("look_up_band" in call.kernel.text for call in seen)


@pytest.mark.parametrize("rows, cols", [(193, 150), (300, 400)])
def test_statistics(seen, rows, cols):
    def dense(q, k, v):
        s = q @ k.mT * 128**-0.5
        p, gap = s.softmax(-1), (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])).abs()
        return p @ v, -(p * s.log_softmax(-1)).sum(-1), (p * gap).sum(-1)

    def ours(q, k, v):
        found = ops.attention_statistics(q, k, v, statistics=("entropy", "distance"))
        return found.values, found.entropy, found.distance

    assert_right(ours, dense, problem(rows, cols)[0])
    assert [call.kernel.name for call in seen] == ["fold_over_cols", "fold_over_cols", "fold_over_rows"]


def test_slices_of_wider_vectors(seen):
    """A cotangent that lies in a slice, at no multiple of 16 bytes: it is copied, and the same kernels run. (Without a
    budget the other one has the joint kernel, which reads no copies.)"""
    (q, k, v), draw = problem(130, 140)
    given = [t.requires_grad_() for t in (q, k, v)]
    wide = torch.randn(2, 2, 130, 131, generator=draw).bfloat16()
    with mr.use(engine="triton"), mr.budget("64MB"):
        grads = [
            torch.autograd.grad(ops.attention(*given), given, g) for g in (wide[..., :128], wide[..., :128].clone())
        ]
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    assert len(seen) == 6  # all of them hand-scheduled
