"""Which cases of a sampled test are in every run: one in n, every value of a parameter among them."""

import itertools

import pytest

from tests.support.sampled import choose

CASES = [{"layer": a, "dtype": b, "case": k} for k, (a, b) in enumerate(itertools.product("abcdefgh", (16, 32, 64)))]
NAMES = [f"test[{k}]" for k in range(len(CASES))]


@pytest.mark.parametrize("share", [1, 2, 3, 50])
def test_every_value_is_among_the_chosen(share):
    chosen = choose(CASES, NAMES, share)
    assert len(chosen) == max(len(CASES) // share, 1)
    for name, count in (("layer", 8), ("dtype", 3)):
        assert len({CASES[k][name] for k in chosen}) == min(count, len(chosen)) or count > len(chosen)


def test_the_choice_is_the_same_in_any_order():
    order = [*range(12, 24), *range(12)]
    again = choose([CASES[k] for k in order], [NAMES[k] for k in order], 3)
    assert {order[k] for k in again} == choose(CASES, NAMES, 3)
