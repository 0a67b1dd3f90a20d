"""Replayed layers that hand their ops views (heads in groups): results and gradients are the layer's own, whatever is
asked for, and the recorded launches take the layer's own tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.common.bounded_cache import LastComputed, clear_caches
from monoidreduce.runtime import autograd, torch_replay
from monoidreduce.runtime.replay import View, apply_views, undo_views

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RECORDED = 2  # the second call of a kind is recorded; from the third on it is replayed


@pytest.fixture(autouse=True)
def kernels(by_address):
    clear_caches()  # the layer's recordings too
    with mr.use(engine="triton"):
        yield


def drawn(*shapes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen).requires_grad_() for s in shapes]


def split_heads(seed=0):
    """Queries of four heads, keys and values of two, as projections give them."""
    made = drawn((2, 7, 4 * 16), (2, 9, 2 * 16), (2, 9, 2 * 8), seed=seed)
    return made, [t.unflatten(-1, (n, -1)).transpose(1, 2) for t, n in zip(made, (4, 2, 2), strict=True)]


def attend(q, k, v, **more):
    return ops.attention(q, k, v, enable_gqa=True, **more)


def by_torch(q, k, v):
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


@pytest.fixture
def applied(monkeypatch):
    """The shapes of what each replayed program is given, a program a list."""
    seen, run = [], autograd._replay_program
    heard = lambda call, *given: (
        seen.append([tuple(v.shape) for v in given if isinstance(v, torch.Tensor)]) or run(call, *given)
    )
    monkeypatch.setattr(autograd, "_replay_program", heard)
    return seen


def assert_close(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        torch.testing.assert_close(got.double(), want.double(), atol=3e-5, rtol=1e-4)


def test_grouped_heads_are_replayed_without_a_view(applied):
    for seed in range(RECORDED + 2):
        given, heads = split_heads(seed)
        y, wanted = attend(*heads), by_torch(*heads)
        g = torch.cos(wanted.detach())
        assert_close([y], [wanted])
        assert_close(torch.autograd.grad(y, given, g, retain_graph=True), torch.autograd.grad(wanted, given, g))
    assert applied[-1] == [(2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 8)], "as the layer was given them"
    assert y._base is None and y.stride() == heads[0].new_empty(2, 7, 4, 8).transpose(1, 2).stride()
    before = [type(node).__name__ for node, _ in y.grad_fn.next_functions]
    assert before == ["TransposeBackward0"] * 3, "the user's own views, and no others"


def replayed(seed=0):
    for _ in range(RECORDED + 1):
        given, heads = split_heads(seed)
        y = attend(*heads)
        torch.autograd.grad(y, given, torch.ones_like(y), retain_graph=True)
    return given, heads, y


@pytest.mark.parametrize("asked", [(0,), (1, 2)])
def test_any_gradients(asked):
    for seed in range(RECORDED + 2):
        _, heads = split_heads(seed)
        heads = [t.detach().requires_grad_(k in asked) for k, t in enumerate(heads)]
        y, wanted, given = attend(*heads), by_torch(*heads), [heads[k] for k in asked]
        g = torch.sin(wanted.detach())
        assert_close(torch.autograd.grad(y, given, g), torch.autograd.grad(wanted, given, g))


@pytest.mark.parametrize("form", ["broadcast", "transposed", "sliced"])
def test_cotangents_of_any_strides(form):
    for seed in range(RECORDED + 2):
        given, heads = split_heads(seed)
        y, wanted = attend(*heads), by_torch(*heads)
        g = {
            "broadcast": lambda: torch.tensor(0.5).expand(2, 4, 7, 8),
            "transposed": lambda: torch.randn(8, 7, 4, 2).permute(3, 2, 1, 0),
            "sliced": lambda: torch.randn(2, 4, 7, 16)[..., ::2],
        }[form]()
        assert_close(torch.autograd.grad(y, given, g), torch.autograd.grad(wanted, given, g))


def test_second_derivatives():
    replayed()
    found = []
    for call in (attend, by_torch):
        given, heads = split_heads(3)
        y = call(*heads)
        first = torch.autograd.grad((y * torch.cos(y.detach())).sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum((t**2).sum() for t in first), given))
    assert_close(*found)


def test_results_that_are_changed_in_place():
    given, _, y = replayed()
    given, heads = split_heads()
    y, wanted = attend(*heads), by_torch(*heads)
    y.mul_(2.0)
    g = torch.cos(wanted.detach())
    assert_close([y], [2 * wanted])
    assert_close(torch.autograd.grad(y, given, g), torch.autograd.grad(2 * wanted, given, g))


def test_two_results_are_two_views():
    for seed in range(RECORDED + 2):
        given, heads = split_heads(seed)
        found = attend(*heads, return_lse=True)
        score = (heads[0] @ heads[1].repeat_interleave(2, 1).mT) / 4
        wanted = by_torch(*heads), torch.logsumexp(score, -1)
        assert type(found).__name__ == "AttentionOutput"
        assert_close(found, wanted)
        g = [torch.cos(t.detach()) for t in wanted]
        assert_close(torch.autograd.grad(tuple(found), given, g), torch.autograd.grad(wanted, given, g))


def test_another_kind_of_call_is_not_served():
    _, heads, _ = replayed()
    longer = [torch.cat([t, t[..., :1, :]], -2).detach() for t in heads]
    assert_close([attend(*longer)], [by_torch(*longer)])
    apart = [t.detach().contiguous() for t in heads]
    assert_close([attend(*apart)], [by_torch(*apart)])
    assert_close([attend(*heads, scale=0.5)], [by_torch(heads[0] * 2, *heads[1:])])
    with torch.no_grad():
        y = attend(*heads)
    assert not y.requires_grad
    assert_close([y], [by_torch(*heads)])
    halves = [t.detach().half() for t in heads]
    assert attend(*halves).dtype is torch.float16


def test_memory_that_runs_out_in_a_replay():
    _, _, y = replayed()
    replay = y.grad_fn.kept[0]
    refuse = lambda *given: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("pretended"))
    object.__setattr__(replay, "launches", type("Refusing", (), {"run": staticmethod(refuse)})())
    given, heads = split_heads(5)
    y, wanted = attend(*heads), by_torch(*heads)
    g = torch.cos(wanted.detach())
    assert_close([y], [wanted])
    assert_close(torch.autograd.grad(y, given, g), torch.autograd.grad(wanted, given, g))


def test_one_tensor_given_twice_is_replayed():
    x = torch.randn(2, 9, 16, requires_grad=True)
    made = torch_replay.LayerReplay(ops.attention.__wrapped__)
    for _ in range(RECORDED + 2):
        y, wanted = made((x, x, x), {}), F.scaled_dot_product_attention(x, x, x)
        g = torch.cos(wanted.detach())
        assert_close([y], [wanted])
        assert_close(torch.autograd.grad(y, x, g), torch.autograd.grad(wanted, x, g))
    (call,) = made.known.values()
    assert call.__name__ == "call"
    other = torch.randn(2, 9, 16)
    assert_close([made((x, other, x), {})], [F.scaled_dot_product_attention(x, other, x)])


def test_views_and_their_inverses():
    x = torch.randn(2, 6, 5).transpose(0, 1)
    for run, given in (
        (torch.Tensor.unflatten, (0, (2, 3))),
        (torch.Tensor.movedim, (0, 2)),
        (torch.Tensor.transpose, (0, 2)),
        (torch.Tensor.unsqueeze, (1,)),
        (torch.Tensor.expand, (1, 6, 2, 5)),
    ):
        found = run(x, *given)
        view = View.of(run, (x, *given), found)
        assert torch.equal(apply_views((view,), x), found) and torch.equal(undo_views((view,), found), x)
    for run, given in (
        (torch.Tensor.expand, (3, 6, 2, 5)),  # repeats
        (torch.Tensor.flatten, ()),  # copies
        (torch.Tensor.neg, ()),
        (torch.Tensor.long, ()),
    ):
        assert View.of(run, (x, *given), run(x, *given)) is None


def test_lists_of_grouped_heads_that_change_in_place():
    """Lists are found once for the same tensors: other ones, and the same with other numbers, are other lists."""
    index, count = torch.tensor([[0], [1], [2]]), torch.tensor([1, 1, 1])
    q, k, v = (t.detach() for t in drawn((4, 48, 16), (2, 48, 16), (2, 48, 8)))

    def call(index):
        return attend(q, k, v, cols=mr.blocks(index, count, 16, 16))

    def expected(index):
        with mr.use(engine="reference"):
            return ops.attention.__wrapped__(q, k, v, enable_gqa=True, cols=mr.blocks(index, count, 16, 16))

    for _ in range(RECORDED + 2):
        assert_close([call(index)], [expected(index)])
    index += 1
    index %= 3
    assert_close([call(index)], [expected(index)])
    count[1] = 0
    assert_close([call(index)], [expected(index)])
    other = index.flip(0)
    assert_close([call(other), call(index)], [expected(other), expected(index)])


def test_what_is_computed_of_the_last_tensors():
    calls = []
    total = LastComputed(lambda *given: calls.append(given) or sum(int(t.sum()) for t in given))
    x, y = torch.arange(3), torch.arange(4)
    assert total(x, y) == total(x, y) == 9 and len(calls) == 1
    y += 1
    assert total(x, y) == 13 and total(x, y.clone()) == 13 and len(calls) == 3
    y = torch.ones(2, dtype=torch.int64)  # perhaps at the same address
    assert total(x, y) == 5
    with torch.inference_mode():
        z = torch.arange(2)
    assert [total(x, z), total(x, z)] == [4, 4] and len(calls) == 6, "of what has no version nothing is known"
    del x, y
    assert total.last[0] == ()
    scaled = LastComputed(lambda t, n: t * n)
    t, n = torch.ones(2), 0.1
    assert scaled(t, n) is scaled(t, n) and scaled(t, 0.2)[0] == t[0] * 0.2


def test_checkpoints_recompute_with_a_replay_what_a_first_call_saved():
    made, given = split_heads()
    wanted = torch.autograd.grad(by_torch(*given).sin().sum(), made, retain_graph=True)
    for _ in range(4):
        out = checkpoint(attend, *given, use_reentrant=False)
        found = torch.autograd.grad(out.sin().sum(), made, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
