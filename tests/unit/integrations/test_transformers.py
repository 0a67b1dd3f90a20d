"""Hugging Face models with our attention and our loss, against transformers' own: real classes, random weights."""

import copy
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from benchmarks.measure import peak_growth  # noqa: E402
from monoidreduce.integrations.transformers import (  # noqa: E402
    causal_lm_loss,
    fuse_loss,
    register,
    token_logprobs,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 8}),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": 5}),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {"sliding_window": 5, "head_dim": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    ),
    "granite": (transformers.GraniteForCausalLM, transformers.GraniteConfig, {"logits_scaling": 4.0}),
}


def make(name, implementation="eager", seed=0, **changes):
    """A model with the same random weights for every implementation of attention."""
    register()
    cls, config_cls, options = MODELS[name]
    config = config_cls(**{**SMALL, **options, **changes})
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    model = cls(config)
    for p in model.parameters():  # logits that are not all alike
        torch.nn.init.normal_(p, std=0.15)
    return model.eval()


def tokens(batch=3, length=19, vocabulary=97, seed=1):
    return torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(ids, left):
    """Some padding in each sequence, and its mask."""
    seen = torch.ones_like(ids)
    for row, count in enumerate((0, 4, 9)):
        part = slice(0, count) if left else slice(ids.shape[1] - count, None)
        seen[row, part] = 0
    return torch.where(seen.bool(), ids, 0), seen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_attention_is_transformers_eager(name, padding):
    ids = tokens()
    ids, seen = (ids, None) if padding == "none" else padded(ids, padding == "left")
    ours, theirs = make(name, "monoidreduce"), make(name, "eager")
    a, b = (m(ids, attention_mask=seen).logits for m in (ours, theirs))
    where = slice(None) if seen is None else seen.bool()  # what a padding token sees is nobody's business
    torch.testing.assert_close(a[where], b[where], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_attention(name):
    ids, seen = padded(tokens(), left=False)
    labels = torch.where(seen.bool(), ids, -100)
    grads = []
    for implementation in ("monoidreduce", "eager"):
        model = make(name, implementation)
        model(ids, attention_mask=seen, labels=labels).loss.backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for n, g in grads[0].items():
        torch.testing.assert_close(g, grads[1][n], atol=1e-5, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(name, cache):
    ids, seen = padded(tokens(length=11), left=True)
    options = dict(attention_mask=seen, max_new_tokens=12, do_sample=False, cache_implementation=cache)
    if cache == "dynamic":
        options.pop("cache_implementation")
    a, b = (make(name, i).generate(ids, **options) for i in ("monoidreduce", "eager"))
    assert torch.equal(a, b)


def test_packed_sequences():
    ids = tokens(batch=1, length=20)
    places = torch.cat([torch.arange(7), torch.arange(13)])[None]
    a, b = (make("llama", i)(ids, position_ids=places, use_cache=False).logits for i in ("monoidreduce", "eager"))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_an_encoder_sees_both_ways():
    register()
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    outputs = []
    ids, seen = padded(tokens(), left=False)
    for implementation in ("monoidreduce", "eager"):
        config._attn_implementation = implementation
        torch.manual_seed(0)
        outputs.append(transformers.BertModel(config).eval()(ids, attention_mask=seen).last_hidden_state)
    torch.testing.assert_close(outputs[0][seen.bool()], outputs[1][seen.bool()], atol=1e-5, rtol=1e-4)


# The loss


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_without_logits(name):
    ids = tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    plain, fused = make(name), fuse_loss(make(name), when="always")
    for options in ({}, {"num_items_in_batch": torch.tensor(40)}, {"num_items_in_batch": 7}):
        grads = []
        for model in (plain, fused):
            model.zero_grad()
            out = model(ids, labels=labels, **options)
            out.loss.backward()
            grads.append((out.loss.detach(), [p.grad.clone() for p in model.parameters()]))
        assert out.logits is None
        torch.testing.assert_close(grads[1][0], grads[0][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grads[1][1], grads[0][1], atol=1e-5, rtol=1e-3)


def test_without_labels_nothing_changes():
    model = make("llama")
    expected = model(tokens()).logits
    fused = fuse_loss(model)
    assert torch.equal(fused(tokens()).logits, expected)
    assert list(inspect.signature(fused.forward).parameters)[:3] == ["input_ids", "attention_mask", "position_ids"]
    twin = copy.deepcopy(fused)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert torch.equal(twin(tokens()).logits, torch.zeros_like(expected)), "a copy runs its own weights"
    assert torch.equal(fused(tokens()).logits, expected)


def test_the_loss_function_and_log_probabilities():
    model, ids = make("gemma2"), tokens()
    inputs = {"input_ids": ids, "labels": ids}
    torch.testing.assert_close(causal_lm_loss(model, inputs), model(**inputs).loss)
    expected = torch.log_softmax(model(ids).logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    found = token_logprobs(model, {"input_ids": ids}, torch.nn.functional.pad(ids[:, 1:], (0, 1)))[:, :-1]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def train(model, steps):
    """Losses of some steps of plain SGD with momentum on fixed random text."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for step in range(steps):
        ids = tokens(batch=4, length=24, seed=step % 5)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_fifty_steps_of_training_are_the_same():
    plain = train(make("llama").train(), 50)
    ours = train(fuse_loss(make("llama", "monoidreduce")).train(), 50)
    assert plain[-1] < plain[0] - 0.3, "the model did not learn: nothing was compared"
    assert (ours - plain).abs().max() < 1e-4


def test_training_needs_less_memory():
    """A vocabulary of 40,000 over 512 tokens: the logits alone are 80 MB."""
    peaks = {}
    for which in ("ours", "plain"):
        model = make("llama", "monoidreduce" if which == "ours" else "eager", vocab_size=40_000)
        if which == "ours":
            fuse_loss(model, when="always")
        ids = tokens(batch=2, length=256, vocabulary=40_000)
        model(ids[:, :8], labels=ids[:, :8]).loss.backward()  # buffers and gradients are there
        peaks[which] = peak_growth(lambda m=model, i=ids: m(i, labels=i).loss.backward())
    assert peaks["ours"] < 0.3 * peaks["plain"], peaks
