"""Our attention in many architectures of transformers, against their own: tiny models of real classes, random weights.

The behaviours are those that transformers tests of every model: outputs and gradients, padding on either side, packed
sequences, generation with both caches, gradient checkpointing, saving and loading; and models that have attention code
of their own are refused before they compute anything.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import monoidreduce as mr  # noqa: E402
from monoidreduce.integrations.transformers import (  # noqa: E402
    NAME,
    causal_lm_loss,
    fuse_loss,
    register,
    token_logprobs,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

VOCABULARY = 97
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)
SMALL = TOKENS | dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
GPT2 = TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
OPT = TOKENS | dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
BART = TOKENS | dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, decoder_start_token_id=1,
    forced_eos_token_id=None,
)  # fmt: skip
T5 = TOKENS | dict(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=1)
VIT = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4
)

# Decoders: every way to say what an attention layer sees, and every option that the layers pass.
DECODERS = {
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL | dict(sliding_window=6)),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "gpt_oss": (  # sinks; sliding and full layers in turn; no SDPA
        "GptOssForCausalLM",
        "GptOssConfig",
        SMALL | dict(head_dim=8, sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SMALL | dict(head_dim=8, sliding_window=4)),
    "doge": ("DogeForCausalLM", "DogeConfig", SMALL),  # reads the mask as a matrix: no FlashAttention
    "pegasus": (  # the decoder's layers say `is_causal=False`: neither SDPA nor FlashAttention
        "BigBirdPegasusForCausalLM",
        "BigBirdPegasusConfig",
        BART | dict(attention_type="original_full"),
    ),
}
SEQUENCE_TO_SEQUENCE = {
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}
ENCODERS = {
    "bert": ("BertModel", "BertConfig", SMALL),
    "modernbert": ("ModernBertModel", "ModernBertConfig", SMALL | dict(local_attention=6)),
    "aimv2_text": (
        "Aimv2TextModel",
        "Aimv2TextConfig",
        SMALL | dict(eos_token_id=2),
    ),  # causal, though its layers say `is_causal=False`
}
ALL = DECODERS | SEQUENCE_TO_SEQUENCE | ENCODERS | {"vit": ("ViTModel", "ViTConfig", VIT)}

# Models that take no notice of the registered attention function
BYPASSING = {
    "bloom": ("BloomForCausalLM", "BloomConfig", TOKENS | dict(hidden_size=32, n_layer=2, n_head=4)),
    "mpt": ("MptForCausalLM", "MptConfig", TOKENS | dict(d_model=32, n_layers=2, n_heads=4)),
    "falcon": ("FalconForCausalLM", "FalconConfig", SMALL),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", GPT2 | dict(rotary_dim=4)),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        TOKENS | dict(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    ),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", GPT2 | dict(rotary_dim=4)),
    "xglm": ("XGLMForCausalLM", "XGLMConfig", TOKENS | dict(d_model=32, ffn_dim=48, num_layers=2, attention_heads=4)),
    "gpt_neox_japanese": ("GPTNeoXJapaneseForCausalLM", "GPTNeoXJapaneseConfig", SMALL),
    "deberta": ("DebertaModel", "DebertaConfig", SMALL),
}


def make(name, implementation="eager", **changes):
    """A model with the same random weights for every implementation of attention."""
    register()
    class_name, config_name, options = (ALL | BYPASSING)[name]
    config = getattr(transformers, config_name)(**options | changes)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.15, generator=generator)
    return model.eval()


def pair(name, **changes):
    return make(name, NAME, **changes), make(name, "eager", **changes)


def tokens(batch=3, length=17, seed=1):
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded(ids, left):
    """Padding of different lengths in a batch, and its mask."""
    seen = torch.ones_like(ids)
    for row, count in enumerate((0, 3, 8)):
        seen[row, slice(0, count) if left else slice(ids.shape[1] - count, None)] = 0
    return torch.where(seen.bool(), ids, 0), seen


def same_gradients(ours, theirs, loss):
    """Both models' losses, and the gradients of all parameters."""
    losses = [loss(model) for model in (ours, theirs)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    for found in losses:
        found.backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


# Served as by transformers itself


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder(name):
    ours, theirs = pair(name)
    for padding in ("none", "left", "right"):
        ids, seen = (tokens(), None) if padding == "none" else padded(tokens(), padding == "left")
        a, b = (model(ids, attention_mask=seen).logits for model in (ours, theirs))
        where = slice(None) if seen is None else seen.bool()
        torch.testing.assert_close(a[where], b[where], atol=2e-5, rtol=1e-4, msg=lambda m, p=padding: f"{p}: {m}")
    ids, seen = padded(tokens(), left=False)
    labels = torch.where(seen.bool(), ids, -100)
    same_gradients(ours, theirs, lambda model: model(ids, attention_mask=seen, labels=labels).loss)


@pytest.mark.parametrize("name", SEQUENCE_TO_SEQUENCE)
def test_an_encoder_and_decoder(name):
    ours, theirs = pair(name)
    ids, seen = padded(tokens(), left=False)
    answer, wanted = padded(tokens(length=11, seed=2), left=False)
    labels = torch.where(wanted.bool(), answer, -100)
    same_gradients(ours, theirs, lambda model: model(ids, attention_mask=seen, labels=labels).loss)
    options = dict(attention_mask=seen, max_new_tokens=7, do_sample=False)
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder(name):
    ours, theirs = pair(name)
    for ids, seen in ((tokens(), None), padded(tokens(), left=False)):
        where = slice(None) if seen is None else seen.bool()
        a, b = (model(ids, attention_mask=seen).last_hidden_state[where] for model in (ours, theirs))
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    seen = seen.bool()
    same_gradients(ours, theirs, lambda m: m(ids, attention_mask=seen).last_hidden_state[seen].square().mean())


def test_a_model_of_images():
    ours, theirs = pair("vit")
    pixels = torch.randn(2, 3, 12, 12)
    same_gradients(ours, theirs, lambda model: model(pixels).last_hidden_state.square().mean())


def test_cross_attention_in_a_layer_that_says_it_is_causal():
    from transformers.models.kosmos2 import modeling_kosmos2

    register()
    x, others, found = torch.randn(2, 5, 32), torch.randn(2, 9, 32), []
    for implementation in (NAME, "eager"):
        config = transformers.Kosmos2Config().text_config
        config._attn_implementation = implementation
        torch.manual_seed(0)
        layer = modeling_kosmos2.KosmosTextAttention(config, 32, 4, is_decoder=False)
        assert layer.is_causal
        found.append(layer(x, encoder_hidden_states=others)[0])
    torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["phi3", "gpt_neox", "gemma3"])
