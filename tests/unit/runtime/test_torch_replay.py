"""A layer's own Python, done once: later calls of the same kind give what the layer itself would, and refuse what it
would refuse."""

import gc
import threading

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.ops import checks
from monoidreduce.runtime import recorder, torch_replay
from monoidreduce.runtime.torch_replay import seen_once
from tests.support import internals

D = 4


def drawn(*shapes, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=gen).requires_grad_() for s in shapes]


def fresh(layer):
    """A layer without what others in this process remember of it, and its outlines."""
    made = checks.public_layer(layer.__wrapped__)
    (found,) = [c.cell_contents for c in made.__closure__ if isinstance(c.cell_contents, torch_replay.LayerReplay)]
    return made, found


def written(outlines):
    """Whether each kind of call that was met twice has an outline."""
    return [call.__name__ == "call" for call in recorded(outlines)]


def recorded(outlines):
    """What is known of the kinds of calls that were met twice."""
    return [call for call in outlines.known.values() if call is not seen_once]


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [t for t in found if t is not None]


def gradients(found, given):
    moving = [t for t in tensors(found) if t.requires_grad]
    return torch.autograd.grad(moving, given, [torch.cos(t.detach()) for t in moving], allow_unused=True)


# layer, shapes of its tensors, options
LAYERS = {
    "attention": (ops.attention, [(2, 5, D), (2, 7, D), (2, 7, 3)], {}),
    "causal": (ops.attention, [(5, D), (7, D), (7, 3)], {"is_causal": True, "scale": 0.3, "softcap": 2.0}),
    "lse": (ops.attention, [(5, D), (7, D), (7, 3)], {"causal": "lower_right", "return_lse": True}),
    "groups": (ops.attention, [(4, 5, D), (2, 7, D), (2, 7, 3)], {"enable_gqa": True, "return_lse": True}),
    "mlp": (ops.mlp, [(2, 5, D), (7, D), (7, 3)], {"activation": "gelu"}),
    "mlp of a function": (ops.mlp, [(5, D), (7, D), (7, 3)], {"activation": torch.tanh}),
    "gated": (ops.gated_mlp, [(5, D), (7, D), (7, D), (7, 3)], {}),
    "clip": (ops.contrastive_loss, [(6, D), (6, D)], {"temperature": 0.5}),
    "infonce": (ops.contrastive_loss, [(6, D), (6, D)], {"kind": "infonce", "reduction": "none"}),
    "siglip": (ops.contrastive_loss, [(6, D), (6, D)], {"kind": "siglip", "bias": -1.0, "normalize": True}),
    "kernel": (ops.kernel_sum, [(5, 3), (7, 3), (7, 2)], {"bandwidth": 0.7}),
    "kernel of numbers": (ops.kernel_sum, [(5, 3), (7, 3), (7,)], {"kernel": "cauchy"}),
    "log kernel": (ops.kernel_logsumexp, [(5, 3), (7, 3)], {}),
    "softmin": (ops.softmin, [(5, 3), (7, 3), (7,)], {"eps": 0.5}),
    "entropy": (ops.linear_entropy, [(2, 5, D), (7, D)], {"temperature": 2.0}),
    "divergence": (ops.linear_kl, [(5, D), (7, D), (5, 3), (7, 3)], {}),
    "given": (ops.linear_cross_entropy, [(2, 5, D), (7, D), (2, 5, 7)], {"reduction": "sum"}),
    "best": (ops.linear_topk, [(2, 5, D), (7, D)], {"k": 2, "log_probs": True}),
    "pool": (ops.max_pool_product, [(5, D), (7, D)], {"return_indices": True}),
    "near": (ops.knn, [(5, 3), (7, 3)], {"k": 2}),
    "assigned": (ops.kmeans_assign, [(5, 3), (7, 3)], {"metric": "cosine"}),
    "late": (ops.maxsim, [(3, 5, D), (2, 7, D)], {"all_pairs": True}),
    "clouds": (ops.chamfer, [(2, 5, 3), (2, 7, 3)], {"reduction": "sum"}),
}
CAREFUL = "given"  # takes gradients off on the way, to keep the digits of a small loss


