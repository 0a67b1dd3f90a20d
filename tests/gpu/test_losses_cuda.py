"""On a GPU: row gradients that a forward keeps, and activations made of the GPU's own tanh, against float64."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops
from tests.support import saved_row_gradient_cases as cases
from tests.support.comparison import assert_error_rule, cast, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIXTEEN = [torch.bfloat16, torch.float16]
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def on_gpu(op):
    """An op on the GPU, seen from the CPU."""

    def call(*args):
        with mr.use(engine="triton", strict=True):
            return op(*(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)).cpu()

    return call


@pytest.mark.parametrize("dtype", [torch.float32, *SIXTEEN], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", [n for n in cases.LOSSES if n != "earlier columns"])
def test_kept_gradients(name, dtype, monkeypatch):
    """Peaked rows among them; plain torch has NaN for rows that see nothing."""
    cases.keep_always(monkeypatch)
    op, dense, make = cases.LOSSES[name]
    trials = []
    for seed in range(3):
        args = make(torch.Generator().manual_seed(seed), dtype)
        both = (run(dense, args, asked=[0]), run(dense, cast(args, torch.float64), asked=[0]))
        trials.append((run(on_gpu(op), args, asked=[0]), *both))
    assert_error_rule(trials, ulps=8.0)


@pytest.mark.parametrize("dtype", SIXTEEN, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shift", [0.0, -2.0, 3.0])
def test_activations(name, dtype, shift):
    """Hidden numbers around 0 and far from it, many of them beyond where a sigmoid is 1 to rounding."""
    f = ACTIVATIONS[name]
    trials = []
    for seed in range(2):
        gen = torch.Generator().manual_seed(seed)
        x, p, q = (torch.randn(n, 64, generator=gen, dtype=torch.float64) for n in (100, 300, 300))
        args = (*((t / 2).to(dtype) for t in (x, p, q)), torch.full((300,), shift, dtype=dtype))
        plain = lambda x, p, q, b: f(x @ p.mT + b) @ q
        ours = on_gpu(lambda x, p, q, b: ops.mlp(x, p, q, bias=b, activation=name))
        trials.append((run(ours, args), run(plain, args), run(plain, cast(args, torch.float64))))
    assert_error_rule(trials, ulps=4.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_what_is_not_finite_or_huge(name):
    f = ACTIVATIONS[name]
    x = torch.tensor([0.0, 1.0, -1.0, 30.0, -30.0, 1e4, -1e4, torch.nan]).view(-1, 1).repeat(1, 16).bfloat16()
    p, q = torch.eye(16).bfloat16()[:1], torch.ones(1, 16).bfloat16()
    got = on_gpu(lambda x, p, q: ops.mlp(x, p, q, activation=name))(x, p, q)
    torch.testing.assert_close(got, f(x.float() @ p.float().mT).expand(-1, 16).bfloat16(), equal_nan=True)
