"""Column-gradient kernels of one warp group (four warps): which folds get one, and what they compute.

They run on the CPU in ``tests/support/gluon_simulator.py``; ``test_aot_compile.py`` compiles them for a GPU, and
``tests/gpu`` runs the same cases there.
"""

from dataclasses import replace

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.kernels import fold_kernel
from monoidreduce.engines.triton.schedules import work_split
from monoidreduce.engines.triton.schedules.logit_forms import match_dropped_number, match_dropped_weight
from monoidreduce.program import constructors
from tests.support import gluon_simulator, internals
from tests.support.aot_compile import Case, calls
from tests.support.golden_files import compare
from tests.support.single_warpgroup_cases import ALONE, DROPPED, OPTIONS, SIZES, check, pulled
from tests.support.warp_specialised_mlp_cases import OTHERS


@pytest.fixture(autouse=True)
def _apart(monkeypatch):
    internals.keep_directions_apart(monkeypatch)


def columns(op=ops.attention, dtype=torch.bfloat16, d=128, plans=None, capability=90, n=300, **options):
    """The launch of an op's column gradients."""
    make = lambda dtype: tuple(torch.zeros(n, d, dtype=dtype) for _ in range(3))
    found = calls(Case("columns", lambda *args: op(*args, **options), make, dtype), capability, plans)
    return next(c for c in found if c.kernel.name == "fold_over_rows")


@pytest.mark.parametrize("options", [{}, DROPPED, {"softcap": 5.0}], ids=repr)
def test_attentions_column_gradients_are_taken(options):
    found = columns(**options)
    assert (
        found.kernel.single_warpgroup
        and found.kernel.hand_scheduled
        and (found.plan.block_kept, found.plan.rendering) == (64, Rendering.HAND_SCHEDULED)
    )
    assert "warp_specialize" not in found.kernel.text and "coin(" not in found.kernel.text
    compile(found.kernel.text, "kernel", "exec")


@pytest.mark.parametrize(
    "options",
    [
        *(o for o in OTHERS if o != {"d": 256}),  # two groups divide those
        {"plans": {"rows": KernelPlan(64, 64, 4, 2, splits=1, rendering=Rendering.DESCRIPTORS)}},
        {"plans": {"rows": replace(ALONE, block_kept=128)}},
        {"plans": {"rows": replace(ALONE, splits=2)}},
        DROPPED | {"softcap": 5.0},  # weights of another form: their coins are compared one by one
        DROPPED | {"n": 301},  # the last column has no neighbour to share a product with
    ],
    ids=lambda o: ", ".join(f"{k}={str(v)[:20]}" for k, v in o.items()),
)
def test_others_are_scheduled_by_the_compiler(options):
    found = columns(**options)
    assert not found.kernel.single_warpgroup and not found.kernel.hand_scheduled


def test_the_text_is_the_same_in_every_run():
    compare("single_warpgroup_dropout", columns(**DROPPED).kernel.text)


def test_the_first_sum_needs_one_score():
    (part,) = work_split.divide_work(staged_spec())
    first, second = part.products
    assert part.single_warpgroup and work_split.count_kept((part,)) == 64
    assert part.dots[1] not in work_split.topological([first.weight])
    assert set(part.dots) <= set(work_split.topological([second.weight]))


def staged_spec(**options):
    """The spec of the column gradients."""
    seen, real = [], fold_kernel.sum_of_products.write_kernel_for_plan

    def taken(spec, *given):
        seen.append(spec)
        return real(spec, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_kernel.sum_of_products, "write_kernel_for_plan", taken)
        columns(**options)
    return next(s for s in seen if s.over == "rows")


