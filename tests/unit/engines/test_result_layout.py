"""Results and gradients lie in memory as the inputs that they belong to."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common import evaluate
from monoidreduce.engines.common.gradient_program import build_gradient_program
from monoidreduce.program.lower import compile_program
from tests.support.model_layout_cases import Model, check, gather


@pytest.mark.parametrize(
    "view",
    [
        lambda: torch.empty(2, 5, 3, 4).transpose(1, 2),
        lambda: torch.empty(5, 2, 3, 4).permute(1, 2, 0, 3),
        lambda: torch.empty(2, 5, 3, 3, 4)[:, :, 1].transpose(1, 2),
        lambda: torch.empty(2, 5, 1, 4).transpose(1, 2),
        lambda: torch.empty(2, 3, 5, 8)[..., :4],
    ],
    ids=["split heads", "lengths first", "fused", "one head", "contiguous but for a gap"],
)
def test_the_order_is_that_of_empty_like(view):
    model = view()
    wanted = torch.empty_like(model).stride()
    found = evaluate.find_strides(tuple(model.shape), model)
    own = torch.empty(model.shape).stride() if found is None else found
    assert [s for s, n in zip(own, model.shape, strict=True) if n > 1] == [
        s for s, n in zip(wanted, model.shape, strict=True) if n > 1
    ]


def test_what_an_input_does_not_have_is_outermost():
    model = torch.empty(1, 5, 3, 4).transpose(1, 2)
    assert evaluate.find_strides((2, 3, 5, 6), model) == (90, 6, 18, 1)
    assert evaluate.find_strides((2, 3, 5, 6), model.expand(2, 3, 5, 4)) == (90, 6, 18, 1)
    assert evaluate.find_strides((2, 3, 0, 6), model) is None  # nothing to lay out


def test_features_stay_innermost():
    assert evaluate.find_strides((2, 3, 5, 4), torch.empty(2, 3, 4, 5).mT) is None


def test_dimensions_are_merged_where_results_allow_it():
    x = torch.empty(2, 3, 5, 4)
    assert evaluate.merge_batch_dims((2, 3), [x], [(60, 20)])[::2] == ((6,), [(20,)])
    assert evaluate.merge_batch_dims((2, 3), [x], [(60, 4)])[::2] == ((2, 3), [(60, 4)])
    assert evaluate.merge_batch_dims((2, 1), [x[:, :1]], [(60, 4)])[::2] == ((2,), [(60,)])
    assert evaluate.merge_batch_dims((), [x[0, 0]], [()])[::2] == ((1,), [(0,)])


@pytest.mark.parametrize("fused", [False, True])
def test_a_models_attention(fused):
    """By tiles in torch; those in C++, of larger problems, write contiguous results."""
    model = Model(2, 4, 2, 70, 16, fused)
    layer, found = gather(model, "eager", torch.float32, causal=True)
    assert layer.stride() == torch.empty_like(model.split(model.inputs(torch.float32)[0])[0]).stride()
    check(model, found, torch.float32, causal=True)


def test_gradients_on_the_eager_engine():
    given = [torch.randn(2, 70, 4, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    with mr.use(engine="eager"):
        found = torch.autograd.grad(mr.ops.attention(*given).sum(), given)
    assert {g.stride() for g in found} == {given[0].stride()}


@mr.op
def weighed(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.relu(x @ y) * y)


def named(op, *shapes):
    """The gradients that the backward of an op tells its engine about, by leaf."""
    (p,) = compile_program(op.program(*(torch.zeros(s) for s in shapes)).outputs).passes
    wanted = tuple(e.feature is not None for e in p.fold.leaves)
    made = build_gradient_program(p.fold, wanted, (True,) * len(p.fold.outputs))
    return [leaf for p in made.program.passes for _, leaf in p.fold.gradients]


@mr.op
def shared(x: Row["d"], y: Col["d"]):
    y = 2 * y  # what is fed is not the input
    return mr.sum(torch.relu(x @ y) * y)


def test_sums_that_are_gradients_are_named():
    assert len(named(weighed, (5, 4), (6, 4))) == 2
    assert len(named(shared, (5, 4), (6, 4))) == 2  # of a pass: its own leaves'
