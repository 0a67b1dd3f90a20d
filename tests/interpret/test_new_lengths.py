"""The first call of a new length of a known op: what is decided for a program or a class of lengths stays decided.

Training on packed or bucketed sequences meets hundreds of lengths."""

import pytest

from monoidreduce.plan.op_counts import round_length
from tests.support import new_lengths


@pytest.fixture(scope="module")
def found():
    return new_lengths.run()


def test_nothing_is_traced_lowered_differentiated_written_or_planned_again(found):
    assert found["anew"] == {}


def test_launches_are_those_of_a_process_that_met_no_other_length(found):
    assert found["different"] and not any(found["different"].values()), found["different"]


def test_what_is_remembered_of_lengths_is_bounded(found):
    assert found["held"] and all(0 < count <= 2 * new_lengths.SMALL for count in found["held"].values()), found["held"]


def test_classes_of_lengths():
    """A class never crosses a power of two (tuned plans are for these), and is a sixteenth of the way to the next."""
    for n in range(1, 5000):
        longest = round_length(n)
        assert n <= longest <= max(n, n * 17 / 16) and longest <= 1 << (n - 1).bit_length()
        assert round_length(longest) == longest
