"""Attention in a model's layout on a GPU: against float64, in the memory order of its inputs, without copies."""

import pytest
import torch

from tests.support.model_layout_cases import Model, attend, check, gather

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("fused", [False, True])
def test_against_float64(width, causal, fused):
    model = Model(1, 8, 2, 1010, width, fused)  # the reference multiplies all pairs' features: 8 GB of them
    layer, found = gather(model, "triton", torch.bfloat16, "cuda", causal=causal)
    assert layer.transpose(1, 2).is_contiguous()
    check(model, found, torch.bfloat16, "cuda", causal=causal)
    again = gather(model, "triton", torch.bfloat16, "cuda", causal=causal)[1]
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.parametrize("width", [64, 128])
def test_no_column_gradients_of_every_head(width):
    """Memory of a forward and a backward: the result, the gradients, those of queries in float32 too, and a few numbers
    per row. Column gradients of every head would be twice the queries' bytes more, or four times in float32."""
    model = Model(4, 32, 4, 4096, width)
    given, y = model.inputs(torch.bfloat16, "cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        found = model.run(attend("triton", causal=True), given, y)
        peak = torch.cuda.max_memory_allocated() - before
        del found
    assert peak <= 1.15 * (y.nbytes + sum(x.nbytes for x in given)) + 2 * given[0].nbytes + 2**20
