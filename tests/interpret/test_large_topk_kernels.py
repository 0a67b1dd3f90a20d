"""Top-k beyond what registers hold: pairs written to panels, the best selected from them, on kernels."""

import math
import warnings

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Batch, Col, Row
from monoidreduce.engines.common.evaluate import Sizes
from monoidreduce.engines.triton.kernels import topk
from monoidreduce.program.expression import node, reduce_node
from tests.support import truncated_sampling
from tests.support.large_topk_cases import K, arguments, dense, derive, sort_rows


@pytest.fixture
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", mr.FallbackWarning)
        yield


@mr.op
def products(x: Row["d"], y: Col["d"]):
    s = x @ y
    return mr.topk(s, K), mr.logsumexp(s)


@mr.op
def least(x: Row["d"], y: Col["d"]):
    return mr.topk(x @ y, K, largest=False, over="rows")


@pytest.mark.parametrize("limit", [None, "14KB"], ids=["whole", "panels"])
def test_products_over_either_axis(limit, no_fallback):
    torch.manual_seed(0)
    x, y = torch.randn(2, 3, 5), torch.randn(2, 75, 5)
    with mr.use(engine="triton", budget=limit):
        (values, places), z = products(x, y)
        smallest, rows = least(y, x)
    s = x @ y.mT
    torch.testing.assert_close(values, sort_rows(s, K)[0])
    assert torch.equal(places, sort_rows(s, K)[1])
    torch.testing.assert_close(z, s.logsumexp(-1))
    torch.testing.assert_close(smallest, sort_rows(s, K, False)[0])
    assert torch.equal(rows, sort_rows(s, K, False)[1])


@mr.op
def masked(x: Row["d"], y: Col["d"], shift: Batch, seed: int, window: int):
    near = (mr.row_index - mr.col_index).abs() <= window
    noisy = mr.sqdist(x, y) + shift + 0.01 * mr.uniform(seed)
    return mr.topk(torch.where(near, -noisy, -torch.inf), K)


@pytest.mark.parametrize("limit", [None, "8KB"], ids=["whole", "panels"])
def test_masks_draws_and_indices_do_not_depend_on_panels(limit, no_fallback):
    """Tiles that are skipped hold nothing; random numbers and indices count from the whole problem's start."""
    torch.manual_seed(0)
    given = (torch.randn(2, 6, 3), torch.randn(2, 300, 3), torch.tensor([0.5, -0.5]), 3, 40)
    with mr.use(engine="reference"):
        wanted = masked(*given)
    with mr.use(engine="triton", budget=limit):
        found = masked(*given)
    torch.testing.assert_close(found.values, wanted.values)
    assert torch.equal(found.indices, wanted.indices) and (found.indices == -1).any()


@mr.op
def ranks_of(x: Row, y: Col):
    return mr.topk((x * y) % 7, K, largest=False), mr.topk(x * y > 3, K)


def test_integers_and_truth_values_with_many_ties(no_fallback):
    x, y = torch.arange(-3, 4), torch.arange(1, 101)
    with mr.use(engine="triton"):
        (values, places), (truths, where) = ranks_of(x, y)
    s = x[:, None] * y
    wanted, at = sort_rows(s % 7, K, False)
    assert torch.equal(values, wanted) and torch.equal(places, at)
    wanted, at = sort_rows((s > 3).long(), K)
    assert torch.equal(truths, wanted > 0) and torch.equal(where, at)


@mr.op
def kept(x: Row, y: Col):
    return mr.topk(x * y, K).values


def test_gradients_and_second_derivatives(no_fallback):
    torch.manual_seed(0)
    x, y, g = (torch.randn(n, dtype=torch.float64) for n in ((3,), (75,), (3, K)))

    def derive(run):
        a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
        first = torch.autograd.grad((run(a, b) ** 3 * g).sum(), (a, b), create_graph=True)
        return *first, *torch.autograd.grad(first[0].sin().sum() + first[1].cos().sum(), (a, b))

    with mr.use(engine="triton"):
        found = derive(kept)
    torch.testing.assert_close(found, derive(lambda x, y: (x[:, None] * y).topk(K).values))


