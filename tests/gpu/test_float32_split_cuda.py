"""float32 operands split into bfloat16 parts, on a GPU: no less exact than plain torch, also over many columns."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import monoidreduce as mr
from monoidreduce import ops
from tests.support import internals
from tests.support.comparison import assert_error_rule, cast, run, there
from tests.support.float32_split_cases import WORKS, gaussian, near, shapes

if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("vectors are split on Hopper and newer", allow_module_level=True)


@pytest.fixture(autouse=True)
def split(monkeypatch):
    """Also small problems are split; whether each kernel that was made multiplies pieces."""
    internals.set_pair_thresholds(monkeypatch, float32_split=0)
    internals.forget_launches(monkeypatch)
    return internals.watch_prepared(monkeypatch, lambda launch: launch.spec.pieces)


def on_gpu(make, seed):
    return tuple(t.cuda() for t in make(torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize("name", [*WORKS, "long walk"])
def test_pieces_keep_the_error_rule(name, precision, split):
    """Of a long walk too: the matrix units cut digits off, which must not add up."""
    ours, plain, make = WORKS.get(name) or (near, gaussian, shapes((16, 64), (30011, 64), (30011, 2)))
    trials = []
    for seed in range(2):
        args = make(torch.Generator().manual_seed(seed))
        with mr.use(engine="triton", precision=precision):
            found = run(there(ours), args)
        trials.append((found, run(there(plain), args), run(there(plain), cast(args, torch.float64))))
    assert_error_rule(trials)
    assert split and all(split)


def test_neighbours_are_found_close_ones_too(split):
    x, y = on_gpu(shapes((1000, 64), (4000, 64)), 0)
    y[:1000] = x + 1e-4 * y[:1000]
    y[7, 3] = torch.inf
    with mr.use(engine="triton", precision="ieee"):
        values, places = ops.knn(x, y, 5)
    expected = (x.double()[:, None] - y.double()).norm(dim=-1).topk(5, largest=False)
    assert torch.equal(places, expected.indices) and all(split)
    torch.testing.assert_close(values.double(), expected.values, rtol=1e-5, atol=0)


def test_runs_are_bitwise_equal():
    args = [t.requires_grad_() for t in on_gpu(shapes((300, 64), (5000, 64), (5000, 20)), 0)]
    with mr.use(engine="triton"):
        first = torch.autograd.grad(near(*args).sum(), args)
        for _ in range(50):
            assert all(map(torch.equal, first, torch.autograd.grad(near(*args).sum(), args)))
