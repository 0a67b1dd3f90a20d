"""The papers' factories against dense float64 torch and against the elementwise definition."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import papers
from monoidreduce.blockwise import MonoidReduce, elementwise_fold, elementwise_grad, mk_GeMMMapReduce
from monoidreduce.errors import ArgumentError, NoGradientError, ShapeError

RAGGED = [(1, 1), (1, 59), (59, 1), (59, 111), (65, 127)]


def randn(*shapes, grad=True):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=grad) for shape in shapes]


def assert_same_with_gradients(layer, dense, inputs):
    """Equal values, and equal gradients of every input for one random cotangent."""
    got, expected = layer(*inputs), dense(*inputs)
    assert_close(got, expected)
    cotangent = torch.randn_like(expected)
    assert_close(torch.autograd.grad(got, inputs, cotangent), torch.autograd.grad(expected, inputs, cotangent))


# The papers' listings, written anew: same names, same arguments, same behaviour.


def islice(parts):
    return zip(*(part.chunk(8) for part in parts), strict=True)


def attention_listing():
    def init(a, b):
        (query,), (_, value) = a, b
        return query.new_full(query.shape[:1], -torch.inf), value.new_zeros(len(query), value.shape[1])

    def proj_fold(a, b):
        (query,), (key, value) = a, b
        logits = query @ key.T
        z = logits.logsumexp(1)
        return z, torch.exp(logits - z[:, None]) @ value

    def binary_reduce(x, y):
        (xz, xv), (yz, yv) = x, y
        z = torch.logaddexp(xz, yz)
        return z, torch.exp(xz - z).unsqueeze(-1) * xv + torch.exp(yz - z).unsqueeze(-1) * yv

    def proj_fold_bwd(a, b, p, gp):
        (query,), (key, value), (pz, pv), (gz, gv) = a, b, p, gp
        weight = torch.exp(query @ key.T - pz[:, None])
        glogits = weight * (gz[:, None] + gv @ value.T - (gv * pv).sum(1, keepdim=True))
        return (glogits @ key,), (glogits.T @ query, weight.T @ gv)

    def D(c, a, g):
        (cz, cv), (az, av), (gz, gv) = c, a, g
        weight = torch.exp(az - cz)
        return weight * (gz + (gv * (av - cv)).sum(-1)), weight.unsqueeze(-1) * gv

    return SimpleNamespace(**locals())


def xentropy2_listing():
    def init(a, b):
        rows = a[0].shape[:1]
        return a[0].new_full(rows, -torch.inf), a[0].new_full(rows, -torch.inf), a[0].new_zeros(rows)

    def proj_fold(a, b):
        student, teacher = a[0] @ b[0].T, a[1] @ b[1].T
        q = teacher.logsumexp(1)
        return student.logsumexp(1), q, (torch.exp(teacher - q[:, None]) * student).sum(1)

    def binary_reduce(x, y):
        (xp, xq, xn), (yp, yq, yn) = x, y
        q = torch.logaddexp(xq, yq)
        return torch.logaddexp(xp, yp), q, xn * torch.exp(xq - q) + yn * torch.exp(yq - q)

    def D(c, a, g):
        (cp, cq, cn), (ap, aq, an), (gp, gq, gn) = c, a, g
        return gp * torch.exp(ap - cp), (gq + gn * (an - cn)) * torch.exp(aq - cq), gn * torch.exp(aq - cq)

    def proj_fold_bwd(a, b, p, gp):
        local, pullback = torch.func.vjp(proj_fold, a, b)
        return pullback(D(p, local, gp))

    return SimpleNamespace(**locals())


def build(listing, name="Layer", *, backward="proj_fold_bwd", avals, bvals, **changes):
    parts = {key: getattr(listing, key) for key in ("init", "proj_fold", "binary_reduce")}
    if backward:
        parts[backward] = getattr(listing, backward)
    return MonoidReduce(
        name, **{"avals": avals, "bvals": bvals, "islice": islice, "jslice": islice, **parts, **changes}
    )


def build_attention(**changes):
    return build(attention_listing(), "Attention", **{"avals": 1, "bvals": 2, **changes})


def dense_attention(q, k, v):
    return (q @ k.T).softmax(1) @ v


def dense_xentropy2(p, q, c, d):
    return -((q @ d.T).softmax(1) * (p @ c.T).log_softmax(1)).sum(1)


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
@pytest.mark.parametrize(("m", "n"), RAGGED)
def test_attention_listing_equals_dense(m, n, backward, seed):
    layer = build_attention(backward=backward)
    inputs = randn((m, 5), (n, 5), (n, 3))
    assert_same_with_gradients(lambda *x: layer.apply(*x)[1], dense_attention, inputs)
    assert_same_with_gradients(
        lambda *x: layer.apply(*x)[0], lambda q, k, v: (q @ k.T + 0 * v.sum()).logsumexp(1), inputs
    )


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
@pytest.mark.parametrize(("m", "n"), RAGGED)
def test_two_distribution_cross_entropy_listing_equals_dense(m, n, backward, seed):
    layer = build(xentropy2_listing(), avals=2, bvals=2, backward=backward)

    def xentropy2(*x):
        p, _, n = layer.apply(*x)
        return p - n

    assert_same_with_gradients(xentropy2, dense_xentropy2, randn((m, 5), (m, 7), (n, 5), (n, 7)))


@pytest.mark.parametrize("listing", [attention_listing, xentropy2_listing])
def test_blocks_agree_with_the_elementwise_definition(listing, seed):
    """Theorem 2.1 itself: the tiles' fold and gradients are those of single pairs, for every part of the product."""
    made = listing()
    if listing is attention_listing:
        rows, cols = tuple(randn((9, 4))), tuple(randn((11, 4), (11, 3)))
        identity = (torch.tensor(-torch.inf), torch.zeros(3))

        def f(a, b):
            return a[0] @ b[0], b[1]
    else:
        rows, cols = tuple(randn((9, 4), (9, 2))), tuple(randn((11, 4), (11, 2)))
        identity = (torch.tensor(-torch.inf), torch.tensor(-torch.inf), torch.tensor(0.0))

        def f(a, b):
            return a[0] @ b[0], a[1] @ b[1], a[0] @ b[0]

    product = build(made, avals=len(rows), bvals=len(cols)).apply(*rows, *cols)
    pairs = elementwise_fold(identity, made.binary_reduce, f, rows, cols)
    assert_close(product, tuple(torch.stack(part) for part in zip(*pairs, strict=True)))

    cotangents = tuple(torch.randn_like(p) for p in product)
    with torch.no_grad():
        ga, gb = elementwise_grad(made.D, f, rows, cols, pairs, list(zip(*cotangents, strict=True)))
    assert_close(torch.autograd.grad(product, rows + cols, cotangents), ga + gb)


