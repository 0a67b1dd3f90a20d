"""Several vectors a row, a column or a batch element: products, sums and extremes over them, gradients, errors."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.plan import schedule
from tests.support.several_vectors import CASES, products, tensors

EXACT = torch.float64


def compare(name: str, rows: int, cols: int, h: int, f: int, second: bool = True) -> None:
    op, twin, shapes = CASES[name]
    given = [[t.clone().requires_grad_() for t in tensors(shapes, rows, cols, h, f, EXACT)] for _ in range(2)]
    found, right = op(*given[0]), twin(*given[1])
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-11)
    weight = torch.linspace(-1, 1, right.numel(), dtype=EXACT).view(right.shape)
    grads = [
        torch.autograd.grad((v * weight).sum(), g, create_graph=second)
        for v, g in zip((found, right), given, strict=True)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-10)
    if second:
        totals = [sum((v * v.detach().cos()).sum() for v in some) for some in grads]
        again = [
            torch.autograd.grad(t, g, allow_unused=True, materialize_grads=True)
            for t, g in zip(totals, given, strict=True)
        ]
        torch.testing.assert_close(*again, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("engine", ["reference", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_as_whole_matrices(name, engine):
    with mr.use(engine=engine):
        compare(name, 5, 7, 3, 4)


@pytest.mark.parametrize("name", ["indexer", "of_columns", "of_both", "largest"])
def test_more_than_one_tile(name, monkeypatch):
    """Ragged tiles, each with several rows and columns."""
    with mr.use(engine="eager"), monkeypatch.context() as patch:
        patch.setattr(schedule, "choose_tiles", lambda *_, **__: schedule.Tiles(1, 4, 3))
        compare(name, 9, 10, 2, 3)


def test_gradcheck():
    q, w, k = (t[0].requires_grad_() for t in tensors("q w k", 3, 4, 2, 2, EXACT))
    op = CASES["indexer"].op
    with mr.use(engine="eager"):
        assert torch.autograd.gradcheck(op, (q, w, k))
        assert torch.autograd.gradgradcheck(op, (q, w, k))


def test_equal_extremes_share_their_gradient():
    """As those of ``torch.amax`` do."""
    x, y = torch.tensor([[1.0, 1.0, 0.0]], requires_grad=True), torch.zeros(1, 3)

    @mr.op
    def largest(x: Row["f"], y: Col["f"]):
        return mr.sum((x - y).amax()) - mr.sum((x - y).amin())

    with mr.use(engine="eager"):
        (found,) = torch.autograd.grad(largest(x, y).sum(), x)
    assert found.tolist() == [[0.5, 0.5, -1.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("engine", ["reference", "eager"])
def test_not_finite(engine, value):
    """A row's NaN or infinity stays in its row."""
    op, twin, shapes = CASES["largest"]
    q, k = tensors(shapes, 5, 7, 3, 4, EXACT)
    q[0, 2, 1, 0] = value
    with mr.use(engine=engine):
        torch.testing.assert_close(op(q, k), twin(q, k), equal_nan=True)


@pytest.mark.parametrize("sizes", [(0, 4, 3, 2), (4, 0, 3, 2), (4, 5, 0, 2), (4, 5, 3, 0)])
def test_nothing(sizes):
    rows, cols, h, f = sizes
    q, w, k = (t[0].requires_grad_() for t in tensors("q w k", rows, cols, h, f, EXACT))
    for engine in ("eager", "auto"):
        with mr.use(engine=engine):
            found = CASES["indexer"].op(q, w, k)
            expected = torch.full((rows,), cols, dtype=EXACT).log() if not h * f or not cols else None
            if expected is not None:
                torch.testing.assert_close(found, expected)
            for t, g in zip((q, w, k), torch.autograd.grad(found.sum(), (q, w, k)), strict=True):
                assert g.shape == t.shape


def test_broadcast_and_strided_arguments():
    op, twin, _ = CASES["indexer"]
    q, w, k = torch.randn(6, 5, 3, 4).permute(2, 0, 3, 1), torch.randn(1, 6, 4), torch.randn(5, 9).T
    torch.testing.assert_close(op(q, w, k), twin(q, w, k))
    torch.testing.assert_close(torch.vmap(op, (0, None, None))(q, w[0], k), twin(q, w, k))


