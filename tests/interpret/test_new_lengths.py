"""The first call of a new length of a known op: what is decided for a program or a class of lengths stays decided.

Training on packed or bucketed sequences meets hundreds of lengths."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.triton.codegen.tile_ranges import compute_tile_ranges, find_longest, identify_table
from monoidreduce.plan.schedule import round_length
from monoidreduce.program.gradient import FoldGradient
from monoidreduce.program.lower import compile_program
from tests.support import new_lengths


@pytest.fixture(scope="module")
def found():
    return new_lengths.run()


def test_nothing_is_traced_lowered_differentiated_written_or_planned_again(found):
    assert found["anew"] == {}


def test_launches_are_those_of_a_process_that_met_no_other_length(found):
    assert found["different"] and not any(found["different"].values()), found["different"]


def test_a_new_length_runs_few_functions(found):
    """Python functions of the library, forward and backward, and a tenth more: prepared anew, the first four run 4584,
    4640, 4717 and 3052."""
    most = {"attention": 2560, "causal": 2600, "split heads": 2620, "perceptron": 1740, "logprobs": 2290}
    assert found["calls"].keys() == most.keys()
    assert {name: count for name, count in found["calls"].items() if count > most[name]} == {}


def test_what_is_remembered_of_lengths_is_bounded(found):
    assert found["held"] and all(0 < count <= 2 * new_lengths.SMALL for count in found["held"].values()), found["held"]


def test_classes_of_lengths():
    """A class never crosses a power of two (tuned plans are for these), and is a sixteenth of the way to the next."""
    for n in range(1, 5000):
        longest = round_length(n)
        assert n <= longest <= max(n, n * 17 / 16) and longest <= 1 << (n - 1).bit_length()
        assert round_length(longest) == longest


@pytest.mark.parametrize("over", ["cols", "rows"])
@pytest.mark.parametrize("window", [None, 7, 40])
def test_a_table_of_visited_tiles_serves_all_lengths_of_as_many_tiles(over, window):
    """It visits what the table of the length itself visits, and calls no more of it whole."""

    @mr.op
    def near(x: mr.Row["f"], y: mr.Col["f"]):
        seen = mr.col_index <= mr.row_index
        seen = seen if window is None else seen & (mr.row_index - mr.col_index <= window)
        return mr.logsumexp(torch.where(seen, x @ y, -torch.inf))

    (fold,) = (p.fold for p in near.program(*torch.randn(2, 8, 4)).passes)
    blocks = (16, 8)
    for lengths in [(n, n) for n in range(1, 100, 5)] + [(40, 96), (97, 33), (64, 63)]:
        longest = find_longest(fold, lengths, blocks)
        assert find_longest(fold, longest, blocks) == longest
        own, shared = (compute_tile_ranges(fold, over, {}, n, blocks, "cpu")[0] for n in (lengths, longest))
        for one, other in zip(own.tolist(), shared.tolist(), strict=True):
            (first, a, b, c, d, last), (again, e, f, g, h, end) = one, other
            whole = {*range(a, b), *range(c, d)}
            assert {*range(again, end)} >= {*range(first, last)} and whole >= {*range(e, f), *range(g, h)}
    some = near.program(*torch.randn(2, 8, 4)).passes[0].fold
    assert find_longest(some, (33, 33), blocks) == (48, 39) and find_longest(some, (33, 40), blocks) == (48, 40)


@mr.op
def causal(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


@mr.op
def before(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index < mr.row_index, q @ k, -torch.inf), v)


def test_a_gradient_has_the_table_of_tile_ranges_of_its_forward():
    """Of one length it is computed once; another mask has another one."""

    def tables(op):
        (forward,) = (p.fold for p in op.program(*torch.randn(3, 8, 4)).passes)
        asked = tuple(e.feature is not None for e in forward.leaves)
        gradients = compile_program(FoldGradient(forward, asked, (True,) * len(forward.outputs))).passes
        return {identify_table(fold) for fold in (forward, *(p.fold for p in gradients))}

    (here,), (there,) = tables(causal), tables(before)
    assert here != there
