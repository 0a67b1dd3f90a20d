"""Warp-specialised MLP kernels: which folds get one, how warp groups divide a tile, and what they compute.

They run on the CPU in ``tests/support/gluon_simulator.py``; ``test_aot_compile.py`` compiles them for a GPU, and
``tests/gpu`` runs the same cases there.
"""

from dataclasses import replace

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.schedules import work_split
from monoidreduce.program import constructors
from monoidreduce.program.expression import node
from tests.support import gluon_simulator, internals
from tests.support.aot_compile import Case, calls
from tests.support.golden_files import compare
from tests.support.warp_specialised_mlp_cases import (
    ABREAST,
    BY_GROUPS,
    CASES,
    OTHERS,
    PLAIN,
    RELAY,
    check,
    check_infinite,
    check_plain,
    made,
)


def launched(op=ops.gated_mlp, dtype=torch.bfloat16, d=128, plans=None, capability=90, count=4, n=300, **options):
    """The launches of a gated perceptron and its gradients."""
    make = lambda dtype: tuple(torch.zeros(n, d, dtype=dtype) for _ in range(count))
    return calls(Case("gated", lambda *args: op(*args, **options), make, dtype), capability, plans)


def grouped(found):
    return [(c.kernel.name, c.plan.block_kept) for c in found if c.kernel.hand_scheduled]


@mr.op
def scaled(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"], row: Row):
    return mr.sum(torch.tanh(x @ gate * row) * (x @ up) * down) * row


@mr.op
def three_sums(x: Row["d"], p: Col["d"], q: Col["d"], u: Col["n"], v: Col["n"], w: Col["n"]):
    s, t = x @ p, x @ q
    return mr.sum(torch.sin(s + t) * u), mr.sum(torch.cos(s + t) * v), mr.sum(torch.sin(s) * w)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "relu", "leaky_relu", "elu"])
def test_a_gated_perceptron_and_its_gradients_are_three_kernels(activation):
    found = launched(activation=activation)
    assert grouped(found) == [("fold_over_cols", 128), ("fold_over_cols", 128), ("fold_over_rows", 64)]
    assert len(found) == 3
    for call in found:
        assert "warp_specialize" in call.kernel.text and "tl.dot(" not in call.kernel.text
        compile(call.kernel.text, "kernel", "exec")


@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "gelu_tanh", "tanh", "sigmoid", "relu", "elu", "mish", "softplus"]
)
def test_the_forward_of_a_plain_perceptron_has_one_score(activation):
    forward = launched(torch.no_grad()(ops.mlp), count=3, activation=activation)
    assert grouped(forward) == [("fold_over_cols", 128)]
    assert "score0 = " in forward[0].kernel.text and "score1 = " not in forward[0].kernel.text


@pytest.mark.parametrize("options", OTHERS, ids=repr)
def test_other_plain_perceptrons_are_scheduled_by_the_compiler(options):
    assert not grouped(launched(torch.no_grad()(ops.mlp), count=3, **options))


@mr.op
def entropy(x: Row["d"], y: Col["d"]):
    s = x @ y
    log_p = s - mr.logsumexp(s)
    return -mr.sum(torch.exp(log_p) * log_p)


@mr.op
def causal(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.where(mr.col_index <= mr.row_index, x @ p, 0.0) * q)


def test_one_score_has_one_number_of_folded_indices_and_no_condition():
    assert not grouped(launched(causal, count=3)) and not grouped(launched(entropy, count=2))
    forward = launched(torch.no_grad()(ops.mlp), count=3, dropout_p=0.1, seed=3)[-1]
    assert forward.kernel.hand_scheduled and "_here = " in forward.kernel.text  # the words of coins


@pytest.mark.parametrize(
    "options",
    [
        *OTHERS,
        {"plans": dict.fromkeys(("cols", "rows"), KernelPlan(64, 64, 4, 2, splits=1, rendering=Rendering.DESCRIPTORS))},
        {"plans": {"cols": replace(ABREAST, splits=2), "rows": replace(RELAY, splits=2)}},
        {"plans": {"cols": RELAY, "rows": replace(RELAY, block_kept=256)}},
    ],
    ids=lambda o: ", ".join(f"{k}={str(v)[:20]}" for k, v in o.items()),
)
def test_others_are_scheduled_by_the_compiler(options):
    assert not grouped(launched(**options))


def test_a_bias_is_a_number_of_kept_indices_and_its_gradient_is_not_a_sum_of_vectors():
    bias = torch.zeros(300, dtype=torch.bfloat16)
    assert grouped(launched(gate_bias=bias)) == [("fold_over_rows", 64)]
    assert ("fold_over_rows", 64) not in grouped(launched(gate_bias=bias.requires_grad_()))


