"""Statistics of attention's weights, and the divergence of two attentions, beside plain torch with whole matrices."""

import sys

import pytest
import torch

import monoidreduce as mr
from monoidreduce.ops import attention, attention_kl, attention_statistics
from tests.support import attention_statistics as dense

R = lambda *shape, dtype=torch.float64: torch.randn(*shape, dtype=dtype)
NAMES = ("lse", "entropy", "distance", "column_sums")
OPTIONS = {
    "plain": {},
    "scale and cap": {"scale": 0.7, "softcap": 2.0},
    "causal": {"causal": True},
    "lower right, window": {"causal": "lower_right", "window": 3},
    "documents": {"causal": True, "documents": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])},
    "lengths": {"lengths": torch.tensor([9, 0])},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.2], dtype=torch.float64)},
}


def tensors(M=9, N=9, dtype=torch.float64):
    return R(2, 4, M, 5, dtype=dtype), R(2, 2, N, 5, dtype=dtype), R(2, 2, N, 3, dtype=dtype)


@pytest.fixture(params=["reference", "eager", "auto"])
def engine(request):
    with mr.use(engine=request.param):
        yield request.param


@pytest.mark.parametrize("name", OPTIONS)
def test_statistics_and_their_gradients(name, engine, seed):
    """Grouped heads, values in the same pass."""
    given = tensors()
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    found = attention_statistics(*mine, enable_gqa=True, **OPTIONS[name])._asdict()
    right = dense.statistics(*theirs, **OPTIONS[name])
    weights = {n: torch.randn_like(t) for n, t in right.items()}
    sums = []
    for values in (found, right):
        finite = {n: torch.where(t.isfinite(), t, 0.0) for n, t in values.items()}
        sums.append(sum((weights[n] * t).sum() for n, t in finite.items()))
    for n, t in right.items():
        torch.testing.assert_close(found[n], t, msg=lambda text, n=n: f"{n}: {text}")
    for a, b in zip(torch.autograd.grad(sums[0], mine), torch.autograd.grad(sums[1], theirs), strict=True):
        torch.testing.assert_close(a, b.nan_to_num(0.0))  # torch's own is NaN where a row sees nothing


LISTS = {
    "blocks": mr.blocks(torch.tensor([[0, 2], [1, 0], [2, 1]]), torch.tensor([2, 0, 1]), rows=3, cols=3),
    "jagged": mr.jagged(torch.tensor([0, 4, 4, 9])),
    "edges": mr.edges.from_neighbours(torch.arange(27).view(9, 3) * 4 % 9),
}


@pytest.mark.parametrize("kind", LISTS)
def test_listed_pairs(kind, engine, seed):
    """As under a mask; of packed sequences as one by one, each from its own start or back from its end."""
    q, k, v = tensors()
    seen, cols = LISTS[kind].mask(9, 9).bool(), LISTS[kind]
    found = attention_statistics(q, k, v, causal=True, enable_gqa=True, cols=cols)
    torch.testing.assert_close(found, attention_statistics(q, k, v, seen, causal=True, enable_gqa=True))
    x, y = R(9, 4).requires_grad_(), R(9, 4).requires_grad_()
    losses = [attention_kl(x, y, 0.5 * x, x + y, **options) for options in ({"cols": cols}, {"attn_mask": seen})]
    grads = [torch.autograd.grad(t.square().sum(), (x, y)) for t in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads)


def test_packed_sequences_of_other_lengths(seed):
    q, k, rows, cols = R(7, 4), R(9, 4), (0, 2, 7), (0, 5, 9)
    given = {"causal": "lower_right", "cols": mr.jagged(torch.tensor(rows), torch.tensor(cols))}
    found, loss = attention_statistics(q, k, **given), attention_kl(q, k, 2 * q, k, **given)
    for a, b, c, d in zip(rows, rows[1:], cols, cols[1:], strict=False):
        one = attention_statistics(q[a:b], k[c:d], causal="lower_right")
        torch.testing.assert_close([t[a:b] for t in found[1:4]], [*one[1:4]])
        torch.testing.assert_close(found.column_sums[c:d], one.column_sums)
        torch.testing.assert_close(loss[a:b], attention_kl(q[a:b], k[c:d], 2 * q[a:b], k[c:d], causal="lower_right"))
    with pytest.raises(mr.ArgumentError, match=r"mr.pages.*Give mr.blocks"):
        attention_statistics(q, k, cols=mr.pages(torch.tensor([[0]]), torch.tensor([1])))


