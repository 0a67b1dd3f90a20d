"""Every layer of the zoo over many ranks: by rows, by columns, by both; uneven and empty parts; the error rule."""

from dataclasses import replace

import pytest
import torch

from tests.support.comparison import assert_equal, assert_error_rule, cast, named, run
from tests.support.layers import BY_NAME, ZOO
from tests.support.rank_cases import DIVISIONS, Case, joined, prepared

WORLDS = [1, 2, 3, 4, 7, 8]
slow = pytest.mark.slow


def whole(case, function=None):
    layer = BY_NAME[case.layer]
    return run(function or layer.op, case.args, cotangents=case.cotangents)


def check(pool, cases):
    cases = [prepared(c) for c in cases]
    answers = pool.run("sharded_many", cases[0].world, cases)
    for n, case in enumerate(cases):
        try:
            assert_equal(joined(case, [a[n] for a in answers]), whole(case))
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(ZOO))
def test_every_layer_by_rows_by_columns_and_by_both(pool, layer, seed):
    world = [2, 3, 4, 7][ZOO.index(layer) % 4]
    check(pool, [Case(layer.name, divided, world, seed=seed % 1000) for divided in DIVISIONS])


@slow
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layer", named(ZOO))
def test_every_layer_in_every_world(pool, layer, world, seed):
    orders = ["contiguous", "zigzag"]
    cases = [Case(layer.name, d, world, seed=seed % 1000, order=o) for d in DIVISIONS for o in orders]
    ring = Case(layer.name, ("rows", "cols"), world, seed=seed % 1000)
    grids = [replace(ring, slices=w, order=orders[w % 3 == 0]) for w in range(1, world) if world % w == 0]
    check(pool, [*cases, *grids, replace(ring, slices="best")])


def test_results_may_be_changed_in_place_or_checkpointed(pool):
    for first, in_place, plain in pool.run("changed", 2, 23):
        torch.testing.assert_close(first, plain)
        torch.testing.assert_close(in_place, plain)


PRECISE = ["causal_attention", "cross_entropy", "gelu_mlp", "gaussian_kernel_of_many_features", "biased_attention"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("divided", DIVISIONS, ids="+".join)
@pytest.mark.parametrize("name", [n for n in PRECISE if n in BY_NAME])
def test_the_error_is_that_of_one_process_in_any_world(pool, name, divided, seed):
    for world in (2, 8):
        cases = [prepared(Case(name, divided, world, 64, 257, seed % 1000 + k, torch.float32)) for k in range(3)]
        answers = pool.run("sharded_many", world, cases)
        trials = []
        for n, case in enumerate(cases):
            dense = BY_NAME[name].dense
            exact = run(dense, cast(case.args, torch.float64), cotangents=case.cotangents)
            trials.append((joined(case, [a[n] for a in answers]), whole(case, dense), exact))
        assert_error_rule(trials)
