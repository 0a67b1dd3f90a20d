"""Turns that use the column gradients' own memory: nothing that is still needed is ever written over."""

import itertools

import pytest
import torch

from monoidreduce.engines.triton.panel.arena import BorrowedTotals, count_lendable
from monoidreduce.plan import panel_layout
from monoidreduce.plan.panel_layout import COLS, ROWS, RowTotals, StorageNeeds, plan_in_place

LARGE = [
    (256_000, 4608, 8192 * 2, RowTotals(8192, 4096, 2304 * 4), 8_000_000),
    (256_000, 4608, 8192 * 2, RowTotals(8192, 4096, 2304 * 4), 64_000_000),
    (256_000, 4608, 8192 * 2, RowTotals(8192, 0, 2304 * 4), 64_000_000),
    (128_256, 8192, 8192 * 2, RowTotals(8192, 4096, 4096 * 4), 8_000_000),
    (32_768, 1024, 32_768 * 2, RowTotals(32_768, 0, 0), 64_000_000),
    (50_257, 1536, 1000 * 6, RowTotals(1000, 384, 768 * 4), 300_000),
    (5000, 600, 59 * 2, RowTotals(59, 0, 300 * 4), 4000),
    (2048, 1536, 2048 * 6, RowTotals(2048, 2048, 0), 1_000_000),  # 81 columns, of which 64 are taken
]


