"""The compiler's list of passes: their names, their order, and programs as text after each of them."""

import json

import pytest
import torch

import monoidreduce as mr
from monoidreduce.engines.common.gradient_program import build_gradient_program
from monoidreduce.explain import format_outputs, list_stages
from monoidreduce.program.gradient import FoldGradient
from monoidreduce.program.lower import Lowered, compile_program, run_passes

PASSES = ["normal form", "merge softmax", "group reductions", "hoist one-sided"]


@mr.op
def loss(x: mr.Row["d"], w: mr.Col["d"], label: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


@mr.op
def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(q @ k, v), mr.logsumexp(q @ k)


@mr.op
def two_passes(x: mr.Row["d"], y: mr.Col["d"]):
    s = x @ y
    return mr.sum(torch.exp(s - mr.logsumexp(s)) * s)


def traced(op, *shapes):
    return op._prepare([torch.zeros(s) if isinstance(s, tuple) else s for s in shapes], {})[0].outputs


def label():
    return torch.zeros(5, dtype=torch.int64)


def test_every_pass_is_observed_once_and_in_order():
    outputs = traced(attention, (5, 4), (7, 4), (7, 3))
    seen = []
    program = run_passes(outputs, lambda name, result: seen.append((name, result)))
    assert [name for name, _ in seen] == ["trace", *PASSES]
    assert seen[0][1] == outputs and seen[-1][1] == program == compile_program(outputs)
    (fold,) = [p.fold for p in program.passes]
    source = FoldGradient(fold, (True,) * len(fold.leaves), (True,) * len(fold.outputs))
    names = []
    assert isinstance(run_passes(source, lambda name, result: names.append(name)), Lowered)
    assert names == ["gradient", *PASSES]
    assert source.present == (True, True, True) and len(source.outputs) == 3
    assert source.results[0] == "P0" and source.cotangents[0] == "g0"


def test_what_each_pass_does_can_be_read():
    text = {s.compiler_pass: s.text for s in list_stages(traced(loss, (5, 4), (7, 4), label()))}
    assert text["trace"] == (
        "t0 = x @ w  # per pair\nreturn soft[cols](t0).logsumexp - sum[cols](where(col_index == label, t0, 0.0))"
    )
    assert "pick[cols](label, t0, 1.0, col)" in text["normal form"], "a sum against an index is a gather"
    assert text["hoist one-sided"].splitlines() == [
        "pass 1:",
        '    x0 <- x  # per row, vector over "d"',
        '    x1 <- w  # per column, vector over "d"',
        "    x2 <- label  # per row",
        "    t0 = x0 @ x1  # per pair",
        "    pass1.r0 = soft[cols](t0)",
        "    pass1.r1 = pick[cols](x2, t0, 1.0, col)",
        "return pass1.r0.log_total - (pass1.r1 - pass1.r0.peak)",
    ]


def test_softmaxes_of_one_logit_are_merged():
    text = {s.compiler_pass: s.text for s in list_stages(traced(attention, (5, 4), (7, 4), (7, 3)))}
    assert text["normal form"].count("soft[") == 2 and text["merge softmax"].count("soft[") == 1


def test_the_backward_of_each_pass_follows_last_first():
    stages = list(list_stages(traced(two_passes, (5, 4), (7, 4)), ["x", "y"]))
    programs = list(dict.fromkeys(s.program for s in stages))
    assert programs == ["forward", "backward of pass 2", "backward of pass 1"]
    backward = {s.compiler_pass: s.text for s in stages if s.program == "backward of pass 1"}
    assert list(backward) == ["gradient", *PASSES]
    assert "g0" in backward["gradient"] and "sum[rows]" in backward["gradient"]
    assert [s.program for s in list_stages(traced(two_passes, (5, 4), (7, 4)))] == ["forward"] * (1 + len(PASSES))


def test_a_gradient_that_does_not_exist_is_told():
    class Steps(mr.Monoid):
        v: mr.Scalar = 0.0

        def combine(a, b):
            return Steps(v=torch.floor(a.v) + torch.floor(b.v))

    @mr.op
    def steps(x: mr.Row, y: mr.Col):
        return mr.reduce(Steps, v=torch.floor(x * y)).v

    *_, last = list_stages(traced(steps, (5,), (7,)), ["x"])
    assert last.program == "backward of pass 1" and "no derivative" in last.text


@pytest.mark.parametrize("backward", [True, False])
def test_explain_prints_the_passes(backward):
    args = torch.zeros(5, 4), torch.zeros(7, 4), label()
    plain = loss.explain(*args, backward=backward)
    text = loss.explain(*args, backward=backward, passes=True)
    data = text.as_dict()
    assert json.loads(json.dumps(data)) == data and "passes" not in plain.as_dict() and text.startswith(plain)
    assert "forward, after normal form:" in text and "forward, after merge softmax: unchanged" in text
    assert ("backward of pass 1, after gradient:" in text) is backward
    assert {s["program"] for s in data["passes"]} == {"forward", *(["backward of pass 1"] if backward else [])}


def test_text_grows_with_the_nodes_and_not_with_the_paths():
    @mr.op
    def deep(x: mr.Row, y: mr.Col):
        s = x * y
        for _ in range(200):
            s = torch.tanh(s) * s
        return mr.sum(s)

    text = format_outputs(traced(deep, (5,), (7,)))
    assert len(text) < 20_000 and max(map(len, text.splitlines())) < 200


def test_signs_and_order_of_operations():
    @mr.op
    def signs(x: mr.Row, y: mr.Col, a: mr.Row):
        return mr.sum((x - (y - a)) / (x * (y + a)) + torch.where((x < y) & (y < a), -(x + y), 0.0))

    text = format_outputs(traced(signs, (5,), (7,), (5,)))
    assert "(x - (y - a)) / (x * (y + a))" in text
    assert "where((x < y) & (y < a), -(x + y), 0.0)" in text


def test_weights_of_16_bit_gradients_have_few_numbers():
    """Attention's values, entropy and distance: three means and three cotangents of a row become three numbers. In
    float32 they stay differences, which keep the digits of what is near its mean."""

    @mr.op
    def three(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
        s = q @ k
        gap = (mr.row_index - mr.col_index).abs().float()
        return mr.softmax_mean(s, v), mr.softmax_mean(s, s), mr.softmax_mean(s, gap)

    (one,) = compile_program(traced(three, (5, 4), (7, 4), (7, 3))).passes
    counts = []
    for narrow in (False, True):
        made = build_gradient_program(one.fold, (True,) * 3, (True,) * len(one.fold.outputs), narrow=narrow)
        (fold,) = [p.fold for p in made.program.passes]
        counts.append(sum(e.rows and e.feature is None for e in fold.leaves))
    assert counts == [8, 6]  # two of the weight itself, a rest and two coefficients; the scale of a result


@pytest.mark.parametrize("name", ["elu", "hardswish", "softsign", "leaky_relu", "selu"])
def test_the_gradient_of_a_best_pair_is_gathered_whatever_conditions_it_has(name):
    function = getattr(torch.nn.functional, name)

    @mr.op
    def best(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.max(function(x @ y))

    gen = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, n, 4, dtype=torch.float64, generator=gen, requires_grad=True) for n in (9, 7))
    *_, last = best.explain(x, y, passes=True).as_dict()["passes"]
    assert last["text"].count("pick[") == 2 and "sum[" not in last["text"]
    weights = torch.arange(18.0, dtype=torch.float64).view(2, 9)
    found = torch.autograd.grad(best(x, y), (x, y), weights)
    exact = torch.autograd.grad(function(x @ y.mT).max(-1).values, (x, y), weights)
    torch.testing.assert_close(found, exact)
