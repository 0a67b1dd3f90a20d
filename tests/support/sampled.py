"""``@pytest.mark.sampled(n)``: of a test's cases one in n is in every run; the others are marked ``slow``.

For tests of many like cases. The chosen ones show every value of each parameter, as far as there are no more values
than chosen cases; then those follow whose names have the smallest hashes. So the choice is the same on every machine,
and a case that is added changes few others.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable

import pytest


def mark_the_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark ``slow`` what the marker ``sampled`` leaves out of every run."""
    tests = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None and hasattr(item, "callspec") and item.get_closest_marker("slow") is None:
            tests[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, share), cases in tests.items():
        chosen = choose([_values(case) for case in cases], [case.nodeid for case in cases], share)
        for k, case in enumerate(cases):
            if k not in chosen:
                case.add_marker("slow")


def choose(cases: list[dict[str, Hashable]], names: list[str], share: int) -> set[int]:
    """The places of one in ``share`` cases, given the values of their parameters."""
    wanted = math.ceil(len(cases) / share)
    values = {(p, v) for case in cases for p, v in case.items()}
    room = {p for p in cases[0] if sum(q == p for q, _ in values) <= wanted}
    missing = {(p, v) for p, v in values if p in room}
    left = sorted(range(len(cases)), key=lambda k: hashlib.sha256(names[k].encode()).digest())
    chosen: set[int] = set()
    while missing:
        best = max(left, key=lambda k: len(missing & cases[k].items()))
        missing -= cases[best].items()
        left.remove(best)
        chosen.add(best)
    return chosen | set(left[: max(wanted - len(chosen), 0)])


def _values(case: pytest.Item) -> dict[str, Hashable]:
    """What a case gives each parameter: small values themselves, of others the place in their list."""
    spec = case.callspec
    return {
        name: value if isinstance(value, str | int | float | bool | type(None)) else ("place", spec.indices[name])
        for name, value in spec.params.items()
    }
