"""The ready-made layers in all pairs of their options: values, gradients, precision, memory."""

import math
import re
import warnings
from functools import partial

import numpy
import pytest
import torch
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import ops
from tests.support import ROOT
from tests.support.allocations import usage
from tests.support.comparison import assert_equal, assert_error_rule, cast, flatten, run, use_small_tiles
from tests.support.ready_made_layers import CHAMFER, CONTRASTIVE, KERNEL_SUM, READY, near
from tests.support.vocabulary_heads import FUNCTIONS

FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


def shown(sample):
    return ",".join(f"{k}={v}" for k, v in sample.items() if v not in (None, False, 0.0, ())).replace(" ", "")


SAMPLES = {ready: ready.samples() for ready in READY}
ALL = [pytest.param(r, s, id=f"{r}-{shown(s)}") for r in READY for s in SAMPLES[r]]


# Older names, what makes arguments, and layers with tests of their own, beside plain torch too
APART = (
    "attention attention_decode attention_kl attention_paged attention_statistics cross_entropy "
    "cross_entropy_distributions cross_entropy_given document_ids entropy graph_attention lightning_indexer "
    "max_pool_product rerank sample sampled_cross_entropy select_blocks selected_attention sinkhorn"
)


def test_every_layer_is_compared_with_plain_torch():
    listed = {ready.name for ready in READY} | set(FUNCTIONS)
    assert sorted(listed | {*APART.split()}) == sorted(name for name in ops.__all__ if name.islower())


def test_the_page_of_layers_names_all_functions_and_modules():
    page = set(re.findall(r"\w+", (ROOT / "docs/layers.md").read_text(encoding="utf-8")))
    assert not {*(name for name in ops.__all__ if name.islower()), *mr.nn.__all__} - page


@pytest.mark.parametrize("ready", READY, ids=repr)
def test_enough_samples(ready):
    assert len(SAMPLES[ready]) >= 25


def both(ready, sample, seed, dtype=FLOAT64):
    args, options = ready.make(sample, seed, dtype)
    return partial(ready.ours, **options), partial(ready.dense, **options), args


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("ready", "sample"), ALL)
def test_float64_equals_plain_torch(ready, sample, seed):
    ours, dense, args = both(ready, sample, seed)
    assert_equal(run(ours, args), run(dense, args))


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("ready", "sample"), [p for p in ALL if p.values[1]["size"] != (1, 1)][::4])
def test_error_rule(ready, sample, seed):
    for dtype, draws in ((torch.float32, 4), (torch.bfloat16, 1)):
        trials = []
        for k in range(draws):
            ours, dense, args = both(ready, sample, seed + k, dtype)
            if ready.name in ("knn", "kmeans_assign", "maxsim", "chamfer") and dtype is torch.bfloat16:
                continue  # whom 16 bits choose is a matter of rounding, theirs and ours
            trials.append((run(ours, args), run(dense, args), run(dense, cast(args, FLOAT64))))
        if trials:
            assert_error_rule(trials)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("ready", "sample"), ALL[::7])
