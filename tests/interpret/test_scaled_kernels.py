"""Vectors stored in 8 bits with scales, in kernels, beside the same layers on plain tensors."""

import contextlib
import warnings

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.triton import use_plan
from monoidreduce.engines.triton.schedules import spec_from_tensors
from tests.support import gluon_simulator, internals
from tests.support import scaled_cases as cases
from tests.support.scaled_cases import KINDS, store, widen
from tests.support.warp_specialised_attention_cases import BY_TURNS

OPS = [cases.attention, cases.head, cases.mlp, cases.near]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("op", "width"),
    [*((op, width) for op in OPS for width in (5, 24)), (cases.head, 300)],
    ids=lambda p: p.function.__name__ if isinstance(p, mr.Op) else str(p),
)
def test_kernels_equal_plain_tensors(op, width, seed):
    torch.manual_seed(seed)
    for kind, scales in zip(KINDS, ("vector", "batch", "number"), strict=True):
        x, *rest = cases.problem(op, kind, scales, width=width, rows=20, cols=37)
        x.requires_grad_()
        exact = op(x, *widen(rest, torch.float64))
        wanted = torch.autograd.grad(exact.square().sum(), x)[0]
        with mr.use(engine="triton"), warnings.catch_warnings():
            warnings.simplefilter("error")  # a fold without a kernel would warn
            found = op(x, *rest)
            gradient = torch.autograd.grad(found.square().sum(), x)[0]
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: str(k)[6:])
@pytest.mark.parametrize("width", [24, 40, 128, 300])
def test_products_of_both_sides_as_they_are_stored(kind, width, seed, monkeypatch):
    torch.manual_seed(seed)
    monkeypatch.setattr(spec_from_tensors, "MANY_STORED", 0)
    seen = []
    internals.forget_launches(monkeypatch)
    internals.replace_launch(monkeypatch, lambda launch, call: seen.append(call.kernel.text) or launch(call))
    x, y = store(torch.randn(20, width), kind), store(torch.randn(37, width), kind, "batch")
    with mr.use(engine="triton"):
        near, best = cases.near(x, y), cases.best(x, y)
    exact = [op(x.dequantize(torch.float64), y.dequantize(torch.float64)) for op in (cases.near, cases.best)]
    for found, wanted in zip((near, best), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
    products = [text for text in seen if "tl.dot(" in text]
    assert len(products) == 2 - (width > 256)  # distances of more features are walked through
    assert all(f"tl.{'int32' if kind is torch.int8 else 'float32'}" in text for text in products)
    assert not any("bfloat16" in text.split("def fold")[-1] for text in products)


ATTENTIONS = {
    "ragged": lambda: (_made((2,), 59, 111), {}),
    "several tiles": lambda: (_made((2,), 129, 257), {}),
    "causal, batches": lambda: (_made((1, 2), 300, 385), {"causal": True}),
    "one key": lambda: (_made((2,), 3, 1), {"return_lse": True}),
    "peaked": lambda: (_made((2,), 200, 520), {"scale": 2.0, "return_lse": True}),
    "heads that share keys": lambda: ((*_made((2, 4), 70, 1)[:1], *_made((2, 2), 1, 140)[1:]), {"enable_gqa": True}),
    "scales of vectors of queries and keys": lambda: (_made((2,), 70, 140, "vector"), {}),
    "heads behind tokens": lambda: (
        tuple(mr.scaled(t.values.transpose(0, 1).contiguous().transpose(0, 1), t.scale) for t in _made((2,), 70, 140)),
        {},
    ),
}


def _made(batch, rows, cols, scales="number"):
    q, k = (store(torch.randn(*batch, n, 128), torch.float8_e4m3fn, scales) for n in (rows, cols))
    return q, k, store(torch.randn(*batch, cols, 128), torch.float8_e4m3fn, "number")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_fp8_attention_has_the_error_of_rounded_weights(name, seed, monkeypatch):
    """Weights have four digits in binary: means are off by 2⁻⁴ of what single values add to them at most."""
    torch.manual_seed(seed)
    given, options = ATTENTIONS[name]()
    seen = gluon_simulator.simulate(monkeypatch)
    with mr.use(engine="triton"), use_plan(BY_TURNS):
        found = ops.attention(*given, **options)
    exact = ops.attention(*(t.dequantize(torch.float64) for t in given), **options)
    if options.get("return_lse"):
        torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=1e-4)
        found, exact = found[0], exact[0]
    assert [c.kernel.transposed is not None for c in seen] == [True]
    error = (found.double() - exact).square().mean() / exact.square().mean()
    assert error.sqrt() < 0.04


def test_weights_with_scales_of_their_own_are_not_rounded_to_8_bits(monkeypatch):
    q, k, _ = _made((2,), 70, 140)
    seen = gluon_simulator.simulate(monkeypatch)
    v = store(torch.randn(2, 140, 128), torch.float8_e4m3fn, "vector")
    with mr.use(engine="triton"), use_plan(BY_TURNS):
        cases.attention(q, k, v)
    assert not any(c.kernel.hand_scheduled for c in seen)