def test_divided_sums_have_no_numbers_of_folded_indices():
    found = grouped(launched(dropout_p=0.1, seed=3))
    assert found == [
        ("fold_over_cols", 128),
        ("fold_over_cols", 128),
        ("fold_over_rows", 128),
    ]  # the last is of one sum


def test_a_score_that_is_no_factor_leaves_the_sums_in_two_kernels():
    forward = launched(lambda *args: three_sums(*(a.detach() for a in args)), count=6)
    kernels = [(c.kernel.name, c.kernel.hand_scheduled) for c in forward]
    assert kernels == [("fold_over_cols", False), ("fold_over_cols", True)]  # the last is of one sum


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("warp_specialised_mlp_gradients", lambda: launched()[-1]),
        (
            "warp_specialised_mlp_forward",
            lambda: launched(torch.no_grad()(ops.mlp), count=3, activation="gelu_tanh")[0],
        ),
    ],
)
def test_the_text_is_the_same_in_every_run(name, call):
    compare(name, call().kernel.text)


def test_one_score_is_a_factor_and_the_rest_is_sent():
    sender, taker = launched()[-1].kernel.text.split("def consumer1(")
    assert sender.count("sent0.index(step % 2).store(") == 4 and "sum2 = " in sender and "sum0 = " not in sender
    assert taker.count("sent0.index(step % 2).load(") == 4 and "sum0 = " in taker and "sum2 = " not in taker


def number(name):
    return node("leaf", (), (name,), rows=True, cols=True, feature=None, dtype="float")


@pytest.mark.parametrize(
    ("weight", "factor"),
    [
        (lambda t, u: t, lambda t, u: constructors.ONE),
        (
            lambda t, u: constructors.apply("mul", constructors.apply("mul", u, t), 3.0),
            lambda t, u: constructors.apply("mul", u, 3.0),
        ),
        (
            lambda t, u: constructors.apply("div", constructors.apply("neg", t), u),
            lambda t, u: constructors.apply("div", -1.0, u),
        ),
        (
            lambda t, u: constructors.apply(
                "where", constructors.apply("gt", u, 0.0), constructors.apply("mul", t, u), 0.0
            ),
            lambda t, u: constructors.apply("where", constructors.apply("gt", u, 0.0), u, 0.0),
        ),
        (
            lambda t, u: constructors.apply("add", t, constructors.apply("mul", t, u)),
            lambda t, u: constructors.apply("add", 1.0, u),
        ),
        (lambda t, u: constructors.apply("add", t, u), lambda t, u: None),
        (lambda t, u: constructors.apply("div", u, t), lambda t, u: None),
        (lambda t, u: constructors.apply("where", constructors.apply("gt", t, 0.0), t, 0.0), lambda t, u: None),
        (lambda t, u: constructors.apply("mul", t, constructors.apply("exp", t)), lambda t, u: None),
    ],
)
def test_what_a_score_is_multiplied_by(weight, factor):
    t, u = number("t"), number("u")
    assert work_split._factor_beside(weight(t, u), t) is factor(t, u)


@pytest.fixture
def by_groups(monkeypatch):
    """Kernels are warp-specialised, and run on the simulator; the launches that did."""
    with use_plan(BY_GROUPS):
        yield gluon_simulator.simulate(monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_against_float64(case, by_groups):
    check(case, "cpu")
    assert {(c.kernel.name, c.plan) for c in by_groups} == {("fold_over_cols", ABREAST), ("fold_over_rows", RELAY)}
    assert len(by_groups) == 2 * case.grouped


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("rows", "cols", "batch", "activation"), PLAIN)
def test_a_plain_perceptron_against_float64(rows, cols, batch, activation, by_groups):
    check_plain(rows, cols, batch, activation, "cpu")
    assert [c.plan for c in by_groups] == [ABREAST] * 2 and all("consumer0" in c.kernel.text for c in by_groups)


def test_an_infinite_cotangent_stays_with_what_is_seen(by_groups):
    check_infinite("cpu")
    assert len(by_groups) == 3