def test_the_dense_engine_agrees(ready, sample, seed):
    ours, _, args = both(ready, sample, seed)
    with mr.use(engine="reference"):
        expected = run(ours, args)
    assert_equal(run(ours, args), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ready", READY, ids=repr)
def test_first_and_second_derivatives(ready, seed):
    sample = {name: values[-1] for name, values in ready.factors.items()} | {"size": (3, 4), "batch": ()}
    sample |= {"kind": "infonce", "features": 2, "k": 2, "exclude_self": True, "hard": 0.0, "activation": "silu"}
    ours, _, args = both(ready, sample, seed)
    at = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def function(*floats):
        given = list(args)
        for k, a in zip(at, floats, strict=True):
            given[k] = a
        return tuple(v for v in flatten(ours(*given)) if v.requires_grad)

    floats = tuple(args[k].requires_grad_() for k in at)
    assert torch.autograd.gradcheck(function, floats, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, floats, fast_mode=True)


# Memory ---------------------------------------------------------------------------------------------------------------

TILE = (96, 128)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ready", READY, ids=repr)
def test_nothing_grows_with_the_pairs(ready, monkeypatch):
    use_small_tiles(monkeypatch, *TILE)
    peaks = []
    for n in (192, 576):
        sample = {name: values[-1] for name, values in ready.factors.items()} | {"size": (n, n), "batch": ()}
        sample |= {"kind": "clip", "k": 3, "features": 3, "all_pairs": False}
        ours, _, args = both(ready, sample, 0, torch.float32)
        used = usage(ours, args)
        assert used.largest <= max(TILE[0] * TILE[1] * 8, 64 * n * 4), used.culprit
        peaks.append(used.peak)
    assert peaks[1] - peaks[0] <= (576 - 192) * 1500, peaks  # a matrix of float32 would add 3,000 bytes a point


# Each its own ---------------------------------------------------------------------------------------------------------


def dense_sinkhorn(x, y, a, b, eps, rounds, metric):
    cost, f, g = near(x, y, metric), torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(rounds):
        f = -eps * torch.logsumexp(b.log().unsqueeze(-2) + (g.unsqueeze(-2) - cost) / eps, -1)
        g = -eps * torch.logsumexp(a.log().unsqueeze(-1) + (f.unsqueeze(-1) - cost) / eps, -2)
    return (a * f).sum(-1) + (b * g).sum(-1)


@pytest.mark.parametrize("metric", ["sqeuclidean", "euclidean"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_sinkhorn_is_the_dense_loop_with_its_gradients(metric, batch, seed):
    """Both at convergence: the envelope's gradient is then that of the whole loop."""
    x, y = (torch.randn(*batch, n, 2, dtype=FLOAT64, requires_grad=True) for n in (9, 12))
    a, b = (torch.rand(*batch, n, dtype=FLOAT64) + 0.5 for n in (9, 12))
    a, b = ((t / t.sum(-1, keepdim=True)).requires_grad_() for t in (a, b))
    value, f, g = ops.sinkhorn(x, y, a, b, eps=1.0, iterations=150, cost=metric)[:3]
    expected = dense_sinkhorn(x, y, a, b, 1.0, 150, metric)
    assert_close(value, expected, rtol=1e-9, atol=1e-9)
    ours, theirs = (torch.autograd.grad(t.sum(), (x, y, a, b)) for t in (value, expected))
    assert_close(ours[:2], theirs[:2], rtol=1e-6, atol=1e-8)
    for p, q in zip(ours[2:], theirs[2:], strict=True):  # a potential is free up to a constant
        assert_close(p - p.mean(-1, keepdim=True), q - q.mean(-1, keepdim=True), rtol=1e-6, atol=1e-7)
    assert f.shape == a.shape and g.shape == b.shape


def test_epsilon_scaling_finds_the_same_optimum_in_fewer_iterations(tmp_path):
    gen = torch.Generator().manual_seed(0)
    x, y = (torch.rand(n, 2, dtype=FLOAT64, generator=gen) for n in (60, 70))
    x, y = x.requires_grad_(), y / 2 + 0.5
    run = partial(ops.sinkhorn, x, y, eps=0.02, iterations=2000, tolerance=1e-8)
    plain, scaled = run(), run(scaling=0.5)
    assert plain.converged and scaled.converged
    assert_close(scaled.value, plain.value, rtol=1e-8, atol=0)
    assert_close(*(torch.autograd.grad(found.value, x)[0] for found in (scaled, plain)), rtol=1e-5, atol=1e-8)
    with torch.no_grad():
        few = [ops.sinkhorn(x, y, eps=0.02, iterations=10, scaling=s).value for s in (1.0, 0.5)]
    assert abs(few[1] - plain.value) < 0.1 * abs(few[0] - plain.value)
    numpy.save(tmp_path / "y.npy", y.numpy())
    stream = ops.sinkhorn.stream(x.detach(), eps=0.02, iterations=10, scaling=0.5)
    assert_close(stream.over(tmp_path / "y.npy", quiet=True).value, few[1])
    none = ops.sinkhorn(x[:0], y, eps=0.02, scaling=0.5)
    assert len(none.f) == 0 and none.iterations == 100
    with pytest.raises(mr.ArgumentError, match=r"the largest cost 1\.[34][0-9]* after 4.* iterations is 50"):
        ops.sinkhorn(x, y, eps=0.02, scaling=0.99, iterations=50, cost="euclidean")


def test_sinkhorn_stops_early_and_takes_16_bits(seed):
    x, y = torch.randn(30, 2), torch.randn(40, 2)
    with mr.tally() as few:
        loose = ops.sinkhorn(x, y, eps=1.0, iterations=500, tolerance=1e-4).value
    with mr.tally() as many:
        tight = ops.sinkhorn(x, y, eps=1.0, iterations=60).value
    assert few.tiles < many.tiles
    assert_close(loose, tight, rtol=1e-3, atol=1e-3)
    narrow = ops.sinkhorn(x.bfloat16(), y.bfloat16(), eps=1.0, iterations=60)
    assert narrow.value.dtype == torch.float32
    assert_close(narrow.value, tight, rtol=0.05, atol=0.05)


def test_contrastive_special_cases(seed):
    x, y = torch.randn(7, 4, dtype=FLOAT64), torch.randn(7, 4, dtype=FLOAT64)
    alone = torch.arange(7)
    assert ops.contrastive_loss(x, None, labels=alone, reduction="sum") == 0  # nothing belongs together
    assert ops.contrastive_loss(x, None, labels=alone).isnan()
    plain = ops.contrastive_loss(x, y, kind="infonce")
    assert_close(ops.contrastive_loss(x, y, kind="infonce", labels=alone), plain)
    assert_close(ops.contrastive_loss(x, y, kind="infonce", hard_negatives=1e-9), plain, rtol=1e-7, atol=1e-7)
    assert ops.contrastive_loss(x[:1], y[:1], hard_negatives=1.0).abs() < 1e-12  # no negatives at all


def test_siglip_keeps_the_digits_of_a_small_loss(seed):
    """A good pair's own term is softplus(-s) for a large s, not a gap of two large numbers."""
    x = 4 * torch.nn.functional.normalize(torch.randn(40, 64), dim=-1)
    trials = []
    for bias in (-8.0, -7.0):
        function = lambda x, y, f, b=bias: f(x, y, None, torch.tensor(b, dtype=x.dtype), scale=None, kind="siglip",
                                             normalize=False, reduction="none", hard_negatives=0.0)  # fmt: skip
        args = (x, x + 0.01 * torch.randn(40, 64))
        ours, dense = (partial(function, f=f) for f in (CONTRASTIVE.ours, CONTRASTIVE.dense))
        trials.append((run(ours, args), run(dense, args), run(dense, cast(args, FLOAT64))))
    assert_error_rule(trials)


def test_chamfer_of_a_cloud_with_itself_is_zero(seed):
    x = torch.randn(2, 40, 20, dtype=FLOAT64).requires_grad_()
    for metric in ("sqeuclidean", "euclidean"):
        value = ops.chamfer(x, x, metric=metric)
        assert value == 0
        assert not torch.autograd.grad(value, x)[0].isnan().any()
    assert CHAMFER.name == "chamfer"


def test_equal_points_have_finite_gradients(seed):
    x = torch.randn(9, 3, dtype=FLOAT64).requires_grad_()
    for kernel in ("laplacian", "energy", "gaussian", "cauchy"):
        (g,) = torch.autograd.grad(ops.kernel_sum(x, x, kernel=kernel).sum(), x)
        assert g.isfinite().all(), kernel
    (g,) = torch.autograd.grad(ops.knn(x, x, 2).values.sum(), x)
    assert g.isfinite().all() and KERNEL_SUM.name == "kernel_sum"


def test_neighbours_of_oneself_can_be_left_out(seed):
    x = torch.randn(30, 3)
    assert torch.equal(ops.knn(x, x, 1).indices.squeeze(-1), torch.arange(30))
    found = ops.knn(x, x, 5, exclude_self=True)
    assert not (found.indices == torch.arange(30).unsqueeze(-1)).any()
    assert (found.values.diff(dim=-1) >= 0).all()


def test_kernels_that_underflow_have_a_logarithm(seed):
    x, y = torch.randn(5, 3), torch.randn(7, 3) + 100
    assert not ops.kernel_sum(x, y).any() and ops.kernel_logsumexp(x, y).isfinite().all()
    assert (ops.kernel_logsumexp(x, y[:0]) == -math.inf).all()


def test_empty_documents_and_padded_ones(seed):
    q, d = torch.randn(2, 5, 4), torch.randn(2, 9, 4)
    found = ops.maxsim(q, d, d_lengths=torch.tensor([0, 9]))
    assert found[0] == -math.inf and found[1].isfinite()
    d[0, 3:] = 1e6
    assert_close(ops.maxsim(q, d, d_lengths=torch.tensor([3, 9]))[0], (q[0] @ d[0, :3].T).amax(-1).sum())


def test_torch_manual_seed_repeats_a_perceptrons_dropout():
    x, p, q = torch.randn(5, 4), torch.randn(30, 4), torch.randn(30, 3)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(ops.mlp(x, p, q, dropout_p=0.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_soft_minima_keep_their_digits_under_autocast():
    x, y, h = torch.rand(20, 3), torch.rand(30, 3), torch.zeros(30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ops.softmin(x, y, h, eps=0.01), ops.softmin(x.bfloat16(), y, h, eps=0.01)
    assert_close(found, tuple(ops.softmin(t, y, h, eps=0.01) for t in (x, x.bfloat16().float())))


def test_sinkhorn_says_whether_it_converged(tmp_path):
    x = torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = ops.sinkhorn(x, x + 0.1, eps=0.5, iterations=500, tolerance=1e-8)
        plain = ops.sinkhorn(x, x + 0.1, eps=0.5, iterations=7)
    assert good.converged is True and good.error <= 1e-8 and 1 < good.iterations < 500
    assert (plain.iterations, plain.error, plain.converged) == (7, None, None)
    numpy.save(tmp_path / "y.npy", (x + 0.5).numpy())
    for call in (
        lambda: ops.sinkhorn(x, x + 0.5, eps=1e-4, iterations=20, tolerance=1e-8),
        lambda: ops.sinkhorn(x.numpy(), (x + 0.5).numpy(), eps=1e-4, iterations=20, tolerance=1e-8),
        lambda: ops.sinkhorn.stream(x, eps=1e-4, iterations=20, tolerance=1e-8).over(tmp_path / "y.npy"),
    ):
        with pytest.warns(mr.ConvergenceWarning, match="in the last of 20 iterations a potential moved by") as seen:
            found = call()
        assert found.converged is False and found.error > 1e-8 and found.iterations == 20
        assert seen[0].filename == __file__  # the caller's line