def test_streams():
    q, w, k = (t[0] for t in tensors("q w k", 5, 23, 3, 4, EXACT))
    found = CASES["indexer"].op.stream(q, w).over(mr.chunks(k, size=6))
    torch.testing.assert_close(found, CASES["indexer"].twin(q, w, k))
    x, d, u = (t[0] for t in tensors("x d u", 5, 23, 3, 4, EXACT))
    found = ops.lightning_indexer.stream(q, weight=w, best=3).over(mr.chunks(k, size=6))
    torch.testing.assert_close(found.values, CASES["best_three"].twin(q, w, k))
    chunks = ({"d": d[at : at + 6], "u": u[at : at + 6]} for at in range(0, 23, 6))
    torch.testing.assert_close(CASES["of_columns"].op.stream(x).over(chunks), CASES["of_columns"].twin(x, d, u))


def test_listed_columns():
    q, w, k = (t[0] for t in tensors("q w k", 4, 6, 3, 4, EXACT))
    found = CASES["indexer"].op(q, w, k, cols=mr.blocks(torch.tensor([[0], [2]]), rows=2, cols=2))
    for rows, cols in ((slice(0, 2), slice(0, 2)), (slice(2, 4), slice(4, 6))):
        torch.testing.assert_close(found[rows], CASES["indexer"].twin(q[rows], w[rows], k[cols]))


