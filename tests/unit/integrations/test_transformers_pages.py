"""``generate`` from pages: the same tokens as with the model's own cache, for prompts of unequal length."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import monoidreduce as mr  # noqa: E402
from monoidreduce.integrations.transformers import PagedKeyValueCache, register  # noqa: E402


@pytest.fixture(scope="module")
def model():
    register()
    config = transformers.LlamaConfig(
        vocab_size=60, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "monoidreduce"
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


HOW = dict(max_new_tokens=9, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_same_tokens(model, page, padded):
    prompt = torch.randint(1, 60, (3, 7), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(prompt)
    if padded:
        seen[0, :4], seen[2, :1] = 0, 0
        prompt = prompt * seen
    cache = PagedKeyValueCache(model.config, page)
    found = model.generate(prompt, attention_mask=seen, past_key_values=cache, **HOW)
    wanted = model.generate(prompt, attention_mask=seen, **HOW)
    assert torch.equal(found.sequences, wanted.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(wanted.logits), rtol=1e-4, atol=1e-5)
    lengths = [15 - 4 * padded, 15, 15 - padded]
    assert cache.get_seq_length() == 15 and cache.layers[1].pages().lengths.tolist() == lengths
    assert cache.book.count == sum(-(-n // page) for n in lengths)  # nobody has a page that he does not need


def test_prompts_in_chunks(model):
    prompt = torch.randint(1, 60, (2, 11), generator=torch.Generator().manual_seed(2))
    cache = PagedKeyValueCache(model.config, 4)
    with torch.no_grad():
        parts = [model(prompt[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 9), (9, 11))]
        wanted = model(prompt).logits
    torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=1e-4, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        torch.testing.assert_close(model(prompt, past_key_values=cache).logits, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_refused(model):
    prompt = torch.randint(1, 60, (2, 6))
    right = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    with pytest.raises(mr.ArgumentError, match="padding before a prompt"):
        model(prompt, attention_mask=right, past_key_values=PagedKeyValueCache(model.config))
    with pytest.raises(mr.ArgumentError, match="beam search"):
        model.generate(prompt, num_beams=2, max_new_tokens=3, past_key_values=PagedKeyValueCache(model.config))
    with pytest.raises(mr.ArgumentError, match="assisted generation drops tokens"):
        pages = PagedKeyValueCache(model.config)
        model.generate(prompt[:1], prompt_lookup_num_tokens=2, max_new_tokens=3, past_key_values=pages)
    with pytest.raises(mr.ArgumentError, match="page was given 0"):
        PagedKeyValueCache(model.config, 0)
    other = transformers.LlamaConfig(num_hidden_layers=1)
    other._attn_implementation = "sdpa"
    with pytest.raises(mr.ArgumentError, match="reads no"):
        PagedKeyValueCache(other)