def test_elementwise_takes_dicts_and_integers(seed):
    """Cross-entropy against classes, as T-values with names; the target and the column's number are integers."""
    (x, w), target = randn((6, 3), (5, 3), grad=False), torch.tensor([0, 4, 2, 2, 1, 0])
    rows, cols = (x, target), (w, torch.arange(5))

    def f(a, b):
        s = a[0] @ b[0]
        return {"p": s, "n": torch.where(a[1] == b[1], s, 0.0)}

    def combine(a, b):
        return {"p": torch.logaddexp(a["p"], b["p"]), "n": a["n"] + b["n"]}

    def D(c, h, g):
        return {"p": g["p"] * torch.exp(h["p"] - c["p"]), "n": g["n"]}

    products = elementwise_fold({"p": torch.tensor(-torch.inf), "n": torch.tensor(0.0)}, combine, f, rows, cols)
    loss = torch.stack([p["p"] - p["n"] for p in products])
    assert_close(loss, torch.nn.functional.cross_entropy(x @ w.T, target, reduction="none"))
    one = {"p": torch.tensor(1.0), "n": torch.tensor(-1.0)}
    (gx, gt), (gw, gi) = elementwise_grad(D, f, rows, cols, products, [one] * 6)
    error = (x @ w.T).softmax(1) - torch.nn.functional.one_hot(target, 5)
    assert gt is None and gi is None
    assert_close((gx, gw), (error @ w, error.T @ x))


# The first form: the proof of concept's layers.


