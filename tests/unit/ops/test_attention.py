"""Attention with every option beside its dense form and torch's own: values, gradients, precision, tiles, memory."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce.ops import attention, attention_decode, document_ids
from tests.support.allocations import usage
from tests.support.block_attention_cases import check_blocks
from tests.support.comparison import assert_equal, assert_error_rule, cast, flatten, run, use_small_tiles
from tests.support.layers.base import coins, logsumexp, softmax
from tests.support.pairwise_options import pairwise

FLOAT64 = torch.float64
B, SHARED, GROUP, M, N, FEATURES, D = 2, 2, 3, 19, 37, 6, 5
H = SHARED * GROUP
SEED = 1234567890123


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


# Every option, densely ------------------------------------------------------------------------------------------------


def dense(q, k, v, attn_mask=None, bias=None, alibi_slopes=None, sinks=None, scale=None, *, options):
    if options.get("enable_gqa"):
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    m, n = s.shape[-2:]
    lengths = options.get("lengths")
    lengths = None if lengths is None else lengths.reshape(-1, *(1,) * (s.dim() - 1))
    i, j = torch.arange(m).unsqueeze(-1), torch.arange(n)
    if options.get("causal") == "lower_right":
        i = i + (n if lengths is None else lengths) - m
    if (cap := options.get("softcap")) is not None:
        s = cap * torch.tanh(s / cap)
    for added in (bias, None if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask):
        s = s if added is None else s + added
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * (i - j).abs()
    seen = torch.ones_like(s, dtype=torch.bool)
    if options.get("causal"):
        seen = seen & (j <= i)
    if (window := options.get("window")) is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        seen = seen & (j >= i - (n + m if left is None else left)) & (j <= i + (n + m if right is None else right))
    if lengths is not None:
        seen = seen & (j < lengths)
    if (documents := options.get("documents")) is not None:
        rows, cols = documents
        seen = seen & (rows.unsqueeze(-1) == cols.unsqueeze(-2)).unflatten(0, (-1, *(1,) * (s.dim() - 3)))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        seen = seen & attn_mask
    s = torch.where(seen, s, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[..., None, None].expand(*s.shape[:-1], 1)], -1)
    weights = softmax(s)[..., :n]
    if p := options.get("dropout_p"):
        counter = torch.arange(weights[..., 0, 0].numel()).view(*weights.shape[:-2], 1, 1)
        weights = (
            weights
            * (coins(SEED, counter, torch.arange(m).unsqueeze(-1), j) >= round(p * 2**15))
            / (1 - round(p * 2**15) / 2**15)
        )
    y = weights.to(v.dtype) @ v
    return (y, logsumexp(s)) if options.get("return_lse") else y


TENSORS = ("attn_mask", "bias", "alibi_slopes", "sinks", "scale")


def ours(q, k, v, attn_mask=None, bias=None, alibi_slopes=None, sinks=None, scale=None, *, options):
    given = dict(attn_mask=attn_mask, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks, scale=scale)
    seed = {"seed": SEED} if options.get("dropout_p") else {}
    return attention(q, k, v, **{n: t for n, t in given.items() if t is not None}, **options, **seed)


FACTORS = {
    "attn_mask": [None, "bool", "float", "bool row", "float column"],
    "bias": [None, "head", "one"],
    "alibi_slopes": [None, "heads"],
    "sinks": [None, "heads", "batch and heads"],
    "scale": [None, "tensor"],
    "causal": [False, True, "lower_right", "upper_left"],
    "window": [None, 5, (4, None), (None, 0), (3, 9)],
    "softcap": [None, 2.0],
    "documents": [None, "ids"],
    "lengths": [None, "padded"],
    "dropout_p": [0.0, 0.3],
    "enable_gqa": [False, True],
    "return_lse": [False, True],
}
SAMPLES = pairwise(FACTORS)


def shown(sample):
    return ",".join(f"{k}={v}" for k, v in sample.items() if v not in (None, False, 0.0)).replace(" ", "") or "nothing"


def problem(sample, seed, dtype=FLOAT64):
    """The tensors of a sample, and its other options."""
    gen = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(shape, generator=gen, dtype=FLOAT64).to(dtype)
    single = lambda t: t.float() if dtype.itemsize == 2 else t  # a learned number is not held in 16 bits
    few = SHARED if sample["enable_gqa"] else H
    shapes = {"bool": (B, 1, M, N), "float": (M, N), "bool row": (B, 1, 1, N), "float column": (H, M, 1)}
    mask = sample["attn_mask"] and randn(*shapes[sample["attn_mask"]])
    tensors = {
        "attn_mask": mask > -1 if sample["attn_mask"] and "bool" in sample["attn_mask"] else mask,
        "bias": sample["bias"] and randn(*((H, M, N) if sample["bias"] == "head" else (B, 1, M, N))),
        "alibi_slopes": sample["alibi_slopes"] and single(randn(H).abs() / 4),
        "sinks": sample["sinks"] and single(randn(H) if sample["sinks"] == "heads" else randn(B, H)),
        "scale": sample["scale"] and single(randn().abs()),
    }
    options = {n: v for n, v in sample.items() if n not in TENSORS}
    documents = (torch.arange(B * M).view(B, M) // 5, torch.arange(B * N).view(B, N) // 9 + torch.arange(B).view(B, 1))
    options["documents"] = options["documents"] and documents
    options["lengths"] = options["lengths"] and torch.tensor([N - 8, M])
    args = (randn(B, H, M, FEATURES), randn(B, few, N, FEATURES), randn(B, few, N, D), *tensors.values())
    return args, {n: v for n, v in options.items() if v is not None}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("sample", SAMPLES, ids=shown)
def test_every_two_options_together(sample, seed):
    args, options = problem(sample, seed)
    assert_equal(run(partial(ours, options=options), args), run(partial(dense, options=options), args))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("sample", SAMPLES[::2], ids=shown)
def test_error_rule(sample, dtype, seed):
    trials = []
    for k in range(4 if dtype is torch.float32 else 1):
        args, options = problem(sample, seed + k, dtype)
        exact = run(partial(dense, options=options), cast(args, FLOAT64))
        trials.append((run(partial(ours, options=options), args), run(partial(dense, options=options), args), exact))
    assert_error_rule(trials)


@pytest.mark.parametrize("sample", SAMPLES[::3], ids=shown)
def test_the_dense_engine_agrees(sample, seed):
    args, options = problem(sample, seed)
    with mr.use(engine="reference"):
        expected = run(partial(ours, options=options), args)
    assert_equal(run(partial(ours, options=options), args), expected)


DERIVED = {
    "softcap and sinks": {"softcap": 2.0, "sinks": (2,), "return_lse": True},
    "sinks of rows that see nothing": {"sinks": (2,), "return_lse": True, "lengths": torch.tensor([0])},
    "slopes and window": {"alibi_slopes": (2,), "window": 2, "scale": ()},
    "bias and mask": {"bias": (2, 3, 4), "attn_mask": (1, 4), "causal": "lower_right"},
    "shared heads": {"enable_gqa": True, "dropout_p": 0.3, "seed": 3, "lengths": torch.tensor([3])},
}


@pytest.mark.parametrize("name", DERIVED)
def test_first_and_second_derivatives(name, seed):
    options = dict(DERIVED[name])
    learned = {n: torch.rand(shape, dtype=FLOAT64) for n, shape in options.items() if n in TENSORS}
    few = 1 if "enable_gqa" in options else 2
    qkv = (torch.randn(1, heads, n, 2, dtype=FLOAT64) for heads, n in ((2, 3), (few, 4), (few, 4)))
    function = lambda q, k, v, *rest: tuple(
        flatten(attention(q, k, v, **(options | dict(zip(learned, rest, strict=True)))))
    )
    floats = tuple(t.requires_grad_() for t in (*qkv, *learned.values()))
    assert torch.autograd.gradcheck(function, floats, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, floats, fast_mode=True)


# Beside torch's own ---------------------------------------------------------------------------------------------------

TORCH = pairwise(
    {
        "mask": [None, "bool", "float", "bool [M, N]"],
        "is_causal": [False, True],
        "scale": [None, 0.3],
        "enable_gqa": [False, True],
        "size": [(M, N), (1, 1), (N, M), (16, 32), (1, 59)],
        "batch": [(B,), (), (2, 1)],
    },
    allowed=lambda s: s["mask"] is None or not s["is_causal"],  # torch refuses both
)


@pytest.mark.parametrize("sample", TORCH, ids=shown)
def test_by_position_it_is_torchs_own(sample, seed):
    (m, n), batch = sample["size"], sample["batch"]
    q = torch.randn(*batch, H, m, FEATURES, dtype=FLOAT64)
    k, v = (torch.randn(*batch, SHARED if sample["enable_gqa"] else H, n, f, dtype=FLOAT64) for f in (FEATURES, D))
    mask = sample["mask"] and torch.randn((m, n) if "[" in sample["mask"] else (*batch, 1, m, n), dtype=FLOAT64)
    if sample["mask"] and "bool" in sample["mask"]:
        mask = mask > -0.5
        mask[..., 0] = True
    rest = (mask, 0.0, sample["is_causal"])
    keywords = {"scale": sample["scale"], "enable_gqa": sample["enable_gqa"]}
    got, expected = (
        run(lambda *qkv, f=f: f(*qkv, *rest, **keywords), (q, k, v))
        for f in (attention, F.scaled_dot_product_attention)
    )
    assert_equal(got, expected)


def test_torch_manual_seed_repeats_dropout():
    q, k, v = (torch.randn(2, 40, 4) for _ in range(3))
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append((attention(q, k, v, None, 0.4), attention(q, k, v, dropout_p=0.4)))
    (a, b), (c, d), (e, _) = results
    assert torch.equal(a, c) and torch.equal(b, d) and not torch.equal(a, b) and not torch.equal(a, e)
    given = attention(q, k, v, dropout_p=0.4, seed=9)
    assert torch.equal(given, attention(q, k, v, dropout_p=0.4, seed=9))
    assert not attention(q, k, v, dropout_p=1.0).any()


def test_dropout_keeps_the_mean_and_asks_no_seed_when_it_is_off(monkeypatch):
    use_small_tiles(monkeypatch, 64, 512)
    q, k, v = torch.randn(1, 4), torch.randn(500, 4) * 0.1, torch.ones(500, 1)
    draws = torch.stack([attention(q, k, v, dropout_p=0.25, seed=s) for s in range(20)])
    assert abs(draws.mean() - 1) < 0.03 and 0.4 < draws.std() / math.sqrt(0.25 / 0.75 / 500) < 1.6
    state = torch.get_rng_state()
    attention(q, k, v)
    assert torch.equal(state, torch.get_rng_state())


# Decoding and packing -------------------------------------------------------------------------------------------------

DECODED = pairwise(
    {
        "queries": [1, 4],
        "shared": [1, 2, 6],
        "window": [None, 7, (3, None)],
        "softcap": [None, 3.0],
        "slopes": [False, True],
        "sinks": [False, True],
        "lse": [False, True],
    }
)


@pytest.mark.parametrize("sample", DECODED, ids=shown)
def test_decoding_is_attention_of_each_sequence_alone(sample, seed):
    m, shared = sample["queries"], sample["shared"]
    q = torch.randn(3, H, m, FEATURES, dtype=FLOAT64)
    keys, values = torch.randn(3, shared, 50, FEATURES, dtype=FLOAT64), torch.randn(3, shared, 50, D, dtype=FLOAT64)
    lengths = torch.tensor([50, 13, 4])
    keys[2, :, 4:], values[2, :, 4:] = 1e5, -1e5  # whatever was left beyond a sequence
    named = {"softcap": sample["softcap"], "window": sample["window"], "return_lse": sample["lse"]}
    named |= {"alibi_slopes": torch.rand(H, dtype=FLOAT64)} if sample["slopes"] else {}
    named |= {"sinks": torch.randn(H, dtype=FLOAT64)} if sample["sinks"] else {}

    def alone(q, keys, values):
        found = []
        for b, length in enumerate(lengths.tolist()):
            k, v = (t[b, :, :length].repeat_interleave(H // shared, 0) for t in (keys, values))
            found.append(flatten(attention(q[b], k, v, causal="lower_right", **named)))
        return [torch.stack(same) for same in zip(*found, strict=True)]

    args = (q, keys, values)
    got = run(lambda *qkv: attention_decode(*qkv, lengths, **named), args)
    assert_equal(got, run(alone, args))
    assert all(v.isfinite().all() for v in got.values.values())


def test_packed_documents_are_attention_of_each_alone(monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)
    lengths = torch.tensor([7, 1, 0, 20, 12])
    ids = document_ids(lengths)
    q, k, v = (torch.randn(H, 40, f, dtype=FLOAT64) for f in (FEATURES, FEATURES, D))

    def alone(q, k, v):
        parts = [t.split(lengths.tolist(), 1) for t in (q, k, v)]
        return torch.cat([attention(*each, causal=True) for each in zip(*parts, strict=True)], 1)

    assert_equal(run(lambda *a: attention(*a, causal=True, documents=ids), (q, k, v)), run(alone, (q, k, v)))
    with mr.tally() as t:
        attention(q[0], k[0], v[0], causal=True, documents=ids)
    assert t.skipped > 0


def test_what_cannot_be_seen_is_not_computed(monkeypatch):
    use_small_tiles(monkeypatch, 16, 32)
    q, k, v = (torch.randn(1, 256, 4) for _ in range(3))
    counts = {}
    for name, options in {
        "all": {},
        "causal": {"causal": True},
        "window": {"window": (16, 0)},
        "lengths": {"lengths": torch.tensor([64])},
        "decode": {"causal": "lower_right", "lengths": torch.tensor([128]), "window": (32, None)},
    }.items():
        with mr.tally() as t:
            attention(q, k, v, **options)
        counts[name] = t.computed / t.tiles
    assert counts["all"] == 1 and counts["lengths"] == 0.25
    assert 0.5 < counts["causal"] < 0.6 and counts["window"] < 0.2 and counts["decode"] < 0.2


def test_unused_options_cost_nothing(seed):
    """The program of plain attention is that of the body without options: one leaf for q, k, v and the scale."""
    from monoidreduce.ops.attention import _attention

    q, k, v = (torch.randn(9, 4) for _ in range(3))
    (fold,) = (p.fold for p in _attention.program(q, k, v, 0.5, False).passes)
    assert len(fold.leaves) == 4 and "where" not in repr(fold.reductions)


# Edges ----------------------------------------------------------------------------------------------------------------


def test_a_row_that_sees_nothing(seed):
    q, k, v = (torch.randn(2, 3, n, 4, dtype=FLOAT64) for n in (9, 12, 12))
    lengths = torch.tensor([0, 12])
    for options in ({"lengths": lengths}, {"lengths": lengths, "sinks": torch.randn(3, dtype=FLOAT64)}):
        result = run(lambda *a, o=options: attention(*a, return_lse=True, **o), (q, k, v))
        assert not result.values["value 0"][0].any() and result.values["value 0"][1].any()
        assert all(g.isfinite().all() for g in result.grads.values()) and not result.grads["gradient 0"][0].any()
        lse = result.values["value 1"][0]
        assert (lse == -math.inf).all() if "sinks" not in options else lse.isfinite().all()


def test_sinks_of_minus_infinity_are_none(seed):
    q, k, v = (torch.randn(3, n, 4, dtype=FLOAT64) for n in (9, 12, 12))
    none = torch.full((3,), -math.inf, dtype=FLOAT64)
    assert_close(attention(q, k, v, sinks=none), attention(q, k, v))
    empty = attention(q, k[:, :0], v[:, :0], sinks=none)
    assert not empty.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_huge_scores_stay_finite_with_every_option(dtype, seed):
    q, k, v = (300 * torch.randn(H, 37, 4) for _ in range(3))
    args = tuple(t.to(dtype) for t in (q, k, v))
    options = dict(causal=True, window=20, alibi_slopes=torch.rand(H), sinks=torch.randn(H))
    for extra in ({}, {"softcap": 30.0}):
        result = run(lambda *a, e=extra: attention(*a, **options, **e), args)
        assert all(t.isfinite().all() for t in result.floating().values())


@pytest.mark.parametrize("size", [(1, 1), (59, 111), (1, 257), (257, 1), (128, 129)], ids=str)
def test_ragged_sizes(size, seed):
    m, n = size
    q, k, v = torch.randn(m, 5, dtype=FLOAT64), torch.randn(n, 5, dtype=FLOAT64), torch.randn(n, 3, dtype=FLOAT64)
    mask = torch.randn(m, n, dtype=FLOAT64)
    for options in ({"causal": "lower_right"}, {"window": 3, "softcap": 5.0}, {}):
        args = (q, k, v, mask)
        function = lambda q, k, v, mask, o=options: attention(q, k, v, mask, **o)
        assert_equal(run(function, args), run(lambda *a, o=options: dense(*a, options=o), args))


def test_numbers_per_sequence_where_keys_are_shared(seed):
    """The batch is that of the queries; keys and values have none."""
    q, k, v = (torch.randn(*lead, n, 4, dtype=FLOAT64) for lead, n in (((2, 6), 5), ((), 7), ((), 7)))
    lengths, documents = torch.tensor([3, 7]), (torch.arange(10).view(2, 5) // 4, torch.arange(14).view(2, 7) // 5)
    for options in ({"lengths": lengths}, {"documents": documents}, {"lengths": lengths, "causal": "lower_right"}):
        wide = tuple(t.expand(2, 6, *t.shape) for t in (k, v))
        got = run(lambda *a, o=options: attention(*a, **o), (q, k, v))
        expected = run(lambda *a, o=options: dense(*a, options=o), (q, *wide))
        assert_close(got.values["value 0"], expected.values["value 0"])
        assert_close(got.grads["gradient 1"], expected.grads["gradient 1"].sum((0, 1)))


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"causal": True, "softcap": 4.0, "return_lse": True}, id="causal"),
        pytest.param({"documents": "ids", "window": 100}, id="documents"),
        pytest.param({"dropout_p": 0.2, "seed": 3}, id="dropout"),
        pytest.param({"alibi_slopes": "heads", "sinks": "heads", "lengths": "padded"}, id="per head"),
    ],
)
def test_nothing_grows_with_the_pairs(options, monkeypatch):
    use_small_tiles(monkeypatch, 96, 128)
    peaks = []
    for n in (192, 384, 768):
        made = dict(options)
        made |= {"documents": torch.arange(n) // 50} if "documents" in made else {}
        made |= {"lengths": torch.tensor([n - 5])} if "lengths" in made else {}
        made |= {name: torch.rand(4) for name in ("alibi_slopes", "sinks") if name in made}
        qkv = (torch.randn(1, 4, n, 4), torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 4))
        used = usage(lambda *a, o=made: attention(*a, enable_gqa=True, **o), qkv)
        peaks.append(used.peak)
        assert used.largest <= max(96 * 128 * 2 * 8, 8 * 4 * n * 4), used.culprit
    a_token = 4 * 4 * 4  # bytes of its vector in all heads; a matrix of pairs would have 15,000 a token
    assert peaks[2] - peaks[0] <= (768 - 192) * 20 * a_token, peaks


def test_shared_heads_and_caches_are_not_copied(monkeypatch):
    use_small_tiles(monkeypatch, 8, 1024, 1)
    q, cache = torch.randn(1, 16, 2, 8), torch.randn(1, 2, 2 * 8192, 8)
    keys, values = cache[:, :, ::2], cache[:, :, 1::2]
    lengths = torch.tensor([8000])
    used = usage(lambda q: attention_decode(q, keys, values, lengths), (q,), backward=False, held=[cache, lengths])
    assert used.peak < keys.numel() * 4 / 2, f"{used.culprit}: {used.peak:,} bytes"


# Mistakes -------------------------------------------------------------------------------------------------------------

Q, K, V = torch.zeros(2, 6, 5, 4), torch.zeros(2, 6, 7, 4), torch.zeros(2, 6, 7, 3)
IDS, CACHE = torch.zeros(7, dtype=torch.int64), torch.zeros(2, 3, 7, 4)
COUNTS = torch.tensor([7, 7])
MISTAKES = {
    "features": (lambda: attention(Q, K[..., :3], V), mr.ShapeError, "q has 4 features.*k has 3"),
    "columns": (lambda: attention(Q, K, V[..., :6, :]), mr.ShapeError, "k has 7 columns.*v has 6"),
    "rank": (lambda: attention(Q[0, 0, 0], K, V), mr.ShapeError, "q is declared"),
    "batch": (lambda: attention(Q, K[:, :3], V[:, :3]), mr.ShapeError, "enable_gqa=True where heads of q share"),
    "type": (lambda: attention(Q.double(), K, V), mr.DTypeError, "q is float64"),
    "integers": (lambda: attention(Q.long(), K, V), mr.DTypeError, "q is int64"),
    "no tensor": (lambda: attention(Q, None, V), mr.ArgumentError, "k is declared"),
    "device": (lambda: attention(Q, K.to("meta"), V), mr.DeviceError, "k on meta"),
    "scale": (lambda: attention(Q, K, V, scale="big"), mr.ArgumentError, "scale is declared float"),
    "scale's shape": (lambda: attention(Q, K, V, scale=torch.ones(2)), mr.ShapeError, "scale is declared float"),
    "mask's shape": (lambda: attention(Q, K, V, torch.zeros(5, 6)), mr.ShapeError, "attn_mask has 6"),
    "mask's rank": (lambda: attention(Q, K, V, torch.zeros(7)), mr.ShapeError, r"attn_mask has shape \(7,\)"),
    "mask of integers": (lambda: attention(Q, K, V, torch.zeros(5, 7).long()), mr.DTypeError, "attn_mask is int64"),
    "mask's type": (lambda: attention(Q, K, V, torch.zeros(5, 7).double()), mr.DTypeError, "attn_mask is float64"),
    "mask a list": (lambda: attention(Q, K, V, [[True]]), mr.ArgumentError, "attn_mask was given"),
    "bias of truths": (lambda: attention(Q, K, V, bias=torch.ones(5, 7).bool()), mr.DTypeError, "bias is bool"),
    "bias's shape": (lambda: attention(Q, K, V, bias=torch.ones(3, 5, 7)), mr.ShapeError, "batch dimensions of bias"),
    "sinks with axes for rows and columns": (
        lambda: attention(Q, K, V, sinks=torch.ones(1, 1, 1, 1)),
        mr.ShapeError,
        "only 2 batch dimensions",
    ),
    "slopes with axes": (lambda: attention(Q, K, V, alibi_slopes=torch.ones(2, 1, 1)), mr.ShapeError, "each head"),
    "is_causal a tensor": (lambda: attention(Q, K, V, is_causal=torch.ones(5)), mr.ArgumentError, "is_causal was"),
    "dropout above 1": (lambda: attention(Q, K, V, None, 1.5), mr.ArgumentError, "dropout_p was given 1.5"),
    "dropout below 0": (lambda: attention(Q, K, V, dropout_p=-0.1), mr.ArgumentError, "from 0 to 1"),
    "dropout a tensor": (lambda: attention(Q, K, V, dropout_p=torch.zeros(2)), mr.ArgumentError, "dropout_p"),
    "seed": (lambda: attention(Q, K, V, dropout_p=0.5, seed=0.5), mr.ArgumentError, "seed was given 0.5"),
    "seed's size": (lambda: attention(Q, K, V, dropout_p=0.5, seed=2**64), mr.ArgumentError, "64 bits"),
    "causal": (lambda: attention(Q, K, V, causal="right"), mr.ArgumentError, '"lower_right"'),
    "two causals": (lambda: attention(Q, K, V, is_causal=True, causal="lower_right"), mr.ArgumentError, "is_causal"),
    "window below 0": (lambda: attention(Q, K, V, window=-2), mr.ArgumentError, "window was given -2"),
    "window of three": (lambda: attention(Q, K, V, window=(1, 2, 3)), mr.ArgumentError, r"\(left, right\)"),
    "window a fraction": (lambda: attention(Q, K, V, window=(1.5, None)), mr.ArgumentError, "whole number"),
    "softcap": (lambda: attention(Q, K, V, softcap=0.0), mr.ArgumentError, "softcap was given 0.0"),
    "slopes": (lambda: attention(Q, K, V, alibi_slopes=torch.ones(5)), mr.ShapeError, "alibi_slopes"),
    "slopes' type": (lambda: attention(Q, K, V, alibi_slopes=torch.ones(6).double()), mr.DTypeError, "float64"),
    "sinks": (lambda: attention(Q, K, V, sinks=torch.ones(4)), mr.ShapeError, "sinks"),
    "sinks a number": (lambda: attention(Q, K, V, sinks=1.0), mr.ArgumentError, "sinks"),
    "lengths' count": (lambda: attention(Q, K, V, lengths=torch.tensor([1, 2, 3])), mr.ShapeError, "lengths"),
    "lengths' type": (lambda: attention(Q, K, V, lengths=torch.ones(2)), mr.DTypeError, "lengths is float32"),
    "lengths' rank": (lambda: attention(Q, K, V, lengths=IDS[None, None, None]), mr.ShapeError, "2 batch dim"),
    "length too long": (lambda: attention(Q, K, V, lengths=COUNTS + 1), mr.ArgumentError, "holds 8.*7 vectors"),
    "length below 0": (lambda: attention(Q, K, V, lengths=-COUNTS), mr.ArgumentError, "holds -7"),
    "documents' size": (lambda: attention(Q, K, V, documents=IDS), mr.ShapeError, "7 and 7 tokens.*5 rows"),
    "documents' type": (lambda: attention(K, K, V, documents=IDS.float()), mr.DTypeError, "documents is float32"),
    "one document": (lambda: attention(K, K, V, documents=3), mr.ArgumentError, "documents was given 3"),
    "heads": (lambda: attention(Q, K[:, :4], V[:, :4], enable_gqa=True), mr.ShapeError, "q has 6, k has 4, v has 4"),
    "heads of v": (lambda: attention(Q, K[:, :3], V, enable_gqa=True), mr.ShapeError, "k has 3, v has 6"),
    "no heads": (lambda: attention(Q[0, 0], K[0, 0], V[0, 0], enable_gqa=True), mr.ShapeError, "heads"),
    "heads of a mask": (
        lambda: attention(Q, K[:, :3], V[:, :3], torch.zeros(2, 5, 7), enable_gqa=True),
        mr.ShapeError,
        "attn_mask has 2 heads, but q has 6",
    ),
    "decode rank": (lambda: attention_decode(Q[0], CACHE, CACHE, COUNTS), mr.ShapeError, r"q has shape \(6, 5, 4\)"),
    "decode no lengths": (lambda: attention_decode(Q, CACHE, CACHE, None), mr.ArgumentError, "lengths was given None"),
    "decode lengths": (lambda: attention_decode(Q, CACHE, CACHE, COUNTS + 1), mr.ArgumentError, "holds 8"),
    "decode lengths' rank": (lambda: attention_decode(Q, CACHE, CACHE, COUNTS[0]), mr.ShapeError, "lengths"),
    "decode lengths' type": (lambda: attention_decode(Q, CACHE, CACHE, COUNTS / 2), mr.DTypeError, "lengths"),
    "decode heads": (lambda: attention_decode(Q[:, :5], CACHE, CACHE, COUNTS), mr.ShapeError, "q has 5, k has 3"),
    "decode features": (lambda: attention_decode(Q, CACHE[..., :2], CACHE, COUNTS), mr.ShapeError, "features"),
    "decode window": (lambda: attention_decode(Q, CACHE, CACHE, COUNTS, window="all"), mr.ArgumentError, "window"),
    "decode softcap": (lambda: attention_decode(Q, CACHE, CACHE, COUNTS, softcap=-1), mr.ArgumentError, "softcap"),
    "ids' rank": (lambda: document_ids(COUNTS[None]), mr.ShapeError, r"lengths has shape \(1, 2\)"),
    "ids' type": (lambda: document_ids(COUNTS / 2), mr.DTypeError, "lengths is float32"),
    "ids below 0": (lambda: document_ids(-COUNTS), mr.ArgumentError, "lengths holds -7"),
    "ids a list": (lambda: document_ids([1, 2]), mr.ArgumentError, "lengths was given"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_before_any_work(name):
    call, error, message = MISTAKES[name]
    with mr.tally() as t, pytest.raises(error, match=f"(?s){message}"):
        call()
    assert t.tiles == 0


def test_enough_samples():
    assert len(SAMPLES) >= 25 and len(TORCH) >= 15 and len(DECODED) >= 10 and len(MISTAKES) >= 40


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_tokens_of_a_block_see_each_other(engine):
    check_blocks(engine)
