"""The first launches of a fold, each in a thread: on the caller's stream, with its settings, to the same numbers."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engine import hardware, triton
from monoidreduce.engine.triton import together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_stream_and_settings_are_the_callers():
    stream, here = torch.cuda.Stream(), lambda: (torch.cuda.current_stream(), hardware.float32_precision())
    with torch.cuda.stream(stream), mr.use(precision="tf32x3"):
        assert together.run([here, here], torch.device("cuda", 0)) == [(stream, "tf32x3")] * 2


def test_what_one_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        together.run([lambda: 1, lambda: 1 // 0], torch.device("cuda", 0))


def test_the_numbers_are_those_of_launches_one_by_one(monkeypatch):
    args = [torch.randn(n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (200, 333, 333, 333)]
    g = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16)

    def gradients():
        monkeypatch.setattr(triton, "_READY", {})
        with mr.use(engine="triton"):
            return torch.autograd.grad(mr.ops.gated_mlp(*args), args, g)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        at_once = gradients()
        monkeypatch.setattr(together, "run", lambda calls, device: [call() for call in calls])
        assert all(torch.equal(a, b) for a, b in zip(at_once, gradients(), strict=True))
