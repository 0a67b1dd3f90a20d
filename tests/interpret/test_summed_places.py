"""Tables read at a number of the row plus one of the column: places of a picture, maps of blocks. Kernels add up tiles
that read the same entries at the same places, of batch elements that share a table and along diagonals."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, Table
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.kernels import histogram
from monoidreduce.engines.triton.schedules import spec_from_tensors
from tests.support import gluon_simulator, internals
from tests.support import table_cases as tables

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "error::monoidreduce.errors.FallbackWarning")
PLAN = KernelPlan(16, 16, 4, 1)


@mr.op
def picture(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"], side: int):
    down = mr.row_index // side - mr.col_index // side + mr.num_cols // side
    right = mr.row_index % side - mr.col_index % side + side - 1
    return mr.softmax_mean(q @ k + mr.lookup(bias, down * (2 * side - 1) + right), v)


@mr.op
def blocks(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"], side: int):
    across = (mr.num_cols + side - 1) // side
    return mr.softmax_mean(q @ k + mr.lookup(bias, (mr.row_index // side) * across + mr.col_index // side), v)


def _places(op, rows, cols, side):
    i, j = torch.arange(rows).unsqueeze(-1), torch.arange(cols)
    if op is blocks:
        return i // side * ((cols + side - 1) // side) + j // side
    return (i // side - j // side + cols // side) * (2 * side - 1) + i % side - j % side + side - 1


def _dense(op, side):
    def run(q, k, v, bias):
        at = _places(op, q.shape[-2], k.shape[-2], side)
        return torch.softmax(q @ k.mT + bias[..., at], -1) @ v

    return run


def _problem(rows, cols, batch, heads, entries, dtype=torch.float64, features=16):
    draw = torch.Generator().manual_seed(rows)
    make = lambda *shape: (torch.randn(shape, generator=draw, dtype=torch.float64) * 0.3).to(dtype)
    vectors = [make(*batch, n, features) for n in (rows, cols, cols)]
    return [*vectors, make(*heads, entries).float() if dtype is torch.bfloat16 else make(*heads, entries)]


@pytest.fixture
def alike(monkeypatch):
    """What was found of tiles that are alike, from few pairs on."""
    monkeypatch.setattr(spec_from_tensors, "MANY", 0)
    found, own = [], histogram.find_alike_tiles
    monkeypatch.setattr(histogram, "find_alike_tiles", lambda *given: found.append(own(*given)) or found[-1])
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "op, side, batch, heads, period, sharing",
    [
        (picture, 8, (2, 2), (2,), 1, 2),  # a table of each head
        (picture, 3, (2,), (), 3, 2),
        (picture, 8, (2,), (2,), 1, 1),  # a table of each batch element
        (picture, 8, (2, 2), (2, 1), 1, 1),  # shared by the last dimension, which is not summed in the kernel
        (blocks, 4, (2, 2), (2,), 0, 2),
    ],
)
def test_tiles_that_are_alike_are_added_first(alike, op, side, batch, heads, period, sharing):
    args = _problem(60 if period == 3 else 36, 50 if period == 3 else 33, batch, heads, 400)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        found = tables.with_gradients(lambda *given: op(*given, side), args)
    for got, right in zip(found, tables.with_gradients(_dense(op, side), args), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    assert (alike[-1].period, alike[-1].sharing) == (period, sharing)


def test_other_numbers_are_other_places(alike):
    """The same call with another width: other places, another period."""
    args = _problem(36, 33, (2,), (), 330)
    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}):
        for side in (8, 5, 8):
            found = tables.with_gradients(lambda *given, side=side: picture(*given, side), args)
            for got, right in zip(found, tables.with_gradients(_dense(picture, side), args), strict=True):
                torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
    assert [found.period for found in alike] == [1, 0]


@mr.op
def hidden(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"], step: int):
    place = mr.row_index * step + mr.col_index
    return mr.softmax_mean(torch.where(place < 40, q @ k + mr.lookup(bias, place), -torch.inf), v)


def test_places_beyond_the_table_at_hidden_pairs(alike):
    """The same call, first with numbers that keep all pairs inside of the table, then with others."""
    args, i, j = _problem(20, 18, (), (), 40), torch.arange(20).unsqueeze(-1), torch.arange(18)

    def dense(step):
        bias = lambda t: torch.where(i * step + j < 40, t[(i * step + j).clamp(max=39)], -torch.inf)
        return lambda q, k, v, t: torch.nan_to_num(torch.softmax(q @ k.mT + bias(t), -1)) @ v

    with mr.use(engine="triton"), use_plan({"cols": PLAN, "rows": PLAN}), torch.no_grad():
        for step in (1, 2, 1):
            torch.testing.assert_close(hidden(*args, step), dense(step)(*args), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("side", [3, 4, 8])
def test_classes_of_tiles(side, monkeypatch):
    """Every tile of a class reads what its first one reads."""
    monkeypatch.setattr(histogram, "_LEAST_WIDTH", 0)
    rows, cols, block, m, n = torch.arange(48), torch.arange(64), 4, 12, 16
    rows, cols = rows // side * 20 + rows % side, -(cols // side) * 20 - cols % side
    found = histogram.find_alike_tiles(rows, cols, block, 1)
    assert found.period == {3: 3, 4: 1, 8: 2}[side]
    tile_of = lambda t, k: t[k * block : (k + 1) * block]
    for group in range(found.first.numel()):
        shift, turn = group // found.period - (m - 1), group % found.period
        begin = max(0, -shift) + (turn - max(0, -shift)) % found.period
        for tile in range(begin, min(m, n - shift), found.period):
            at = tile_of(rows, tile)[:, None] + tile_of(cols, tile + shift)
            assert at.min() == found.first[group] and at.max() < found.first[group] + found.width


def test_no_two_tiles_are_alike():
    assert histogram.find_alike_tiles(torch.arange(8) * 8, torch.arange(8), 4, 1) is None
    assert histogram.find_alike_tiles(torch.arange(8) // 4 * 2, torch.arange(8) // 4, 4, 3) is None  # one entry each


@pytest.mark.parametrize("op, features", [(picture, 128), (blocks, 64)])
def test_hand_scheduled_kernels(monkeypatch, op, features):
    """All three, on the simulator; the table's gradient has a generated kernel, whose 16-bit products the interpreter
    cannot compute."""
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0, saved_row_gradients=0, float32_split=2**62)
    args = _problem(130, 140, (2, 1), (1,), 700, torch.bfloat16, features)
    with mr.use(engine="triton"):
        found = tables.with_gradients(lambda *given: op(*given, 10), args)
    right = tables.with_gradients(_dense(op, 10), [a.double() for a in args])
    for one, expected in zip(found[:4], right[:4], strict=True):
        assert float((one.double() - expected).norm() / expected.norm()) < 2e-2
    assert [call.kernel.name for call in seen] == ["fold_over_cols", "fold_over_cols", "fold_over_rows"]
