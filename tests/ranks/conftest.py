"""One pool of eight ranks for all tests."""

import pytest

from tests.ranks.pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()
