"""Kernels that take turns (Gluon, on Hopper) against float64: sizes, conditions, strides, guesses that fail."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engine import triton as engine
from monoidreduce.engine.triton import KernelPlan, launch, staged, use_plan

HOPPER = torch.cuda.is_available() and staged.on(torch.device("cuda"))
pytestmark = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU, and Triton 3.6")

BY_TURNS = {"cols": KernelPlan(128, 128, 4, 2, parts=1, boxes=2)}
SIZES = [(1, 1), (59, 111), (128, 128), (129, 257), (1000, 777), (64, 1025)]


def made(M, N, D=128, batch=(3,), size=1.0, seed=0):
    gen = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (torch.randn(*batch, n, D, generator=gen, device="cuda") for n in (M, N, N))
    return (q * size).bfloat16(), k.bfloat16(), v.bfloat16()


def by_turns(*args, **options):
    """Values and logsumexp by a staged kernel; that it was one is looked at."""
    kernels = []
    real = launch.execute
    with pytest.MonkeyPatch.context() as patch, use_plan(BY_TURNS), mr.use(engine="triton"):
        patch.setattr(engine, "_READY", {})
        patch.setattr(launch, "execute", lambda call: kernels.append(call.kernel) or real(call))
        got = ops.attention(*args, return_lse=True, **options)
    assert [k.staged for k in kernels] == [True]
    return got


def check(args, **options):
    """Not more than twice the error of plain torch in bfloat16: the dense form, rounded where torch rounds."""
    got, lse = by_turns(*args, **options)
    with mr.use(engine="reference"):
        exact, exact_lse = ops.attention(*(a.double() for a in args), return_lse=True, **options)
        plain, _ = ops.attention(*args, return_lse=True, **options)
    scale = exact.norm()
    allowed = max(2 * (plain.double() - exact).norm().item(), 2**-8 * scale.item())
    assert (got.double() - exact).norm() <= allowed
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    torch.testing.assert_close(lse[seen].double(), exact_lse[seen], rtol=1e-3, atol=2e-2)
    return got


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("M", "N"), SIZES)
def test_sizes(M, N, D):
    check(made(M, N, D))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": "lower_right"},
        {"causal": True, "window": (100, 0)},
        {"softcap": 20.0},
        {"causal": True, "softcap": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize(("M", "N"), [(129, 257), (1000, 777), (640, 640)])
def test_conditions(M, N, options):
    check(made(M, N), **options)


def test_documents_and_rows_that_see_nothing():
    documents = torch.arange(700, device="cuda") // 60
    check(made(700, 700), documents=documents, causal=True)
    check(made(700, 700), documents=(documents, documents.flip(0) + 3))


def test_strides_and_broadcasts():
    q, k, v = made(300, 400, 128, (2, 4))
    check((q.transpose(0, 1), k[:1].expand(2, 4, 400, 128).transpose(0, 1), v.transpose(0, 1)))
    wide = torch.randn(2, 300, 3 * 128, device="cuda").bfloat16()
    check(wide.split(128, -1))


@pytest.mark.parametrize("causal", [False, True])
def test_a_guess_that_fails(causal):
    q, k, v = made(300, 700, size=0.1)
    k = k + torch.linspace(0, 400, 700, device="cuda").bfloat16()[:, None] * (torch.arange(128, device="cuda") == 3)
    q = q + 12 * (torch.arange(128, device="cuda") == 3)  # later logits lie far above those of the first tile
    check((q.bfloat16(), k.bfloat16(), v), causal=causal, scale=1.0)
    check((-q.bfloat16(), k.bfloat16(), v), causal=causal, scale=1.0)


def test_rows_that_see_nothing_in_the_first_tile_and_little_later():
    """Their logits lie 300 below what the guess is for a row that saw nothing."""
    q, k, v = made(700, 700, size=0.1)
    here = torch.arange(128, device="cuda") == 3
    documents = torch.arange(700, device="cuda") // 150
    check((q + (12 * here).bfloat16(), k - (25 * here).bfloat16(), v), documents=documents, scale=1.0)


def test_nan_and_infinity_stay_in_their_rows():
    q, k, v = made(300, 300)
    q[:, 7, 3], q[:, 150, 0] = math.nan, math.inf
    got, lse = by_turns(q, k, v)
    rest = torch.tensor([i for i in range(300) if i not in (7, 150)], device="cuda")
    want, want_lse = by_turns(q[:, rest], k, v)
    assert got[:, 7].isnan().all() and lse[:, 7].isnan().all()
    torch.testing.assert_close(got[:, rest], want, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse[:, rest], want_lse, rtol=1e-3, atol=1e-2)


def test_repeats_bit_for_bit():
    args = made(1000, 777)
    first = by_turns(*args, causal=True)
    for _ in range(20):
        again = by_turns(*args, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_gradients_through_it():
    args = [a.requires_grad_() for a in made(384, 512)]
    with use_plan(BY_TURNS), mr.use(engine="triton"):
        grads = torch.autograd.grad(ops.attention(*args, causal=True).float().square().sum(), args)
    wide = [a.detach().double().requires_grad_() for a in args]
    with mr.use(engine="reference"):
        exact = torch.autograd.grad(ops.attention(*wide, causal=True).square().sum(), wide)
    for a, b in zip(grads, exact, strict=True):
        assert (a.double() - b).norm() <= 0.02 * b.norm()


def test_chosen_where_pairs_are_many_and_nothing_of_their_size_is_kept():
    q, k, v = made(4096, 4096, 128, (8,))
    kernels = []
    real = launch.execute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_READY", {})
        patch.setattr(launch, "execute", lambda call: kernels.append(call.kernel) or real(call))
        ops.attention(q, k, v)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        ops.attention(q, k, v)
    assert [k.staged for k in kernels] == [True]
    assert torch.cuda.max_memory_allocated() - before <= 2 * q.nbytes
