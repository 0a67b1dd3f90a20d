"""Every layer of the zoo over each of the four domains, against the dense call with the same mask.

Some layers run always, all of them with the slow tests.
"""

import pytest
import torch

import monoidreduce as mr
from tests.support.comparison import Result, assert_equal, assert_error_rule, cast, is_float, run
from tests.support.layers import ZOO
from tests.support.masked_twin import Case, make_domain, make_repeats

KINDS = ("edges", "blocks", "jagged", "pages")
DRAWS = ("dropout_attention", "categorical_sample")
SOME = (
    "causal_attention", "slot_attention", "pooling", "moments", "mean_of_the_best", "embedding_lookup",
    "monoids_over_rows", "sinkhorn_step", "jensen_shannon", "info_nce", "messages_along_weighted_edges",
    "normalized_mlp",
)  # fmt: skip


def cases(kinds=KINDS, make=make_domain, keep=lambda layer, kind: True, some=SOME):
    """Each layer over each domain where it makes sense; without those of ``some``, slow."""
    found = []
    for kind in kinds:
        for layer in ZOO:
            if (kind == "pages" and has_pairs(layer)) or not keep(layer, kind):  # pages have no numbers per pair
                continue
            marks = () if layer.name in some else (pytest.mark.slow,)
            found.append(pytest.param(Case(layer, *make(kind)), id=f"{layer.name}-{kind}", marks=marks))
    return found


def has_pairs(layer):
    return any(p.axis == "pairs" for p in layer.parameters)


def is_placed(layer, kind):
    """Random numbers of pages are those of the positions; the twin's rows count from 0."""
    return kind != "pages" or layer.name not in DRAWS


def without_empty_lists(kind):
    """Of rows and columns that have no pair, the dense call does not know all derivatives."""
    return make_domain(kind, empty=False)


def where_defined(got: Result, truth: Result, also: Result) -> Result:
    """The gradients with the truth's NaN in place: a masked pair of a row without pairs is inf × 0 in a dense call."""
    hidden = {n: truth.grads[n].isnan() | also.grads[n].isnan() for n in truth.grads}
    return Result(got.values, {n: torch.where(hidden[n], torch.nan, g) for n, g in got.grads.items()})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", cases(keep=is_placed))
def test_values_and_gradients(case, seed):
    args = case.args(seed)
    truth = run(case.dense, args)
    found = run(case.listed, args)
    assert_equal(where_defined(found, truth, truth), where_defined(truth, truth, truth))
    weight = [
        f"gradient {k}" for k, p in enumerate(case.layer.parameters) if p.name == "weight"
    ]  # that of -inf is -inf
    assert all(g.isfinite().all() for n, g in found.grads.items() if n not in weight)
    with mr.use(engine="reference"):
        dense = run(case.listed, args)
    assert_equal(where_defined(dense, truth, dense), where_defined(truth, truth, dense))


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_pages_are_those_of_positions(name, seed):
    layer = next(layer for layer in ZOO if layer.name == name)
    case = Case(layer, mr.pages(torch.tensor([[2, 0], [3, 1]]), torch.tensor([5, 5]), page=3), 5, 12)
    args = case.args(seed)
    assert_equal(run(case.listed, args), run(case.dense, args))


def second(function, args):
    """Gradients of a random sum of the gradients of a random sum of the values that are finite."""
    floats = [a.detach().requires_grad_() for a in args if is_float(a)]
    given = iter(floats)
    values = function(*(next(given) if is_float(a) else a for a in args))
    gen = torch.Generator().manual_seed(3)
    draw = lambda t: torch.randn(t.shape, generator=gen, dtype=t.dtype)
    sums = [(torch.where(v.isfinite(), v, 0.0) * draw(v)).sum() for v in values if v.requires_grad]
    if not sums:
        return Result({}, {})
    first = torch.autograd.grad(sum(sums), floats, create_graph=True, allow_unused=True)
    sums = [(torch.where(g.isfinite(), g, 0.0) * draw(g)).sum() for g in first if g is not None and g.requires_grad]
    found = torch.autograd.grad(sum(sums), floats, allow_unused=True) if sums else [None] * len(floats)
    zeros = [torch.zeros_like(a) if g is None else g for a, g in zip(floats, found, strict=True)]
    return Result({}, {f"second derivative {k}": g for k, g in enumerate(zeros)})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "case", cases(make=without_empty_lists, keep=lambda l, k: l.differentiable and is_placed(l, k), some=SOME[:5])
)
def test_second_derivatives(case, seed):
    args = case.args(seed)
    truth = second(case.dense, args)
    found = second(case.listed, args)
    assert_equal(where_defined(found, truth, truth), truth, rtol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("case", cases(make=without_empty_lists, keep=is_placed, some=SOME[:7]))
def test_error_is_at_most_twice_that_of_the_dense_call(case, dtype, seed):
    args = case.args(seed, dtype)
    found, plain, truth = run(case.listed, args), run(case.dense, args), run(case.dense, cast(args, torch.float64))
    assert_error_rule([(found, plain, truth)], terms=1.0)  # gradients of numbers near 1, which may cancel


@pytest.mark.parametrize(
    "case", cases(("edges", "blocks"), make_repeats, lambda l, kind: kind == "blocks" or not has_pairs(l), SOME[:7])
)
def test_repeated_columns_and_a_long_list(case, seed):
    args = case.args(seed)
    with mr.use(engine="reference"):
        truth = run(case.listed, args)
    found = run(case.listed, args)
    assert_equal(where_defined(found, truth, truth), where_defined(truth, truth, truth))
