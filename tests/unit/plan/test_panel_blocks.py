"""Blocks of rows: they are few, fit, and nothing that is still needed is ever written over."""

import itertools

import pytest

from monoidreduce.plan import panel_layout
from monoidreduce.plan.panel_layout import BlockBytes, Machine, busy_share, plan_row_blocks, separate_total_bytes

H200 = Machine(132, (128, 128))
CASES = [  # rows, columns, features, room
    (32_768, 32_768, 512, 64_000_000),
    (65_536, 65_536, 768, 64_000_000),
    (65_536, 65_536, 768, 40_000_000),
    (50_001, 20_003, 264, 9_000_000),
    (5000, 5000, 300, 10**7),
    (200_000, 3000, 1024, 30_000_000),
]


def of(features, lends=True):
    return BlockBytes(2, 4 * features, 4 * features, 2 * features if lends else 0, (features, features))


@pytest.mark.parametrize("machine", [Machine(1, (16, 16)), H200, Machine(108, (128, 256))])
@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize(("rows", "cols", "features", "room"), CASES)
def test_blocks_are_few_and_fit(rows, cols, features, room, lends, machine):
    each = of(features, lends)
    found = plan_row_blocks(rows, cols, each, machine, room, panel_layout.MAX_ROUNDINGS, True)
    if found is None:
        assert not lends  # totals of an eighth of the rows are too much
        return
    ends = [0, *(b.last for b in found.blocks)]
    assert [b.first for b in found.blocks] == ends[:-1] and ends[-1] == rows
    assert 1 < len(found.blocks) <= panel_layout.MAX_ROUNDINGS
    assert found.rows == max(b.rows for b in found.blocks) and found.cols == min(b.cols for b in found.blocks)
    for b in found.blocks:
        assert b.rows * b.cols * each.pair + separate_total_bytes(b, rows, each) <= room
        totals = (b.last - b.first) * each.row + (b.cols * each.col if b.strips else 0)
        assert not b.strips or totals <= (rows - b.first) * each.lent  # a strip's lie in gradients, whole


@pytest.mark.parametrize(("rows", "cols", "features", "room"), CASES[:3])
def test_panels_are_nearly_square(rows, cols, features, room):
    found = plan_row_blocks(rows, cols, of(features), H200, room, panel_layout.MAX_ROUNDINGS, True)
    side = (room / 2) ** 0.5
    whole = [b for b in found.blocks if not separate_total_bytes(b, rows, of(features))]
    assert sum(b.last - b.first for b in whole) > 0.6 * rows
    for b in whole:
        assert 0.6 * side < b.rows < 1.4 * side and 0.6 * side < b.cols < 1.4 * side


@pytest.mark.parametrize(("rows", "cols", "features", "room"), CASES[:3])
def test_totals_lie_in_one_piece(rows, cols, features, room):
    """In two pieces their sums would be two products. Blocks end where gradients hold no more, and those of the last
    few rows lie apart."""
    *others, last = plan_row_blocks(rows, cols, of(features), H200, room, panel_layout.MAX_ROUNDINGS, True).blocks
    assert not any(separate_total_bytes(b, rows, of(features)) for b in others)
    assert separate_total_bytes(last, rows, of(features)) == (last.last - last.first) * of(features).row
    assert last.last - last.first < 0.2 * rows


def test_strips_make_blocks_fewer():
    """Where row gradients hold the totals of several panels: more panels of the same height, and fewer roundings."""
    given = (65_536, 65_536, of(768), H200, 64_000_000)
    with_strips, without = (plan_row_blocks(*given, panel_layout.MAX_ROUNDINGS, strips) for strips in (True, False))
    assert with_strips.blocks[0].strips and not any(b.strips for b in without.blocks)
    assert with_strips.rows < 0.75 * without.rows and len(with_strips.blocks) <= len(without.blocks)


def test_fewer_blocks_where_fewer_are_asked_for():
    """As few as fit where those asked for do not."""
    given = (32_768, 32_768, of(512), H200, 64_000_000)
    counts = [len(plan_row_blocks(*given, most, False).blocks) for most in range(2, panel_layout.MAX_ROUNDINGS + 1)]
    assert all(a <= b for a, b in itertools.pairwise(counts)) and counts[0] <= 4 < counts[-1]
    assert plan_row_blocks(32_768, 32_768, of(512), H200, 10**6, 2, False) is None


def test_short_panels_that_add_to_float32_do_not_pay():
    """Whole rows are kept from 128 a panel on, from 1024 where every panel reads and writes all column totals."""
    assert panel_layout.PanelLayout(128, 10**5).is_worthwhile(10**5) and not panel_layout.PanelLayout(
        127, 10**5
    ).is_worthwhile(10**5)
    assert panel_layout.PanelLayout(1024, 10**5, float32_totals=True).is_worthwhile(
        10**5
    ) and not panel_layout.PanelLayout(896, 10**5, float32_totals=True).is_worthwhile(10**5)
    assert panel_layout.PanelLayout(90, 10**5, float32_totals=True).is_worthwhile(90)  # all there are


@pytest.mark.parametrize(
    ("rows", "share"), [(5632, 1.0), (5120, 0.909), (8448, 1.0), (8832, 0.836), (3072, 0.873), (11264, 1.0)]
)
def test_some_heights_leave_no_processor_idle(rows, share):
    """132 tiles of 256 × 128 numbers are 5632 rows of 768; of 8448 rows 264 tiles of 128 × 192."""
    tiles = (256, 128), (192, 192), (128, 192), (128, 160), (128, 128)
    assert busy_share(rows, 768, tiles, 132) == pytest.approx(share, abs=1e-3)
    assert busy_share(rows, 768, ((1, 1),), 1) == 1
