"""How many files of the library a reader must open to follow a call on a CPU, the first one and a known one."""

import pytest

from tests.support.visited_files import assert_few, visited

# engine: files that a first forward, a known forward, and a known forward with its backward may visit. Lower them where
# files are joined.
MOST = {"eager": (26, 7, 8)}


@pytest.mark.parametrize("engine", MOST)
def test_files_that_a_call_visits(engine):
    assert_few(engine, MOST[engine])


def test_a_known_call_does_not_trace_or_plan_again():
    found = visited("eager")["forward"][-1]
    assert not [name for name in found if name in ("op.py", "program/trace.py", "program/lower.py", "runtime/bind.py")]