@pytest.mark.parametrize("name", LAYERS)
def test_calls_after_the_second_are_the_layer_itself(name):
    layer, shapes, options = LAYERS[name]
    made, outlines = fresh(layer)
    for seed in range(4):
        given = drawn(*shapes, seed=seed)
        got, want = made(*given, **options), layer.__wrapped__(*given, **options)
        assert type(got) is type(want)
        for a, b in zip(tensors(got), tensors(want), strict=True):
            assert torch.equal(a, b) and a.requires_grad == b.requires_grad
        for a, b in zip(gradients(got, given), gradients(want, given), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert written(outlines) == [name != CAREFUL]


def test_where_labels_are_not_looked_at_losses_have_outlines(monkeypatch):
    """As on a GPU; the share of a row is counted in every call."""
    internals.hide_labels(monkeypatch)
    for layer, options in (
        (ops.linear_cross_entropy, {}),
        (ops.linear_cross_entropy, {"reduction": "sum", "class_weights": torch.rand(7)}),
        (ops.linear_cross_entropy, {"return_lse": True, "return_accuracy": True, "z_loss": 0.1}),
        (ops.linear_logprobs, {"return_entropy": True, "top_k": 2}),
    ):
        made, outlines = fresh(layer)
        for seed in range(4):
            x, w = drawn((2, 5, D), (7, D), seed=seed)
            target = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(seed))
            target[0, :seed] = -100
            got, want = made(x, w, target, **options), layer.__wrapped__(x, w, target, **options)
            for a, b in zip(tensors(got), tensors(want), strict=True):
                assert torch.equal(a, b)
            for a, b in zip(gradients(got, (x, w)), gradients(want, (x, w)), strict=True):
                assert torch.equal(a, b)
        assert written(outlines) == [True]


def test_what_looks_at_numbers_has_no_outline():
    (x, w), target = drawn((5, D), (7, D)), torch.arange(5)
    made, outlines = fresh(ops.linear_cross_entropy)
    for _ in range(4):
        made(x, w, target)
    assert written(outlines) == [False]
    with pytest.raises(mr.LabelError):
        made(x, w, target + 3)
    made, outlines = fresh(ops.mlp)
    found = {float(made(x, w, w, dropout_p=0.5).detach().sum()) for _ in range(6)}
    assert written(outlines) == [False] and len(found) > 1, "a seed is drawn in every call"


@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ({"window": 1}, {"window": True}, mr.ArgumentError),
        ({"scale": 0.5}, {"scale": "0.5"}, mr.ArgumentError),
        ({"softcap": 1.0}, {"softcap": -1.0}, mr.ArgumentError),
        ({"dropout_p": 0.0}, {"dropout_p": 2.0}, mr.ArgumentError),
        ({"causal": True}, {"causal": "left"}, mr.ArgumentError),
        ({}, {"v": torch.ones(8, 3)}, mr.ShapeError),
        ({}, {"v": torch.ones(7, 3, dtype=torch.float64)}, mr.DTypeError),
        ({}, {"v": torch.ones(7, 3).to_sparse()}, mr.MonoidReduceError),
        ({}, {"colour": 3}, TypeError),
    ],
)
def test_a_wrong_call_is_refused_after_right_ones(right, wrong, error):
    made, _ = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    for _ in range(4):
        made(q, k, v=v, **right)
    for _ in range(2):
        with pytest.raises(error):
            made(q, k, **{"v": v, **wrong})
    made(q, k, v=v, **right)


def test_one_tensor_given_twice_says_nothing_of_two():
    made, _ = fresh(ops.contrastive_loss)
    x, y = drawn((6, D), (6, D))
    for _ in range(3):
        made(x, x)
    for _ in range(3):
        assert torch.equal(made(x, y), ops.contrastive_loss.__wrapped__(x, y))
        assert torch.equal(made(y, x), ops.contrastive_loss.__wrapped__(y, x))
        assert torch.equal(made(x, x), ops.contrastive_loss.__wrapped__(x, x))


