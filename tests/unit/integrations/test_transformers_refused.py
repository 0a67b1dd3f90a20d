"""Models that never call the attention function are refused before they compute anything, not served wrongly."""

import copy
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

import monoidreduce as mr  # noqa: E402
from monoidreduce.integrations.transformers import NAME, fuse_loss, register  # noqa: E402
from tests.support.tiny_transformers import BYPASSING, DECODERS, GPT2, IMAGES, SMALL, make, tokens  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("name", BYPASSING)
def test_a_model_with_attention_of_its_own_is_refused(name):
    class_name = BYPASSING[name][0]
    with pytest.raises(mr.ArgumentError, match=rf'{class_name} was given .* Use attn_implementation="eager"'):
        make(name, NAME)
    theirs = make(name)  # with attention of its own it is made as ever
    expected = theirs(tokens())[0]
    theirs.set_attn_implementation(NAME)  # transformers warns, and leaves it as it is
    assert torch.equal(theirs(tokens())[0], expected)


@pytest.mark.parametrize("name", BYPASSING)
def test_a_configuration_that_is_changed_by_hand_is_refused_or_means_nothing(name):
    """Refused where transformers makes the mask, before any number; a model that makes its own goes on as before."""
    model = make(name)
    expected = model(tokens())[0]
    model.config._attn_implementation = NAME
    if name in ("bloom", "mpt", "falcon", "codegen", "xglm", "gptj", "gpt_neo", "gpt_neox_japanese"):
        with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
            model(tokens())
    else:
        assert torch.equal(model(tokens())[0], expected)
    if hasattr(model, "lm_head"):
        for check in (True, False):
            with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
                fuse_loss(model, check=check)


@pytest.mark.parametrize("when", ["made", "set later", "written by hand"])
def test_a_part_of_a_larger_model_is_refused(when):
    """Images and text: the tower of images is served, and the decoder has attention of its own."""
    register()
    config = transformers.LlavaConfig(
        text_config=transformers.XGLMConfig(**BYPASSING["xglm"][2]),
        vision_config=transformers.CLIPVisionConfig(**IMAGES["clip"][2]),
        image_token_index=3,
    )
    both = dict(text_config=NAME, vision_config=NAME)
    if when == "made":
        with pytest.raises(mr.ArgumentError, match="XGLMModel was given"):
            transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=both)
        return
    kinds = dict(text_config="eager", vision_config=NAME)
    model = transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation=kinds).eval()
    expected = model(tokens()).logits
    if when == "set later":  # transformers warns, and leaves the decoder as it is
        model.set_attn_implementation(both)
        assert torch.equal(model(tokens()).logits, expected)
    else:
        model.config.text_config._attn_implementation = NAME
        with pytest.raises(mr.ArgumentError, match="do not call the attention function"):
            model(tokens())


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


def test_blocks_of_keys_that_an_indexer_chose_are_refused():
    """The model leaves them to the attention function, and out of its mask, unless that is eager or SDPA by name."""
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax

    register()
    config = transformers.MiniMaxM3VLTextConfig(
        **SMALL, num_local_experts=2, num_experts_per_tok=1, layer_types=["minimax_m3_sparse", "full_attention"],
        head_dim=8, index_n_heads=2, index_head_dim=8, index_block_size=2, index_topk_blocks=2,
    )  # fmt: skip
    model = minimax.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation=NAME).eval()
    with pytest.raises(mr.ArgumentError, match=r"MiniMaxM3VLAttention passes blocks of keys .*\b(eager)\b.*sdpa"):
        model(tokens())


class OwnAttention(transformers.models.llama.modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = hidden_states.shape[:-1]
        q, k, v = (
            project(hidden_states).view(*shape, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        causal = attention_mask is None
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=causal, enable_gqa=True
        )
        return self.o_proj(found.transpose(1, 2).reshape(*shape, -1)), None


class CallsBase(transformers.models.llama.modeling_llama.LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OwnLlama(transformers.LlamaForCausalLM):
    attention = OwnAttention

    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = self.attention(config, index)


class LlamaThatCallsBase(OwnLlama):
    attention = CallsBase


def own_llama(model_class, implementation=NAME):
    register()
    config = transformers.LlamaConfig(**DECODERS["llama"][2])
    return model_class._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("how", ["called", "copied", "set later", "compiled", "fused"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_of_ones_own_in_a_served_model_is_refused(batch, how):
    """It would take our mask [B, N] for one of its own and, with one sequence, see the future."""
    model = own_llama(OwnLlama, "sdpa" if how == "set later" else NAME)
    ids = tokens(batch)
    seen = torch.ones_like(ids)
    seen[:, :3] = 0
    if how == "copied":
        model = copy.deepcopy(model)
    kind = Exception if how == "compiled" else mr.ArgumentError  # Dynamo raises an error of its own with the message
    with pytest.raises(kind, match=r"OwnAttention, has attention code of its own.*ALL_ATTENTION_"):
        if how == "set later":
            model.set_attn_implementation(NAME)
        elif how == "fused":
            fuse_loss(model)
        elif how == "compiled":
            model = torch.compile(model, backend="eager", fullgraph=True)
        model(ids, attention_mask=seen)


def test_a_forward_of_ones_own_on_one_layer_is_refused():
    model = make("llama", NAME)
    layer = model.model.layers[1].self_attn
    layer.forward = types.MethodType(OwnAttention.forward, layer)
    with pytest.raises(mr.ArgumentError, match=r"its layer (model\.)?layers\.1\.self_attn"):
        model(tokens())


def test_a_layer_that_calls_the_attention_function_is_served():
    ours, theirs = own_llama(LlamaThatCallsBase), own_llama(LlamaThatCallsBase, "eager")
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(tokens()).logits, theirs(tokens()).logits, atol=2e-5, rtol=1e-4)
