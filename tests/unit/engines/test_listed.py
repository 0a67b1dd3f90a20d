"""Folds over listed pairs: equal to dense folds in which each pair counts as often as it is listed."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import monoidreduce as mr
from monoidreduce import Batch, Col, Pair, Row
from monoidreduce.engines import listed
from monoidreduce.engines.listed import edge_numbers
from monoidreduce.runtime.dry_run import LiveMemory
from tests.support import listed_cases, own_monoids

F64 = torch.float64


@pytest.mark.parametrize("first", range(0, 48, 12))
def test_random_lists(first):
    """Some of the thousand lists of the slow test."""
    for seed in range(first, first + 12):
        listed_cases.check_random_lists(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(48, 1000, 119))
def test_many_random_lists(first):
    for seed in range(first, min(first + 119, 1000)):
        listed_cases.check_random_lists(seed)


# Every kind of reduction, against the reference engine


class LogSum(mr.Monoid):
    z: mr.Scalar = -torch.inf

    def combine(a, b):
        return LogSum(z=torch.logaddexp(a.z, b.z))

    def pullback(c, a, g):
        return LogSum(z=torch.exp(a.z - c.z) * g.z)


@mr.op
def moments(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.var(x @ y), mr.var(x @ y, correction=0, over="rows"), mr.weighted_mean(torch.exp(x @ y), v)


@mr.op
def best(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    return mr.max(mr.sqdist(x, y)), mr.argmin(s), mr.max(s, over="rows"), mr.argmax(s, over="rows")


@mr.op
def several_best(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.topk(x @ y, 2, largest=False)


@mr.op
def two_passes(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    return mr.sum((s - 0.1 * mr.sum(s)).square() * v)


@mr.op
def one_sided(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.sum(v), mr.count(True), mr.sum(x, over="rows"), mr.all(v.sum() > -1), mr.any(x.sum() > 0, over="rows")


@mr.op
def conditions(x: Row["f"], y: Col["f"], v: Col["d"]):
    gap = mr.row_index - mr.col_index
    s = torch.where(gap >= -1, 3 * torch.tanh((x @ y) / 3) - 0.1 * gap.abs(), -torch.inf)
    return mr.softmax_mean(s, v), mr.logsumexp(x @ y) - mr.sum(torch.where(mr.col_index == mr.row_index, x @ y, 0.0))


@mr.op
def draws(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    return mr.sum(mr.dropout(torch.exp(s), 0.3, 7) * v), mr.sum(mr.uniform(3) * s), mr.sample(s, 5)


@mr.op
def own_monoid(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.reduce(LogSum, z=x @ y).z


@mr.op
def vectors(x: Row["f"], y: Col["f"], v: Col["d"]):
    """Vectors per pair, walked and reduced over features; sums of gaps between vectors."""
    gap, z = torch.abs(x - y), torch.exp(-mr.sqdist(x, y))
    near = torch.where(mr.col_index <= mr.row_index + 2, torch.sin(gap) * z, 0.0)
    return mr.logsumexp(-gap.sum()), mr.sum(z * v), mr.softmax_mean(z, near), mr.sum(near, over="rows")


OPS = [moments, best, several_best, two_passes, one_sided, conditions, draws, own_monoid, vectors]
PROBLEMS = {
    "edges": lambda: listed_cases.random_problem(3),
    "blocks": lambda: listed_cases.random_problem(7),
    "jagged": lambda: listed_cases.random_problem(5),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.function.__name__)
def test_kinds_of_reductions(op, kind):
    problem = PROBLEMS[kind]()
    args = problem.args()

    def run(engine):
        with mr.use(engine=engine):
            found = op(*args, cols=problem.domain)
            found = [found] if isinstance(found, torch.Tensor) else list(found)
            return [*found, *listed_cases.gradients(found, args)]

    expected = run("reference")
    for engine in ("eager", "auto"):
        for one, other in zip(run(engine), expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("op", [conditions, best, two_passes], ids=lambda op: op.function.__name__)
def test_second_derivatives(op):
    """With a pair that is listed twice, a list that is empty, and blocks that the axes cut."""
    args = [torch.randn(n, 2, dtype=F64, requires_grad=True) for n in (3, 4, 4)]
    blocks = mr.blocks(torch.tensor([[0, 1, 1], [1, 0, 0]]), torch.tensor([3, 1]), rows=2, cols=3)

    def call(*given):
        found = op(*given, cols=blocks)
        return tuple(
            torch.where(t.isfinite(), t, 0.0)
            for t in ([found] if isinstance(found, torch.Tensor) else found)
            if t.is_floating_point()
        )

    assert gradcheck(call, args, fast_mode=True)
    assert gradgradcheck(call, args, fast_mode=True)


# Numbers of edges and of pairs


@mr.op
def entropy(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    p = torch.exp(s - mr.logsumexp(s))
    part, gap = p / (1 + v[0] ** 2), (s - mr.mean(s)) ** 2
    return mr.sum(p * v), mr.sum(p * torch.log(p)), mr.sum(gap), mr.softmax_mean(s, part), mr.max(part)


@pytest.mark.parametrize("engine", ["reference", "eager"])
@pytest.mark.parametrize("lists", ["edges", "blocks", "jagged"])
def test_gradients_where_a_statistic_of_no_columns_is_infinite(lists, engine):
    """The second pass reads it of a row without columns: what is NaN of pairs that do not exist is in no gradient."""
    domain = {
        "edges": mr.edges(torch.tensor([0, 2, 2, 5]), torch.tensor([0, 1, 2, 3, 0])),
        "blocks": mr.blocks.from_mask(torch.tensor([[True, False], [False, False], [True, True]]), rows=1, cols=2),
        "jagged": mr.jagged(torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 2, 4])),
    }[lists]
    args = [torch.randn(n, d, dtype=F64, requires_grad=True) for n, d in ((3, 2), (4, 2), (4, 3))]

    def listed(*args):
        with mr.use(engine=engine):
            *found, mean, most = entropy(*args, cols=domain)
        assert mean[1] == 0 or lists == "jagged"
        return tuple(torch.nan_to_num(t) for t in (*found, mean, torch.where(most.isfinite(), most, 0.0)))

    assert gradcheck(listed, args) and gradgradcheck(listed, args)


@mr.op
def weighted_values(x: Row["f"], y: Col["f"], v: Col["d"], weight: Pair):
    hit = torch.where(mr.col_index == mr.row_index, weight + x @ y, 0.0)
    return mr.softmax_mean(weight, torch.tanh(weight) * v), mr.max(x @ y), mr.sum(hit), mr.sum(hit * v)


@mr.op
def biased(x: Row["f"], bias: Pair, y: Col):
    return mr.logsumexp(x.sum() * bias), mr.count(y > 0)


@mr.op
def forty_best(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = x @ y
    found = mr.topk(s, 40)
    mean = mr.topk_mean(s, v, 40)
    return found.values, found.gather(mr.sqdist(x, y)), mr.max(s, over="rows"), mean, mr.logsumexp(s)


@mr.op
def mean_of_best(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.topk_mean(x @ y, v, 40)


@pytest.mark.parametrize("engine", ["eager", "panel", "auto"])
@pytest.mark.parametrize("kind", ["blocks", "edges"])
def test_gradients_of_what_is_best_read_the_best_pairs_alone(kind, engine):
    """Also of entries that stand twice and of rows with fewer; no list is walked for them."""
    gen = torch.Generator().manual_seed(2)
    index = torch.randint(0, 5, (4, 3), generator=gen)
    blocks = mr.blocks(index, torch.tensor([3, 2, 0, 3]), 16, 16)
    edges = mr.edges(torch.arange(65).clamp(min=9) * 50 - 450, torch.randint(0, 70, (50 * 55,), generator=gen))
    args = [torch.randn(n, 32, generator=gen, dtype=F64, requires_grad=True) for n in (64, 70, 70)]
    domain, found = {"blocks": blocks, "edges": edges}[kind], {}
    for name in (engine, "reference"):
        with mr.use(engine=name):
            results = forty_best(*args, cols=domain)
            finite = [torch.where(r.isfinite(), r, 0.0) for r in results]
            found[name] = [*finite, *torch.autograd.grad(sum(r.cos().sum() for r in finite), args, create_graph=True)]
            found[name] += torch.autograd.grad(sum(g.sin().sum() for g in found[name][-3:]), args)
    for got, right in zip(found[engine], found["reference"], strict=True):
        torch.testing.assert_close(got, right)
    if kind == "blocks" and engine == "eager":
        with mr.use(engine=engine):
            best, mean = forty_best(*args, cols=domain)[0], mean_of_best(*args, cols=domain)
            with mr.tally() as tiles:
                torch.autograd.grad(torch.where(best.isfinite(), best, 0.0).sum(), args[:2])
                torch.autograd.grad(mean.sum(), args)
        assert tiles.computed == 0


@pytest.mark.parametrize("batch", [(), (2,)], ids=["columns of all", "columns of each"])
def test_numbers_of_pairs_that_a_batch_shares(batch):
    """Rows of several batch elements meet the same blocks of pairs."""
    domain = mr.blocks(torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1]), rows=2, cols=3)
    x, bias, y = torch.randn(2, 4, 3, dtype=F64), torch.randn(4, 8, dtype=F64), torch.randn(*batch, 8, dtype=F64)
    s = torch.where(domain.mask(4, 8) > 0, x.sum(-1, keepdim=True) * bias, -torch.inf)
    found, count = biased(x, bias, y, cols=domain)
    torch.testing.assert_close(found, s.logsumexp(-1))
    assert (count == (domain.mask(4, 8).bool() & (y > 0).unsqueeze(-2)).sum(-1)).all()


def test_gradients_of_numbers_of_pairs_that_are_expanded():
    """Each batch element has its own, though all are one in memory."""
    domain = mr.blocks(torch.tensor([[0, 2], [1, 0]]), torch.tensor([2, 1]), rows=2, cols=3)
    x, y = torch.randn(2, 4, 3, dtype=F64), torch.randn(8, dtype=F64)
    bias = torch.randn(4, 8, dtype=F64).expand(2, 4, 8).detach().requires_grad_()
    found = biased(x, bias, y, cols=domain)[0].square()
    for one, other in zip(found, torch.autograd.grad(found.sum(), bias, retain_graph=True)[0], strict=True):
        torch.testing.assert_close(torch.autograd.grad(one.sum(), bias, retain_graph=True)[0].sum(0), other)


@pytest.mark.parametrize("features, values", [(0, 2), (2, 0), (0, 0)])
def test_vectors_without_features(features, values):
    domain = mr.edges(torch.tensor([0, 2, 2, 4]), torch.tensor([1, 0, 3, 2]))
    sizes = ((3, features), (4, features), (4, values))
    args = [*(torch.randn(*n, dtype=F64, requires_grad=True) for n in sizes), torch.randn(4, dtype=F64)]

    def run(engine):
        with mr.use(engine=engine):
            found = weighted_values(*args, cols=domain)
            return [*found, *torch.autograd.grad([t.sum() for t in found], args[:3], allow_unused=True)]

    for one, other in zip(run("eager"), run("reference"), strict=True):
        torch.testing.assert_close(one, other)


def test_numbers_of_edges():
    """An edge that is listed twice has two numbers, each with its own gradient."""
    edges = mr.edges(torch.tensor([0, 3, 3, 5]), torch.tensor([1, 0, 1, 2, 0]))
    args = [torch.randn(n, 1, dtype=F64, requires_grad=True) for n in (3, 3, 3)]
    args.append(torch.randn(5, dtype=F64, requires_grad=True))
    call = lambda *given: listed_cases.both_ways(*given, cols=edges)[0]
    assert gradcheck(call, args, fast_mode=True)
    assert gradgradcheck(call, args, fast_mode=True)
    x, y, v, bias = args
    owner = torch.tensor([0, 0, 0, 2, 2])
    weight = torch.exp(torch.tanh((x[owner] * y[edges.index]).sum(-1)) + bias)
    total = torch.zeros(3, dtype=F64).index_add(0, owner, weight)[owner]
    expected = torch.zeros(3, 1, dtype=F64).index_add(0, owner, (weight / total).unsqueeze(1) * v[edges.index])
    torch.testing.assert_close(call(*args), expected)


@mr.op
def two_best(x: Row, y: Col):
    s = x * y
    return mr.topk(s, 2), mr.argmin(s)


@pytest.mark.parametrize("tied", [True, False])
def test_best_edges(tied):
    """Of equal least numbers the first column's wins, in whatever order it is listed; a row may have no edge."""
    index = torch.tensor([3, 1, 0, 2, 2, 4, 1])
    domain = mr.edges(torch.tensor([0, 4, 4, 7]), index)
    x, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 2.0, 1.0, 0.0] if tied else [1.0, 5.0, 2.0, 3.0, 0.0])
    given = [x.requires_grad_(), y.requires_grad_()]
    best, least = two_best(*given, cols=domain)
    expected = [[1, 2], [-1, -1], [1, 2]] if tied else [[1, 3], [-1, -1], [1, 2]]
    found = best.indices.sort(-1).values if tied else best.indices  # top-k leaves open which of equals is first
    assert found.tolist() == expected and least.tolist() == [0, -1, 4]
    seen = torch.where(best.values.isfinite(), best.values, 0.0)
    at = torch.tensor(expected).clamp(min=0)
    assert torch.equal(seen, (x[:, None] * y[at]) * torch.tensor([[1.0], [0.0], [1.0]]))
    found = torch.autograd.grad(seen.sum(), given)
    for one, right in zip(found, torch.autograd.grad((x[[0, 2], None] * y[at[[0, 2]]]).sum(), given), strict=True):
        torch.testing.assert_close(one, right)


