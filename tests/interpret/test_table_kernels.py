"""Tables that pairs look up have kernels, and so have their gradients: along diagonals, and by any other index."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, Table
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.kernels import histogram
from monoidreduce.engines.triton.schedules import spec_from_tensors
from monoidreduce.reductions.histogram import sum_diagonals
from tests.support import table_cases as tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")
CASES = [pytest.param(case, id=case.name) for case in tables.CASES]
PLAN = KernelPlan(16, 16, 4, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bands", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kernels(case, bands, monkeypatch):
    monkeypatch.setattr(spec_from_tensors, "MANY", 0 if bands else 2**22)
    args = case.problem(21, 50, (2,), 20)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        tables.assert_right(case, tables.with_gradients(case.op, args), args)


@pytest.mark.parametrize("rows, cols", [(50, 21), (16, 48), (1, 17)])
def test_single_precision_and_other_shapes(rows, cols):
    case = tables.CASES[0]
    args = case.problem(rows, cols, (2,), 20, torch.float32)
    with mr.use(engine="triton"), use_plan({"cols": KernelPlan(16, 32, 4, 1), "rows": PLAN}):
        one, other = (tables.with_gradients(case.op, args) for _ in range(2))
    tables.assert_right(case, one, args, 2e-4)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_table_that_several_instances_divide(monkeypatch):
    monkeypatch.setattr(histogram, "MOST_ENTRIES", 16)
    case = next(c for c in tables.CASES if c.name == "swin")
    args = case.problem(21, 30, (2,), 20)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        tables.assert_right(case, tables.with_gradients(case.op, args), args)


def test_what_no_pair_reads_and_what_is_not_there():
    """Entries without a pair have no gradient; an index beyond the table at a hidden pair reads NaN, unseen."""

    @mr.op
    def hidden(x: Row["f"], y: Col["f"], t: Table["n"]):
        back = mr.row_index - mr.col_index
        return mr.sum(torch.where(back >= 0, x @ y * mr.lookup(t, back), 0.0))

    x, y = torch.randn(9, 16, dtype=torch.float64), torch.randn(20, 16, dtype=torch.float64)
    t = torch.randn(12, dtype=torch.float64, requires_grad=True)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        (found,) = torch.autograd.grad(hidden(x, y, t).sum(), t)
    expected = [(x @ y.T).diagonal(-d).sum() for d in range(9)] + [torch.zeros((), dtype=torch.float64)] * 3
    torch.testing.assert_close(found, torch.stack(expected))


def test_second_derivatives():
    args = [a.requires_grad_() for a in tables.CASES[0].problem(5, 6, (2,), 16)]

    def second(function):
        (first,) = torch.autograd.grad(function(*args).sin().sum(), args[-1:], create_graph=True)
        return torch.autograd.grad((first * torch.arange(first.numel()).view_as(first)).sum(), args)

    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        found = second(tables.relative)
    for got, right in zip(found, second(tables.dense_relative), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("rows, cols", [(200, 130), (64, 300), (128, 64)])
def test_sums_of_tiles_along_diagonals(rows, cols):
    """What a warp-specialised kernel leaves of every tile of 64 x 64 pairs becomes one sum for each diagonal."""
    strips, tiles = 2 * -(-rows // 128), -(-cols // 64)
    x = torch.zeros(2, 64 * strips, 64 * tiles)
    x[:, :rows, :cols] = torch.randn(2, rows, cols, generator=torch.Generator().manual_seed(0))
    tile = x.view(2, strips, 64, tiles, 64).transpose(2, 3).flip(3)  # rows in reverse
    parts = torch.zeros(2, strips, tiles, 128)
    for i in range(64):
        parts[..., i : i + 64] += tile[..., i, :]
    found = histogram.sum_tiles(parts, rows, cols)
    torch.testing.assert_close(found, sum_diagonals(x[:, :rows, :cols]))
