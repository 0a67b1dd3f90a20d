"""Our attention in many architectures of transformers, against their own: tiny models of real classes, random weights.

The behaviours are those that transformers tests of every model: outputs, losses and gradients, padding on either side,
packed documents, every kind of cache and of generation, gradient checkpointing, saving and loading, compiled graphs.
"""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")

from monoidreduce.integrations.transformers import NAME, causal_lm_loss, fuse_loss, register, token_logprobs  # noqa: E402
from tests.support.tiny_transformers import (  # noqa: E402
    DECODERS,
    ENCODERS,
    IMAGES,
    INDEXED,
    SEQUENCE_TO_SEQUENCE,
    TOKENS,
    make,
    padded,
    pair,
    same_gradients,
    tokens,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

TEXT_TOWER = TOKENS | dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, eos_token_id=2
)
WAYS = ["beams", "assistant", "lookup", "chunks", "static chunks", "quantised", "no cache"]
SLIDING = {
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "phimoe",
    "gpt_oss",
    "llama4",
}  # of which there are no quantised caches


def mostly_slow(*in_every_run):
    """All decoders, of which those that are not named are marked slow."""
    return [name if name in in_every_run else pytest.param(name, marks=pytest.mark.slow) for name in DECODERS]


class TestDecoder:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", DECODERS)
    def test_logits_loss_and_gradients(self, name):
        ours, theirs = pair(name)
        with torch.no_grad():
            for padding in ("none", "left"):
                ids, seen = (tokens(), None) if padding == "none" else padded(tokens(), left=True)
                a, b = (model(ids, attention_mask=seen).logits for model in (ours, theirs))
                where = slice(None) if seen is None else seen.bool()  # what a padding token sees is nobody's business
                torch.testing.assert_close(
                    a[where], b[where], atol=2e-5, rtol=1e-4, msg=lambda m, p=padding: f"{p}: {m}"
                )
        ids, seen = padded(tokens(), left=False)
        labels = torch.where(seen.bool(), ids, -100)
        same_gradients(ours, theirs, lambda model: model(ids, attention_mask=seen, labels=labels).loss)

    @pytest.mark.parametrize("name", DECODERS)
    def test_packed_documents(self, name):
        """As DataCollatorWithFlattening packs them: position ids and, for FlashAttention, where documents begin."""
        documents = [tokens(1, length, seed=length)[0].tolist() for length in (6, 1, 8)]
        collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
        batch = dict(collate([{"input_ids": ids} for ids in documents]))
        ours, theirs = pair(name)
        places = {key: batch[key] for key in ("input_ids", "position_ids")}
        with torch.no_grad():
            found = ours(**places, use_cache=False).logits
            torch.testing.assert_close(found, theirs(**places, use_cache=False).logits, atol=2e-5, rtol=1e-4)
            if name in ("opt", "pegasus", "doge"):
                return  # they take no notice of where documents begin
            labels = batch.pop("labels")
            found = ours(**batch, use_cache=False).logits
            if name == "llama4":  # its chunks begin with the batch, not with each document
                torch.testing.assert_close(found, theirs(**places, use_cache=False).logits, atol=2e-5, rtol=1e-4)
                return
            alone = [theirs(torch.tensor([ids]), use_cache=False).logits for ids in documents]
            torch.testing.assert_close(found, torch.cat(alone, 1), atol=2e-5, rtol=1e-4)
            assert labels.shape == batch["input_ids"].shape

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", DECODERS)
    def test_greedy_generation(self, name):
        """With padding on the left, from a cache that grows, a static one, and none."""
        ids, seen = padded(tokens(length=9), left=True)
        options = dict(attention_mask=seen, max_new_tokens=6, do_sample=False)
        ours, theirs = pair(name)
        expected = theirs.generate(ids, **options)
        assert torch.equal(ours.generate(ids, **options), expected)
        assert torch.equal(ours.generate(ids, **options, cache_implementation="static"), expected)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("name", mostly_slow("qwen3", "gpt_oss"))
    @pytest.mark.parametrize(
        "way", ["beams", "assistant", "lookup", "chunks", "static chunks", "quantised", "no cache"]
    )
    def test_other_ways_to_generate(self, name, way):
        ours, theirs = pair(name)
        ids, seen = padded(tokens(length=9), left=True)
        options = dict(attention_mask=seen, max_new_tokens=8, do_sample=False)
        more = {
            "beams": dict(num_beams=3),
            "lookup": dict(prompt_lookup_num_tokens=3),
            "chunks": dict(prefill_chunk_size=4),
            "static chunks": dict(prefill_chunk_size=4, cache_implementation="static"),
            "quantised": dict(cache_implementation="quantized", cache_config={"backend": "fp8"}),
            "no cache": dict(use_cache=False),
        }.get(way, {})
        if way == "quantised" and name in SLIDING:
            pytest.skip("transformers has no quantised cache with sliding layers")
        if way == "static chunks" and name == "gpt_neox":
            pytest.skip("transformers makes this cache for another number of heads")
        if way in ("assistant", "lookup"):  # one sequence, in which tokens come again
            ids = tokens(1, 4).repeat(1, 3)
            options.update(attention_mask=torch.ones_like(ids))
        if way == "assistant":
            more = dict(assistant_model=make(name, NAME))
            with torch.no_grad():
                next(more["assistant_model"].parameters()).mul_(1.1)  # it is often right, not always
        exact = {} if way in ("assistant", "lookup", "no cache", "chunks", "static chunks") else more
        expected = theirs.generate(ids, **options, **exact)
        assert torch.equal(ours.generate(ids, **options, **more), expected)

    @pytest.mark.parametrize("name", mostly_slow("gemma2"))
    def test_a_cache_that_is_continued(self, name):
        """Several tokens at a time, to a cache that has some, with padding: logits of every token."""
        ids, seen = padded(tokens(length=14), left=True)
        found = []
        for model in pair(name):
            cache, logits = transformers.DynamicCache(config=model.config), []
            for part in (slice(0, 9), slice(9, 13), slice(13, 14)):
                given = dict(attention_mask=seen[:, : part.stop], past_key_values=cache)
                logits.append(model(ids[:, part], **given).logits)
            found.append(torch.cat(logits, 1)[seen.bool()])
        torch.testing.assert_close(*found, atol=2e-5, rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", DECODERS)
    def test_saved_and_loaded(self, name, tmp_path):
        theirs = make(name)
        theirs.save_pretrained(tmp_path)
        ours = type(theirs).from_pretrained(tmp_path, attn_implementation=NAME)
        assert ours.config._attn_implementation == NAME
        torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-4)

    # Those left out do not compile in one graph with attention of their own either: experts by sizes that are data, a
    # warning on the way (GPT-2), and torch's strides of a softplus's gradient (Doge).
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name",
        [
            n
            for n in DECODERS
            if n not in ("mixtral", "phimoe", "llama4", "deepseek", "pegasus", "gpt_oss", "gpt2", "doge")
        ],
    )
    def test_a_training_step_in_one_graph(self, name):
        torch.compiler.reset()
        ours, theirs = pair(name)
        compiled = torch.compile(ours, fullgraph=True, dynamic=False, backend="aot_eager")
        for model in (compiled, theirs):
            model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", INDEXED)
