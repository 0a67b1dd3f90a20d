"""Streams on a GPU: chunks through pinned memory, ahead of the work, and the folds of one that has them all."""

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


@pytest.mark.parametrize("op", [attention, causal], ids=["full", "causal"])
def test_a_stream_is_the_whole_with_gradients(op):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 32, generator=gen) for n in (300, 5000, 5000))
    rows = q.cuda().requires_grad_()
    y = op.stream(rows).over(mr.chunks(k, v.numpy(), size=700, device="cuda"))
    y.square().sum().backward()
    whole = q.cuda().requires_grad_()
    expected = op(whole, k.cuda(), v.cuda())
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows.grad, whole.grad, rtol=1e-3, atol=1e-3)


def test_a_buffer_is_not_filled_before_its_copy_is_over():
    """Every chunk arrives whole although the two pinned buffers are used again and again."""
    data = numpy.arange(64 * 4096 * 16, dtype=numpy.float32).reshape(-1, 16)
    seen = [chunk.sum() for (chunk,) in mr.chunks(data, size=4096, device="cuda")]
    expected = [torch.from_numpy(data[at : at + 4096]).cuda().sum() for at in range(0, len(data), 4096)]
    torch.testing.assert_close(torch.stack(seen), torch.stack(expected))