def test_numbers_of_kept_indices_are_read_and_multiply_what_is_written(by_groups):
    x, gate, up, down, _ = made(200, 130)
    row = torch.randn(200).bfloat16()
    with mr.use(engine="triton"):
        got = scaled(x, gate, up, down, row)
    wide = [a.double() for a in (x, gate, up, down, row[:, None])]
    exact = (torch.tanh(wide[0] @ wide[1].mT * wide[4]) * (wide[0] @ wide[2].mT)) @ wide[3] * wide[4]
    assert (got.double() - exact).norm() <= 2**-8 * exact.norm()
    assert [c.plan for c in by_groups] == [ABREAST]
    assert "tl.convert_layout(" in by_groups[0].kernel.text.split("# results")[1]


OPTIONS = [{}, {"softcap": 5.0}, {"alibi_slopes": torch.tensor([0.1, 0.5])}, {"causal": True}]
OPTIONS += [{"causal": True, "softcap": 5.0}, {"dropout_p": 0.2, "seed": 3}]
OPTIONS += [{"dropout_p": 0.5, "seed": -(2**62), "causal": True}]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize(("heads", "rows", "cols"), [(2, 200, 300), (2, 300, 171), (1, 65, 64)])
def test_the_row_gradient_of_attention(options, heads, rows, cols, by_groups):
    gen = torch.Generator().manual_seed(0)
    q, k, v, y = (
        torch.randn(2, h, n, 128, generator=gen).bfloat16()
        for h, n in zip((2, heads, heads, 2), (rows, cols, cols, rows), strict=True)
    )

    def pulled(engine, dtype):
        one = q.to(dtype).requires_grad_()
        given = {k: v.to(dtype) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        with mr.use(engine=engine):
            out = ops.attention(one, k.to(dtype), v.to(dtype), enable_gqa=heads == 1, **given)
            return torch.autograd.grad(out, one, y.to(dtype))[0]

    got, exact = pulled("triton", torch.bfloat16), pulled("reference", torch.float64)
    assert (got.double() - exact).norm() <= 2**-7 * exact.norm()
    assert [c.plan for c in by_groups] == [ABREAST] * 2 and "consumer0" in by_groups[1].kernel.text
    text = by_groups[1].kernel.text
    assert ("_here = " in text) == ("dropout_p" in options)  # the words of coins, through a ring
    assert ("= thrown(" in text) == ("dropout_p" in options and cols % 2 == 0)  # of an odd number one has no neighbour
    assert ("= coin(" in text) == ("dropout_p" in options and cols % 2 == 1)


@mr.op
def itself(x: Row["d"], p: Col["d"]):
    return mr.sum(torch.tanh(x @ p) * p)


@pytest.mark.parametrize(("rows", "cols"), [(200, 300), (65, 64), (1, 1)])
def test_a_score_is_made_of_what_is_summed(rows, cols, by_groups):
    x, p, *_ = made(rows, cols)
    with mr.use(engine="triton"):
        got = itself(x, p)
    exact = torch.tanh(x.double() @ p.double().mT) @ p.double()
    assert (got.double() - exact).norm() <= 2**-8 * exact.norm()
    assert [c.plan for c in by_groups] == [ABREAST] and by_groups[0].kernel.text.count("_ring = ") == 1


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (r"& 1\) \^ 1\n", "& 1)\n", "nobody ends"),  # the copying warp waits before it begins
        (r"mbarrier.arrive\(x0_empty.index\(\(step - 1\) % 4\)\)", "pass", "nobody ends"),  # a block is not given back
        (r"mbarrier.arrive\(sent_full.index\(step % 2\)\)", "pass", "nobody ends"),  # numbers are not sent
        (r"score2 = warpgroup_mma_wait\(2, deps=\[score2\]\)", "pass", "Product"),  # a product is not waited for
    ],
    ids=["phase", "arrival", "sent", "wait"],
)
def test_the_machine_sees_a_broken_turn(text, instead, message, by_groups, monkeypatch):
    """Else it would prove nothing."""
    gluon_simulator.change_kernels(monkeypatch, text, instead, where=lambda call: call.plan == RELAY, patience=0.5)
    with pytest.raises((AssertionError, TypeError), match=message):
        check(CASES[5], "cpu")


def test_taken_where_they_keep_a_device_busy(monkeypatch):
    internals.pretend_device(monkeypatch, processors=132)
    assert grouped(launched(n=16384)) == [("fold_over_cols", 128), ("fold_over_cols", 128), ("fold_over_rows", 64)]
    assert grouped(launched(n=7000)) == [("fold_over_rows", 64)]  # 110 of 132 are busy, or 55
    plain = lambda n: grouped(launched(torch.no_grad()(ops.mlp), count=3, n=n))
    assert plain(16384) == [("fold_over_cols", 128)] and not plain(7000)
    assert not grouped(launched(n=17000))  # of two rounds, or three, the last would have next to nothing to do