def test_half_precision_rows_and_a_row_of_nan(no_fallback):
    torch.manual_seed(0)
    x, y = torch.randn(4, 8).half(), torch.randn(300, 8).half()
    x[2] = math.nan
    with mr.use(engine="triton"):
        values, places = mr.ops.linear_topk(x, y, 128)
    s = x.float() @ y.float().mT
    torch.testing.assert_close(values.float(), sort_rows(s, 128)[0], rtol=2e-3, atol=2e-3, equal_nan=True)
    assert torch.equal(places[2], torch.arange(128))


def test_too_small_a_budget_says_what_would_do():
    x, y = torch.randn(3, 4), torch.randn(400, 4)
    with mr.use(engine="triton", budget=100), pytest.raises(mr.BudgetError, match="at least"):
        mr.ops.linear_topk(x, y, 100)


@mr.op
def gathered(x: Row["d"], y: Col["d"], c: Col, label: Col):
    s = x @ y
    best = mr.topk(s, K)
    return best.gather(c), best.gather(label), best.gather(torch.tanh(s) * c), mr.topk_mean(s, y, K)


def test_what_is_gathered_and_its_gradients(no_fallback):
    x, *others = arguments()
    with mr.use(engine="triton"):
        found, gradients = derive(gathered, [x[:3], *others])
    wanted, exact = derive(lambda *given: [dense(*given, both=False)[k] for k in (2, 3, 5, 6)], [x[:3], *others])
    torch.testing.assert_close([*found, *gradients], [*wanted, *exact])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("engine", ["triton", "panel"])
@pytest.mark.parametrize("limits", [dict(top_p=0.9), dict(min_p=0.2), dict(top_k=7, top_p=0.8)], ids=str)
def test_truncated_draws_are_those_of_the_definition(limits, engine, no_fallback):
    x, weight, bias = truncated_sampling.arguments()
    with mr.use(engine=engine):
        index, log_prob = mr.ops.linear_sample(x[:4], weight, 1, bias=bias, **limits)
    with mr.use(engine="reference"):
        wanted, exact = truncated_sampling.draw(x[:4], weight, 1, bias, **limits)
    assert torch.equal(index, wanted)
    torch.testing.assert_close(log_prob, exact)


KINDS = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("held", [None, 64], ids=["whole rows", "strips"])
@pytest.mark.parametrize("dtype", KINDS, ids=lambda d: str(d)[6:])
def test_selection_is_that_of_a_stable_sort(dtype, held, monkeypatch):
    """The first of equals, NaN above all, zeros whatever their signs, sorted rows (whose threshold must be raised),
    infinities, the ends of int64."""
    if held:
        monkeypatch.setattr(topk, "_LARGE_HELD", {4: held, 8: held})
        monkeypatch.setattr(topk, "_LANES", 128)
    torch.manual_seed(0)
    x = torch.randn(7, 205)
    x[1] -= 20
    x[2, 7], x[2, 30:100], x[3, :190], x[4, ::2] = math.nan, -0.0, -math.inf, 0.0
    x[5], x[6, :], x[6, 5:200] = x[5].sort().values, math.inf, -math.inf
    if dtype is torch.int64:
        x = (x.nan_to_num(0, 5, -7) * 3).long()
        x[0, 3], x[0, 9] = -(2**63), 2**63 - 1
    x = torch.nn.functional.pad(x.to(dtype), (0, 3))[:, :205]
    compute = torch.promote_types(dtype, torch.float32)
    for k, largest in ((16, True), (3, False), (60, True)):
        values, places = topk.select_large(x, k, largest, compute)
        wide = x if dtype is torch.int64 else x.to(compute)
        wanted, at = sort_rows(wide, k, largest)
        assert torch.equal(places, at)
        torch.testing.assert_close(values, wanted, rtol=0, atol=0, equal_nan=True)
    assert [t.shape for t in topk.select_large(x[:0], 3, True, compute)] == [(0, 3), (0, 3)]


def test_a_large_problem_is_never_held_whole():
    score = node("leaf", (), ("x0",), rows=True, cols=True, feature=None, dtype="float")
    best = reduce_node("topk", "cols", (2048, True), (score,))
    sizes = Sizes(4096, 32768, (), {}, torch.device("cpu"), torch.float32)
    rows, cols = topk._choose_panel_shape(best, sizes, 4096, 32768)
    assert rows <= 1024 and cols == 32768
    assert topk._choose_panel_shape(best, sizes, 64, 4096) == (64, 4096)  # little is
