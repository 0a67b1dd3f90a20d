"""How many files of the library a reader must open to follow a call by kernels, the first one and a known one."""

import pytest

from tests.support.visited_files import assert_few

# how it runs: files that a first forward, a known forward, and a known forward with its backward may visit. On a GPU
# known calls are replayed; the interpreter launches nothing again. Lower them where files are joined; the aim is 30 for
# a first call.
MOST = {"triton": (36, 14, 16), "h200": (36, 8, 10)}


@pytest.mark.parametrize("engine", MOST)
def test_files_that_a_call_visits(engine):
    assert_few(engine, MOST[engine])