@pytest.mark.parametrize(("m", "n"), [(1, 1), (59, 111), (255, 257), (300, 513)])
def test_proof_of_concept_layers_equal_dense(m, n, seed):
    q, k, v = randn((m, 5), (n, 5), (n, 3))
    target = torch.randint(n, (m,))
    assert_same_with_gradients(papers.attention, dense_attention, (q, k, v))
    assert_same_with_gradients(papers.mlp, lambda x, p, q: torch.relu(x @ p.T) @ q, (q, k, v))
    assert_same_with_gradients(
        lambda x, w: papers.cross_entropy(x, w, target),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, target, reduction="none"),
        (q, k),
    )


def entropy_parts():
    """Entropy of softmax(x @ w.T): T = {z: log normaliser, n: mean score}; the papers' own never had a backward."""

    def init(x, w):
        return x.new_full((len(x),), -torch.inf), x.new_zeros(len(x))

    def chunker(x, w):
        return papers.tiles(len(x), len(w), row_inputs=(0,), n_inputs=2)

    def proj_fold(x, w):
        s = x @ w.T
        z = s.logsumexp(1)
        return z, (torch.exp(s - z[:, None]) * s).sum(1)

    def proj_fold_bwd(x, w, a, ga):
        (z, n), (gz, gn) = a, ga
        s = x @ w.T
        gs = torch.exp(s - z[:, None]) * (gz[:, None] + gn[:, None] * (1 + s - n[:, None]))
        return gs @ w, gs.T @ x

    def binary_reduce(a, b):
        z = torch.logaddexp(a[0], b[0])
        return z, a[1] * torch.exp(a[0] - z) + b[1] * torch.exp(b[0] - z)

    return locals()


def dense_entropy(x, w):
    return -((x @ w.T).softmax(1) * (x @ w.T).log_softmax(1)).sum(1)


def test_entropy_has_a_backward(seed):
    layer = mk_GeMMMapReduce("Entropy", **entropy_parts())

    def entropy(x, w):
        z, n = layer.apply(x, w)
        return z - n

    assert_same_with_gradients(entropy, dense_entropy, randn((59, 4), (300, 4)))


def test_packed_functions_are_told_by_their_signatures(seed):
    """The listing's ``proj_fold(x)`` and the README's ``proj_fold(query, key)`` are the same layer, mixed or not."""
    plain = entropy_parts()
    packed = {
        "init": lambda x: plain["init"](*x),
        "chunker": lambda x: plain["chunker"](*x),
        "proj_fold": lambda x: plain["proj_fold"](*x),
        "proj_fold_bwd": lambda x, a, ga: plain["proj_fold_bwd"](*x, a, ga),
        "binary_reduce": plain["binary_reduce"],
    }
    variadic = {**plain, "init": lambda *x: plain["init"](*x), "proj_fold": lambda x, *w: plain["proj_fold"](x, *w)}
    inputs = randn((3, 4), (300, 4))
    for functions in (packed, variadic, {**plain, "init": packed["init"]}):
        layer = mk_GeMMMapReduce("Entropy", **functions)
        assert_same_with_gradients(
            lambda *x, layer=layer: -layer.apply(*x)[1] + layer.apply(*x)[0], dense_entropy, inputs
        )


def test_a_single_input_is_unpacked_unless_said_otherwise(seed):
    (x,) = randn((7, 4))

    def chunker(x):
        yield lambda a: a, lambda parts: parts

    common = {"binary_reduce": lambda a, b: (a[0] + b[0],), "chunker": chunker, "D": lambda p, h, g: g}
    plain = mk_GeMMMapReduce("Sum", init=lambda x: (x.new_zeros(7),), proj_fold=lambda x: (x.sum(1),), **common)
    packed = mk_GeMMMapReduce(
        "Sum", init=lambda x: (x[0].new_zeros(7),), proj_fold=lambda x: (x[0].sum(1),), packed=True, **common
    )
    for layer in (plain, packed):
        assert_same_with_gradients(lambda x, layer=layer: layer.apply(x)[0], lambda x: x.sum(1), [x])


