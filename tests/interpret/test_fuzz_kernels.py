"""Random programs by generated kernels, in Triton's interpreter, against plain torch. More:
``TRITON_INTERPRET=1 python -m tests.fuzz --share interpret --programs 1000``."""

import pytest

from tests.fuzz.runner import assert_programs

SHARDS, PROGRAMS = 4, 10


@pytest.mark.parametrize("shard", range(SHARDS))
def test_kernels_agree_with_plain_torch(shard: int):
    assert_programs(range(shard * PROGRAMS, (shard + 1) * PROGRAMS), share="interpret")
