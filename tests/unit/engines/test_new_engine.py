"""An engine of one function, under one name, runs every layer, its gradients and second derivatives, and compiled."""

import pytest
import torch

import monoidreduce as mr
from tests.support import two_walks_engine as new
from tests.support.comparison import assert_equal, named, run
from tests.support.layers import BY_NAME, ZOO


@pytest.fixture(autouse=True)
def engine():
    with new.planted(), mr.use(engine=new.NAME):
        yield


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(ZOO))
def test_layers_and_their_gradients(layer, seed):
    args = layer.args(13, 17, seed)
    before = len(new.walks)
    assert_equal(run(layer.op, args), run(layer.dense, args))
    assert len(new.walks) > before


def test_second_derivatives(seed):
    layer = BY_NAME["sigmoid_attention"]
    args = [a.requires_grad_() if a.is_floating_point() else a for a in layer.args(3, 4, seed)]
    assert torch.autograd.gradgradcheck(layer.op, args)


def test_inside_a_compiled_function(seed):
    layer = BY_NAME["sigmoid_attention"]
    args = layer.args(13, 17, seed)
    before = len(new.walks)
    assert_equal(run(torch.compile(layer.op, backend="aot_eager", fullgraph=True), args), run(layer.dense, args))
    assert len(new.walks) > before
