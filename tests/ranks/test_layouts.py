"""Other ways to say what is divided: DTensors, meshes of two dimensions, zig-zag order; and what ranks refuse."""

import pytest
import torch.distributed as dist

import monoidreduce as mr
from tests.support.comparison import assert_equal, run
from tests.support.layers import BY_NAME
from tests.support.rank_cases import Case, joined, prepared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["causal_attention", "window_attention", "info_nce", "biased_attention"])
@pytest.mark.parametrize("world", [3, 8])
def test_zigzag_order_is_the_same_layer(pool, name, world, seed):
    case = prepared(Case(name, ("rows", "cols"), world, 37, 45, seed % 1000, order="zigzag"))
    answers = pool.run("sharded", world, case)
    assert_equal(joined(case, answers), run(BY_NAME[name].op, case.args, cotangents=case.cotangents))


GRIDS = [(4, 2, "contiguous"), (6, 3, "zigzag"), (8, 2, "zigzag"), (8, 4, "contiguous"), (8, "best", "contiguous")]
MANY = ["causal_attention", "cross_entropy", "info_nce", "nearest_neighbours", "attention_of_ones_own_monoid"]


@pytest.mark.parametrize(("world", "slices", "order"), GRIDS)
def test_a_grid_of_slices_is_the_same_layer(pool, world, slices, order, seed):
    cases = [Case(name, ("rows", "cols"), world, 37, 45, seed % 1000, order=order, slices=slices) for name in MANY]
    cases = [prepared(c) for c in cases]
    answers = pool.run("sharded_many", world, cases)
    for n, case in enumerate(cases):
        whole = run(BY_NAME[case.layer].op, case.args, cotangents=case.cotangents)
        assert_equal(joined(case, [a[n] for a in answers]), whole)


def test_slices_that_make_no_grid():
    with pytest.raises(mr.ArgumentError, match="slices=2"), mr.shard(rows=None, cols=_alone(), slices=2):
        pass
    for wrong in (0, -1, 1.5, True, "most"):
        with pytest.raises(mr.ArgumentError, match="slices"), mr.shard(rows=_alone(), cols=_alone(), slices=wrong):
            pass


def _alone():
    """A group of one, in this process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def test_groups_for_rows_and_columns_share_one_rank_or_all(pool):
    answers = pool.run("groups_that_overlap", 8)
    assert answers[:4] == [["same", "refused"]] * 4 and answers[4:] == [["same"]] * 4, answers


def test_zigzag_balances_causal_work(pool):
    pairs = pool.run("causal_pairs", 4, 256, "zigzag")
    plain = pool.run("causal_pairs", 4, 256, "contiguous")
    assert max(pairs) < 1.3 * min(pairs)
    assert max(plain) > 2 * min(plain)


PLACEMENTS = [
    ("rows",),
    ("cols",),
    ("rows+cols",),
    ("rows", "cols"),
    ("rows+cols", "-"),
    ("batch", "rows+cols"),
    ("batch", "cols"),
    ("-", "rows"),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=" × ".join)
def test_dtensors_are_placed_and_placed_back(pool, placement):
    world = 8  # a mesh is made by all ranks there are
    for answer in pool.run("dtensors", world, placement):
        assert answer == "same", answer


def test_dtensors_in_a_grid(pool):
    for answer in pool.run("dtensors", 8, ("rows+cols",), 2):
        assert answer == "same", answer


def test_pairs_that_ranks_share(pool):
    """A bias for all rows, for all columns, for all of the batch: its gradient is the sum of all ranks', once."""
    for answer in pool.run("shared_pairs", 3):
        assert answer == "same", answer


def test_the_gradient_of_a_pair_takes_no_more_than_itself(pool):
    """Round a ring: written where it belongs, a rank's share of it at a time."""
    for answer in pool.run("pair_memory", 4, 256, 512):
        assert answer["largest"] <= answer["bias"]
        assert answer["peak"] <= 1.6 * answer["bias"]  # itself, the quarter at hand, and tiles


def test_what_goes_by_its_usual_name(pool):
    for answers in pool.run("usual_names", 8):
        assert set(answers.values()) == {"same"}, answers


@pytest.mark.parametrize("fault", ["shared by one", "rows", "columns of one", "own columns"])
def test_pairs_that_do_not_fit_are_an_error_on_every_rank(pool, fault):
    for rank, (kind, text, after) in enumerate(pool.run("odd_pairs", 3, fault)):
        assert kind == ("ShapeError" if fault == "rows" and rank == 2 else "ShardError"), (rank, kind, text)
        assert after, "the group no longer works"


def test_a_mesh_of_two_dimensions(pool):
    for answer in pool.run("two_groups", 8):
        assert answer == "same", answer


def test_second_derivatives_over_ranks(pool):
    for answer in pool.run("second_derivatives", 3):
        assert answer == "same", answer


@pytest.mark.parametrize("divided", [("rows",), ("cols",), ("rows", "cols")], ids="+".join)
def test_ready_made_losses_are_those_of_one_process(pool, divided):
    for answer in pool.run("losses", 3, divided):
        assert answer == "same", answer


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", ["label", "features", "dtype", "number", "op", "rank", "uneven", "batch"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_refuses_what_one_brings(pool, fault, world):
    """A typed error on all ranks, and the group still works afterwards."""
    kinds = pool.run("refused", world, fault)
    own = {"label": "LabelError", "features": "ShapeError", "rank": "ShapeError"}.get(fault, "ShardError")
    guilty = world - 1
    for rank, (kind, text, after) in enumerate(kinds):
        assert kind == (own if rank == guilty else "ShardError"), (rank, kind, text)
        assert after, "the group no longer works"
    if own != "ShardError":
        assert f"rank {guilty}" in kinds[0][1]


def test_a_label_that_nobody_has_is_an_error_on_every_rank(pool):
    for answers in pool.run("label_of_nobody", 3):
        assert all(kind == "LabelError" and "41" in text for kind, text in answers), answers


def test_nothing_is_left_changed(pool):
    assert all(pool.run("left_alone", 2))
