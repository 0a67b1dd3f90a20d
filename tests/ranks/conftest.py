"""One pool of eight ranks for all tests, started anew after a failure."""

import pytest

from tests.support.rank_pool import Pool


@pytest.fixture(scope="session")
def _pools():
    pools = []
    yield pools
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(_pools):
    if _pools and _pools[-1].broken:
        _pools.pop().close()
    if not _pools:
        _pools.append(Pool())
    return _pools[-1]