@pytest.mark.parametrize("fill", [lambda most: most, panel_layout.fill_waves(8192, 132)], ids=["any", "full"])
@pytest.mark.parametrize(("cols", "line", "column", "rows", "room"), LARGE)
def test_turns_do_all_of_it_and_spoil_nothing(cols, line, column, rows, room, fill):
    plan = plan_in_place(cols, line, column, rows, room, 4096, fill)
    rest = (rows.number - rows.lent) * rows.each
    assert plan is not None and plan.lent == rows.lent
    assert plan.own * column + (rest if plan.totals is None else 0) <= room
    assert plan.own % (64 if plan.own >= 64 else 16) == 0  # as a panel's rows are rounded up: no byte more
    free = cols * line if plan.totals is None else plan.totals
    assert plan.totals is None or plan.totals + rest <= cols * line
    done = {"cols": 0, "rows": 0}
    spans = {over: [] for over in done}
    rows_done = False
    for turn in plan.panels:
        for over in turn.over:
            done[over] += turn.last - turn.first
            spans[over].append((turn.first, turn.last))
        rows_done |= turn.over == COLS
        assert not (rows_done and "cols" in turn.over)  # the row totals are given up once
        if turn.at is None:
            assert turn.last - turn.first <= plan.own
            continue
        end = turn.at + -(-(turn.last - turn.first) // 64) * 64 * column
        assert end <= (cols * line if rows_done else free)  # neither beyond, nor in the row totals
        written = max([0, *(last for _, last in spans["rows"])])
        assert turn.at >= (0 if turn.over == ROWS else written * line)
        if turn.over == ROWS:
            assert not spans["rows"]  # nothing is written yet that the panel could lie over
    for over in done:
        assert done[over] == cols
        ordered = sorted(spans[over])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ordered))
    met_twice = sum(t.last - t.first for t in plan.panels if t.over == ROWS)
    assert met_twice <= (0 if plan.totals is None else rest // line + 2)


@pytest.mark.parametrize(
    ("cols", "line", "column", "rows", "room"),
    [
        (1000, 600, 100_000, RowTotals(1000, 0, 900), 10**6),
        (1000, 600, 10_000, RowTotals(1, 0, 0), 10_000),
        (10, 4, 10**6, RowTotals(1, 0, 0), 10**5),
    ],
)
def test_where_it_is_of_no_use_there_is_none(cols, line, column, rows, room):
    assert plan_in_place(cols, line, column, rows, room, 4096, lambda most: most) is None


@pytest.mark.parametrize(("rows", "most"), [(8192, 2862), (8192, 2368), (1000, 5000), (131072, 1500), (59, 700)])
def test_panels_leave_few_processors_idle(rows, most):
    found = panel_layout.fill_waves(rows, 132)(most)
    assert 0.7 * most <= found <= most

    def busy(count):
        tiles = -(-rows // 128) * count
        return tiles / (-(-tiles // 132) * 132)

    whole = most // 256
    best = max(busy(n) for n in range(-(-whole * 4 // 5), whole + 1))
    assert found == most if most < 1024 else busy(found // 256) >= 0.97 * best


def test_without_processors_panels_are_as_large_as_they_may():
    assert panel_layout.fill_waves(8192, 1)(2862) == 2862


@pytest.mark.parametrize(("begin", "count", "lent"), [(0, 50, 50), (16, 60, 42), (40, 60, 30), (96, 4, 2), (99, 1, 0)])
@pytest.mark.parametrize("spare", [None, 10, 100 * 24])
def test_totals_lie_in_their_gradients_and_in_those_of_later_rows(begin, count, lent, spare, seed):
    gradients = torch.full((100, 24), float("nan"), dtype=torch.bfloat16)
    own = gradients[begin:]
    assert count_lendable(own, count, torch.float32) == lent
    totals = BorrowedTotals.allocate(own, count, lent, torch.float32)
    inside = [t.untyped_storage().data_ptr() == gradients.untyped_storage().data_ptr() for _, t in totals.pieces]
    assert [len(t) for _, t in totals.pieces] == [n for n in (lent, count - lent) if n]
    assert inside == [True] * (lent > 0) + [False] * (lent < count)
    values = torch.randn(count, 24)
    for rows, t in totals.pieces:
        t += values[rows]
    totals.round_into_gradient(None if spare is None else torch.full((spare,), float("nan"), dtype=torch.bfloat16))
    assert torch.equal(own[:count], values.bfloat16()) and gradients[:begin].isnan().all()


def test_totals_begin_where_numbers_are_aligned():
    assert count_lendable(torch.empty(100, 3, dtype=torch.bfloat16), 10, torch.float32) == 0
    assert count_lendable(torch.empty(100, 24, dtype=torch.bfloat16)[1:], 10, torch.float32) == 10
    assert count_lendable(torch.empty(100, 4, dtype=torch.bfloat16)[1:], 10, torch.float32) == 0


def test_totals_of_some_rows():
    """Of a block that begins at row 7, in two pieces: what a panel of it adds to."""
    gradients = torch.zeros(30, 8, dtype=torch.bfloat16)
    lent = BorrowedTotals.allocate(gradients, 20, 15, torch.float32, first=7)
    panels_of = (7, 27), (7, 12), (20, 27), (24, 27)
    for first, last in panels_of:
        for part, totals in lent.select(slice(first, last)):
            totals += torch.arange(first, last).float()[part, None]
    wanted = [row * sum(first <= row < last for first, last in panels_of) for row in range(7, 27)]
    assert torch.cat([totals for _, totals in lent.pieces])[:, 0].tolist() == wanted


STOWED = [
    (256_000, 4608, 8192 * 2, RowTotals(8192, 4096, 2304 * 4), 128, 0.23),
    (128_256, 8192, 8192 * 2, RowTotals(8192, 4096, 4096 * 4), 256, 0.38),
    (128_256, 8192, 4096 * 2, RowTotals(4096, 2048, 4096 * 4), 256, 0.85),
    (128_256, 8192, 1000 * 2, RowTotals(1000, 384, 4096 * 4), 256, 0.9),
    (50_257, 1536, 1000 * 2, RowTotals(1000, 384, 768 * 4), 128, 0.6),
    (32_003, 2208, 59 * 2, RowTotals(59, 0, 1104 * 4), 128, 0.8),
    (32_003, 2208, 700 * 2, RowTotals(700, 0, 0), 128, 0.8),  # nobody asks for gradients of rows
]


@pytest.mark.parametrize("fill", [lambda most: most, panel_layout.fill_waves(8192, 132)], ids=["any", "full"])
@pytest.mark.parametrize("room", [2_000_000, 8_000_000, 64_000_000])
@pytest.mark.parametrize(("cols", "line", "column", "rows", "tile", "least"), STOWED)
def test_what_is_stowed_is_there_until_it_is_summed(cols, line, column, rows, tile, least, room, fill):
    needs = StorageNeeds(6 * rows.number * -(-cols // tile), rows.number * line, tile)
    plan = plan_in_place(cols, line, column, rows, room, 16384, fill, needs)
    assert plan is not None and plan.stored[-1].last >= least * cols
    end = cols * line if plan.totals is None else plan.totals
    assert plan.vectors + needs.vectors <= end and plan.stored[0].at >= needs.sums
    ends = [turn.at + (turn.last - turn.first) * column for turn in plan.stored]
    assert ends[-1] <= plan.vectors
    for turn, last, after in itertools.zip_longest(plan.stored, ends, plan.stored[1:]):
        assert turn.over == ROWS | COLS and (turn.last - turn.first) % tile == 0
        assert turn.last * line <= turn.at  # its own gradients are written before it
        assert after is None or (after.first, after.at) == (turn.last, last)
    first = plan.stored[-1].last
    spans = {over: sorted((t.first, t.last) for t in plan.panels if over in t.over) for over in ("rows", "cols")}
    for met in spans.values():
        assert met[0][0] == first and met[-1][1] == cols and all(a[1] == b[0] for a, b in itertools.pairwise(met))
    assert all(turn.at is None or turn.at >= first * line for turn in plan.panels)


def test_nothing_is_stowed_where_gradients_are_small():
    """A contrastive loss: one column in a hundred could be."""
    rows = RowTotals(32_768, 16_384, 512 * 4)
    assert (
        plan_in_place(32_768, 1024, 65_536, rows, 64_000_000, 16384, lambda most: most, StorageNeeds(10**8, 2**25, 128))
        is None
    )