def test_sampling_is_forward_only_and_follows_the_softmax(seed):
    """T = {w: log weight, v: a sample}: ⊙ keeps either sample with the probability of its weight (February 2023)."""
    draws, classes = 20_000, 11
    generator = torch.Generator().manual_seed(seed)

    def pick(z, other):
        return torch.rand(z.shape, generator=generator) < torch.exp(z - torch.logaddexp(z, other))

    def proj_fold(x, w, index):
        s = x @ w.T
        z = s.logsumexp(1)
        return z, index[torch.multinomial(torch.exp(s - z[:, None]), 1, generator=generator)[:, 0]]

    def chunker(x, w, index):
        for cut in papers.slicer(classes, 4):
            yield lambda a: a, lambda x, cut=cut: (x[0], x[1][cut], x[2][cut])

    sample = mk_GeMMMapReduce(
        "Sample",
        init=lambda x, w, index: (x.new_full((len(x),), -torch.inf), index.new_full((len(x),), -1)),
        chunker=chunker,
        proj_fold=proj_fold,
        binary_reduce=lambda a, b: (torch.logaddexp(a[0], b[0]), torch.where(pick(a[0], b[0]), a[1], b[1])),
    )
    (x, w) = randn((1, 3), (classes, 3))
    weight, index = sample.apply(x.expand(draws, 3), w, torch.arange(classes))
    assert index.dtype == torch.int64 and not index.requires_grad
    frequency = torch.bincount(index, minlength=classes) / draws
    # 5 standard deviations of a frequency around 1/4 over 20,000 draws are 0.015
    assert_close(frequency.double(), (x @ w.T).softmax(1)[0].detach(), atol=0.02, rtol=0)
    with pytest.raises(NoGradientError, match=r"Sample was made without a backward.*proj_fold_bwd=, or D="):
        weight.sum().backward()


# Gradients: who gets one, how often, and how exactly.


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_only_what_needs_a_gradient_gets_one(needs, backward, seed):
    layer = build_attention(backward=backward)
    inputs = [x.requires_grad_(need) for x, need in zip(randn((5, 4), (9, 4), (9, 3), grad=False), needs, strict=True)]
    dense = [x.detach().clone().requires_grad_() for x in inputs]
    layer.apply(*inputs)[1].square().sum().backward()
    dense_attention(*dense).square().sum().backward()
    for x, like, need in zip(inputs, dense, needs, strict=True):
        assert (x.grad is not None) == need
        if need:
            assert_close(x.grad, like.grad)


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
def test_gradcheck(backward, seed):
    assert torch.autograd.gradcheck(build_attention(backward=backward).apply, randn((3, 2), (10, 2), (10, 2)))
    layer = build(xentropy2_listing(), avals=2, bvals=2, backward=backward)
    assert torch.autograd.gradcheck(layer.apply, randn((3, 2), (3, 2), (10, 2), (10, 2)))


def test_integer_outputs_and_inputs_have_no_gradient(seed):
    """The greatest score and where it is: T = {m: number, i: integer}, derived from D."""
    layer = MonoidReduce(
        "Argmax",
        avals=1,
        bvals=2,
        islice=islice,
        jslice=islice,
        init=lambda a, b: (a[0].new_full((len(a[0]),), -torch.inf), b[1].new_full((len(a[0]),), -1)),
        proj_fold=lambda a, b: (lambda top: (top.values, b[1][top.indices]))((a[0] @ b[0].T).max(1)),
        binary_reduce=lambda x, y: tuple(torch.where(x[0] >= y[0], s, t) for s, t in zip(x, y, strict=True)),
        D=lambda p, h, g: (torch.where(p[1] == h[1], g[0], 0.0), None),
    )
    x, w = randn((13, 4), (59, 4))
    _, index = layer.apply(x, w, torch.arange(59))
    assert_close(index, (x @ w.T).argmax(1))
    assert not index.requires_grad
    assert_same_with_gradients(
        lambda x, w: layer.apply(x, w, torch.arange(59))[0], lambda x, w: (x @ w.T).amax(1), [x, w]
    )


def test_16_bit_types_accumulate_in_float32():
    """1024 ones, one by one: in bfloat16 the sum would stop at 256, where the next number is 258."""
    ones = torch.ones(1024, 1, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    layer = MonoidReduce(
        "Dot",
        avals=1,
        bvals=1,
        islice=lambda parts: [parts],
        jslice=lambda parts: zip(*(part.split(1) for part in parts), strict=True),
        init=lambda a, b: (a[0].new_zeros(1),),
        proj_fold=lambda a, b: ((a[0] @ b[0].T).sum(1),),
        proj_fold_bwd=lambda a, b, p, gp: ((gp[0][:, None] @ b[0],), (gp[0][:, None].T @ a[0],)),
        binary_reduce=lambda x, y: (x[0] + y[0],),
    )
    (y,) = layer.apply(x, ones)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, ones.grad.dtype) == (torch.bfloat16,) * 3
    assert (y.item(), x.grad.item()) == (1024.0, 1024.0)


