"""Tiny models of transformers with random weights, one for each way that attention layers and their masks are used."""

import torch
import transformers

from monoidreduce.integrations.transformers import NAME, register

VOCABULARY = 97
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)
SMALL = TOKENS | dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
HEADS_OF_8 = SMALL | dict(head_dim=8)
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
GPT2 = TOKENS | dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)
OPT = TOKENS | dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32)
BART = TOKENS | dict(
    d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, decoder_start_token_id=1,
    forced_eos_token_id=None,
)  # fmt: skip
WHISPER = BART | dict(
    num_mel_bins=4, max_source_positions=10, max_target_positions=40, suppress_tokens=None, begin_suppress_tokens=None
)
T5 = TOKENS | dict(d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=1)
VIT = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=12, patch_size=4
)
DEEPSEEK = SMALL | dict(  # queries and keys of 12 features, values of 8
    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=16,
    first_k_dense_replace=1,
)  # fmt: skip
INDEXER = DEEPSEEK | dict(q_lora_rank=16, index_topk=4, index_n_heads=2, index_head_dim=8, head_dim=4)

# Decoders: every way to say what an attention layer sees, and every option that the layers pass.
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SMALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", HEADS_OF_8),
    "mistral": ("MistralForCausalLM", "MistralConfig", SMALL | dict(sliding_window=5)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", SMALL | EXPERTS),
    "gemma2": (  # soft caps; sliding and full layers in turn
        "Gemma2ForCausalLM",
        "Gemma2Config",
        HEADS_OF_8 | dict(sliding_window=5, final_logit_softcapping=3.0, attn_logit_softcapping=2.0),
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", HEADS_OF_8 | dict(sliding_window=4)),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", SMALL | dict(sliding_window=6)),
    "phimoe": (  # layers that do not tell the attention function of their window
        "PhimoeForCausalLM",
        "PhimoeConfig",
        SMALL | EXPERTS | dict(sliding_window=5),
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", HEADS_OF_8 | EXPERTS | dict(sliding_window=4)),  # sinks; no SDPA
    "llama4": (  # chunks, of which FlashAttention knows nothing; layers without positions
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        HEADS_OF_8 | EXPERTS | dict(attention_chunk_size=4, intermediate_size_mlp=32, no_rope_layers=[1, 0]),
    ),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "doge": ("DogeForCausalLM", "DogeConfig", SMALL),  # reads the mask as a matrix: no FlashAttention
    "pegasus": (  # the decoder's layers say `is_causal=False`: neither SDPA nor FlashAttention
        "BigBirdPegasusForCausalLM",
        "BigBirdPegasusConfig",
        BART | dict(attention_type="original_full"),
    ),
}
INDEXED = {  # an indexer chooses four keys a query, which the model gives to the attention function beside a mask
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig", INDEXER),
}
SEQUENCE_TO_SEQUENCE = {
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        TOKENS | dict(encoder=HEADS_OF_8 | dict(sliding_window=4), decoder=HEADS_OF_8 | dict(sliding_window=4)),
    ),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
}
ENCODERS = {
    "bert": ("BertModel", "BertConfig", SMALL),
    "modernbert": ("ModernBertModel", "ModernBertConfig", SMALL | dict(local_attention=6)),
    "aimv2_text": (  # causal, though its layers say `is_causal=False`
        "Aimv2TextModel",
        "Aimv2TextConfig",
        SMALL | dict(eos_token_id=2),
    ),
}
IMAGES = {
    "vit": ("ViTModel", "ViTConfig", VIT),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VIT),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VIT),
}

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
ALL = DECODERS | INDEXED | SEQUENCE_TO_SEQUENCE | ENCODERS | IMAGES | BYPASSING


def make(name, implementation="eager", **changes):
    """A model with the same random weights for every implementation of attention."""
    register()
    class_name, config_name, options = ALL[name]
    config = getattr(transformers, config_name)(**options | changes)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation=implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.15, generator=generator)
    return model.eval()


def pair(name, **changes):
    """A model with our attention and its twin with transformers' own."""
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
    compared = 0
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=2e-5, rtol=1e-3, msg=lambda m, name=name: f"{name}: {m}")
            compared += 1
    assert compared, "no parameter has a gradient"
