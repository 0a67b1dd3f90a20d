"""torch.compile around models of transformers with our attention: one graph, the same numbers.

Most of the time goes into tracing transformers itself, so each test compiles a model of one layer once.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from monoidreduce.integrations.transformers import NAME, fuse_loss, register  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

SMALL = dict(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": 5}),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {"sliding_window": 5, "head_dim": 8, "attn_logit_softcapping": 2.0},
    ),
}


@pytest.fixture(autouse=True)
def without_earlier_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pair(name):
    """A model with our attention and its twin with transformers' own."""
    register()
    model_class, config_class, options = MODELS[name]
    found = []
    for implementation in (NAME, "eager"):
        model = model_class._from_config(config_class(**SMALL, **options), attn_implementation=implementation)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(0, 0.15, generator=generator)
        found.append(model.eval())
    return found


def tokens(batch=2, length=13, seed=1):
    return torch.randint(2, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_a_sliding_window_and_open_lengths_in_one_graph():
    ours, theirs = pair("mistral")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (13, 17):
            ids = tokens(length=length)
            torch.testing.assert_close(compiled(ids).logits, theirs(ids).logits, atol=1e-5, rtol=1e-4)


def test_a_training_step_without_a_cache_in_one_graph():
    """Without a cache transformers looks for packed sequences, which cannot be ruled out in a graph."""
    ours, theirs = pair("llama")
    fuse_loss(ours.train(), check=False)  # the first call is that of the compiler
    compiled = torch.compile(ours, fullgraph=True, dynamic=False, backend="aot_eager")
    places = torch.cat([torch.arange(5), torch.arange(8)]).expand(2, -1)
    given = dict(input_ids=tokens(), labels=tokens(), position_ids=places, use_cache=False)
    for model in (compiled, theirs):
        model(**given).loss.backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert compiled(**given).logits is None
    assert ours.lm_head is ours._modules["lm_head"], "the head is back in its place"
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def test_training_after_evaluation_of_a_model_that_breaks_the_graph():
    """The parts of its forward are then compiled by themselves, and those of an evaluation have the head itself."""
    model, plain = pair("llama")
    model.model.forward = torch.compiler.disable(model.model.forward)  # as PEFT's hooks with checkpointing break it
    expected, head = plain(tokens(), labels=tokens()), model.lm_head
    compiled = torch.compile(fuse_loss(model, check=False), backend="eager")
    for training in (True, False, True):
        model.train(training)
        found = compiled(tokens(), labels=tokens())
        assert (found.logits is None) == training
        torch.testing.assert_close(found.loss, expected.loss)
        assert model.lm_head is model._modules["lm_head"] is head


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_with_a_static_cache_in_one_graph(name):
    ours, theirs = pair(name)
    ids = tokens(length=9)
    seen = torch.ones_like(ids)
    seen[1, :4] = 0
    options = dict(attention_mask=seen, max_new_tokens=7, do_sample=False)
    config = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # transformers compiles on accelerators unless it is told otherwise
    found = ours.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert hasattr(ours, "_compiled_call"), "nothing was compiled"
    assert torch.equal(found, theirs.generate(ids, **options))


def test_the_masks_of_a_compiled_model_are_those_of_a_plain_one():
    """No matrix where indices say it: also for chunks, which have a size like a window's, and for packed documents."""
    utilities = transformers.masking_utils
    config = transformers.MistralConfig(**SMALL, sliding_window=4)
    config._attn_implementation = NAME
    config.attention_chunk_size = 6
    register()

    def masks(embeddings, padding, positions):
        given = (config, embeddings, padding, None, positions)
        return [
            utilities.create_causal_mask(*given),
            utilities.create_sliding_window_causal_mask(*given),
            utilities.create_chunked_causal_mask(*given),
            utilities.create_bidirectional_mask(config, embeddings, padding),
            utilities.create_bidirectional_sliding_window_mask(config, embeddings, padding),
        ]

    compiled = torch.compile(masks, fullgraph=True, backend="eager")
    embeddings, padding = torch.randn(2, 9, 32), torch.ones(2, 9, dtype=torch.long)
    padding[1, :3] = 0
    packed = torch.cat([torch.arange(4), torch.arange(5)]).expand(2, -1)
    for given in ((None, None), (padding, None), (None, packed)):
        plain, traced = masks(embeddings, *given), compiled(embeddings, *given)
        for a, b in zip(plain, traced, strict=True):
            assert (a is None and b is None) or a.shape == b.shape
            if a is None or a.dtype is torch.bool:
                assert a is None or torch.equal(a, b)
            else:  # documents may have other numbers
                assert a.untyped_storage().nbytes() <= 2 * 9 * 8
                same, others = ((m[:, 0, 0][:, None] == m[:, 0, 0][:, :, None]) for m in (a, b))
                shown = a[:, 0, 0] >= 0
                assert torch.equal(shown, b[:, 0, 0] >= 0)
                assert torch.equal(
                    same & shown[:, None] & shown[:, :, None], others & shown[:, None] & shown[:, :, None]
                )
