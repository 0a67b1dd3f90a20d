"""How many files of the library a reader must open to follow a call by kernels, the first one and a known one."""

from tests.support.visited_files import visited

FIRST, KNOWN, BACKWARD = 76, 18, 23  # lower them where files are joined; the aim is 30 for a first call, 10 for a known


def test_files_that_a_call_visits():
    found = visited("triton")
    assert len(found["forward"][0]) <= FIRST, found["forward"][0]
    assert len(found["forward"][-1]) <= KNOWN, found["forward"][-1]
    assert len(found["backward"][-1]) <= BACKWARD, found["backward"][-1]
    assert found["forward"][-1] == found["forward"][-2]  # nothing is found out anew