def test_compiled():
    op, twin, _ = CASES["indexer"]
    given = [[t.clone().requires_grad_() for t in tensors("q w k", 5, 7, 3, 4, torch.float32)] for _ in range(2)]
    found, right = torch.compile(lambda *a: op(*a) * 2, fullgraph=True, backend="aot_eager")(*given[0]), twin(*given[1])
    torch.testing.assert_close(found, 2 * right)
    grads = torch.autograd.grad(found.sum(), given[0]), torch.autograd.grad(2 * right.sum(), given[1])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """No more than twice the error of plain torch in the same precision."""
    op, twin, shapes = CASES["indexer"]
    given = [t.to(dtype) for t in tensors(shapes, 40, 50, 4, 16, EXACT)]
    exact, plain = twin(*(t.double() for t in given)), twin(*given)
    with mr.use(engine="eager"):
        assert (op(*given) - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_memory_of_tiles():
    """Neither the products of all pairs nor their gradients are ever held: the peak does not grow with the columns."""
    op, q, w = CASES["indexer"].op, torch.empty(2048, 8, 32, device="meta"), torch.empty(2048, 8, device="meta")
    least = [op.cost(q, w, torch.empty(n, 32, device="meta"))["flash"].peak for n in (2**14, 2**16)]
    assert least[1] - least[0] < 2 * (2**16 - 2**14) * 32 * 4 and least[1] < 2048 * 2**16


def test_top_k_gradients_are_gathers():
    program = CASES["best_three"].op.explain(*tensors("q w k", 5, 7, 3, 4, EXACT), passes=True).as_dict()["passes"]
    assert "pick[rows]" in program[-1]["text"] and "sum[" not in program[-1]["text"]


@pytest.mark.parametrize("causal", [False, True])
def test_lightning_indexer(causal):
    q, k, w = (t.requires_grad_() for t in tensors("q k w", 6, 8, 3, 4, EXACT))
    found = ops.lightning_indexer(q, k, w, 2, causal=causal)
    s = (products(q, k).relu() * w.unsqueeze(-2)).sum(-1)
    s = torch.where(torch.arange(8) <= torch.arange(6)[:, None], s, -torch.inf) if causal else s
    right = s.topk(2)
    torch.testing.assert_close(found.values, right.values)
    assert torch.equal(found.indices, torch.where(right.values.isinf(), -1, right.indices))
    seen = right.values.isfinite()
    ours, plain = (torch.autograd.grad(v[seen].sum(), (q, k, w)) for v in (found.values, right.values))
    torch.testing.assert_close(ours, plain)


def test_lightning_indexer_of_packed_sequences():
    q, k, w = tensors("q k w", 7, 7, 3, 4, EXACT)
    found = ops.lightning_indexer(q, k, w, 2, causal=True, cols=mr.jagged(torch.tensor([0, 3, 7])))
    for a, b in ((0, 3), (3, 7)):
        one = ops.lightning_indexer(q[:, a:b], k[:, a:b], w[:, a:b], 2, causal=True)
        torch.testing.assert_close(found.values[:, a:b], one.values)
        assert torch.equal(found.indices[:, a:b], torch.where(one.indices < 0, -1, one.indices + a))


def two_letters(q: Row["h", "f"], d: Col["g", "f"]):
    return mr.sum((q @ d).sum())


def first_letter(q: Row["f", "h"], k: Col["f"]):
    return mr.sum((q @ k).sum())


def elementwise(q: Row["h", "f"], k: Col["f"]):
    return mr.sum((q * k).sum())


def sum_of_several(q: Row["h", "f"], k: Col["f"]):
    return mr.sum(q.sum() * k.sum())


def several_returned(q: Row["h", "f"], d: Col["h", "f"]):
    return mr.sum(d)


def of_a_pair(x: Row["f"], y: Col["f"], m: mr.Batch["h", "f"]):
    return mr.sum((m @ (x - y).abs()).sum())


def vectors_folded(q: Row["h", "f"], k: Col["f"]):
    return mr.max(q @ k)


@pytest.mark.parametrize(
    ("body", "shapes", "kind", "words"),
    [
        (two_letters, ((4, 3, 2), (5, 6, 2)), mr.ShapeError, ('"h", "f"', '"g", "f"', "both letters must be equal")),
        (first_letter, ((4, 2, 3), (5, 2)), mr.ShapeError, ('"f", "h"', "The last letter is summed over")),
        (elementwise, ((4, 3, 2), (5, 2)), mr.ShapeError, ("mul", "w * (x @ y)")),
        (sum_of_several, ((4, 3, 2), (5, 2)), mr.ShapeError, ("several vectors", "x[0]")),
        (several_returned, ((4, 3, 2), (5, 3, 2)), mr.TraceError, ("several vectors", "one letter")),
        (of_a_pair, ((4, 2), (5, 2), (3, 2)), mr.ShapeError, ("a value of the pair",)),
        (vectors_folded, ((4, 3, 2), (5, 2)), mr.UnreducedError, ("mr.max",)),
        (CASES["indexer"].op.function, ((4, 3), (4, 3), (5, 2)), mr.ShapeError, ('Row["h", "f"]', "[..., M, h, f]")),
        (CASES["indexer"].op.function, ((4, 3, 2), (4, 2), (5, 2)), mr.ShapeError, ('features "h"',)),
        (CASES["picked"].op.function, ((4, 1, 2), (5, 2)), mr.ShapeError, ("1 vectors", "[1]")),
    ],
)
def test_refused(body, shapes, kind, words):
    with pytest.raises(kind) as error:
        mr.op(body)(*map(torch.zeros, shapes))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("names", [("h", "f", "g"), ("h",), ("h", "h"), ("h", 0), "h*f", "h,f"])
def test_refused_declarations(names):
    with pytest.raises(mr.DeclarationError):
        Row[names]
    assert str(mr.Batch["d", "d"]) == 'Batch["d", "d"]'


def test_stored_columns():
    """Keys of small numbers with scales; several vectors cannot be stored so."""
    q, w, _ = (t[0] for t in tensors("q w k", 5, 7, 3, 4, torch.float32))
    k, scale = torch.randint(-127, 128, (7, 4), dtype=torch.int8), torch.rand(7) / 50
    given = [t.clone().requires_grad_() for t in (q, w)], [t.clone().requires_grad_() for t in (q, w)]
    found = CASES["indexer"].op(*given[0], mr.scaled(k, scale))
    right = CASES["indexer"].twin(*given[1], k * scale[:, None])
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(v.sum(), g) for v, g in zip((found, right), given, strict=True)))
    with pytest.raises(mr.ArgumentError, match=r'declared Row\["h", "f"\], but was given mr.scaled'):
        CASES["indexer"].op(mr.scaled(q.to(torch.int8), 1.0), w, k.float())
