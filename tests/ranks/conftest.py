"""One pool of eight ranks for all tests, and one of four that have other packages imported; started anew after a
failure."""

import pytest

from tests.support.rank_pool import Pool

PEERS = ("megatron.core.tensor_parallel", "transformers.models.llama.modeling_llama")


def pytest_collection_modifyitems(items):
    """Tests of the pool that takes long to start are neighbours: one process of pytest starts it."""
    items.sort(key=lambda item: "peers" not in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def _pools():
    pools = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def pool(_pools):
    return _find_pool(_pools, "eight", lambda: Pool())


@pytest.fixture
def peers(_pools):
    """Four ranks of a process that has imported the packages that we are compared with."""
    return _find_pool(_pools, "peers", lambda: Pool(4, imported=PEERS))


def _find_pool(pools, name, make):
    if name in pools and pools[name].broken:
        pools.pop(name).close()
    if name not in pools:
        pools[name] = make()
    return pools[name]
