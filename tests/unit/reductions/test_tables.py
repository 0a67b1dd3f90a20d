"""Tables that pairs look up: values, gradients and second derivatives on every engine that needs no kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Pair, Row, Table
from monoidreduce.engines.eager import cpp
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.program.constructors import is_along_diagonals
from monoidreduce.program.expression import topological
from monoidreduce.reductions.histogram import sum_diagonals
from tests.support import table_cases as tables
from tests.support.comparison import use_small_tiles

CASES = [pytest.param(case, id=case.name) for case in tables.CASES]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_engines(engine, case, monkeypatch):
    use_small_tiles(monkeypatch)
    args = case.problem(21, 34, (2, 3))
    with mr.use(engine=engine):
        tables.assert_right(case, tables.with_gradients(case.op, args), args)


@pytest.mark.parametrize("case", CASES)
def test_whole_matrices(case):
    args = case.problem(9, 13, (3,))
    with mr.use(engine="auto"), follow({"call": Choice("dense")}), mr.tally() as count:
        tables.assert_right(case, tables.with_gradients(case.op, args), args)
    assert not count.pairs_computed  # no tile was walked


def test_generated_cpp(monkeypatch):
    if cpp.compiler.current_compiler() is None or cpp.compiler.gemm_addresses() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    run, found = cpp.run, []
    monkeypatch.setattr(cpp, "run", lambda *given: found.append(run(*given)) or found[-1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for name, dtype in (("relative", torch.float64), ("kinds", torch.float32)):
            case = next(c for c in tables.CASES if c.name == name)
            args = case.problem(150, 170, (2, 1), dtype=dtype)
            with mr.use(engine="eager"):
                tables.assert_right(
                    case, tables.with_gradients(case.op, args), args, 1e-9 if dtype.itemsize == 8 else 2e-4
                )
    finally:
        torch.set_num_threads(before)
    assert len(found) >= 4 and None not in found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ["reference", "eager"])
def test_second_derivatives(engine, case):
    args = case.problem(6, 7, (2,), 2)
    expected = _second_derivatives(case.dense, args)
    with mr.use(engine=engine):
        for got, right in zip(_second_derivatives(case.op, args), expected, strict=True):
            torch.testing.assert_close(got, right)


def _second_derivatives(function, args):
    """The gradient of all first gradients, each weighed differently."""
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    found = function(*given)
    total = sum((v.sin() if v.is_floating_point() else v).sum() for v in ([found] if torch.is_tensor(found) else found))
    asked = [a for a in given if a.requires_grad]
    first = torch.autograd.grad(total, asked, create_graph=True)
    weights = [torch.cos(torch.arange(g.numel(), dtype=g.dtype)).view_as(g) for g in first]
    return torch.autograd.grad([(g * w).sum() for g, w in zip(first, weights, strict=True)], asked)


def test_gradients_are_the_slopes():
    args = [a.requires_grad_() for a in tables.CASES[0].problem(3, 4, (), 2)]
    with mr.use(engine="eager"):
        assert torch.autograd.gradcheck(tables.relative, args)
        assert torch.autograd.gradgradcheck(tables.relative, args, fast_mode=True, check_undefined_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_those_of_plain_torch(dtype, monkeypatch):
    use_small_tiles(monkeypatch)
    case = tables.CASES[0]
    args = case.problem(150, 170, (2,), 16, dtype)
    exact = tables.with_gradients(case.dense, [a.double() for a in args])
    plain = tables.with_gradients(case.dense, args)
    with mr.use(engine="eager"):
        for got, own, right in zip(tables.with_gradients(case.op, args), plain, exact, strict=True):
            assert (got - right).abs().max() <= 2 * (own - right).abs().max()


def test_a_table_of_many_pairs_keeps_its_digits():
    @mr.op
    def spread(x: Row, y: Col, t: Table["n"]):
        return mr.sum(mr.lookup(t, (mr.row_index * 7 + mr.col_index) % 3))

    t = torch.zeros(3, requires_grad=True)
    x = torch.zeros(3000)
    with mr.use(engine="eager"):
        (spread(x, x, t) * 0.1).sum().backward()
    torch.testing.assert_close(t.grad, torch.full((3,), 0.1 * 3000 * 1000), rtol=1e-6, atol=0)


def test_the_same_bits_every_time(monkeypatch):
    use_small_tiles(monkeypatch)
    for case in tables.CASES:
        args = case.problem(40, 50, (2, 2), dtype=torch.float32)
        with mr.use(engine="eager"):
            one, other = (tables.with_gradients(case.op, args) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("rows, cols, batch", [(0, 5, ()), (5, 0, ()), (3, 4, (0,))])
def test_no_pairs(rows, cols, batch):
    x, y = torch.zeros(*batch, rows, 2), torch.zeros(*batch, cols, 2)
    bias = torch.zeros(3, requires_grad=True)

    @mr.op
    def op(x: Row["f"], y: Col["f"], bias: Table["n"]):
        return mr.sum(x @ y + mr.lookup(bias, mr.row_index - mr.col_index, clamp=True))

    out = op(x, y, bias)
    assert out.shape == (*batch, rows)
    out.sum().backward()
    assert torch.equal(bias.grad, torch.zeros(3))


def test_strided_and_broadcast_arguments():
    case = tables.CASES[4]
    q, k, v, _, bias = case.problem(12, 17, (2, 3))
    hops = torch.randint(0, 7, (3, 1, 17), generator=torch.Generator().manual_seed(1))
    args = [q, k.transpose(0, 1).contiguous().transpose(0, 1), v, hops, bias.repeat_interleave(2, -1)[..., ::2]]
    dense = lambda q, k, v, bias: case.dense(q, k, v, hops.expand(3, 12, 17), bias)
    expected = tables.with_gradients(dense, [a for a in args if a is not hops])
    for engine in ("reference", "eager"):
        with mr.use(engine=engine):
            found = tables.with_gradients(lambda q, k, v, bias: case.op(q, k, v, hops, bias), args[:3] + args[4:])
        for got, right in zip(found, expected, strict=True):
            torch.testing.assert_close(got, right)


def test_entries_that_are_not_finite_stay_where_they_are_read():
    bias = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf], requires_grad=True)
    column = torch.ones(5)
    for engine in ("reference", "eager"):
        with mr.use(engine=engine):
            out = _rowwise(torch.arange(5).clamp(max=3), column, bias)
        assert torch.equal(out.isnan(), torch.tensor([False, True, False, False, False]))
        assert out[2] == torch.inf and out[3] == out[4] == -torch.inf


@mr.op
def _rowwise(at: Row, y: Col, bias: Table["n"]):
    return mr.sum(y * mr.lookup(bias, at + mr.col_index * 0))


def test_integer_and_truth_tables():
    @mr.op
    def sparse(x: Row, y: Col, seen: Table["n"], weight: Table["n"]):
        at = (mr.row_index // 2) * 2 + mr.col_index // 2
        return mr.sum(torch.where(mr.lookup(seen, at), y * mr.lookup(weight, at), 0.0))

    seen, weight = torch.tensor([True, False, True, True]), torch.tensor([1, 2, 3, 4])
    for engine in ("reference", "eager"):
        with mr.use(engine=engine):
            out = sparse(torch.zeros(4), torch.ones(4), seen, weight)
        assert out.tolist() == [2.0, 2.0, 14.0, 14.0]


def test_compiled_calls_and_vmap():
    case = tables.CASES[0]
    args = case.problem(8, 9, (2,), dtype=torch.float32)
    compiled = torch.compile(lambda *a: case.op(*a), backend="aot_eager", fullgraph=True)
    for got, right in zip(tables.with_gradients(compiled, args), tables.with_gradients(case.op, args), strict=True):
        torch.testing.assert_close(got, right)
    q, k, v, bias = args
    mapped = torch.vmap(case.op, in_dims=(0, 0, 0, None))(q, k, v, bias)
    torch.testing.assert_close(mapped, case.op(q, k, v, bias))


# Out of range -------------------------------------------------------------------------------------------------


@mr.op
def _near(x: Row, y: Col, bias: Table["n"]):
    return mr.sum(y * mr.lookup(bias, (mr.row_index - mr.col_index).abs()))


@mr.op
def _moved(x: Row, y: Col, bias: Table["n"], by: int):
    return mr.sum(y * mr.lookup(bias, mr.row_index - mr.col_index + by))


@mr.op
def _given(x: Row, y: Col, at: Pair, bias: Table["n"]):
    return mr.sum(y * mr.lookup(bias, at))


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_out_of_range_is_an_error(engine):
    x = torch.ones(4)
    with mr.use(engine=engine):
        for _ in range(2):
            with pytest.raises(mr.TableError, match='at 2 pairs: the table "n" has 3 entries'):
                _near(x, x, torch.ones(3))
            assert _near(x, x, torch.ones(4)).tolist() == [4.0] * 4
        assert _moved(x, x, torch.ones(7), 3).tolist() == [4.0] * 4
        for _ in range(2):
            with pytest.raises(
                mr.TableError, match=r"at 3 pairs.*\n  in _moved, test_tables.py, called with x=float32"
            ):
                _moved(x, x, torch.ones(7), 5)
        at = torch.zeros(4, 4, dtype=torch.int64)
        assert _given(x, x, at, torch.ones(7)).tolist() == [4.0] * 4
        at[1, 2] = -1
        with pytest.raises(mr.TableError, match="at 1 pair:"):
            _given(x, x, at, torch.ones(7))


def test_pairs_that_are_left_out_do_not_count():
    x = torch.ones(4)
    with pytest.raises(mr.TableError, match="at 1 pair:"):  # the last row sees the first column
        tables.causal(torch.ones(4, 1), torch.ones(4, 1), torch.ones(4, 1), torch.ones(3))
    bias = torch.ones(4, requires_grad=True)
    out = tables.causal(torch.ones(4, 1), torch.ones(4, 1), x.unsqueeze(-1), bias)
    assert out.flatten().tolist() == [1.0] * 4


def test_what_is_no_lookup():
    with pytest.raises(mr.DeclarationError, match="without the name of its size"):

        @mr.op
        def bare(x: Row, y: Col, t: Table):
            return mr.sum(x * y)

    with pytest.raises(mr.DeclarationError, match="table of vectors"):
        Table["n", "f"]

    @mr.op
    def floats(x: Row, y: Col, t: Table["n"]):
        return mr.sum(mr.lookup(t, x * y))

    @mr.op
    def rows(x: Row["f"], y: Col):
        return mr.sum(y * mr.lookup(x, mr.col_index))

    with pytest.raises(mr.ArgumentError, match="as an index"):
        floats(torch.ones(2), torch.ones(2), torch.ones(2))
    with pytest.raises(mr.ArgumentError, match="as a table"):
        rows(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(mr.TraceError, match="outside the body"):
        mr.lookup(torch.ones(2), 0)


# What is known of an index --------------------------------------------------------------------------------------


def test_which_indices_are_equal_along_diagonals():
    diagonal = {case.name for case in tables.CASES if all(map(is_along_diagonals, _indices(case)))}
    assert diagonal == {"relative", "causal", "t5"}


def _indices(case):
    outputs = case.op.program(*case.problem(5, 6)).outputs
    return [e.args[1] for e in topological(outputs) if e.op == "lookup" and e.is_pair]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 5), (1, 5, 130), (3, 200, 9)])
def test_sums_along_diagonals(shape):
    x = torch.randn(shape, dtype=torch.float64)
    expected = torch.stack([x.diagonal(-d, 1, 2).sum(-1) for d in range(1 - shape[2], shape[1])], -1)
    torch.testing.assert_close(sum_diagonals(x), expected)


# Some of the pairs ----------------------------------------------------------------------------------------------


def test_packed_sequences_look_up_by_their_own_positions():
    q, k, v, bias = tables.CASES[0].problem(9, 9)
    offsets = torch.tensor([0, 4, 9])
    bias = bias[4:13].clone().requires_grad_()
    parts = [
        tables.dense_relative(q[a:b], k[a:b], v[a:b], bias[5 - (b - a) : 4 + (b - a)]) for a, b in ((0, 4), (4, 9))
    ]
    expected = torch.cat(parts)
    (right,) = torch.autograd.grad(expected.sin().sum(), bias)

    @mr.op
    def packed(q: Row["f"], k: Col["f"], v: Col["d"], bias: Table["n"]):
        return mr.softmax_mean(q @ k + mr.lookup(bias, mr.row_index - mr.col_index + 4), v)

    for engine in ("reference", "eager"):
        with mr.use(engine=engine):
            found = packed(q, k, v, bias, cols=mr.jagged(offsets, offsets))
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), bias)[0], right)


def test_listed_pairs_look_up():
    x, bias = torch.ones(4), torch.arange(4.0, requires_grad=True)
    own = mr.edges(torch.arange(5), torch.tensor([3, 2, 1, 0]))
    found = _near(x, x, bias, cols=own)
    assert found.tolist() == [3.0, 1.0, 1.0, 3.0]
    (found * torch.arange(4)).sum().backward()
    assert bias.grad.tolist() == [0.0, 3.0, 0.0, 3.0]


# Planning -------------------------------------------------------------------------------------------------------


def test_a_large_table_is_no_wide_vector():
    """The plans of a layer are those of its vectors, however many entries its table has: no panels, on any device."""
    q, bias = torch.empty(2, 512, 64, device="meta"), torch.empty(2, 1023, device="meta")
    for device in ("cpu", "cuda"):
        assert "panel" not in str(tables.relative.cost(q, q, q, bias, device=device).chosen.schedule)


def test_sums_of_losses():
    @mr.op
    def loss(x: Row["d"], y: Col["d"], t: Table["n"]):
        return mr.logsumexp(x @ y + mr.lookup(t, mr.row_index - mr.col_index + mr.num_cols - 1))

    x, y, t = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((9, 300), (300, 300), (308,)))
    at = torch.arange(9).unsqueeze(-1) - torch.arange(300) + 299
    right = torch.autograd.grad((x @ y.T + t[at]).logsumexp(1).sum(), (x, y, t))
    for engine in ("eager", "auto", "panel"):
        with mr.use(engine=engine):
            for got, expected in zip(torch.autograd.grad(loss.total(x, y, t), (x, y, t)), right, strict=True):
                torch.testing.assert_close(got, expected)
