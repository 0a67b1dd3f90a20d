"""Inverse, gamma and error functions, and bits of whole numbers, in kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton import KernelPlan, use_plan
from tests.support import scalar_functions as cases

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")
PLAN = KernelPlan(16, 16, 4, 1)


@pytest.fixture(autouse=True)
def kernels():
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("names", cases.MANY)
def test_values_and_gradients(names, dtype, seed):
    x, y = torch.randn(5, 3, dtype=dtype), torch.randn(18, 3, dtype=dtype)
    mine, theirs = ([t.clone().requires_grad_() for t in (x, y)] for _ in range(2))
    got, want = cases.smooth(*mine, names), cases.smooth_dense(*theirs, names)
    close = {"rtol": 2e-5, "atol": 2e-4} if dtype is torch.float32 else {"rtol": 1e-11, "atol": 1e-10}
    torch.testing.assert_close(got, want, **close)
    for a, b in zip(*(torch.autograd.grad(v.sum(), t) for v, t in ((got, mine), (want, theirs))), strict=True):
        loose = max(10 * close["rtol"], 1e-8)  # torch's own trigamma is exact to 4e-10
        torch.testing.assert_close(a, b, rtol=loose, atol=10 * loose)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_special_values(dtype):
    """Zeros of both signs, poles, ends of the domain, infinities and NaN: one pair each."""
    points = cases.SPECIAL.to(dtype)
    one = ("sinc", "asin", "acos", "asinh", "acosh", "atanh", "erfinv", "lgamma", "digamma", "log10")
    two = ("atan2", "hypot", "fmod", "copysign", "xlogy")

    @mr.op
    def functions_of_one(x: mr.Row, y: mr.Col):
        return tuple(mr.max(getattr(torch, name)(x + y)) for name in one)

    @mr.op
    def functions_of_two(x: mr.Row, z: mr.Row, y: mr.Col):
        return tuple(mr.max(getattr(torch, name)(x + y, z + y)) for name in two)

    zero = torch.full((1,), -0.0, dtype=dtype)
    for name, got in zip(one, functions_of_one(points, zero), strict=True):
        torch.testing.assert_close(got, getattr(torch, name)(points), equal_nan=True, rtol=1e-5, atol=1e-6, msg=name)
    x, z = (t.flatten() for t in torch.meshgrid(points, points, indexing="ij"))
    for name, got in zip(two, functions_of_two(x, z, zero), strict=True):
        torch.testing.assert_close(got, getattr(torch, name)(x, z), equal_nan=True, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_bits(dtype):
    i, j, _ = cases.codes(dtype, 5, 19, 1)
    i, j = i[:, 0], j[:, 0]
    for k, (got, want) in enumerate(zip(cases.bits(i, j), cases.bits_dense(i, j), strict=True)):
        assert torch.equal(got, want), k


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_hamming_distance(dtype):
    x, y, width = cases.codes(dtype, 5, 21, 3)

    @mr.op
    def distances(x: mr.Row["w"], y: mr.Col["w"], width: int):
        d = mr.popcount(x ^ y, int(width)).sum()
        return mr.min(d), mr.sum(d)

    right = cases.hamming_dense(x, y, width)
    low, total = distances(x, y, width)
    assert torch.equal(low, right.amin(1)) and torch.equal(total, right.sum(1))


def test_blocks_by_a_shift():
    """Tiles outside the diagonal are skipped, by the range of the shifted index."""

    @mr.op
    def blocks(x: mr.Row, y: mr.Col):
        return mr.sum(torch.where(mr.row_index >> 4 == mr.col_index >> 4, x * y, 0.0))

    x = torch.ones(70)
    torch.testing.assert_close(blocks(x, x), torch.tensor([16.0] * 64 + [6.0] * 6))


def test_cells_of_morton_codes():
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randint(0, 64, (n, 2), generator=g).int() for n in (9, 20))
    right = ((x[:, None] >> 3) == (y >> 3)).all(-1).sum(1)
    assert torch.equal(cases.same_cell(x, y, 6), right)
