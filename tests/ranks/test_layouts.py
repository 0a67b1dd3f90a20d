"""Other ways to say what is divided: DTensors, meshes of two dimensions, zig-zag order; and what ranks refuse."""

import pytest

from tests.layers import BY_NAME
from tests.layers_compare import assert_equal, run
from tests.ranks.cases import Case, joined, prepared


@pytest.mark.parametrize("name", ["causal_attention", "window_attention", "cross_entropy", "info_nce"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_zigzag_order_is_the_same_layer(pool, name, world, seed):
    case = prepared(Case(name, ("rows", "cols"), world, 37, 45, seed % 1000, order="zigzag"))
    answers = pool.run("sharded", world, case)
    assert_equal(joined(case, answers), run(BY_NAME[name].op, case.args, cotangents=case.cotangents))


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
    for kind, text in pool.run("label_of_nobody", 3):
        assert kind == "LabelError" and "41" in text


def test_nothing_is_left_changed(pool):
    assert all(pool.run("left_alone", 2))