@pytest.mark.parametrize("name", cases.PACKED)
def test_blocks_and_4_bits_in_kernels(name, seed):
    torch.manual_seed(seed)
    for op, width in ((cases.attention, 24), (cases.mlp, 6), (cases.near, 40), (cases.attention, 128)):
        x, *rest = cases.problem(op, cases.PACKED[name], width=width, rows=20, cols=37)
        x.requires_grad_()
        exact = op(x, *widen(rest, torch.float64))
        with mr.use(engine="triton"), warnings.catch_warnings():
            warnings.simplefilter("error")
            found = op(x, *rest)
            gradient = torch.autograd.grad(found.square().sum(), x)[0]
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(gradient, torch.autograd.grad(exact.square().sum(), x)[0])


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, *cases.PACKED], ids=lambda k: str(k).removeprefix("torch."))
def test_what_is_computed_of_stored_vectors_alone(kind, seed):
    """By a kernel too: norms of columns, of 20 features, fewer than a block has."""
    torch.manual_seed(seed)
    x, *rest = cases.problem(cases.cosine, cases.PACKED.get(kind, kind), width=20, rows=9, cols=37)
    exact = cases.cosine(x, *widen(rest, torch.float64))
    with mr.use(engine="triton"), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(cases.cosine(x, *rest), exact)


@pytest.mark.parametrize("name", cases.PACKED)
def test_blocks_and_4_bits_in_k_loops(name, seed):
    torch.manual_seed(seed)
    x, y = torch.randn(20, 300, dtype=torch.float16), cases.PACKED[name](torch.randn(37, 300) / 4)
    with mr.use(engine="triton"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cases.best(x, y)
    exact = cases.best(x.double(), y.dequantize(torch.float64))
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=1e-2)


def test_pages_of_4_bits():
    q = torch.randn(2, 4, 1, 32)
    k, v = (cases.store_blocks(torch.randn(5, 16, 2, 32), 16) for _ in range(2))
    pages = mr.pages(torch.tensor([[4, 1], [2, 0]]), torch.tensor([20, 3]), page=16)
    with mr.use(engine="triton"), warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ops.attention_paged(q, k, v, pages)
    torch.testing.assert_close(found, ops.attention_paged(q, *widen((k, v), torch.float32), pages))


def test_decoding_from_pages_of_8_bits_is_one_kernel(monkeypatch):
    """A store may hold far more columns than a call reads: nothing is computed of it before."""
    q = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16)
    k, v = (store(torch.randn(9, 16, 2, 16), torch.int8, "vector") for _ in range(2))
    pages = mr.pages(torch.tensor([[4, 1], [2, 0]]), torch.tensor([32, 3]), page=16)
    exact = ops.attention_paged(q.double(), *widen((k, v), torch.float64), pages)
    with mr.use(engine="triton"), torch.no_grad():
        found = ops.attention_paged(q, k, v, pages)
        torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)
        internals.forget_launches(monkeypatch)
        launches = internals.collect_launches(monkeypatch)
        ops.attention_paged(q, k, v, pages)
    assert [one.kernel.name for one in launches] == ["fold_over_cols"]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=lambda k: str(k)[6:])
def test_wide_columns_of_many_rows_are_widened_once(kind, monkeypatch):
    """Without a budget: their kernels are those of plain vectors, and labels are gathered. With one, in every tile."""
    monkeypatch.setattr("monoidreduce.engines.triton.schedules.spec_from_tensors._WIDENED", 16)
    torch.manual_seed(0)
    x, target = torch.randn(20, 320, dtype=torch.bfloat16) / 8, torch.randint(0, 37, (20,))
    w = store(torch.randn(37, 320), kind)
    exact = ops.linear_cross_entropy(x.double(), w.dequantize(torch.float64), target, reduction="none")
    widened = internals.watch_prepared(
        monkeypatch, lambda launch: [c[1] for c in launch.conversions.casts if c[0].is_stored]
    )
    for budget, expected in ((None, [torch.bfloat16]), ("64MB", [])):
        with mr.use(engine="triton"), torch.no_grad(), mr.budget(budget) if budget else contextlib.nullcontext():
            found = ops.linear_cross_entropy(x, w, target, reduction="none")
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=2e-2)  # the loss is bfloat16
        assert expected in widened
        widened.clear()


EDGES = mr.edges.from_neighbours((torch.arange(20)[:, None] * 3 + torch.arange(5)) % 37)


@pytest.mark.parametrize("cols", [None, EDGES], ids=["all", "edges"])
@pytest.mark.parametrize("engine", ["eager", "panel", "triton"])
def test_a_scale_of_all_values_multiplies_the_mean_alone(engine, cols, seed):
    """The scale is applied before the mean is written; the logsumexp beside it is of the logits."""
    torch.manual_seed(seed)
    for scales in ("number", "batch"):
        q, k, v = cases.problem(both, torch.int8, scales, width=24, rows=20, cols=37, batch=() if cols else (2,))
        q.requires_grad_()
        with mr.use(engine="reference"):
            exact = both(q, *widen((k, v), torch.float64), **({"cols": cols} if cols else {}))
        with mr.use(engine=engine):
            found = both(q, k, v, **({"cols": cols} if cols else {}))
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(one, other)
            grad, wanted = (torch.autograd.grad(t.square().sum(), q, retain_graph=True)[0] for t in (one, other))
            torch.testing.assert_close(grad, wanted)


@mr.op
def both(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    s = q @ k
    return mr.softmax_mean(s, v), mr.logsumexp(s)