def test_numbers_of_edges_of_each_batch_element():
    pointer = torch.tensor([0, 2, 5, 5]).expand(2, -1)
    index = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 0, 3, 2]])
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=make).requires_grad_()
    args = [draw(2, 3, 3), draw(2, 4, 3), draw(2, 5)]
    found = edge_totals(*args, cols=mr.edges(pointer, index))
    grads = torch.autograd.grad(found.sin().sum(), args)
    for b in range(2):
        own = [a[b].detach().requires_grad_() for a in args]
        expected = edge_totals(*own, cols=mr.edges(pointer[b], index[b]))
        torch.testing.assert_close(found[b], expected)
        for g, right in zip(grads, torch.autograd.grad(expected.sin().sum(), own), strict=True):
            torch.testing.assert_close(g[b], right)


@mr.op
def edge_totals(x: Row["f"], y: Col["f"], e: mr.Pair):
    return mr.sum(torch.tanh(x @ y + e))


@mr.op
def by_distance(x: Row["f"], y: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(x @ y + mr.lookup(bias, mr.row_index - mr.col_index + 12), v)


@mr.op
def by_kinds(x: Row["f"], y: Col["f"], a: Row, b: Col, bias: mr.Table["n"]):
    s = torch.tanh(x @ y) * mr.lookup(bias, a * 3 + b)
    return mr.sum(s), mr.logsumexp(s, over="rows")


@pytest.mark.parametrize("seed", [0, 1, 4, 15, 24])
def test_tables(seed):
    """Gradients of what pairs look up; the last block of rows is cut, lists are per batch element or for all."""
    problem = listed_cases.random_problem(seed)
    x, y, v = problem.args(seed=seed)
    make = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, dtype=torch.float64, generator=make).requires_grad_()
    bias, small = draw(26), draw(9)
    a, b = (torch.randint(0, 3, (n,), generator=make) for n in (problem.rows, problem.cols))
    found, kinds = by_distance(x, y, v, bias, cols=problem.domain), by_kinds(x, y, a, b, small, cols=problem.domain)
    grads = [
        *listed_cases.gradients([found], [x, y, v, bias]),
        *listed_cases.gradients(kinds, [x, y, small]),
    ]
    i, j = torch.arange(problem.rows)[:, None], torch.arange(problem.cols)
    s, times = torch.broadcast_tensors(x @ y.mT + bias[i - j + 12], problem.times)
    weight = times * s.exp()
    total = weight.sum(-1, keepdim=True)
    expected = (weight / torch.where(total > 0, total, 1.0)) @ v
    s, times = torch.broadcast_tensors(torch.tanh(x @ y.mT) * small[a[:, None] * 3 + b], problem.times)
    column = (times * s.exp()).sum(-2)
    twins = (s * times).sum(-1), torch.where(column > 0, torch.where(column > 0, column, 1.0).log(), -torch.inf)
    wanted = [
        *listed_cases.gradients([expected], [x, y, v, bias]),
        *listed_cases.gradients(twins, [x, y, small]),
    ]
    for one, other in zip((found, *kinds, *grads), (expected, *twins, *wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_second_derivatives_of_tables():
    domain = mr.edges(torch.tensor([0, 3, 3, 7]), torch.tensor([0, 1, 1, 2, 3, 0, 2]))
    shapes = (3, 2), (4, 2), (4, 2), (16,)
    args = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    call = lambda *given: by_distance(*given, cols=domain)
    assert torch.autograd.gradcheck(call, args)
    assert torch.autograd.gradgradcheck(call, args, fast_mode=True)


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (5, 1), (2, 5, 6), (1, 1)], ids=str)
def test_numbers_of_pairs_over_blocks(shape):
    args = [torch.randn(2, 5, 3, dtype=F64), torch.randn(6, 3, dtype=F64), torch.randn(2, 6, 2, dtype=F64)]
    args = [t.requires_grad_() for t in (*args, torch.randn(*shape, dtype=F64))]
    blocks = mr.blocks(torch.tensor([[0, 0], [1, 0], [1, 1]]), torch.tensor([2, 2, 1]), rows=2, cols=4)

    def run(engine):
        with mr.use(engine=engine):
            found = listed_cases.both_ways(*args, cols=blocks)
            return [*found, *listed_cases.gradients(found, args)]

    for one, other in zip(run("eager"), run("reference"), strict=True):
        torch.testing.assert_close(one, other)


