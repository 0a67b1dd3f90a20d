"""Ready-made layers over lists of columns by generated kernels, against tiles in torch: values and gradients."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def per_key_head():
    cols = mr.blocks.from_mask(torch.rand(2, 3, 3) > 0.4, 16, 16)
    call = lambda q, k, v: ops.attention(q, k, v, enable_gqa=True, causal=True, cols=cols)
    return call, (torch.randn(4, 40, 16), torch.randn(2, 48, 16), torch.randn(2, 48, 16))


def paged():
    held = mr.pages(torch.tensor([[3, 1], [2, 0]]), torch.tensor([20, 5]), 16)
    call = lambda q, k, v: ops.attention_paged(q, k, v, held, window=(9, None))
    return call, (torch.randn(2, 4, 1, 16), torch.randn(4, 16, 2, 16), torch.randn(4, 16, 2, 16))


def graph():
    cols = mr.edges.from_neighbours(torch.randint(9, (7, 5)), torch.tensor([5, 0, 1, 3, 5, 2, 4]))
    return lambda t, s, v: ops.graph_attention(t, s, v, cols), (torch.randn(7), torch.randn(9), torch.randn(9, 16))


def sampled():
    target, samples = torch.randint(30, (6,)), torch.randint(30, (6, 7))
    call = lambda x, w: ops.sampled_cross_entropy(x, w, target, samples, remove_hits=True, reduction="none")
    return call, (torch.randn(6, 16), torch.randn(30, 16))


@pytest.mark.parametrize("make", [per_key_head, paged, graph, sampled])
def test_kernels_agree_with_tiles(make):
    call, inputs = make()
    found = []
    for engine in ("triton", "eager"):
        with mr.use(engine=engine):
            given = [x.clone().requires_grad_() for x in inputs]
            y = call(*given)
            found.append((y, *torch.autograd.grad(y, given, torch.linspace(-1, 1, y.numel()).view(y.shape))))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
