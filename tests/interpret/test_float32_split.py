"""float32 operands split into bfloat16 parts: values and gradients keep the error rule; infinities stay infinite."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.codegen import compiler
from monoidreduce.engines.triton.schedules import spec_from_tensors
from tests.support import internals
from tests.support.comparison import assert_error_rule, cast, run
from tests.support.float32_split_cases import WORKS, gaussian, shapes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy tells of infinities


@pytest.fixture(autouse=True)
def split(monkeypatch):
    """Everything is for the matrix units; whether each kernel that was made multiplies pieces."""
    internals.set_pair_thresholds(monkeypatch, float32_split=0)
    internals.forget_launches(monkeypatch)
    compiler.compile_fold.cache_clear()
    yield internals.watch_prepared(monkeypatch, lambda launch: launch.spec.pieces)
    compiler.compile_fold.cache_clear()


@pytest.fixture(params=[("ieee", 0), ("tf32x3", 1)], ids=["ieee, loads", "tf32x3, copies"])
def precise(request):
    """Both precisions; blocks are loaded, or copied by tensor descriptors."""
    precision, boxes = request.param
    plan = KernelPlan(32, 32, 4, 1, rendering=Rendering(boxes))
    with mr.use(engine="triton", precision=precision), use_plan({"cols": plan, "rows": plan}):
        yield precision


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WORKS)
def test_pieces_keep_the_error_rule(name, precise, split):
    ours, plain, make = WORKS[name]
    trials = []
    for seed in range(2):
        args = make(torch.Generator().manual_seed(seed))
        trials.append((run(ours, args), run(plain, args), run(plain, cast(args, torch.float64))))
    assert_error_rule(trials)
    assert split and all(split)


def test_clouds_far_from_the_origin_are_moved(precise):
    x, y, b = shapes((19, 16), (37, 16), (37, 3))(torch.Generator().manual_seed(0))
    x, y = (x * 0.25 + 64).round(decimals=4), (y * 0.25 + 64).round(decimals=4)
    ours = lambda x, y, b: ops.kernel_sum(x, y, b, bandwidth=1.0)
    plain = lambda x, y, b: torch.exp(-(x[:, None] - y).square().sum(-1) / 2) @ b
    assert_error_rule([(run(ours, (x, y, b)), run(plain, (x, y, b)), run(plain, cast((x, y, b), torch.float64)))])


def test_nearest_neighbours_are_found(precise, split):
    x, y = shapes((19, 33), (130, 33))(torch.Generator().manual_seed(0))
    values, places = ops.knn(x, y, 10)
    expected = torch.cdist(x.double(), y.double()).topk(10, largest=False)
    assert torch.equal(places, expected.indices) and all(split)
    torch.testing.assert_close(values, expected.values.float())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row_and_column(precise, value):
    x, y = shapes((19, 16), (37, 16))(torch.Generator().manual_seed(0))
    y[:, 3] = torch.arange(37) % 3 - 1.0  # pieces that are 0
    x[4, 3] = value

    @mr.op
    def greatest(x: Row["d"], y: Col["d"]):
        s = x @ y
        return mr.max(s), mr.min(s), mr.max(s, over="rows")

    dense = x.double() @ y.double().mT
    for got, want in zip(greatest(x, y), (dense.amax(1), dense.amin(1), dense.amax(0)), strict=True):
        torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_an_infinitely_far_point_weighs_nothing(precise):
    x, y, b = shapes((19, 16), (37, 16), (37, 2))(torch.Generator().manual_seed(0))
    y[5, 7] = torch.inf
    got = ops.kernel_sum(x, y, b, bandwidth=3.0)
    seen = torch.arange(37) != 5
    torch.testing.assert_close(got, gaussian(x, y[seen], b[seen]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_nothing_to_split(precise, size):
    x, y = torch.randn(size[0], 16), torch.randn(size[1], 16)
    assert torch.equal(ops.kernel_sum(x, y, torch.randn(size[1], 1)), torch.zeros(size[0], 1))


def test_thirds_add_up_to_their_number():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(70, 19, generator=gen) * torch.logspace(-25, 30, 70)[:, None]
    x[3, 2], x[4, 5], x[5, 1], x[6, 6] = torch.inf, -torch.inf, 0.0, 1.0
    whole, norms, _ = spec_from_tensors._split_vectors(x.expand(3, 70, 19), 1, None, True, False)
    assert whole.shape == (3, 70, 96) and whole.stride(0) == 0
    first, second, third = whole[0].float().unflatten(1, (3, 32)).unbind(1)
    assert not first[:, 19:].any()
    finite = x.isfinite()
    together = (first.double() + second.double() + third.double())[:, :19]
    torch.testing.assert_close(together[finite], x.double()[finite], rtol=2.0**-50, atol=0)
    large = x.abs() > 1e-15  # less than this has no pieces that are not 0
    for part in (first, second, third):
        assert torch.equal(part[:, :19].sign()[large], x.sign()[large])
    assert torch.equal(first[:, :19][~finite], x[~finite])
    torch.testing.assert_close(norms[0], x.square().sum(-1))


def test_halves_add_up_to_their_number():
    x = torch.randn(70, 19, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 70)[:, None]
    x[1], x[2, 2:] = 0.0, 0.0
    whole, norms, scales = spec_from_tensors._split_vectors(x.expand(3, 70, 19), 1, None, True, True)
    assert whole.shape == (3, 70, 64) and scales.shape == norms.shape == (3, 70) and scales.stride(0) == 0
    first, second = whole[0].double().unflatten(1, (2, 32)).unbind(1)
    together = (first + second)[:, :19] * scales[0].double()[:, None]
    most = x.double().abs().amax(1, keepdim=True)
    assert ((together - x.double()).abs() <= x.double().abs() * 2.0**-22 + most * 2.0**-39).all()
    assert not whole[0].unflatten(1, (2, 32))[..., 19:].any()


def test_vectors_of_which_more_is_made_are_left_whole(split):
    @mr.op
    def bent(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.tanh(x + y).sum() * (x @ y))

    x, y = shapes((9, 16), (11, 16))(torch.Generator().manual_seed(0))
    with mr.use(engine="triton", precision="tf32x3"):
        torch.testing.assert_close(bent(x, y), (torch.tanh(x[:, None] + y).sum(-1) * (x @ y.mT)).sum(1))
    assert split == [0]


def test_where_vectors_are_split(split, monkeypatch):
    """Where pairs are many and memory is not bounded; products of TF32 are for who asks for them."""
    x, y = shapes((9, 16), (11, 16))(torch.Generator().manual_seed(0))
    internals.set_pair_thresholds(monkeypatch, float32_split=100)
    with mr.use(engine="triton", precision="tf32"):
        ops.knn(y, x.repeat(2, 1), 2)
    with mr.use(engine="triton"):
        ops.knn(x, y, 2)  # 99 pairs
        ops.knn(y, x.repeat(2, 1), 2)
        with mr.budget("1MB"):
            ops.knn(y, x.repeat(2, 1), 2)
    assert split == [0, 0, 2, 0]


def test_close_points_keep_their_digits(split):
    """Where a product would cost digits, distances are computed feature by feature; those of other pairs stay."""
    x, far = shapes((19, 33), (37, 33))(torch.Generator().manual_seed(0))
    y = torch.cat([far, x + 1e-4 * far[:19], x[:1]])
    y[3, 4] = torch.inf
    with mr.use(engine="triton", precision="ieee"):
        values, places = ops.knn(x, y, 3)
    expected = (x.double()[:, None] - y.double()).norm(dim=-1).topk(3, largest=False)
    torch.testing.assert_close(values.double(), expected.values, rtol=3e-6, atol=0)
    assert torch.equal(places, expected.indices) and values[0, 0] == 0 and all(split)