def test_packed_sequences(name):
    ours, theirs = pair(name)
    places = torch.cat([torch.arange(6), torch.arange(11)])[None]
    a, b = (m(tokens(1), position_ids=places, use_cache=False).logits for m in (ours, theirs))
    torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    alone = ours(tokens(1)[:, 6:], use_cache=False).logits
    torch.testing.assert_close(a[:, 6:], alone, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["phi3", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_greedy_generation(name, cache):
    ids, seen = padded(tokens(length=9), left=True)
    options = dict(attention_mask=seen, max_new_tokens=9, do_sample=False, cache_implementation=cache)
    a, b = (model.generate(ids, **options) for model in pair(name))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["gpt_oss", "bert", "t5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_in_the_first_call(name, reentrant):
    models = pair(name)
    for model in models:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ids, seen = padded(tokens(), left=False)
    more = {"decoder_input_ids": ids} if name == "t5" else {}
    torch.manual_seed(0)
    options = dict(attention_mask=seen, **more)
    for module in (m for model in models for m in model.modules()):
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for rate in ("attention_dropout", "dropout", "dropout_prob"):  # passed to the attention function as a number
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    same_gradients(*models, lambda m: m(ids, **options)[0][seen.bool()].square().mean())


def test_saved_and_loaded_with_our_attention(tmp_path):
    theirs = make("phi3")
    theirs.save_pretrained(tmp_path)
    ours = transformers.Phi3ForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
    assert ours.config._attn_implementation == NAME
    torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-4)
    theirs.set_attn_implementation(NAME)
    assert torch.equal(theirs(tokens()).logits, ours(tokens()).logits)


# Refused, never served wrongly


@pytest.mark.parametrize("name", BYPASSING)
def test_a_model_with_attention_of_its_own_is_refused(name):
    class_name = BYPASSING[name][0]
    with pytest.raises(mr.ArgumentError, match=rf'{class_name} was given .* Use attn_implementation="eager"'):
        make(name, NAME)
    theirs = make(name)  # with attention of its own it is made as ever
    expected = theirs(tokens())[0]
    theirs.set_attn_implementation(NAME)  # transformers warns, and leaves it as it is
    assert torch.equal(theirs(tokens())[0], expected)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "codegen"])
def test_a_configuration_that_is_changed_by_hand_is_refused_before_any_number(name):
    model = make(name)
    model.config._attn_implementation = NAME
    with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
        model(tokens())
    with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
        fuse_loss(model)
    with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
        fuse_loss(model, check=False)


def test_a_subclass_is_judged_by_the_layers_that_it_inherits():
    class MyBloom(transformers.BloomForCausalLM):
        pass

    class MyGPT2(transformers.GPT2LMHeadModel):
        pass

    register()
    with pytest.raises(mr.ArgumentError, match="MyBloom was given"):
        MyBloom._from_config(transformers.BloomConfig(**BYPASSING["bloom"][2]), attn_implementation=NAME)
    ours = MyGPT2._from_config(transformers.GPT2Config(**GPT2), attn_implementation=NAME).eval()
    theirs = make("gpt2")
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["phi3", "gpt2", "bert"])
def test_attention_weights_are_not_returned(name):
    with pytest.raises(mr.ArgumentError, match=r'weights, which are never built.* attn_implementation="eager"'):
        make(name, NAME)(tokens(), output_attentions=True)


# The tuple that return_dict=False asks for


@pytest.mark.parametrize("where", ["call", "configuration"])
def test_a_fused_loss_in_a_tuple(where):
    plain, fused = make("phi3"), fuse_loss(make("phi3"))
    fused.config.return_dict = where == "call"
    options = {"return_dict": False} if where == "call" else {}
    for more in ({}, {"use_cache": False}, {"output_hidden_states": True}):
        expected = plain(tokens(), labels=tokens(), return_dict=False, **more)
        found = fused(tokens(), labels=tokens(), **options, **more)
        assert type(expected) is type(found) is tuple
        assert list(map(type, expected[2:])) == list(map(type, found[2:])) and len(expected) == len(found)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] is None, "the logits, which were not built, keep their place"
    torch.testing.assert_close(fused(tokens(), labels=tokens(), return_dict=True).loss, expected[0])
    left_open = fused(tokens(), labels=tokens(), return_dict=None)
    assert isinstance(left_open, tuple) == (where == "configuration")


def test_losses_from_inputs_that_ask_for_a_tuple():
    model, inputs = make("phi3"), {"input_ids": tokens(), "return_dict": False}
    expected = model(tokens(), labels=tokens())
    torch.testing.assert_close(causal_lm_loss(model, inputs | {"labels": tokens()}), expected.loss)
    found = token_logprobs(model, inputs, tokens())
    torch.testing.assert_close(found, expected.logits.log_softmax(-1).gather(-1, tokens()[..., None])[..., 0])
