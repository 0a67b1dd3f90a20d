"""The kernel that combines the results of splits: equal to combining them with torch's operations."""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines import triton
from monoidreduce.engines.common.combine import combine
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.triton import KernelPlan, use_plan
from monoidreduce.engines.triton.kernels import small_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def several(q: Row["f"], k: Col["f"], v: Col["d"], b: Col):
    s = q @ k
    return mr.softmax_mean(s, v), mr.softmax_mean(s, b), mr.logsumexp(s)


@mr.op
def loss(q: Row["f"], k: Col["f"]):
    return mr.logsumexp(q @ k)


def parts(op, shape, width, seed=0):
    """Results of parts as kernels leave them: rows that saw nothing in one, in all, infinity in one, NaN in one."""
    generator = torch.Generator().manual_seed(seed)
    made = lambda *tail: torch.randn(*shape, *tail, generator=generator)
    columns = {attention: (width, width, width), several: (width, width, width, 0), loss: (width, width)}[op]
    fold = op.program(*(torch.zeros(4, d) if d else torch.zeros(4) for d in columns)).passes[0].fold
    (r,) = fold.reductions
    log, peak = 5 * made(), 300 * made()
    flat = log.view(shape[0], -1)
    flat[0, 0] = -math.inf
    if flat.shape[1] > 4:
        flat[:, 1], flat[0, 2], flat[-1, 3] = -math.inf, math.inf, math.nan
    means = [made(width) if v.feature is not None else made() for v in r.args[1:]]
    seen = lambda m: torch.where((log == -math.inf).view(*log.shape, *(1,) * (m.dim() - log.dim())), 0.0, m)
    return fold, [log + peak, *map(seen, means), log, torch.where(log.isinf(), 0.0, peak)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", [(2, 59), (5, 2, 111), (3, 1), (64, 7)], ids=str)
@pytest.mark.parametrize(("op", "width"), [(attention, 64), (attention, 111), (attention, 1), (several, 16), (loss, 8)])
def test_as_torch_has_it(op, width, shape):
    fold, stacked = parts(op, shape, width)
    lengths = [10] * shape[0]
    found = combine(fold, stacked, lengths, ordered=True, faster=small_kernels.combine_splits)
    expected = combine(fold, [t.double() for t in stacked], lengths, ordered=True)
    for a, b, plain in zip(found, expected, combine(fold, stacked, lengths, ordered=True), strict=True):
        torch.testing.assert_close(a, plain, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4, equal_nan=True)


@mr.op
def most(q: Row["f"], k: Col["f"]):
    s = q @ k
    return mr.max(s), mr.argmax(s), mr.argmin(s), mr.sum(torch.relu(s)), mr.count(s > 0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("shape", [(2, 59), (5, 2, 111), (126, 7), (3, 1)], ids=str)
def test_the_best_and_sums_as_torch_has_them(shape, dtype, seed):
    """Ties, of zeros with signs too, NaN, infinities, places where nothing was seen."""
    fold = most.program(torch.zeros(4, 8), torch.zeros(4, 8)).passes[0].fold
    gen = torch.Generator().manual_seed(seed)
    for r in fold.reductions:
        if r.attrs[0] == "best":
            value = torch.randint(-2, 3, shape, generator=gen).to(dtype)
            value.view(-1)[torch.randint(value.numel(), (value.numel() // 6,), generator=gen)] = math.nan
            value.view(-1)[torch.randint(value.numel(), (value.numel() // 6,), generator=gen)] = -0.0
            value.view(shape[0], -1)[:, 0] = -math.inf
            place = torch.arange(value.numel()).view(shape)
            wanted = value.max(0) if r.attrs[2][0] else value.min(0)
            wanted = wanted.values, place.gather(0, wanted.indices[None])[0]
            found = small_kernels.combine_splits(r, [value, place])
        else:
            whole = r.args[0].dtype == "int"
            value = (
                torch.randint(-9, 9, shape, generator=gen) if whole else torch.randn(shape, generator=gen, dtype=dtype)
            )
            found, wanted = small_kernels.combine_splits(r, [value]), (value.sum(0),)
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("op", [attention, several, loss, most])
def test_cut_walks_are_launches(by_address, op, seed):
    """The same as walks that were not cut, forward and backward, in calls that find their launches again."""
    gen = torch.Generator().manual_seed(seed)
    drawn = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float32).requires_grad_()
    for _ in range(3):
        given = [drawn(2, 17, 16), drawn(2, 70, 16), drawn(2, 70, 16), drawn(2, 70)][: len(op.parameters)]
        results = []
        for number in (1, 3):
            with (
                mr.use(engine="triton"),
                use_plan({over: KernelPlan(16, 16, 4, 1, number) for over in ("cols", "rows")}),
            ):
                found = op(*given)
                found = found if isinstance(found, tuple) else (found,)
                moving = [y for y in found if y.requires_grad]
                ones = [torch.arange(y.numel()).cos().view(y.shape) for y in moving]
                results.append([*found, *torch.autograd.grad(moving, given, ones, allow_unused=True)])
        for whole, cut in zip(*results, strict=True):
            assert whole is cut or whole.dtype == cut.dtype
            torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
    assert by_address


def test_large_parts_are_let_go_at_once(by_address, monkeypatch):
    """They are no part of a tape, which holds all that it needs until it is done."""
    launched = []
    monkeypatch.setattr(
        small_kernels,
        "combine_splits",
        lambda *given, real=small_kernels.combine_splits: launched.append(given) or real(*given),
    )
    args = [torch.randn(n, 16) for n in (40, 70, 70)]
    for small, calls in ((2**20, 1), (0, 3)):
        monkeypatch.setattr(small_kernels, "_SMALL", small)
        launched.clear()
        with mr.use(engine="triton"), use_plan({"cols": KernelPlan(16, 16, 4, 1, 3 + calls)}), torch.no_grad():
            for _ in range(3):
                found = attention(*args)
                torch.testing.assert_close(
                    found, torch.softmax(args[0] @ args[1].T, -1) @ args[2], rtol=1e-4, atol=1e-5
                )
        assert len(launched) >= calls and (calls == 3 or len(launched) < 3)


def test_what_has_no_kernel_is_left_to_torch():
    fold, stacked = parts(attention, (2, 5), 8)
    (r,) = fold.reductions
    assert small_kernels.combine_splits(r, [t.double() for t in stacked]) is None
    assert small_kernels.combine_splits(r, [t[:, :0] for t in stacked]) is None
    _, wide = parts(attention, (2, 5), 2000)
    assert small_kernels.combine_splits(r, wide) is None


def test_results_are_of_the_same_types_as_those_of_a_whole_walk():
    fold = several.program(*(torch.zeros(4, 16) for _ in range(3)), torch.zeros(4)).passes[0].fold
    args = [*(torch.randn(n, 16).half() for n in (40, 70, 70)), torch.randn(70).half()]
    sizes = Sizes(40, 70, (), {"f": 16, "d": 16}, torch.device("cpu"), torch.float32)
    found = []
    for number in (1, 3):
        with use_plan({"cols": KernelPlan(16, 16, 4, 1, number)}):
            found.append(triton.run(fold, args, sizes))
    assert {t.dtype for t in found[0]} == {torch.float16, torch.float32}
    for whole, cut in zip(*found, strict=True):
        assert whole.dtype == cut.dtype
        torch.testing.assert_close(cut, whole, rtol=2e-3, atol=2e-3)