def test_numbers_and_names_are_part_of_a_kind():
    made, outlines = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    for scale in (0.5, 0.25, 0.5, 0.0, -0.0, 0.25, 0.5, 1, True, 1.0):
        assert torch.equal(made(q, k, v, scale=scale), ops.attention.__wrapped__(q, k, v, scale=scale))
    assert torch.equal(made(v=v, k=k, q=q), made(q, k, v))
    outlines.known.size, before = 64, recorded(outlines)
    for _ in range(100):  # a number that changes in every call leaves those alone that are used
        made(q, k, v, scale=float(torch.rand(())))
        made(q, k, v, scale=0.25)
    after = recorded(outlines)
    assert 0 < len(after) < 10 and all(call in before for call in after)
    assert len(outlines.known) <= outlines.known.size


def test_who_asks_for_gradients_is_no_part_of_it():
    made, outlines = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    with torch.no_grad():
        for _ in range(3):
            assert not made(q, k, v).requires_grad
    assert len(gradients(made(q, k, v), (q, k, v))) == 3
    assert not made(q.detach(), k.detach(), v.detach()).requires_grad
    assert len(recorded(outlines)) == 1


def test_what_is_out_of_the_ordinary_takes_the_long_way():
    made, outlines = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    want = made(q, k, v)
    for _ in range(2):
        made(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert made(q, k, v).dtype is torch.bfloat16
    with mr.use(engine="reference"):
        torch.testing.assert_close(made(q, k, v), want)
    batched = torch.vmap(lambda one: made(one, k, v))(q[None])
    torch.testing.assert_close(batched[0], want)
    with torch.device("cpu"):  # a mode of torch's own
        assert torch.equal(made(q, k, v), want)
    meta = made(*(t.to("meta") for t in (q, k, v)))
    assert meta.shape == want.shape and len(recorded(outlines)) == 1


def test_outlines_hold_no_tensors():
    made, outlines = fresh(ops.kernel_logsumexp)
    given = drawn((5, 3), (7, 3))
    seen = {id(t) for t in given}
    for _ in range(4):
        made(*given)
    del given
    gc.collect()
    assert written(outlines) == [True]
    assert not [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and id(o) in seen]


@pytest.mark.parametrize("there", [True, False])
def test_a_step_that_is_ready_for_calls_of_its_kind(there):
    """What was made ready in the call that is watched does the same in those after it."""
    made = []

    def ready(x, by):
        made.append(by)
        return (lambda x, by: -(x * by)) if there else None

    double = recorder.step(lambda x, by: x * by, ready)
    outlines = torch_replay.LayerReplay(lambda x: double(x, 2.0) + 1)
    for turn in range(4):
        (x,) = drawn((3,), seed=turn)
        sign = -1 if there and turn > 1 else 1
        assert torch.equal(outlines((x,), {}), sign * x * 2.0 + 1)
    assert written(outlines) == [True] and made == [2.0]


def test_a_layer_that_takes_gradients_off_has_no_outline():
    def layer(x):
        with torch.no_grad():
            y = x * 2
        return x + y

    outlines = torch_replay.LayerReplay(layer)
    (x,) = drawn((3,))
    for _ in range(4):
        found = outlines((x,), {})
        assert torch.equal(torch.autograd.grad(found, x, torch.ones(3))[0], torch.ones(3))
    assert written(outlines) == [False]


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: x[x > 0].sum(),  # a form that numbers decide
        lambda x: x * float(x.detach().sum()),
        lambda x: x + KEPT,
        lambda x: F.pad(x, (1, 1)),
        lambda x: x if x.requires_grad else -x,
        lambda x: sum((x * 1.0 for _ in range(40)), x),
    ],
    ids=["chosen", "looked at", "from elsewhere", "unknown", "asked", "long"],
)
def test_what_an_outline_cannot_say(layer):
    outlines = torch_replay.LayerReplay(layer)
    for seed in range(4):
        (x,) = drawn((9,), seed=seed)
        x = x if seed % 2 else x.detach()
        assert torch.equal(outlines((x,), {}), layer(x))
    assert written(outlines) == [False]