def test_keys_that_an_indexer_chose(name):
    """Logits with and without padding, the loss's gradients, and greedy generation."""
    ours, theirs = pair(name)
    ids, seen = padded(tokens(), left=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-4)
        generate = [m.generate(ids, attention_mask=seen, max_new_tokens=3, do_sample=False) for m in (ours, theirs)]
    assert torch.equal(*generate)
    ids, seen = padded(tokens(), left=False)
    labels = torch.where(seen.bool(), ids, -100)
    same_gradients(ours, theirs, lambda model: model(ids, attention_mask=seen, labels=labels).loss)


class TestEncoderAndDecoder:
    @pytest.mark.parametrize("name", SEQUENCE_TO_SEQUENCE)
    def test_loss_gradients_and_generation(self, name):
        ours, theirs = pair(name)
        answer, wanted = padded(tokens(length=11, seed=2), left=False)
        labels = torch.where(wanted.bool(), answer, -100)
        if name == "whisper":
            sounds = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(0))
            inputs, prompt = dict(input_features=sounds), dict(decoder_input_ids=tokens(3, 2))
            generate = [functools.partial(super(type(m), m).generate, **inputs, **prompt) for m in (ours, theirs)]
        else:
            ids, seen = padded(tokens(length=13), left=False)
            inputs = dict(input_ids=ids, attention_mask=seen)
            generate = [functools.partial(m.generate, **inputs) for m in (ours, theirs)]
        same_gradients(ours, theirs, lambda model: model(**inputs, labels=labels).loss)
        options = dict(max_new_tokens=5, do_sample=False)
        expected = generate[1](**options)
        assert torch.equal(generate[0](**options), expected)
        assert torch.equal(generate[0](**options, cache_implementation="static"), expected)
        beams, others = (call(**options, num_beams=2) for call in generate)
        assert torch.equal(beams, others)


class TestEncoder:
    @pytest.mark.parametrize("name", ENCODERS)
    def test_outputs_and_gradients(self, name):
        ours, theirs = pair(name)
        for ids, seen in ((tokens(), None), padded(tokens(), left=False)):
            where = slice(None) if seen is None else seen.bool()
            a, b = (model(ids, attention_mask=seen).last_hidden_state[where] for model in (ours, theirs))
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
        seen = seen.bool()
        same_gradients(ours, theirs, lambda m: m(ids, attention_mask=seen).last_hidden_state[seen].square().mean())

    @pytest.mark.parametrize("name", IMAGES)
    def test_a_model_of_images(self, name):
        ours, theirs = pair(name)
        pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        same_gradients(ours, theirs, lambda model: model(pixels).last_hidden_state.square().mean())

    def test_images_and_text_together(self):
        """CLIP: a causal tower of text, and one of images that sees both ways, each with its own configuration."""
        register()
        towers = dict(text_config=TEXT_TOWER, vision_config=IMAGES["clip"][2], projection_dim=16)
        ours, theirs = (
            transformers.CLIPModel._from_config(transformers.CLIPConfig(**towers), attn_implementation=choice).eval()
            for choice in (NAME, "eager")
        )
        theirs.load_state_dict(ours.state_dict())
        assert ours.text_model.config._attn_implementation == ours.vision_model.config._attn_implementation == NAME
        pixels = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(0))
        ids, seen = padded(tokens(), left=False)
        given = dict(input_ids=ids, attention_mask=seen, pixel_values=pixels)
        same_gradients(ours, theirs, lambda model: model(**given, return_loss=True).loss)


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


# The tuple that return_dict=False asks for


@pytest.mark.parametrize("where", ["call", "configuration"])
def test_a_fused_loss_in_a_tuple(where):
    plain, fused = make("phi3"), fuse_loss(make("phi3"), when="always")
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