@pytest.mark.parametrize("layer", [papers.attention, papers.mlp])
def test_bfloat16_error_is_within_twice_that_of_plain_torch(layer, seed):
    dense = dense_attention if layer is papers.attention else lambda x, p, q: torch.relu(x @ p.T) @ q
    exact = randn((111, 32), (700, 32), (700, 16))
    cotangent = torch.randn(111, 16, dtype=torch.float64)

    def run(function, dtype):
        inputs = [x.detach().to(torch.bfloat16).to(dtype).requires_grad_() for x in exact]
        y = function(*inputs)
        return [y, *torch.autograd.grad(y, inputs, cotangent.to(torch.bfloat16).to(dtype))]

    truth = run(dense, torch.float64)
    for got, plain, true in zip(run(layer, torch.bfloat16), run(dense, torch.bfloat16), truth, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - true).norm() <= 2 * (plain - true).norm()


def test_the_backward_recomputes_under_the_forwards_autocast(seed):
    """The weights of a row sum to one only if the backward's scores are rounded as the forward's were."""
    q, k = (5 * x.detach().float() for x in randn((7, 8), (33, 8)))
    v = torch.ones(33, 1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = build_attention().apply(q, k, v)[1]
    y.sum().backward()  # outside
    assert_close(v.grad.sum(), torch.tensor(7.0), atol=0.02, rtol=0)


def test_expanded_strided_and_empty_inputs(seed):
    q, k, v = (x.detach() for x in randn((5, 59), (5, 59), (3, 59)))
    inputs = [x.T.requires_grad_() for x in (q, k, v)]
    y = papers.attention(*inputs)
    y.sum().backward()  # the cotangent is one number, expanded
    dense = [x.detach().clone().requires_grad_() for x in inputs]
    dense_attention(*dense).sum().backward()
    for x, like in zip(inputs, dense, strict=True):
        assert_close(x.grad, like.grad)
    nothing = papers.mlp(*randn((5, 4), (0, 4), (0, 3)))
    assert_close(nothing, torch.zeros(5, 3, dtype=torch.float64))
    assert papers.attention(*randn((0, 4), (7, 4), (7, 3))).shape == (0, 3)


def test_nothing_of_pair_size_is_allocated(seed):
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                self.numel = max(self.numel, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    m, n = 1024, 1536
    with Largest() as largest:
        papers.attention(*randn((m, 8), (n, 8), (n, 8))).sum().backward()
    assert 0 < largest.numel <= papers.TILE**2 < m * n


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
def test_second_derivatives_are_refused(backward, seed):
    layer = build_attention(backward=backward)
    x = randn((3, 2), (9, 2), (9, 2))
    first = torch.autograd.grad(layer.apply(*x)[1].square().sum(), x, create_graph=True)
    plain = torch.autograd.grad(dense_attention(*x).square().sum(), x)
    assert_close([g.detach() for g in first], list(plain))
    with pytest.raises(NoGradientError, match=r"Attention can be differentiated once.*@mr.op"):
        torch.autograd.grad(first[0].sum() + x[0].sum(), x[0])
    with pytest.raises(NoGradientError):
        torch.autograd.grad(layer.apply(*x)[1].sum(), x, create_graph=True)[2].sum().backward()


@pytest.mark.parametrize("backward", ["proj_fold_bwd", "D"])
def test_torch_func_grad_goes_through(backward, seed):
    layer = build_attention(backward=backward)
    x = tuple(randn((3, 2), (9, 2), (9, 2), grad=False))
    for argnums in ((0, 1, 2), (1,)):
        got = torch.func.grad(lambda *x: layer.apply(*x)[1].square().sum(), argnums)(*x)
        assert_close(got, torch.func.grad(lambda *x: dense_attention(*x).square().sum(), argnums)(*x))


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"avals": 0}, ArgumentError, r"Attention: avals is 0, bvals 2\. Give each side 1"),
        ({"D": lambda p, h, g: g}, ArgumentError, r"Attention has both proj_fold_bwd and D"),
    ],
)
def test_mistakes_at_the_factory(changes, error, message):
    with pytest.raises(error, match=message):
        build_attention(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"init": lambda a, b: a[0]}, ArgumentError, r"init returned tensor \[9, 2\]\. Return a tuple of tensors"),
        ({"proj_fold": lambda a, b: (a[0],)}, ArgumentError, r"proj_fold returned tuple of 1\. Return a tuple of 2"),
        (
            {"binary_reduce": lambda x, y: (x[0], x[1][:1])},
            ShapeError,
            r"binary_reduce returned shape \[1, 3\].*\[2, 3\]",
        ),
        ({"islice": lambda parts: [[part.clone() for part in parts]]}, ArgumentError, "a tile is a copy"),
        ({"jslice": lambda parts: [[part.clone() for part in parts]]}, ArgumentError, "a tile is a copy"),
        ({"islice": lambda parts: islice(parts[:1])}, ArgumentError, "islice returned tuple of 1"),
        ({"islice": lambda parts: [parts] * len(parts)}, ArgumentError, r"islice cut its tensors into 1, 2 tiles"),
        ({"proj_fold_bwd": lambda a, b, p, gp: a + b}, ArgumentError, r"proj_fold_bwd returned tuple of 3"),
        ({"proj_fold_bwd": lambda a, b, p, gp: (a, a)}, ArgumentError, r"proj_fold_bwd's gb returned tuple of 1"),
        ({"proj_fold_bwd": lambda a, b, p, gp: (a, (b[0], b[1][:, :1]))}, ShapeError, r"\[2, 1\].*\[2, 3\]"),
        ({"backward": "D", "D": lambda p, h, g: (None, g[1][:1])}, ShapeError, r"D returned shape \[1, 3\].*\[2, 3\]"),
        ({"backward": None}, NoGradientError, "Attention was made without a backward"),
    ],
)
def test_mistakes_in_the_functions(changes, error, message):
    layer = build_attention(**changes)
    with pytest.raises(error, match=message) as caught:
        layer.apply(*randn((9, 2), (11, 2), (11, 3)))[1].sum().backward()
    assert "in MonoidReduce_Attention.apply(tensor [9, 2], tensor [11, 2], tensor [11, 3])" in str(caught.value)


