"""Budgets that are too small: the error names what was given, and an amount that suffices for the whole call."""

import functools

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines import panel
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.panel import as_program, split_into_loops, split_softmax_means
from monoidreduce.engines.triton.panel.arena import MemoryPlan
from monoidreduce.plan import budget, panel_layout
from monoidreduce.plan.panel_layout import InPlaceLayout, PanelLayout
from monoidreduce.program.gradient import FoldGradient
from monoidreduce.program.lower import compile_program


def make_ops():
    @mr.op
    def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["f"]):
        return mr.softmax_mean(q @ k, v)

    @mr.op
    def two_passes(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["f"]):
        s = q @ k
        z = mr.logsumexp(s)
        return mr.sum(torch.exp(s - z) * (q @ v))  # a second product: the second pass needs more than the first

    @mr.op
    def both_ways(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["f"]):
        s = torch.relu(q @ k)
        return mr.sum(s * v), mr.max(q @ v, over="rows")

    @mr.op
    def best(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["f"]):
        return mr.topk(q @ k, 3).values

    return {op.function.__name__: op for op in (attention, two_passes, both_ways, best)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(make_ops()))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("engine", ["eager", "panel"])
def test_the_amount_that_an_error_names_is_enough(name, backward, engine):
    """One row of a panel is more than four times the least tile here: a quarter of the room is too much for tiles."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 3, generator=gen, requires_grad=backward) for n in (2, 20011, 20011))

    def call(limit):
        with mr.use(engine=engine), mr.budget(limit):
            y = make_ops()[name](q, k, v)
            sum(t.sum() for t in (y if isinstance(y, tuple) else (y,))).backward() if backward else None

    with pytest.raises(mr.BudgetError, match="Give at least") as caught:
        call(10)
    least = caught.value.details["least"]
    call(least)
    with pytest.raises(mr.BudgetError) as caught:
        call(9 * budget.parse(least) // 10)
    given = caught.value.details["given"]
    assert budget.parse(given) < budget.parse(caught.value.details["least"]) <= budget.parse(least)


@pytest.mark.parametrize("rows", [1, 7, 500, 100_000])
@pytest.mark.parametrize("cols", [1, 40, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_a_step_on_panels_takes_at_least_is_enough_for_it(rows, cols, dtype):
    """Of every engine, for folds and their gradients: planned on sizes alone, nothing is allocated."""
    x = torch.empty(1, 300, dtype=dtype)
    for name, op in make_ops().items():
        folds = [] if name == "best" else [p.fold for p in op.program(x, x, x).passes]
        folds += [p.fold for fold in list(folds) for p in backward_of(fold)]
        for fold in folds:
            sizes = Sizes(rows, cols, (), {"f": 300}, torch.device("cpu"), torch.float32)
            for walk in split_into_loops(split_softmax_means(as_program(fold))):
                for each in walk.split_directions() or [walk]:
                    for made in (panel.TorchStep(each, sizes, {dtype}), MemoryPlan(each, sizes, {dtype})):
                        assert made.choose_layout(made.least_bytes()) is not None, (type(made), fold)


def backward_of(fold):
    asked = tuple(e.dtype == "float" for e in fold.leaves)
    return compile_program(FoldGradient(fold, asked, (True,) * len(fold.outputs))).passes


def test_too_little_never_looks_like_enough():
    for size in (1, 9_999, 10_000, 63_500_001, 63_999_999, 64_000_000, 12_345_678_901):
        assert budget.parse(budget.format_floor(size)) <= size <= budget.parse(budget.format_ceil(size))
        assert size - budget.parse(budget.format_floor(size)) <= size / 1000
    assert budget.format_floor(63_500_000) == "63.5MB" and budget.format_floor(64_000_000) == "64MB"


def test_panels_take_no_more_than_they_gain_by_however_much_is_free():
    gib = 2**30
    free = lambda: 139 * gib
    assert budget.allowed_bytes(free) == 139 * gib // 64
    assert budget.allowed_bytes(free, 0, budget.PANELS) == budget.PANELS
    assert budget.allowed_bytes(lambda: 24 * gib, 0, budget.PANELS) == 24 * gib // 64
    assert budget.allowed_bytes(free, 2 * gib, budget.PANELS) == 2 * gib  # the least that serves
    with mr.budget("3GB"):  # what was asked for is given
        assert budget.allowed_bytes(free, 0, budget.PANELS) == 3_000_000_000


def test_the_least_of_other_layouts_is_not_taken_where_whole_rows_fit_in_less():
    free, asked = lambda: 140 * 2**30, []

    def choose(limit, most=10**9, in_place=None):
        asked.append(limit)
        return PanelLayout(128, 4096, in_place=in_place) if limit >= most else None

    assert panel_layout.choose_in_budget(choose, free, 2 * 2**30)[0] == budget.PANELS
    assert asked == [budget.PANELS]
    whole = functools.partial(choose, most=2**31)
    assert panel_layout.choose_in_budget(whole, free, 2**31) == (2**31, PanelLayout(128, 4096))
    stored = InPlaceLayout((), 0, 0, 0)
    assert panel_layout.choose_in_budget(functools.partial(choose, in_place=stored), free, 2**31)[0] == 2**31
    with mr.budget("1GB"):
        assert panel_layout.choose_in_budget(whole, free, 2**31) == (10**9, None)