def test_a_repeated_edge_with_numbers_has_no_maximum_gradient():
    @mr.op
    def largest(x: Row, y: Col, bias: Pair):
        return mr.max(x * y + bias)

    args = [torch.ones(2), torch.ones(3), torch.tensor([1.0, 2.0], requires_grad=True)]
    found = largest(*args, cols=mr.edges(torch.tensor([0, 2, 2]), torch.tensor([1, 1])))
    assert found.tolist() == [3.0, -torch.inf]
    with pytest.raises(mr.ArgumentError, match="listed twice"):
        found[0].backward()


@mr.op
def smooth(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = torch.tanh(x @ y) - 0.1 * (mr.row_index - mr.col_index).abs()
    far = torch.abs(x - y).amax(-1) - mr.sqdist(x, y)
    sums = mr.sum(s * x, over="rows"), mr.sum(torch.sin(x - y) * far), mr.count(s > 0)
    return mr.softmax_mean(s, v), mr.logsumexp(s, over="rows"), *sums


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(0, 36, 3))
def test_numbers_of_a_few_edges_at_a_time(seed, monkeypatch):
    """Sums and softmax means over edges on a CPU, which are run without gathering vectors, in many stretches."""
    monkeypatch.setattr(edge_numbers, "_STRETCH", 5)
    monkeypatch.setattr(edge_numbers, "_VECTORS", 7)
    problem = listed_cases.random_problem(seed)
    args = problem.args(seed=seed)

    def run(engine):
        with mr.use(engine=engine):
            found = smooth(*args, cols=problem.domain)
            return [*found, *listed_cases.gradients(found, args)]

    for one, other in zip(run("eager"), run("reference"), strict=True):
        torch.testing.assert_close(one, other)