KEPT = torch.ones(9)


def test_many_threads():
    made, _ = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    failures = []

    def work(turn):
        try:
            for n in range(1, 30):
                rows = q[: 1 + (n + turn) % 5].detach()
                assert torch.equal(made(rows, k, v), ops.attention.__wrapped__(rows, k, v))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


# Vectors that are stored as small numbers


def stored(shape, scale, seed=0, **more):
    gen = torch.Generator().manual_seed(seed)
    return mr.scaled(torch.randint(-90, 90, shape, generator=gen, dtype=torch.int8), scale, **more)


def test_calls_with_stored_vectors_are_replayed():
    layer, outlines = fresh(ops.attention)
    (q,) = drawn((2, 5, D))
    share = torch.rand(2, 7)
    forms = {
        "numbers": lambda s: (stored((2, 7, D), s), stored((2, 7, 3), 2 * s)),
        "vectors": lambda s: (stored((2, 7, D), s * torch.rand(2, 7)), stored((2, 7, 3), s * torch.rand(2, 1))),
        "one tensor of both": lambda s: (stored((2, 7, D), share), stored((2, 7, 3), share, seed=1)),
    }
    for count, make in enumerate(forms.values(), 1):
        for seed in range(4):
            torch.manual_seed(seed)
            k, v = make(0.01)
            found, wanted = layer(q, k, v), ops.attention.__wrapped__(q, k, v)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            torch.testing.assert_close(gradients(found, q), gradients(wanted, q), rtol=0, atol=0)
        assert written(outlines) == [True] * count
    k, v = forms["numbers"](0.02)  # another number is another recording
    torch.testing.assert_close(layer(q, k, v), ops.attention.__wrapped__(q, k, v), rtol=0, atol=0)


def test_a_replayed_call_with_stored_vectors_runs_none_of_the_layer():
    seen = []

    def layer(q, k, v):
        seen.append(1)
        return ops.attention(q, k, v, scale=0.3)

    outlines = torch_replay.LayerReplay(layer)
    given = drawn((5, D))[0].detach(), stored((7, D), torch.rand(7)), stored((7, 3), 0.1)
    found = [outlines(given, {}) for _ in range(5)]
    assert len(seen) == 2  # to see the kind, and to record it
    assert all(torch.equal(found[0], one) for one in found)


def test_masters_that_ask_for_gradients_are_not_replayed():
    layer, outlines = fresh(ops.attention)
    q, k, v = drawn((5, D), (7, D), (7, 3))
    kept = stored((7, D), 0.01, master=k)
    for _ in range(3):
        (g,) = torch.autograd.grad(layer(q, kept, v).sum(), k)
        assert g.shape == k.shape
    assert not outlines.known
    with torch.no_grad():
        for _ in range(3):
            found = layer(q, kept, v)
    assert written(outlines) == [True]
    torch.testing.assert_close(found, layer(q, kept, v).detach())
    assert torch.autograd.grad(layer(q, kept, v).sum(), k)[0].shape == k.shape


FACTOR = 1.0


def test_ops_with_stored_vectors_follow_what_their_bodies_read(monkeypatch):
    @mr.op
    def layer(x: mr.Row["f"], y: mr.Col["f"]):
        return mr.sum(FACTOR * (x @ y))

    x, y = torch.rand(3, D), stored((7, D), torch.rand(7))
    for factor in (1.0, 2.0, 1.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        for _ in range(4):
            torch.testing.assert_close(layer(x, y), factor * (x @ y.dequantize().T).sum(1))
        assert written(layer._stored_calls) == [True]
