"""Streams on a GPU: chunks through pinned memory, ahead of the work, and the folds of one that has them all."""

import gc
import threading

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.sources import AlongAxis, Chunks

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


@pytest.mark.parametrize("where", ["pinned", "pageable", "file"])
def test_memory_is_rows_state_and_two_chunks(where, tmp_path):
    """However long the stream, and however slow the work: a chunk in use, a chunk ahead, and what a fold holds."""
    count, size = 12 * 2**16, 2**16  # of 64 numbers: 16 MiB a chunk
    y = torch.randn(count, 64, pin_memory=where == "pinned")
    if where == "file":
        numpy.save(tmp_path / "y.npy", y.numpy())
    source = mr.chunks(tmp_path / "y.npy" if where == "file" else y, size=size, device="cuda")
    x = torch.randn(8, 64, device="cuda")
    chunk = size * 64 * 4

    def peak(op):
        op(None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        op(None)
        return torch.cuda.max_memory_allocated() - before

    folded = peak(lambda _: total.stream(x).over(source, quiet=True))
    alone = peak(lambda _: total(x, y[:size].cuda()))  # one chunk and what its fold holds
    assert folded <= alone + chunk + 2**20, (folded, alone, chunk)


@mr.op
def total(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.tanh(x @ y))


def test_a_source_that_fails_and_one_that_is_left():
    """An error in the thread that copies is the caller's; a source that is not read to its end leaves no thread."""
    before = threading.active_count()

    class Broken:
        shape = (100, 4)

        def __getitem__(self, which):
            if which.start >= 40:
                raise OSError("the disk is gone")
            return torch.ones(which.stop - which.start, 4)

    source = Chunks([AlongAxis(Broken(), 0)], 20, torch.device("cuda"))
    with pytest.raises(OSError, match="disk"):
        list(source)
    for _ in mr.chunks(torch.ones(100, 4), size=10, device="cuda"):
        break
    gc.collect()
    assert threading.active_count() == before