@pytest.mark.parametrize("names", [["entropy"], ["distance"], ["column_sums"], ["entropy", "column_sums"]])
def test_derivatives(names, seed):
    q, k = R(4, 3).requires_grad_(), R(5, 3).requires_grad_()
    f = lambda q, k: tuple(t for t in attention_statistics(q, k, statistics=names, causal=True) if t is not None)
    with mr.use(engine="eager"):
        assert torch.autograd.gradcheck(f, (q, k))
        assert torch.autograd.gradgradcheck(f, (q, k))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True, "window": 4}, {"softcap": 2.0, "teacher_softcap": 3.0, "scale": 0.5}, OPTIONS["documents"]],
    ids=str,
)
def test_divergence(direction, options, engine, seed):
    """An indexer of one head beside a teacher of four that share two heads of keys."""
    given = R(2, 1, 9, 3), R(2, 1, 9, 3), R(2, 4, 9, 5), R(2, 2, 9, 5)
    mine, theirs = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    loss = attention_kl(*mine, direction=direction, enable_gqa=True, **options)
    four = (theirs[0].expand(2, 4, 9, 3), theirs[1].expand(2, 4, 9, 3), *theirs[2:])
    if direction == "reverse":
        swapped = {"softcap": "teacher_softcap", "teacher_softcap": "softcap", "scale": "teacher_scale"}
        right = dense.kl(*four[2:], *four[:2], **{swapped.get(n, n): v for n, v in options.items()})
    else:
        right = dense.kl(*four, **options)
    torch.testing.assert_close(loss, right)
    weight = torch.randn_like(right)
    grads = torch.autograd.grad((loss * weight).sum(), mine), torch.autograd.grad((right * weight).sum(), theirs)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_derivatives_of_the_divergence(seed):
    given = [t.requires_grad_() for t in (R(4, 3), R(5, 3), R(4, 2), R(5, 2))]
    with mr.use(engine="eager"):
        assert torch.autograd.gradcheck(lambda *t: attention_kl(*t, causal=True), given)
        assert torch.autograd.gradgradcheck(lambda *t: attention_kl(*t, causal=True), given)


