"""Every layer on a GPU, by every engine that runs there: values and gradients against float64, in four precisions.

A kernel takes seconds to compile: ``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the layers, so that twelve
processes share the work.
"""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce.plan.settings import ENGINES as NAMES
from tests.support.comparison import assert_equal, assert_error_rule, cast, is_float, run, there
from tests.support.layers import ZOO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
LAYERS = ZOO[PART::PARTS]
ENGINES = sorted(set(NAMES) - {"auto"})
SIZES = [(59, 111), (257, 128)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
DRAWS = 40  # by which a layer is judged that two find wanting


def by(engine, layer):
    def call(*args):
        with mr.use(engine=engine):
            return layer.op(*args)

    return there(call)


def plain(layer):
    def call(*args):
        with torch.device("cuda"):  # there it counts its rows and columns
            return layer.dense(*args)

    return there(call)


def trial(layer, engine, dtype, size, number):
    """Ours, and plain torch, both on the GPU, and the truth."""
    args = layer.make(*size, torch.Generator().manual_seed(number), dtype)
    assert any(is_float(a) for a in args)
    return run(by(engine, layer), args), run(plain(layer), args), run(layer.dense, cast(args, torch.float64))


@pytest.mark.filterwarnings("ignore::monoidreduce.errors.FallbackWarning")  # an engine says what it has no kernel for
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_layer_within_the_error_rule(layer, engine, dtype):
    for size in SIZES:
        trials = [trial(layer, engine, dtype, size, number) for number in range(2)]
        if dtype is torch.float64:
            for ours, _, truth in trials:
                assert_equal(ours, truth)
            continue
        try:
            assert_error_rule(trials)
        except AssertionError:  # the largest of few errors, and which of two near equals is picked, are luck: draw more
            more = (trial(layer, engine, dtype, size, number) for number in range(2, DRAWS))
            assert_error_rule([*trials, *more])


@pytest.mark.parametrize("engine", ENGINES)
def test_repeats_bit_for_bit(engine):
    layer = next(entry for entry in ZOO if entry.differentiable)
    args = layer.make(257, 511, torch.Generator().manual_seed(0), torch.float32)
    first = run(by(engine, layer), args)
    for _ in range(20):
        again = run(by(engine, layer), args)
        assert all(torch.equal(a, again.all()[name]) for name, a in first.all().items())