def test_a_copied_tile_is_refused_before_a_wrong_result_is_returned():
    layer = build_attention(islice=lambda parts: [[part.clone() for part in parts]])
    with pytest.raises(ArgumentError, match="a tile is a copy"):
        layer.apply(*randn((9, 2), (11, 2), (11, 3), grad=False))


def test_init_may_expand_a_number_or_hand_back_an_input(seed):
    """A running sum that starts from a tensor of the caller's, which stays as it was."""
    common = {"avals": 2, "bvals": 1, "islice": islice, "jslice": islice, "D": lambda p, h, g: g}
    common |= {"proj_fold": lambda a, b: ((a[0] @ b[0].T).sum(1),), "binary_reduce": lambda x, y: (x[0] + y[0],)}
    x, start, w = randn((9, 2), (9,), (11, 2), grad=False)
    before = start.clone()
    (y,) = MonoidReduce("Sum", init=lambda a, b: (a[1],), **common).apply(x, start, w)
    assert_close((y, start), (start + (x @ w.T).sum(1), before))
    (y,) = MonoidReduce("Sum", init=lambda a, b: (a[0].new_zeros(()).expand(9),), **common).apply(x, start, w)
    assert_close(y, (x @ w.T).sum(1))


@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_of_tensors(count):
    with pytest.raises(ArgumentError, match=f"given {count} arguments. Attention takes 1 row and 2 column tensors"):
        build_attention().apply(*randn((9, 2))[:1] * count)
    with pytest.raises(
        ArgumentError, match=rf"given {count} arguments. Attention takes 3 tensors \(query, key, value\)"
    ):
        papers._Attention.apply(*randn((9, 2))[:1] * count)


def test_not_a_tensor():
    with pytest.raises(ArgumentError, match=r"1 row and 2 column tensors\n  in .*tensor \[9, 2\], float"):
        build_attention().apply(*randn((9, 2)), 1.0, None)


def test_the_function_carries_its_name():
    layer = build_attention()
    assert layer.__name__ == layer.__qualname__ == "MonoidReduce_Attention"
    assert layer.__module__ == __name__
    assert issubclass(layer, torch.autograd.Function)