def test_the_mean_over_heads_has_the_gradient_of_an_indexers_loss(seed):
    """KL(mean of the heads' weights ‖ indexer) and the mean of the heads' divergences, for the indexer."""
    q, k = R(1, 9, 3).requires_grad_(), R(1, 9, 3).requires_grad_()
    teacher_q, teacher_k = R(4, 9, 5), R(4, 9, 5)
    ours = attention_kl(q, k, teacher_q, teacher_k, causal=True).mean(0).sum()
    p = dense.softmax(dense.scores(teacher_q, teacher_k, causal=True)).mean(0)
    s = torch.log_softmax(dense.scores(q, k, causal=True)[0], -1).masked_fill(p == 0, 0.0)
    theirs = (torch.xlogy(p, p) - p * s).sum()
    for a, b in zip(torch.autograd.grad(ours, (q, k)), torch.autograd.grad(theirs, (q, k)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_no_more_than_twice_those_of_torch(dtype, seed):
    q, k, v = R(2, 60, 16, dtype=dtype), R(2, 70, 16, dtype=dtype), R(2, 70, 8, dtype=dtype)
    with mr.use(engine="eager"):
        found = attention_statistics(q, k, v, causal=True)._asdict()
    plain = dense.statistics(q, k, v, causal=True)
    right = dense.statistics(*(t.double() for t in (q, k, v)), causal=True)
    for name, t in right.items():
        error, allowed = ((x[name].double() - t).abs().mean() for x in (found, plain))
        assert error <= 2 * allowed + 1e-6, name


def test_masks_that_add_infinities_and_rows_that_see_nothing(seed):
    q, k = R(4, 3).requires_grad_(), R(5, 3).requires_grad_()
    bias = torch.zeros(4, 5, dtype=torch.float64)
    bias[1], bias[0, 2] = -torch.inf, -torch.inf
    seen = bias == 0
    right = dense.statistics(q, k, attn_mask=seen)
    for given in ({"bias": bias}, {"attn_mask": bias}, {"attn_mask": seen}, {"attn_mask": ~seen, "mask_hides": True}):
        found = attention_statistics(q, k, **given)
        for name in NAMES:
            torch.testing.assert_close(getattr(found, name), right[name])
        assert found.entropy[1] == 0 and found.distance[1] == 0 and found.lse[1] == -torch.inf
        grads = torch.autograd.grad(found.entropy.sum() + found.column_sums.square().sum(), (q, k))
        assert all(g.isfinite().all() for g in grads) and grads[0][1].abs().max() == 0
    assert attention_kl(q, k, q, k, attn_mask=seen).abs().max() < 1e-12


def test_empty_axes():
    found = attention_statistics(R(3, 2), R(0, 2), R(0, 4))
    assert found.values.shape == (3, 4) and found.entropy.tolist() == [0, 0, 0] and found.column_sums.shape == (0,)
    found = attention_statistics(R(0, 2), R(3, 2))
    assert found.column_sums.tolist() == [0, 0, 0] and found.entropy.shape == (0,)
    assert attention_kl(R(3, 2), R(0, 2), R(3, 2), R(0, 2)).tolist() == [0, 0, 0]


def test_what_is_asked_for_and_the_rest():
    q, k, v = R(4, 3), R(5, 3), R(5, 2)
    found = attention_statistics(q, k, v, statistics="distance")
    assert found.lse is None and found.entropy is None and found.column_sums is None
    torch.testing.assert_close(found.values, attention(q, k, v))
    torch.testing.assert_close(found.distance, dense.statistics(q, k)["distance"])
    assert attention_statistics(q, k, v, statistics=()).lse is None


def test_passes():
    """Values, entropy and distance are one pass, column sums a second; a divergence is one."""
    q, k, v = R(40, 8), R(50, 8), R(50, 4)
    ops = sys.modules["monoidreduce.ops.attention_statistics"]
    assert "1 pass over the pairs" in str(ops._statistics.explain(q, k, 0.3, "lse entropy distance", v=v, causal=True))
    assert "2 passes over the pairs" in str(ops._statistics.explain(q, k, 0.3, " ".join(NAMES), v=v, softcap=2.0))
    assert "1 pass over the pairs" in str(ops._kl.explain(q, k, q, k, 0.3, 0.3, causal=True))


def test_streams_of_columns(seed):
    q, k = R(6, 3), R(20, 3)
    names = ("lse", "entropy", "distance")
    found = attention_statistics.stream(q, statistics=names).over(k.split(7))
    right = dense.statistics(q, k)
    for name in names:
        torch.testing.assert_close(getattr(found, name), right[name])


def test_wrong_arguments():
    q, k = R(4, 3), R(5, 3)
    with pytest.raises(mr.ArgumentError, match="entropy"):
        attention_statistics(q, k, statistics=["entropie"])
    with pytest.raises(mr.ArgumentError, match="statistics"):
        attention_statistics(q, k, statistics=())
    with pytest.raises(mr.ArgumentError, match="truth values"):
        attention_kl(q, k, q, k, torch.zeros(4, 5, dtype=torch.float64))
    with pytest.raises(mr.ArgumentError, match="direction"):
        attention_kl(q, k, q, k, direction="both")
    with pytest.raises(mr.ShapeError, match="heads"):
        attention_kl(R(4, 9, 3), R(3, 9, 3), R(4, 9, 3), R(2, 9, 3), enable_gqa=True)
    with pytest.raises(mr.ShapeError):
        attention_kl(q, k, R(3, 3), k)
    with pytest.raises(mr.DTypeError):
        attention_statistics(q.long(), k)
