"""What every test has: random numbers of its own, shown when it fails; a cache of its own; a number of threads."""

import gc
import hashlib
import json
import os
import pathlib
import random
import shutil
import tempfile

import hypothesis
import numpy
import pytest
import torch

from tests.support.sampled import mark_the_others_slow

# Nothing of a test run is left in the cache of whoever runs it, nor found there; nor do workers find each other's.
if "MONOIDREDUCE_CACHE" not in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["MONOIDREDUCE_CACHE"] = _cache = tempfile.mkdtemp(prefix="monoidreduce-tests-")
else:
    _cache = None

# The tests name the engine that they test. Left to itself, the planner would run small cases dense; that choice is
# tested in tests/unit/plan/test_schedule_choice.py.
if not torch.cuda.is_available():
    os.environ.setdefault("MONOIDREDUCE_ENGINE", "eager")

_file = ""  # of the last test
SEED_NAMES = json.loads((pathlib.Path(__file__).parent / "support" / "seed_names.json").read_text())

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# No deadline: the first call of a test may compile or tune. The same examples on every run.
hypothesis.settings.register_profile("monoidreduce", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile("monoidreduce")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """A seed derived from the test's name: the same on every run and machine, in any order.

    All random generators start from it. A file that was renamed keeps the seeds of its earlier name, which is in
    ``tests/support/seed_names.json``: some bounds are close enough that other random numbers exceed them.
    """
    path, _, test = request.node.nodeid.partition("::")
    name = f"{SEED_NAMES.get(path, path)}::{test}"
    value = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    if torch.cuda.is_available():
        torch.manual_seed(value)
    else:  # without a device, the other would note its caller, frame by frame, for the day that one appears
        torch.default_generator.manual_seed(value)
    numpy.random.seed(value)
    random.seed(value)
    return value


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch):
    """Says whether labels are looked at, as on a CPU, or are not, as on a GPU. Layers remember what a call like theirs
    did: not in this test, where it changes."""

    # Not imported above: Triton may not be imported before its interpreter is asked for (tests/interpret/conftest.py).
    from monoidreduce.runtime.torch_replay import LayerReplay
    from tests.support import internals

    def say(looks: bool) -> None:
        internals.hide_labels(monkeypatch, not looks)
        monkeypatch.setattr(LayerReplay, "__call__", lambda self, args, kwargs: self.layer(*args, **kwargs))

    return say


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]):
    mark_the_others_slow(items)


gc.disable()  # until all tests are collected: nearly all that collecting makes stays, and is looked at again and again


def pytest_collection_finish():
    """Ten thousand tests live to the end of a run: the garbage collector need not look at them, ever."""
    gc.freeze()
    gc.enable()


def pytest_runtest_logfinish(nodeid: str):
    """Nor at what the files of earlier tests imported and remember: a collection sees the objects of one file."""
    global _file
    path = nodeid.partition("::")[0]
    if path != _file:
        gc.collect()
        gc.freeze()
        _file = path


def pytest_unconfigure():
    gc.unfreeze()  # extensions look at the end for what was never collected, and would name every one of their types
    if _cache is not None:
        shutil.rmtree(_cache, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.failed and "seed" in getattr(item, "funcargs", {}):
        report.sections.append(("random seed", str(item.funcargs["seed"])))
    return report
