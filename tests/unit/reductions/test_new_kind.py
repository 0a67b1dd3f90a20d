"""A kind of reduction in one file, with one row in the table, runs on every engine that needs no kernels."""

import functools

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common import combine
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.eager import cpp
from monoidreduce.plan.schedule import Choice, follow
from monoidreduce.program import constructors
from monoidreduce.program.expression import node, reduce_node
from monoidreduce.program.lower import Fold
from monoidreduce.reductions import KINDS, FastForm, all_have
from tests.support import new_kinds as new
from tests.support.comparison import use_small_tiles


@pytest.fixture(autouse=True)
def row():
    with new.planted():
        yield


@pytest.mark.parametrize(("name", "op"), new.NAMES)
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_engines(engine, name, op, monkeypatch):
    use_small_tiles(monkeypatch)
    with mr.use(engine=engine):
        new.check(name, op, new.problem())


@pytest.mark.parametrize(("name", "op"), new.NAMES)
def test_whole_matrices(name, op):
    with mr.use(engine="auto"), follow({"call": Choice("dense")}), mr.tally() as count:
        new.check(name, op, new.problem())
    assert not count.pairs_computed  # no tile was walked


@pytest.mark.parametrize("name", new.CASES)
def test_single_precision_is_as_exact_as_plain_torch(name, monkeypatch):
    use_small_tiles(monkeypatch)
    with mr.use(engine="eager"):
        new.check(name, "by_rows", new.problem(dtype=torch.float32), 2e-5)


@pytest.mark.parametrize("name", new.CASES)
def test_second_derivatives(name):
    x, y, b = new.problem(4, 6)
    with mr.use(engine="eager"):
        assert torch.autograd.gradgradcheck(
            lambda x: new.CASES[name].by_rows(x, y, b)[0], (x.requires_grad_(),), check_undefined_grad=False
        )


@pytest.mark.parametrize("empty", [False, True], ids=["", "with an empty part"])
@pytest.mark.parametrize("name", new.CASES)
def test_results_of_parts_combine(name, empty):
    x = torch.randn(1, 3, 50).double()
    x[:, 1, :20] = -torch.inf
    rest = [torch.ones_like(x)] * (new.count_fields(name) - 1)
    leaves = [
        node("leaf", (), (f"x{k}",), rows=True, cols=True, feature=None, dtype="float") for k in range(len(rest) + 1)
    ]
    fold = Fold(tuple(leaves), (reduce_node(name, "cols", (), tuple(leaves)),))
    lengths = [20, 0, 30] if empty else [20, 30]
    parts = zip(*(t.split(lengths, dim=-1) for t in (x, *rest)), strict=True)
    dense = lambda fields: KINDS[name].dense([*fields], [False] * len(fields), "cols", (), fields[0].shape[-1])
    stacked = [torch.stack([t.squeeze(-1) for t in ts]) for ts in zip(*map(dense, parts), strict=True)]
    for found, right in zip(combine.combine(fold, stacked, lengths), dense((x, *rest)), strict=True):
        torch.testing.assert_close(found, right.squeeze(-1))


@pytest.mark.parametrize("name", [n for n, case in new.CASES.items() if new.has_absent(case.KIND)])
@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_lists_of_columns(engine, name):
    """Each row folds columns of its own, one of them twice."""
    lists, case = torch.stack([torch.randint(83, (6,)) for _ in range(37)]), new.CASES[name]
    lists[:, 0] = lists[:, 1]

    def plain(x, y, b):
        rows = [case.plain("by_rows", x[i : i + 1], y[cols], b[cols]) for i, cols in enumerate(lists)]
        return [torch.cat(found) for found in zip(*rows, strict=True)]

    with mr.use(engine=engine):
        found = new.with_gradients(functools.partial(case.by_rows, cols=mr.edges.from_neighbours(lists)), new.problem())
    for got, right in zip(found, new.with_gradients(plain, new.problem()), strict=True):
        torch.testing.assert_close(got, right)


@pytest.mark.parametrize("name", new.CASES)
def test_the_cost_model_counts_it(name):
    assert new.CASES[name].by_rows.cost(*new.problem()).chosen.seconds > 0


@pytest.mark.parametrize("name", new.CASES)
def test_streams(name):
    x, y, b = new.problem()
    expected = new.truth(name, "by_rows", (x, y, b))
    fold = new.CASES[name].by_rows.stream(x)
    for start, stop in ((0, 30), (30, 31), (31, 83)):
        fold.update(y[start:stop], b[start:stop])
    for found, right in zip(fold.result(), expected, strict=False):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", new.CASES)
def test_gradients_of_a_stream(name):
    x, y, b = new.problem()
    values = new.CASES[name].by_rows.stream(x.requires_grad_()).over([(y[:40], b[:40]), (y[40:], b[40:])])
    (found,) = torch.autograd.grad(values, x, [new.cotangent(len(x))] * len(values))
    torch.testing.assert_close(found, new.truth(name, "by_rows", (x, y, b))[len(values)])


def test_fast_forms_run_for_kinds_that_declare_them(monkeypatch):
    """What is written for some kinds of the library is read from them: without its declaration, a sum does without."""
    x, y, _ = (t.float() for t in new.problem())
    leaves, sizes = (x, y), Sizes(len(x), len(y), (), {"d": 5}, x.device, torch.float32)
    p, q = (node("leaf", (), (n,), rows=n == "x", cols=n == "y", feature="d", dtype="float") for n in ("x", "y"))
    fold = Fold((p, q), (reduce_node("sum", "cols", (), (constructors.dot(p, q),)),))
    assert cpp.applies(fold, leaves, sizes, worth=0)
    monkeypatch.setattr(type(KINDS["sum"]), "fast_forms", ~FastForm.CPP)
    assert not cpp.applies(fold, leaves, sizes, worth=0)
    assert all_have(FastForm.EDGES | FastForm.LISTS, fold.reductions)
    assert not any(all_have(form, [reduce_node(name, "cols", (), ())]) for name in new.CASES for form in FastForm)
