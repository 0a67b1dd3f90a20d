"""Every layer on a GPU, by every engine that runs there: values and gradients against float64, in four precisions.

A kernel takes seconds to compile: ``MONOIDREDUCE_TEST_SHARD=3/12`` runs a twelfth of the layers, so that twelve
processes share the work.
"""

import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engine.registry import NAMES
from tests.layers import ZOO
from tests.layers_compare import assert_equal, assert_error_rule, cast, is_float, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PART, PARTS = map(int, os.environ.get("MONOIDREDUCE_TEST_SHARD", "0/1").split("/"))
LAYERS = ZOO[PART::PARTS]
ENGINES = sorted(set(NAMES) - {"auto"})
SIZES = [(59, 111), (257, 128)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def on_gpu(args):
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


def back(result):
    return type(result)({k: v.cpu() for k, v in result.values.items()}, {k: v.cpu() for k, v in result.grads.items()})


def gpu_run(layer, engine, args):
    """The layer on the GPU, with the same cotangents as on the CPU."""

    def call(*given):
        with mr.use(engine=engine):
            out = layer.op(*on_gpu(given))
        return [
            t.cpu()
            for t in (out.values() if isinstance(out, dict) else [out] if isinstance(out, torch.Tensor) else out)
        ]

    return back(run(call, args))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_layer_within_the_error_rule(layer, engine, dtype):
    for M, N in SIZES:
        trials = []
        for number in range(2):
            args = layer.make(M, N, torch.Generator().manual_seed(number), dtype)
            truth = run(layer.dense, cast(args, torch.float64))
            assert any(is_float(a) for a in args)
            trials.append((gpu_run(layer, engine, args), run(layer.dense, args), truth))
        if dtype is torch.float64:
            for ours, _, truth in trials:
                assert_equal(ours, truth)
        else:
            assert_error_rule(trials)


@pytest.mark.parametrize("engine", ENGINES)
def test_repeats_bit_for_bit(engine):
    layer = next(entry for entry in ZOO if entry.differentiable)
    args = layer.make(257, 511, torch.Generator().manual_seed(0), torch.float32)
    first = gpu_run(layer, engine, args)
    for _ in range(20):
        again = gpu_run(layer, engine, args)
        assert all(torch.equal(a, again.all()[name]) for name, a in first.all().items())
