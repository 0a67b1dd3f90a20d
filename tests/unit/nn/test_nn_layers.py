"""Modules: torch's state dicts and calls, the same results; copies, pickles, saved files."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import nn, ops
from tests.support.allocations import usage
from tests.support.comparison import use_small_tiles
from tests.support.pairwise_options import pairwise

E, HEADS = 12, 3
FLOAT64 = torch.float64


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    use_small_tiles(monkeypatch)


# Multi-head attention -------------------------------------------------------------------------------------------------

FACTORS = {
    "bias": [True, False],
    "add_bias_kv": [False, True],
    "add_zero_attn": [False, True],
    "widths": [None, (7, 5)],
    "batch_first": [True, False],
    "batched": [True, False],
    "mask": [None, "bool", "float", "bool per head", "causal"],
    "padding": [None, "bool", "float"],
    "size": [(9, 11), (1, 20), (19, 1), (16, 16)],
}
SAMPLES = pairwise(FACTORS, lambda s: s["mask"] != "causal" or s["size"][0] == s["size"][1])


def shown(sample):
    return ",".join(f"{k}={v}" for k, v in sample.items() if v not in (None, False)).replace(" ", "")


def attention_pair(sample):
    kdim, vdim = sample["widths"] or (None, None)
    options = {name: sample[name] for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")}
    theirs = torch.nn.MultiheadAttention(E, HEADS, kdim=kdim, vdim=vdim, dtype=FLOAT64, **options)
    ours = nn.MultiheadAttention(E, HEADS, kdim=kdim, vdim=vdim, dtype=FLOAT64, **options)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5)
    assert not any(ours.load_state_dict(theirs.state_dict()))
    return ours, theirs


def attention_inputs(sample):
    (m, n), (kdim, vdim), b = sample["size"], sample["widths"] or (E, E), 2
    lead = (b,) if sample["batched"] else ()
    qkv = [torch.randn(*lead, length, width, dtype=FLOAT64) for length, width in ((m, E), (n, kdim), (n, vdim))]
    if sample["batched"] and not sample["batch_first"]:
        qkv = [t.transpose(0, 1).contiguous() for t in qkv]
    options = {}
    heads = (b * HEADS if sample["batched"] else HEADS,)
    if sample["mask"]:
        lead_mask = heads if "per head" in sample["mask"] else ()
        mask = torch.randn(*lead_mask, m, n, dtype=FLOAT64)
        options["attn_mask"] = mask > 1 if "bool" in sample["mask"] else mask
        if sample["mask"] == "causal":
            options["attn_mask"] = torch.ones(m, n).triu(1).bool()
            options["is_causal"] = True
    if sample["padding"]:
        padding = torch.randn(*lead, n, dtype=FLOAT64)
        options["key_padding_mask"] = padding > 1 if sample["padding"] == "bool" else padding
    for name, mask in options.items():
        if name != "is_causal" and mask.dtype is torch.bool:
            mask[..., 0] = False  # torch's module gives NaN where nothing is seen
    return [t.requires_grad_() for t in qkv], options


# torch warns where a boolean mask meets a floating one, and adds them all the same
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("sample", SAMPLES, ids=shown)
def test_multihead_attention_is_torchs(sample, seed):
    ours, theirs = attention_pair(sample)
    qkv, options = attention_inputs(sample)
    got, none = ours(*qkv, **options)
    options.pop("is_causal", None)  # a hint, with which torch forgets the keys that are added to all sequences
    expected, _ = theirs(*qkv, need_weights=False, **options)
    assert none is None
    assert_close(got, expected, rtol=1e-9, atol=1e-11)
    cotangent = torch.randn_like(expected)
    found = [torch.autograd.grad(y, [*qkv, *m.parameters()], cotangent) for y, m in ((got, ours), (expected, theirs))]
    assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


def test_enough_samples():
    assert len(SAMPLES) >= 20


def test_dropout_is_drawn_in_training_only(seed):
    module, x = nn.MultiheadAttention(E, HEADS, dropout=0.5, batch_first=True), torch.randn(2, 9, E)
    with torch.no_grad():
        module.train()
        assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
        module.eval()
        assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_a_transformer_takes_the_module(seed):
    layer = torch.nn.TransformerEncoderLayer(E, HEADS, 24, batch_first=True, dropout=0.0).train()
    x, mask = torch.randn(2, 9, E), torch.nn.Transformer.generate_square_subsequent_mask(9)
    expected = layer(x, src_mask=mask, is_causal=True)
    ours = nn.MultiheadAttention(E, HEADS, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    assert_close(layer(x, src_mask=mask, is_causal=True), expected, atol=1e-5, rtol=1e-5)


def test_hidden_rows_are_zero_and_masks_are_not_copied(seed, monkeypatch):
    module, x = nn.MultiheadAttention(E, HEADS, batch_first=True), torch.randn(1, 9, E)
    hidden = torch.zeros(9, 9, dtype=torch.bool)
    hidden[4] = True
    y = module(x, x, x, attn_mask=hidden)[0]
    assert_close(y[0, 4], module.out_proj.bias)
    use_small_tiles(monkeypatch, 64, 64)
    mask, x = torch.rand(512, 512) > 0.5, torch.randn(1, 512, E)
    mask[:, 0] = False
    used = usage(lambda x: module(x, x, x, attn_mask=mask)[0], (x,), held=[mask, *module.parameters()])
    assert used.largest < mask.numel() // 2, used.culprit


LINE = torch.randn(2, 9, E)
BAD_CALLS = {
    "weights": (lambda m: m(LINE, LINE, LINE, need_weights=True), mr.ArgumentError, "never built"),
    "features": (lambda m: m(LINE[..., 1:], LINE, LINE), mr.ShapeError, "query has shape"),
    "ranks": (lambda m: m(LINE, LINE[0], LINE[0]), mr.ShapeError, "key has shape"),
    "no tensor": (lambda m: m(LINE, None, LINE), mr.ArgumentError, "key was given NoneType"),
    "keys and values": (lambda m: m(LINE, LINE, LINE[:, 1:]), mr.ShapeError, "k has 9 columns, but v has 8"),
    "batches": (lambda m: m(LINE, LINE[:1].repeat(3, 1, 1), LINE), mr.ShapeError, "batch dimensions"),
    "mask's shape": (lambda m: m(LINE, LINE, LINE, attn_mask=torch.zeros(9, 8)), mr.ShapeError, "attn_mask"),
    "mask's heads": (lambda m: m(LINE, LINE, LINE, attn_mask=torch.zeros(2, 9, 9)), mr.ShapeError, "6, 9, 9"),
    "mask's type": (lambda m: m(LINE, LINE, LINE, attn_mask=torch.zeros(9, 9).int()), mr.DTypeError, "attn_mask"),
    "padding": (lambda m: m(LINE, LINE, LINE, torch.zeros(9)), mr.ShapeError, "key_padding_mask"),
    "padding's type": (lambda m: m(LINE, LINE, LINE, torch.zeros(2, 9).int()), mr.DTypeError, "key_padding_mask"),
    "type": (lambda m: m(LINE.double(), LINE.double(), LINE.double()), RuntimeError, "dtype"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_wrong_calls_are_named(name):
    call, error, message = BAD_CALLS[name]
    with mr.tally() as t, pytest.raises(error, match=message):
        call(nn.MultiheadAttention(E, HEADS, batch_first=True))
    assert t.tiles == 0


# The others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu])
def test_perceptrons(bias, activation, seed):
    x = torch.randn(2, 9, E, dtype=FLOAT64)
    function = getattr(F, activation) if isinstance(activation, str) else activation
    plain = nn.MLP(E, 40, 5, bias=bias, activation=activation, dtype=FLOAT64)
    assert sorted(plain.state_dict()) == sorted(["fc1.weight", "fc2.weight", *(["fc1.bias", "fc2.bias"] * bias)])
    assert_close(plain(x), plain.fc2(function(plain.fc1(x))))
    gated = nn.GatedMLP(E, 40, bias=bias, activation=activation, dtype=FLOAT64)
    expected = gated.down_proj(function(gated.gate_proj(x)) * gated.up_proj(x))
    assert_close(gated(x), expected)
    for module, dense in ((plain, plain.fc2(function(plain.fc1(x)))), (gated, expected)):
        g = torch.randn_like(dense)
        weights = list(module.parameters())
        assert_close(torch.autograd.grad(module(x), weights, g), torch.autograd.grad(dense, weights, g))


def test_perceptrons_drop_in_training_only(seed):
    x = torch.randn(9, E)
    for module in (nn.MLP(E, 40, dropout=0.5), nn.GatedMLP(E, 40, dropout=0.5)):
        assert not torch.equal(module(x), module(x))
        assert torch.equal(module.eval()(x), module(x))


@pytest.mark.parametrize("kind", ["clip", "infonce", "siglip"])
@pytest.mark.parametrize("learned", [True, False])
def test_contrastive_loss(kind, learned, seed):
    x, y = torch.randn(9, E), torch.randn(9, E)
    loss = nn.ContrastiveLoss(kind, temperature=0.1, learned=learned)
    bias = {"bias": -10.0} if kind == "siglip" else {}
    assert_close(loss(x, y), ops.contrastive_loss(x, y, kind=kind, scale=10.0, normalize=True, **bias))
    names = ["logit_scale"] + ["logit_bias"] * (kind == "siglip")
    assert sorted(loss.state_dict()) == sorted(names)
    assert len(list(loss.parameters())) == learned * len(names)
    if learned:
        loss(x, y).backward()
        assert all(p.grad.isfinite() for p in loss.parameters())
    labels = torch.arange(9) // 3
    expected = ops.contrastive_loss(x, None, kind=kind, scale=10.0, normalize=True, labels=labels, **bias)
    assert_close(loss(x, labels=labels), expected)


def test_the_scale_has_a_ceiling(seed):
    x = torch.randn(9, E)
    loss = nn.ContrastiveLoss(temperature=1e-4)
    assert_close(loss(x, x), ops.contrastive_loss(x, x, scale=100.0, normalize=True))


def test_wrong_contrastive_options():
    for options in ({"kind": "moco"}, {"temperature": 0.0}, {"temperature": -1.0}):
        with pytest.raises(mr.ArgumentError):
            nn.ContrastiveLoss(**options)


def test_modules_without_weights(seed):
    q, d = torch.randn(2, 5, 4), torch.randn(3, 9, 4)
    assert_close(nn.MaxSim(normalize=True, all_pairs=True)(q, d), ops.maxsim(q, d, normalize=True, all_pairs=True))
    x, y, lengths = torch.randn(2, 5, 3), torch.randn(2, 9, 3), torch.tensor([2, 5])
    expected = ops.chamfer(x, y, points="sum", x_lengths=lengths)
    assert_close(nn.ChamferLoss(points="sum")(x, y, lengths), expected)
    assert_close(nn.SinkhornLoss(eps=0.5, iterations=9)(x, y), ops.sinkhorn(x, y, eps=0.5, iterations=9).value)


MODULES = {
    "MultiheadAttention": (lambda: nn.MultiheadAttention(E, HEADS, add_bias_kv=True), lambda m, x: m(x, x, x)[0]),
    "MLP": (lambda: nn.MLP(E, 20, activation="gelu"), lambda m, x: m(x)),
    "GatedMLP": (lambda: nn.GatedMLP(E, 20, bias=True, activation=F.gelu), lambda m, x: m(x)),
    "ContrastiveLoss": (lambda: nn.ContrastiveLoss("siglip"), lambda m, x: m(x, x * 2)),
    "MaxSim": (lambda: nn.MaxSim(normalize=True), lambda m, x: m(x, x * 2)),
    "ChamferLoss": (lambda: nn.ChamferLoss(metric="euclidean"), lambda m, x: m(x, x * 2)),
    "SinkhornLoss": (lambda: nn.SinkhornLoss(eps=0.5, iterations=3), lambda m, x: m(x, x * 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_copied_pickled_and_saved(name, seed):
    make, call = MODULES[name]
    module, x = make(), torch.randn(9, E)
    expected = call(module, x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)]
    fresh = make()
    fresh.load_state_dict(module.state_dict())
    for other in [*others, fresh]:
        assert torch.equal(call(other, x), expected) and repr(other) == repr(module)
    half = call(copy.deepcopy(module).to(torch.bfloat16), x.bfloat16())
    assert_close(half.float(), expected, rtol=0.2, atol=0.2)