def test_weights_that_coins_decide_on():
    spec = staged_spec(**DROPPED)
    first, second = (p.weight for p in work_split.divide_work(spec)[0].products)
    one, other = match_dropped_weight(first, spec), match_dropped_weight(second, spec)
    assert one.dropout == other.dropout and one.weight is other.weight and one.pair is None
    assert other.pair.op == "dot" and other.number.op == "leaf"
    assert (
        match_dropped_weight(constructors.apply("where", constructors.apply("gt", one.weight, 0.0), second, 0.0), spec)
        == other
    )
    assert match_dropped_number(first, spec) == (one.weight, one.dropout) and match_dropped_number(second, spec) is None
    assert match_dropped_weight(one.weight, spec) is None
    assert match_dropped_weight(constructors.apply("mul", second, one.weight), spec) is None


@pytest.fixture
def alone(monkeypatch):
    """Column gradients have kernels of one warp group, which run on the simulator; the launches that did."""
    plans = {"cols": KernelPlan(128, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED), "rows": ALONE}
    with use_plan(plans):
        yield gluon_simulator.simulate(monkeypatch)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
def test_against_float64(options, rows, cols, alone):
    found = pulled("triton", torch.bfloat16, options, rows, cols)
    check(found, options, rows, cols)
    assert [c.kernel.name for c in alone if c.kernel.single_warpgroup] == ["fold_over_rows"]


@pytest.mark.parametrize(
    ("text", "instead", "message"),
    [
        (r"\(step // 2\) & 1\)", "((step // 2) & 1) ^ 1)", "nobody ends"),  # a block is waited for in the wrong round
        (r"if step \+ 1 < steps:\n", "if step + 2 < steps:\n", "nobody ends"),  # a block is not asked for
        (r"score1 = warpgroup_mma_wait\(1, deps=\[score1\]\)", "pass", "Product"),  # a product is not waited for
    ],
    ids=["phase", "copy", "wait"],
)
def test_the_machine_sees_a_broken_turn(text, instead, message, alone, monkeypatch):
    """Else it would prove nothing."""
    gluon_simulator.change_kernels(
        monkeypatch, text, instead, where=lambda call: call.kernel.single_warpgroup, patience=0.5
    )
    with pytest.raises((AssertionError, TypeError), match=message):
        pulled("triton", torch.bfloat16, {}, 200, 300)


def test_a_total_of_nothing_leaves_its_row_without_a_part(alone):
    """Rows that see no column: their weights are 0, and so is what they give."""
    found = pulled("triton", torch.bfloat16, {"causal": True}, 64, 300)
    assert all((g[..., 64:, :] == 0).all() for g in found[1:])


@mr.op
def two_sums(x: Row["d"], y: Row["d"], p: Col["d"], q: Col["d"]):
    s = x @ p
    return mr.sum(s * p), mr.sum(s * (y @ q) * q)


@mr.op
def dropped(x: Row["d"], y: Row["d"], p: Col["d"], q: Col["d"]):
    s = x @ p
    return mr.sum(s * mr.dropout(p, 0.1, 3)), mr.sum(s * (y @ q) * q)


@pytest.mark.parametrize(("op", "taken"), [(two_sums, True), (dropped, False)])
def test_coins_of_folded_columns_are_not_for_it(op, taken):
    make = lambda dtype: tuple(torch.zeros(300, 128, dtype=dtype) for _ in range(4))
    found = calls(Case("two sums", lambda *args: op(*(a.detach() for a in args)), make), 90)
    assert [c.kernel.single_warpgroup for c in found if c.kernel.name == "fold_over_cols"] == [taken]


def test_sums_over_columns(alone):
    gen = torch.Generator().manual_seed(0)
    x, y, p, q = (torch.randn(n, 128, generator=gen).mul(128**-0.25).bfloat16() for n in (130, 130, 200, 200))
    with use_plan({"cols": ALONE}), mr.use(engine="triton"):
        found = two_sums(x, y, p, q)
    x, y, p, q = (a.double() for a in (x, y, p, q))
    for got, exact in zip(found, ((x @ p.mT) @ p, (x @ p.mT * (y @ q.mT)) @ q), strict=True):
        assert (got.double() - exact).norm() <= 2**-8 * exact.norm()
    assert [c.kernel.single_warpgroup for c in alone] == [True]