# Packed sequences and pages


def test_indices_of_packed_sequences():
    """Indices count from the start of the own sequence, also where rows and columns are packed differently."""

    @mr.op
    def prefix(x: Row, y: Col):
        return mr.sum(torch.where(mr.col_index <= mr.row_index, y, 0.0)), mr.sum(mr.col_index + 10 * mr.row_index)

    y = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    sums, places = prefix(torch.zeros(4), y, cols=mr.jagged(torch.tensor([0, 2, 4]), torch.tensor([0, 3, 5])))
    assert sums.tolist() == [1.0, 3.0, 8.0, 24.0]
    assert places.tolist() == [3, 33, 1, 21]
    assert prefix(y, y, cols=mr.jagged(torch.tensor([0, 2, 5])))[0].tolist() == [1.0, 3.0, 4.0, 12.0, 28.0]


@mr.op
def chosen(x: Row["f"], y: Col["f"], v: Col["d"], n: Col):
    s = x @ y
    best = mr.topk(s, 2)
    first = torch.where(mr.col_index == mr.argmax(s), s, 0.0)
    return mr.topk_mean(s, v, 2), (best.values * best.gather(n * (mr.col_index + 1))).sum(), mr.sum(first * v)


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_what_was_found_in_packed_sequences_is_gathered(engine, square):
    """Places that a reduction finds are those of the packed call, and indices those of the sequence."""
    rows = torch.tensor([0, 3, 3, 9])
    cols = rows if square else torch.tensor([0, 4, 6, 11])
    length = int(cols[-1])
    args = [torch.randn(9, 3), torch.randn(length, 3), torch.randn(length, 2), torch.randn(length)]
    args = [t.double().requires_grad_() for t in args]
    with mr.use(engine=engine):
        found = chosen(*args, cols=mr.jagged(rows) if square else mr.jagged(rows, cols))
        grads = torch.autograd.grad([t.sum() for t in found], args)
    spans = zip(rows[:-1], rows[1:], cols[:-1], cols[1:], strict=True)
    each = [chosen(args[0][a:b], *(t[c:d] for t in args[1:])) for a, b, c, d in spans if b > a]
    truth = [torch.cat(parts) for parts in zip(*each, strict=True)]
    for one, other in zip(
        (*found, *grads), (*truth, *torch.autograd.grad([t.sum() for t in truth], args)), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_the_first_of_equals_in_lists_of_any_order(engine):
    """Of integers too; places beyond a short list are -1. A column that is listed twice is found twice."""

    @mr.op
    def three(x: Row, y: Col):
        s = x * y
        return mr.topk(s, 3), mr.topk(s, 3, largest=False), mr.topk(x + 0, 2).indices

    y, edges = torch.tensor([1, 2, 2, 1, 2]), mr.edges(torch.tensor([0, 5, 7, 7]), torch.tensor([4, 3, 2, 1, 2, 3, 0]))
    for x in (torch.ones(3, dtype=torch.int64), torch.ones(3)):
        with mr.use(engine=engine):
            most, least, of_row = three(x, y.to(x.dtype), cols=edges)
        assert most.indices.tolist() == [[1, 2, 2], [0, 3, -1], [-1, -1, -1]]
        assert least.indices.tolist() == [[3, 1, 2], [0, 3, -1], [-1, -1, -1]]
        assert of_row.tolist() == [[1, 2], [0, 3], [-1, -1]]


def test_the_variance_of_one_pair_is_undefined():
    @mr.op
    def spread(x: Row["f"], y: Col["f"]):
        return mr.var(x @ y), mr.var(x @ y, correction=0)

    x, y, degrees = torch.randn(100, 64), torch.randn(100, 64), torch.randint(1, 30, (100,))
    degrees[::2] = 1
    edges = mr.edges(listed_cases.offsets(degrees), torch.randint(0, 100, (int(degrees.sum()),)))
    assert spread(x, y, cols=edges)[0][::2].isnan().all()


@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
@pytest.mark.parametrize("kind", ["edges", "blocks", "jagged"])
def test_the_gradient_of_the_variance_of_one_pair_is_undefined(engine, kind):
    """As in torch; that of no pair is zero, and that of divisors that count no pair less is a number."""

    @mr.op
    def spread(x: Row, y: Col):
        return mr.var(x * y), mr.var(x * y, correction=0)

    ends = torch.tensor([0, 1, 1, 3])
    lists = {
        "edges": lambda: mr.edges(ends, torch.tensor([0, 1, 2])),
        "blocks": lambda: mr.blocks(torch.tensor([[0, 0], [0, 0], [1, 2]]), torch.tensor([1, 0, 2]), rows=1, cols=1),
        "jagged": lambda: mr.jagged(torch.tensor([0, 1, 2, 3]), ends),
    }
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with mr.use(engine=engine):
        for k, undefined in ((0, [True, False, False]), (1, [False, False, False])):
            for g in torch.autograd.grad(spread(x, y, cols=lists[kind]())[k].sum(), (x, y)):
                assert g.isnan().tolist() == undefined


@pytest.mark.parametrize("engine", ["eager", "auto"])
def test_what_belongs_to_no_sequence_is_never_read(engine):
    """Memory beyond the last offset may hold anything; also where a body needs two passes, and rows have no columns."""
    rows, cols = torch.tensor([0, 280, 280, 360]), torch.tensor([0, 270, 280, 280])
    args = [torch.randn(n, 3, dtype=F64) for n in (370, 290, 290)]
    clean = [t[:360] if len(t) == 370 else t[:280] for t in args]
    for t, end in zip(args, (360, 280, 280), strict=True):
        t[end:] = torch.nan
    domain = mr.jagged(rows, cols)
    for op in (two_passes, conditions, best):

        def run(given, op=op):
            given = [t.requires_grad_() for t in given]
            found = op(*given, cols=domain)
            found = [found] if isinstance(found, torch.Tensor) else list(found)
            total = sum(torch.where(t.isfinite(), t, 0.0).sum() for t in found if t.requires_grad)
            return found, torch.autograd.grad(total, given, materialize_grads=True)

        with mr.use(engine=engine):
            (found, grads), (expected, truths) = run([t.clone() for t in args]), run([t.clone() for t in clean])
        for one, other in zip((*found, *grads), (*expected, *truths), strict=True):
            torch.testing.assert_close(one[: len(other)], other, equal_nan=True)


@pytest.mark.parametrize("engine", ["eager", "panel", "auto"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nan_stays_in_its_own_packed_sequence(engine, bad):
    """Of values and gradients: short neighbours are folded together, and 0 * NaN must not carry it to them."""
    offsets, others = torch.tensor([0, 5, 9, 12]), torch.tensor([0, 1, 2, 3, 4, 9, 10, 11])
    for at in range(3):
        args = [torch.randn(12, 3, dtype=F64) for _ in range(3)]
        args[at][6, 1] = bad
        args = [t.requires_grad_() for t in args]
        with mr.use(engine=engine):
            found = [two_passes(*args, cols=mr.jagged(offsets))]
            found += torch.autograd.grad(found[0].sum(), args)
            truth = [two_passes(*(t[others] for t in args), cols=mr.jagged(torch.tensor([0, 5, 8])))]
            truth += [t[others] for t in torch.autograd.grad(truth[0].sum(), args)]
        for one, other in zip(found, truth, strict=True):
            torch.testing.assert_close(one[others], other)


def test_sequences_are_folded_one_by_one():
    """Pairs of two long sequences are never computed, those of short neighbours are."""
    args = [torch.randn(n, 3) for n in (900, 900, 900)]
    offsets = torch.tensor([0, 300, 310, 320, 900])
    with mr.use(engine="eager"), mr.tally() as tiles:
        two_passes(*args, cols=mr.jagged(offsets))
    assert tiles.computed == 2 * 3  # two passes over three stretches
    numbers = torch.tensor([0, 0, 1, 1, 2])
    stretches = listed._make_stretches(numbers, torch.tensor([0, 1, 1, 3]), 12)
    parts = listed.Stretch(slice(0, 2), slice(0, 1)), listed.Stretch(slice(2, 4), slice(1, 3))
    assert stretches == (listed.Stretch(slice(0, 4), slice(0, 3), parts),)
    assert listed._make_stretches(numbers.flip(0), numbers, 12) is None


@mr.op
def paged(q: Row["f"], k: Col["f"], v: Col["d"], slope: Batch):
    gap = mr.row_index - mr.col_index
    s = torch.where(gap >= 0, q @ k - slope * gap, -torch.inf)
    return mr.softmax_mean(s, v), mr.logsumexp(s), mr.max(s), mr.argmax(s)


@pytest.mark.parametrize("engine", ["reference", "eager"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_pages(engine, heads):
    """Grouped queries, causal by position, a page that two sequences share, and the gradients of the pages."""
    pages, page, rows = 8, 4, 3
    table, lengths = torch.tensor([[5, 2, 7], [1, 0, 0], [2, 3, 4]]), torch.tensor([9, 3, 12])
    chance = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, dtype=F64, generator=chance).requires_grad_()
    q, k, v = draw(3, 4, rows, 5), draw(pages, page, heads, 5), draw(pages, page, heads, 2)
    args = [q, k, v, draw(4)]
    domain = mr.pages(table, lengths, page=page)
    with mr.use(engine=engine):
        found = paged(*args, cols=domain)
        grads = listed_cases.gradients(found, args)
    keys, values = (domain.gather(t).repeat_interleave(4 // heads, 1) for t in (k, v))
    gap = (lengths[:, None] - rows + torch.arange(rows))[:, None, :, None] - torch.arange(keys.shape[2])
    s = torch.where(gap >= 0, q @ keys.mT - args[3][:, None, None] * gap, -torch.inf)
    expected = torch.softmax(s, -1) @ values, torch.logsumexp(s, -1), s.amax(-1), s.argmax(-1)
    for one, other in zip((*found, *grads), (*expected, *listed_cases.gradients(expected, args)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_column_tensor_may_be_called_table():
    @mr.op
    def total(x: Row, table: Col):
        return mr.sum(x * table)

    domain = mr.pages(torch.tensor([[1]]), torch.tensor([2]), page=2)
    assert total(torch.ones(1, 1, 1), torch.arange(4.0).view(2, 2, 1), cols=domain).tolist() == [[[5.0]]]


# Sizes, memory, types


def test_one_long_list():
    """A list of many pieces, beside short ones; the same numbers in every run."""
    lengths = torch.tensor([3, 9001, 0, 1])
    index = torch.randint(0, 500, (int(lengths.sum()),))
    problem = listed_cases.Problem(mr.edges(listed_cases.offsets(lengths), index), 4, 500)
    args = problem.args()
    with mr.use(engine="eager"):
        found = listed_cases.bundle(*args, cols=problem.domain)
        grads = listed_cases.gradients(found, args)
        again = listed_cases.bundle(*args, cols=problem.domain)
    expected = listed_cases.dense_bundle(*args, problem.times)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    for one, other in zip(grads, listed_cases.gradients(expected, args), strict=True):
        torch.testing.assert_close(one, other)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if not a.isnan().any())


@pytest.mark.parametrize("rows, cols", [(0, 3), (3, 0), (0, 0)])
def test_no_rows_or_columns(rows, cols):
    args = [torch.randn(n, 2, requires_grad=True) for n in (rows, cols, cols)]
    empty = torch.zeros(0, dtype=torch.int64)
    for domain in (mr.edges(torch.zeros(rows + 1, dtype=torch.int64), empty),):
        found = listed_cases.bundle(*args, cols=domain)
        assert found[0].shape == (rows, 2) and found[5].shape == (cols,)
        assert found[1].eq(-torch.inf).all() and found[8].eq(0).all()
        assert all(g.abs().sum() == 0 for g in listed_cases.gradients(found, args))


@pytest.mark.parametrize("engine", ["reference", "eager"])
def test_no_sequences_pages_or_batch(engine):
    """Forward and gradients of what has a size of 0 somewhere: a table of no pages, rows of none, no batch element."""
    pages = lambda *shape: mr.pages(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0]).int(), page=2)
    cases = [
        (pages(2, 0), (2, 2, 3), (0, 2, 2)),  # no pages at all
        (pages(2, 0), (2, 0, 3), (3, 2, 0)),  # no heads
        (mr.pages(torch.tensor([[1]]), torch.tensor([2]), page=2), (1, 2, 0), (3, 2, 2)),  # no rows
        (pages(0, 1), (0, 2, 3), (3, 2, 2)),
        (mr.edges.from_neighbours(torch.zeros(3, 2, dtype=torch.int64)), (0, 3), (0, 4)),
    ]
    for domain, rows, cols in cases:
        x, y = torch.randn(*rows, 3, requires_grad=True), torch.randn(*cols, 3, requires_grad=True)
        with mr.use(engine=engine):
            found = extremes_of_all(x, y, cols=domain)
            assert all(t.shape == rows for t in found)
            grads = listed_cases.gradients([torch.where(t.isfinite(), t, 0.0) for t in found[:2]], [x, y])
        assert [g.shape for g in grads] == [x.shape, y.shape]


@mr.op
def extremes_of_all(x: Row["f"], y: Col["f"]):
    s = x @ y
    return mr.max(s), mr.logsumexp(s), mr.argmin(s)


def test_memory_is_that_of_the_lists():
    """Nothing has the size of rows × columns, which would be 1.6 GB, forward or backward."""
    count, degree = 20_000, 4
    index = torch.randint(0, count, (count * degree,))
    edges = mr.edges(torch.arange(count + 1) * degree, index)
    args = [torch.randn(count, 8, requires_grad=True) for _ in range(3)]
    with LiveMemory(args) as memory:
        listed_cases.bundle(*args, cols=edges)[0].sum().backward()
    assert memory.peak < 60 * 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_types(dtype):
    """No more than twice the error of the dense twin in the same type."""
    problem = listed_cases.random_problem(7, repeats=False)
    args = [t.detach() for t in problem.args(dtype)]
    exact = listed_cases.dense_bundle(*(t.double() for t in args), problem.times)
    plain = listed_cases.dense_bundle(*args, problem.times.to(dtype))
    found = listed_cases.bundle(*args, cols=problem.domain)
    for one, other, truth in list(zip(found, plain, exact, strict=True))[:5]:
        assert one.dtype in (dtype, torch.float32)  # numbers per row keep the type of the arithmetic
        least = 4 * torch.finfo(dtype).eps * max(1.0, float(truth.nan_to_num(0.0, 0.0, 0.0).abs().max()))
        error = lambda t, truth=truth: float((t.double() - truth).nan_to_num(0.0, 0.0, 0.0).abs().max())
        assert error(one) <= max(2 * error(other), least)


def test_strided_and_broadcast_arguments():
    problem = listed_cases.random_problem(3)
    _, y, v = (t.detach() for t in problem.args())
    wide = torch.randn(2, 1, 3, problem.rows, dtype=F64).mT.expand(2, 3, problem.rows, 3)
    shifted = torch.cat([y, y], -1)[..., 1:4]
    domain = problem.domain
    found = listed_cases.bundle(wide, shifted, v[..., :1].expand_as(v), cols=domain)
    other = listed_cases.bundle(wide.contiguous(), shifted.contiguous(), v[..., :1].expand_as(v).clone(), cols=domain)
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(one, two, equal_nan=True)


def test_changed_lists_are_read_again():
    index = torch.tensor([0, 1])
    edges = mr.edges(torch.tensor([0, 1, 2]), index)

    @mr.op
    def total(x: Row, y: Col):
        return mr.sum(x * y)

    given = torch.ones(2), torch.tensor([1.0, 2.0, 4.0])
    assert total(*given, cols=edges).tolist() == [1.0, 2.0]
    index[1] = 2
    assert total(*given, cols=edges).tolist() == [1.0, 4.0]


# The rest of a call


def test_explain_and_cost():
    args = [torch.randn(300, 4) for _ in range(3)]
    edges = mr.edges(torch.arange(301) * 3, torch.randint(0, 300, (900,)))
    text = conditions.explain(*args, cols=edges)
    assert "over edges: 3 of 300 columns a row (1 % of the pairs), at most 3" in text
    assert text.as_dict()["listed"]["longest"] == 3 and text.as_dict()["cols"] == 300
    assert conditions.cost(*args, cols=edges)["flash"].flops < conditions.cost(*args)["flash"].flops / 20
    jagged = mr.jagged(torch.tensor([0, 100, 200, 290]))
    assert "over jagged: 93.7 of 300 columns a row (31 % of the pairs), at most 100" in two_passes.explain(
        *args, cols=jagged
    )
    assert best.explain(*args, cols=None).as_dict()["listed"] is None
    assert torch.equal(two_passes(*args, cols=None), two_passes(*args))


def test_total():
    problem = listed_cases.random_problem(3)
    args = problem.args()
    call = mr.op(lambda_loss)
    torch.testing.assert_close(call.total(*args, cols=problem.domain), call(*args, cols=problem.domain).sum())


def lambda_loss(x: Row["f"], y: Col["f"], v: Col["d"]):
    return mr.logsumexp(torch.where(mr.col_index >= 0, x @ y, 0.0).clamp(min=-9) + 0 * v.sum()).clamp(min=-9.0)


def test_what_is_refused():
    args = [torch.randn(2, 3), torch.randn(4, 3), torch.randn(4, 2)]
    edges = mr.edges(torch.tensor([0, 1, 2]), torch.tensor([0, 3]))
    with pytest.raises(mr.StreamError, match="cols"):
        best.stream(args[0], cols=edges)
    with pytest.raises(mr.ArgumentError, match=r"mr\.blocks"):
        best(*args, cols=3)
    with pytest.raises(mr.ShapeError, match=r"one tensor of offsets for both.*mr\.jagged\(row_offsets, col_offsets"):
        best(*args, cols=mr.jagged(torch.tensor([0, 2])))
    with pytest.raises(mr.ShapeError, match=r"of cols\.index, \(5,\).*of x"):
        best(args[0].expand(2, 2, 3), *args[1:], cols=mr.blocks(torch.zeros(5, 1, 1, dtype=torch.int64)))
    with pytest.raises(mr.ColumnListError, match="0 to 3"):
        best(*args, cols=mr.edges(torch.tensor([0, 1, 2]), torch.tensor([0, 4])))
    with pytest.raises(mr.ShapeError, match="one number an edge"):
        listed_cases.both_ways(*args, torch.randn(2, 4), cols=edges)
    with pytest.raises(mr.DeclarationError, match="another name"):
        mr.op(_with_cols)


def _with_cols(x: Row, cols: Col):
    return mr.sum(x * cols)


@mr.op
def extent(x: mr.Row, y: mr.Col):
    found = mr.reduce(own_monoids.Extent, low=x * y, high=x * y)
    return found.high - found.low


def test_gradient_of_an_idempotent_monoid_over_repeated_columns():
    """What is folded twice counts once: as in mr.max, the first of equal entries has the gradient."""
    x, y = torch.tensor([1.0, 3.0]).requires_grad_(), torch.tensor([2.0, 5.0, -1.0]).requires_grad_()
    cols = mr.edges(torch.tensor([0, 4, 6]), torch.tensor([1, 1, 0, 1, 2, 2]))
    with mr.use(engine="eager"):
        gx, gy = torch.autograd.grad(extent(x, y, cols=cols).sum(), (x, y))
    assert gx.tolist() == [3.0, 0.0] and gy.tolist() == [-1.0, 1.0, 0.0]


def test_what_is_left_unreduced_is_said_in_the_words_of_the_body():
    @mr.op
    def unreduced(x: Row, y: Col):
        return mr.sum(x * y) * y

    @mr.op
    def counted(x: Row, y: Col):
        return mr.sum(x * y) / mr.count(over="rows")  # one number of all pairs, but of lists one for each column

    x, edges = torch.randn(3), mr.edges(torch.arange(4), torch.arange(3))
    for op, word in ((unreduced, "a value for every pair. Fold it"), (counted, "one for each row or column of lists")):
        with pytest.raises(mr.UnreducedError, match=word) as raised:
            op(x, x, cols=edges)
        assert "return mr.sum(x * y)" in str(raised.value) and "_cols" not in str(raised.value)
