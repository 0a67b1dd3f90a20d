"""Vectors stored in 8 bits with scales, beside the same layers on plain tensors."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops, stream
from tests.support import scaled_cases as cases
from tests.support.allocations import Watch
from tests.support.comparison import use_small_tiles
from tests.support.scaled_cases import KINDS, store, widen

OPS = [cases.attention, cases.head, cases.mlp, cases.near]
named = lambda op: op.function.__name__


@pytest.fixture(autouse=True)
def seeded(seed):
    torch.manual_seed(seed)


def assert_equal_to_plain_tensors(engine, op, x, rest):
    """Values and the gradient of the rows, beside a call on the numbers that are stored."""
    x.requires_grad_()
    with mr.use(engine=engine):
        found = op(x, *rest)
        gradient = torch.autograd.grad(found.square().sum(), x)[0]
    exact = op(x, *widen(rest, torch.float64))
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(gradient, torch.autograd.grad(exact.square().sum(), x)[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS, ids=lambda k: str(k)[6:])
@pytest.mark.parametrize("op", [*OPS, cases.cosine], ids=named)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_float64_equals_plain_tensors(engine, op, kind, monkeypatch):
    use_small_tiles(monkeypatch, 4, 6)
    for scales in ("vector", "batch", "number"):
        x, *rest = cases.problem(op, kind, scales)
        assert_equal_to_plain_tensors(engine, op, x, rest)


@pytest.mark.parametrize("op", [cases.attention, cases.head, cases.mlp], ids=named)
def test_scales_have_gradients(op):
    x, *rest = cases.problem(op, torch.int8, width=4, rows=3, cols=5)
    plain = [a for a in rest if isinstance(a, torch.Tensor)]
    stored = [a for a in rest if not isinstance(a, torch.Tensor)]
    assert len(plain) + len(stored) == len(rest)

    def run(x, *scales):
        return op(x, *plain, *(mr.scaled(a.values, s) for a, s in zip(stored, scales, strict=True)))

    given = (x.requires_grad_(), *(a.scale.double().requires_grad_() for a in stored))
    with mr.use(engine="eager"):
        assert torch.autograd.gradcheck(run, given)
        assert torch.autograd.gradgradcheck(run, given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("op", [cases.attention, cases.mlp], ids=named)
def test_error_is_at_most_twice_that_of_plain_tensors(op, dtype):
    x, *rest = cases.problem(op, torch.int8, dtype=torch.float32, rows=40, cols=300)
    x = x.to(dtype)
    exact = op(x.double(), *widen(rest, torch.float64))
    errors = [(y.double() - exact).square().mean() for y in (op(x, *rest), op(x, *widen(rest, dtype)))]
    assert op(x, *rest).dtype is dtype
    assert errors[0] <= 4 * errors[1] + (4e-7 * exact.abs().max()) ** 2


def test_rows_may_be_stored_and_both_sides():
    x, y = store(torch.randn(6, 8), torch.int8), store(torch.randn(9, 8), torch.float8_e4m3fn)
    found = cases.near(x, y)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, cases.near(x.dequantize(), y.dequantize()))


def test_nothing_of_the_size_of_wide_columns_is_allocated():
    """16 MB of stored columns would be 64 MB in float32."""
    q, k = torch.randn(4, 64, requires_grad=True), torch.randint(-9, 9, (2**17, 64), dtype=torch.int8)
    scale = torch.rand(2**17) / 10
    with mr.use(engine="eager", budget="8MB"), Watch([q, k, scale]) as watch:
        cases.attention(q, mr.scaled(k, scale), mr.scaled(k, scale)).sum().backward()
    assert watch.largest <= 8e6 and watch.peak <= 12e6


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inside_a_compiled_function(backend):
    q, k, v = cases.problem(cases.attention, torch.int8, dtype=torch.float32)
    run = lambda q, k, s, v: cases.attention(q, mr.scaled(k, s), v) * 2
    given = (q.requires_grad_(), k.values, k.scale, v.dequantize())
    found, plain = torch.compile(run, backend=backend, fullgraph=True)(*given), run(*given)
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), q)[0] for y in (found, plain)))
    whole = torch.compile(lambda q, k, v: cases.attention(q, k, v), backend=backend, fullgraph=True)
    torch.testing.assert_close(whole(q, k, v), cases.attention(q, k, v))


def test_autocast_keeps_what_is_stored():
    q, k, v = cases.problem(cases.attention, torch.float8_e4m3fn, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cases.attention(q, k, v)
    assert found.dtype is torch.bfloat16
    exact = cases.attention(q.double(), *widen((k, v), torch.float64))
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def test_over_listed_columns():
    q, k, v = cases.problem(cases.attention, torch.int8, batch=())
    cols = mr.edges(torch.arange(0, 22, 3), torch.randint(0, 13, (21,)))
    found = cases.attention(q, k, v, cols=cols)
    torch.testing.assert_close(found, cases.attention(q, *widen((k, v), torch.float64), cols=cols))


def test_vmap():
    q, k, v = cases.problem(cases.attention, torch.int8)
    found = torch.vmap(lambda q, k, s: cases.attention(q, mr.scaled(k, s), v.dequantize()[0].double()))(
        q, k.values, k.scale
    )
    plain = cases.attention(q, k, v.dequantize(torch.float64)[:1])
    torch.testing.assert_close(found, plain)


def test_ready_made_layers():
    x, t = torch.randn(50, 40), torch.randint(0, 90, (50,))
    w = store(torch.randn(90, 40), torch.int8)
    layers = {
        "cross-entropy": lambda w: ops.linear_cross_entropy(x, w, t, label_smoothing=0.1, bias=torch.ones(90)),
        "cross-entropy of rows": lambda w: ops.linear_cross_entropy(x, w, t, reduction="none"),
        "log-probabilities": lambda w: ops.linear_logprobs(x, w, t),
        "samples": lambda w: ops.linear_sample(x, w, seed=3),
        "best": lambda w: ops.linear_topk(x, w, 3),
        "entropy": lambda w: ops.linear_entropy(x, w),
        "neighbours": lambda w: ops.knn(x, w, 3),
        "late interaction": lambda w: ops.maxsim(x, w),
        "a kernel sum": lambda w: ops.kernel_sum(x, torch.ones(90, 40), w, bandwidth=8.0),
    }
    for name, layer in layers.items():
        found, plain = layer(w), layer(w.dequantize())
        torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("scales", ["vector", "batch", "number"])
def test_caches_of_keys_and_values(scales):
    q = torch.randn(2, 8, 3, 16)
    k, v = (store(torch.randn(2, 2, 60, 16), kind, scales) for kind in KINDS[:2])
    lengths = torch.tensor([60, 33])
    for layer in (
        lambda k, v: ops.attention(q, k, v, causal=True, enable_gqa=True),
        lambda k, v: ops.attention_decode(q, k, v, lengths),
    ):
        torch.testing.assert_close(layer(k, v), layer(k.dequantize(), v.dequantize()), rtol=1e-4, atol=1e-5)


def test_explain_and_cost_of_stored_arguments():
    given = cases.problem(cases.attention, torch.int8, dtype=torch.float32)
    assert "k_scale_" in cases.attention.explain(*given)
    assert cases.attention.cost(*given)["flash"].flops > 0
    assert cases.attention.program(*given).passes


def test_wrong_ones_are_refused():
    stored = store(torch.randn(2, 7, 4), torch.int8)
    with pytest.raises(mr.DTypeError, match="int8, float8_e4m3fn, float8_e5m2"):
        mr.scaled(torch.randn(3, 4), 1.0)
    with pytest.raises(mr.ShapeError, match=r"\(2, 7\) of them"):
        mr.scaled(stored.values, torch.rand(3))
    with pytest.raises(mr.ArgumentError, match="scale was given"):
        mr.scaled(stored.values, "large")
    with pytest.raises(mr.DTypeError, match="scale is int64"):
        mr.scaled(stored.values, torch.ones(2, 7, dtype=torch.int64))
    with pytest.raises(mr.ArgumentError, match="Only vectors"):
        cases.head(torch.randn(2, 3, 4), stored, stored)
    with pytest.raises(mr.ArgumentError, match="too many"):
        cases.near(stored, stored, stored)
    with pytest.raises(mr.ArgumentError, match="unknown keyword 'z'"):
        cases.near(stored, z=stored)
    with pytest.raises(mr.ShapeError, match="no batch dimension"):
        stored.unsqueeze(-1)


@pytest.mark.parametrize("name", cases.PACKED)
@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_blocks_and_4_bits_equal_plain_tensors(engine, name, monkeypatch):
    use_small_tiles(monkeypatch, 4, 6)
    for op in (*OPS, cases.cosine):
        x, *rest = cases.problem(op, cases.PACKED[name], width=40)
        assert_equal_to_plain_tensors(engine, op, x, rest)


def test_blocks_in_batches_lists_and_transforms():
    q, k, v = cases.problem(cases.attention, cases.PACKED["4 bits, blocks of 16"], width=32)
    plain = widen((k, v), torch.float64)
    cols = mr.edges(torch.arange(0, 22, 3), torch.randint(0, 13, (21,)))
    torch.testing.assert_close(cases.attention(q, k, v, cols=cols), cases.attention(q, *plain, cols=cols))
    run = lambda q, k, s: cases.attention(q, mr.scaled(k, s, block=16, bits=4), plain[1][0])
    torch.testing.assert_close(torch.vmap(run)(q, k.values, k.scale), cases.attention(q, plain[0], plain[1][:1]))
    whole = torch.compile(lambda q, k, v: cases.attention(q, k, v), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(q, k, v), cases.attention(q, *plain))
    x = q[0, :2].requires_grad_()
    stored = cases.store_blocks(torch.randn(9, 32, dtype=torch.float64), 16)
    assert torch.autograd.gradcheck(lambda x: cases.best(x, stored), x)
    assert torch.autograd.gradgradcheck(lambda x: cases.attention(x, stored, stored), x)


def test_scales_of_blocks_of_vectors():
    x, values = torch.randn(5, 8), torch.randint(-9, 9, (10, 8), dtype=torch.int8)
    few, both = torch.rand(4), torch.rand(4, 2)
    wide = values.float() * few.repeat_interleave(3)[:10, None]
    torch.testing.assert_close(cases.best(x, mr.scaled(values, few, block=3)), cases.best(x, wide))
    wide = values.float() * both.repeat_interleave(4, 0)[:10].repeat_interleave(4, 1)
    torch.testing.assert_close(cases.best(x, mr.scaled(values, both[:3], block=4)), cases.best(x, wide))


def test_nothing_of_the_size_of_unpacked_columns_is_allocated():
    """4 MB of 4-bit columns would be 32 MB in float32."""
    q, k = torch.randn(4, 64, requires_grad=True), torch.randint(0, 255, (2**17, 32), dtype=torch.uint8)
    scale = torch.rand(2**17, 2) / 10
    stored = mr.scaled(k, scale, block=32, bits=4)
    with mr.use(engine="eager", budget="8MB"), Watch([q, k, scale]) as watch:
        cases.attention(q, stored, stored).sum().backward()
    assert watch.largest <= 8e6 and watch.peak <= 16e6


def test_what_stored_vectors_say_of_themselves():
    stored = cases.store_blocks(torch.randn(2, 3, 5, 8), 4)
    assert stored.shape == (2, 3, 5, 8) and len(stored) == 2 and stored.dtype is torch.uint8
    assert repr(stored) == "mr.scaled(uint8[2, 3, 5, 4], float32[2, 3, 5, 2], block=4, bits=4)"
    moved = stored.to("cpu").unsqueeze(-3).unflatten(-4, (3, 1))
    torch.testing.assert_close(moved.dequantize(), stored.dequantize()[:, :, None, None])
    torch.testing.assert_close(stored[1:].dequantize(), stored.dequantize()[1:])
    torch.testing.assert_close(stored[torch.tensor([1, 0])], stored.dequantize()[[1, 0]])
    both = [mr.scaled(store(torch.randn(4, 8), torch.int8).values, 0.1, wide=torch.bfloat16) for _ in range(2)]
    assert cases.attention(*both, both[1]).dtype is torch.bfloat16


def test_wrong_blocks_and_bits_are_refused():
    bytes4, scale = torch.zeros(6, 4, dtype=torch.uint8), torch.ones(6, 2)
    with pytest.raises(mr.DTypeError, match="uint8"):
        mr.scaled(bytes4.to(torch.int8), 1.0, bits=4)
    with pytest.raises(mr.ArgumentError, match="8, or 4"):
        mr.scaled(bytes4, 1.0, bits=3)
    with pytest.raises(mr.ArgumentError, match="block was given 0"):
        mr.scaled(bytes4, scale, bits=4, block=0)
    with pytest.raises(mr.ShapeError, match=r"\(6, 2\), \(2, 2\) or \(2,\)"):
        mr.scaled(bytes4, 0.5, bits=4, block=4)
    with pytest.raises(mr.ShapeError, match="scale has shape"):
        mr.scaled(bytes4, torch.ones(6, 3), bits=4, block=4)
    with pytest.raises(mr.ArgumentError, match="detach"):
        mr.scaled(bytes4, scale.requires_grad_(), bits=4, block=4)
    with pytest.raises(mr.DTypeError, match="wide was given"):
        mr.scaled(bytes4, 1.0, bits=4, wide=torch.int8)


def _with_master(kind, dtype=torch.float64):
    master = torch.randn(2, 9, 8, dtype=dtype, requires_grad=True)
    stored = (cases.PACKED[kind] if isinstance(kind, str) else lambda x: store(x, kind))(master.detach())
    block = stored.block or None
    return master, lambda w: mr.scaled(stored.values, stored.scale, block=block, bits=stored.bits, master=w)


@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn, "4 bits, blocks of 16"], ids=str)
def test_masters_are_given_the_gradient_of_what_was_rounded(kind, engine):
    w, make = _with_master(kind)
    x, v = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 9, 3, dtype=torch.float64)
    wide = make(w).dequantize(torch.float64).requires_grad_()
    for op, rest in ((cases.attention, (v,)), (cases.mlp, (v,)), (cases.near, ())):
        with mr.use(engine=engine):
            found = op(x, make(w), *rest)
            (gradient,) = torch.autograd.grad(found.square().sum(), w)
        exact = op(x, wide, *rest)
        torch.testing.assert_close(found, exact)
        torch.testing.assert_close(gradient, torch.autograd.grad(exact.square().sum(), wide)[0])


def test_masters_in_transforms_of_other_types_and_without_gradients():
    w, make = _with_master(torch.int8, torch.float32)
    x, v = torch.randn(2, 5, 8), torch.randn(2, 9, 3)
    loss = lambda w: cases.mlp(x, make(w), v).square().sum()
    (expected,) = torch.autograd.grad(loss(w), w)
    torch.testing.assert_close(torch.func.grad(loss)(w.detach()), expected)
    t = torch.randn_like(w)
    torch.testing.assert_close(torch.func.jvp(loss, (w.detach(),), (t,))[1], (expected * t).sum())
    compiled = torch.compile(lambda w: cases.mlp(x, make(w), v).square().sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(w), w)[0], expected)
    both = cases.mlp(x, make(w), make(w)).sum()  # all vectors of the layer but its rows
    assert torch.autograd.grad(both, w)[0].isfinite().all()
    half = cases.mlp(x.bfloat16(), make(w), v.bfloat16())
    assert half.dtype is torch.bfloat16 and torch.autograd.grad(half.sum(), w)[0].dtype is torch.float32
    second = torch.autograd.grad(torch.autograd.grad(loss(w), w, create_graph=True)[0].sum(), w)[0]
    assert second.abs().sum() > 0
    with torch.no_grad(), mr.use(engine="eager"), Watch([x, v, w]) as watch:
        found = cases.mlp(x, make(w), v)
    torch.testing.assert_close(found, cases.mlp(x, make(w.detach()), v))
    assert watch.largest < w.numel() * 4 + 1


def test_masters_of_slices_heads_and_layers():
    w, make = _with_master(torch.int8, torch.float32)
    stored = make(w)
    assert stored[1:].master.shape == (1, 9, 8) and stored.unsqueeze(-3).master.shape == (2, 1, 9, 8)
    assert repr(stored).endswith("master=float32[2, 9, 8])")
    x, labels = torch.randn(5, 8), torch.randint(0, 9, (5,))
    one = torch.randn(9, 8, requires_grad=True)
    kept = store(one.detach(), torch.int8)
    loss = ops.linear_cross_entropy(x, mr.scaled(kept.values, kept.scale, master=one), labels)
    wide = kept.dequantize().requires_grad_()
    exact = ops.linear_cross_entropy(x, wide, labels)
    torch.testing.assert_close(torch.autograd.grad(loss, one)[0], torch.autograd.grad(exact, wide)[0])
    with pytest.raises(mr.ShapeError, match="master has shape"):
        mr.scaled(kept.values, kept.scale, master=one[1:])
    with pytest.raises(mr.DTypeError, match="master was given"):
        mr.scaled(kept.values, kept.scale, master=kept.values)


@pytest.mark.parametrize("name", ["int8", *cases.PACKED])
def test_streams(name, monkeypatch):
    monkeypatch.setattr(stream, "SIZE", 4)
    make = cases.PACKED.get(name, lambda x: store(x, torch.int8))
    q, k, v = (torch.randn(n, d, dtype=torch.float64) for n, d in ((5, 32), (11, 32), (11, 6)))
    k, v, rows = make(k), make(v), make(q)
    wide = widen((k, v), torch.float64)
    q.requires_grad_()
    found, exact = cases.attention.stream(q).over(k, v), cases.attention(q, *wide)
    torch.testing.assert_close(found, exact)
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), q)[0], torch.autograd.grad(exact.square().sum(), q)[0]
    )
    torch.testing.assert_close(
        cases.attention.stream(rows).over([(k[:7], v[:7]), (k[7:], v[7:])]),
        cases.attention(rows.dequantize(torch.float64), *wide),
    )
    by_chunks = cases.attention.stream(q.detach())
    by_chunks.update(k=k, v=wide[1])
    torch.testing.assert_close(by_chunks.result(), exact.detach())


def test_streams_refuse_what_they_cannot_do():
    master = torch.randn(6, 8, requires_grad=True)
    kept = store(master.detach(), torch.int8)
    trained = mr.scaled(kept.values, kept.scale, master=master)
    with pytest.raises(mr.ArgumentError, match="has a master"):
        cases.best.stream(torch.randn(3, 8)).over(trained)
    with pytest.raises(mr.ArgumentError, match="among columns that are stored"):
        cases.attention.stream(torch.randn(3, 8)).over(kept, master[1:])


def test_an_error_of_a_call_with_stored_vectors_names_the_users_file():
    stored = mr.scaled(torch.zeros(5, 8, dtype=torch.int8), torch.ones(5))
    with pytest.raises(mr.ShapeError, match="equal sizes") as error:
        cases.best(torch.zeros(3, 9), stored)
    said = str(error.value)
    assert "in best, scaled_cases.py, called with x=float32[3, 9], y=int8[5, 8]" in said and "_scale_" not in said
