"""Masks of transformers said by a few numbers per key: who sees whom is what transformers' own matrix says.

Masks are made by transformers' functions, as models call them, and read by the attention function of a real layer:
equal scores and the unit vectors as values give the row of who is seen.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model  # noqa: E402
from transformers.models.mistral.modeling_mistral import MistralAttention  # noqa: E402

import monoidreduce as mr  # noqa: E402
from monoidreduce.integrations.transformers import NAME, attention_forward, mask, register  # noqa: E402
from monoidreduce.integrations.transformers_masks import Code  # noqa: E402
from tests.support.tiny_transformers import SMALL, pair, tokens  # noqa: E402

BATCH, WINDOW, CHUNK = 2, 5, 6


def configuration(implementation):
    register()
    config = transformers.MistralConfig(**SMALL | dict(sliding_window=WINDOW))
    config.attention_chunk_size = CHUNK
    config._attn_implementation = implementation
    return config


def positions_of(*lengths):
    return torch.cat([torch.arange(n) for n in lengths])[None].expand(BATCH, -1)


def image_blocks(length):
    """Two images in the first sequence, side by side, and one in the second; text is in no block."""
    blocks = torch.full((BATCH, length), -1)
    blocks[0, 2:6], blocks[0, 6:9], blocks[1, 1:8] = 0, 1, 0
    return blocks


def causal(config, x, padding, cache, **more):
    return masking_utils.create_causal_mask(config, x, padding, cache, **more)


def sliding(config, x, padding, cache, **more):
    return masking_utils.create_sliding_window_causal_mask(config, x, padding, cache, **more)


def chunks(config, x, padding, cache, **more):
    return masking_utils.create_chunked_causal_mask(config, x, padding, cache, **more)


def packed(config, x, padding, cache):
    return causal(config, x, padding, cache, position_ids=positions_of(7, 1, x.shape[1] - 8))


def packed_sliding(config, x, padding, cache):
    return sliding(config, x, padding, cache, position_ids=positions_of(7, 1, x.shape[1] - 8))


def packed_chunks(config, x, padding, cache):
    return chunks(config, x, padding, cache, position_ids=positions_of(7, 1, x.shape[1] - 8))


def blocks(config, x, padding, cache):
    return causal(config, x, padding, cache, block_sequence_ids=image_blocks(x.shape[1]))


def blocks_in_window(config, x, padding, cache):  # as Gemma 3 has it
    ids, overlay = image_blocks(x.shape[1]), masking_utils.sliding_window_overlay(WINDOW)
    more = dict(or_mask_function=masking_utils.blockwise_overlay(ids), and_mask_function=overlay)
    return causal(config, x, padding, cache, **more)


def both_ways(config, x, padding, cache):
    return masking_utils.create_bidirectional_mask(config, x, padding)


def both_ways_sliding(config, x, padding, cache):
    return masking_utils.create_bidirectional_sliding_window_mask(config, x, padding)


CACHED = [causal, sliding, chunks]
UNCACHED = [packed, packed_sliding, packed_chunks, blocks, blocks_in_window, both_ways, both_ways_sliding]
WINDOWED = {sliding, packed_sliding, blocks_in_window}
PADDING = {"none": None, "left": (slice(0, 1), slice(0, 7)), "right": (slice(1, 2), slice(-4, None)), "ones": ()}


def caches(config, name):
    """A cache that has seen 9 tokens, of which 4 are beyond a sliding window."""
    if name == "none":
        return None
    kind = transformers.DynamicCache if name == "dynamic" else transformers.StaticCache
    cache = kind(config=config, **({} if name == "dynamic" else dict(max_cache_len=24)))
    for layer in range(config.num_hidden_layers):
        cache.update(*[torch.zeros(BATCH, 2, 9, 8)] * 2, layer)
    return cache


def seen_pairs(made, config, window, queries, keys, is_causal):
    """The share that each key has in each query's output, by our attention function in a layer of Mistral."""
    layer = MistralAttention(config, 0)
    q, k = torch.zeros(BATCH, 4, queries, 8), torch.zeros(BATCH, 2, keys, 8)
    v = torch.eye(keys).expand(BATCH, 2, keys, keys)
    return attention_forward(layer, q, k, v, made, is_causal=is_causal, sliding_window=window)[0][:, :, 0]


def check(create, padding, cache, make=None):
    """Ours against the matrix that transformers makes; the number of bytes that ours holds."""
    config, theirs = configuration(NAME), configuration("eager")
    if create in CACHED and create is not causal:
        for c in (config, theirs):
            c.layer_types = [{sliding: "sliding_attention", chunks: "chunked_attention"}[create]] * 2
    new = 12 if cache == "none" else 3
    past = 0 if cache == "none" else 9
    x, given = torch.zeros(BATCH, new, 32), None
    if PADDING[padding] is not None:
        given = torch.ones(BATCH, past + new, dtype=torch.long)
        if PADDING[padding]:
            given[PADDING[padding]] = 0
    matrix = create(theirs, x, given, caches(theirs, cache))
    made = (make or create)(config, x, given, caches(config, cache))
    keys = new if matrix is None else matrix.shape[-1]
    visible = torch.ones(BATCH, new, keys) if matrix is None else (matrix[:, 0] == 0).float()
    expected = visible / visible.sum(-1, keepdim=True).clamp(min=1)
    is_causal = create not in (both_ways, both_ways_sliding)
    found = seen_pairs(made, config, WINDOW if create in WINDOWED else None, new, keys, is_causal)
    somebody = visible.any(-1)  # with padding on the left, what sees nobody is padding
    torch.testing.assert_close(found[somebody], expected[somebody])
    assert not found[~somebody].any() and (padding == "left" or somebody.all())
    assert 0 < visible.mean() < 1 or create is both_ways
    return 0 if made is None else made.untyped_storage().nbytes(), keys


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("create", CACHED + UNCACHED, ids=lambda f: f.__name__)
def test_without_a_cache(create, padding):
    held, keys = check(create, padding, "none")
    assert held <= BATCH * keys * 3 * 8, "a matrix was made"
    if padding == "ones" and create in (causal, sliding, both_ways):
        assert held == 0, "a mask that hides nothing is no mask"


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("create", CACHED, ids=lambda f: f.__name__)
def test_with_a_cache(create, cache, padding):
    held, keys = check(create, padding, cache)
    assert held <= BATCH * keys * 2 * 8


def test_a_static_cache_is_not_read():
    """Its number of tokens is a tensor, which would have to come from the device."""
    with torch.device("meta"):
        found = mask(2, 3, 8, q_offset=torch.zeros((), dtype=torch.long), device="meta")
    assert found.shape == (2, 1, Code.LENGTHS, 8) and found.device.type == "meta"


def test_what_indices_do_not_say_is_a_matrix():
    plain = dict(batch_size=2, q_length=6, kv_length=6)
    own = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 3)
    assert mask(**plain, mask_function=own).shape == (2, 1, 6, 6) and not mask(**plain, mask_function=own)[0, 0, 5, 3]
    either = masking_utils.or_masks(masking_utils.sliding_window_causal_mask_function(2), own)
    assert mask(**plain, mask_function=either).shape == (2, 1, 6, 6)
    assert mask(**plain, allow_is_causal_skip=False).shape == (2, 1, 6, 6)  # somebody wants to see it
    for model_class in (transformers.DogeModel, transformers.DeepseekV32Model):  # their layers compute with the mask
        config = model_class.config_class()
        found = mask(**plain, config=config, q_offset=torch.tensor(0), device="cpu", dtype=torch.float32)
        assert found.shape == (2, 1, 6, 6)


def test_images_in_a_decoder():
    """Gemma 3's masks of text and images, in sliding and in full layers, as its own function makes them."""
    places = torch.full((3, 17), -1)
    places[:, 3:9], places[1, 11:14] = 0, 1
    padding = torch.ones(3, 17)
    padding[2, :2] = 0
    logits = []
    for model in pair("gemma3"):
        given = (model.config, torch.zeros(3, 17, 32), padding, None, None, places)
        masks = create_masks_for_vision_model(*given)
        if model.config._attn_implementation == NAME:
            assert [tuple(m.shape) for m in masks.values()] == [(3, 1, Code.BLOCKS, 17)] * 2
        logits.append(model(tokens(), attention_mask=masks).logits[padding.bool()])
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)


def test_where_documents_begin():
    """What FlashAttention is told of a packed batch, without position ids; refused where it does not fit."""
    layer = MistralAttention(configuration(NAME), 0)
    q, v = torch.zeros(1, 4, 9, 8), torch.eye(9).expand(1, 4, 9, 9)
    starts = torch.tensor([0, 2, 2, 6, 9], dtype=torch.int32)
    found = attention_forward(layer, q, q, v, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts)[0][0, :, 0]
    ids = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2])
    expected = ((ids[:, None] == ids) & (torch.arange(9)[:, None] >= torch.arange(9))).float()
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))
    with pytest.raises(mr.ArgumentError, match=r"cu_seq_lens_q ends at 6, but there are 9 tokens"):
        attention_forward(layer, q, q, v, None, cu_seq_lens_q=starts[:-1], cu_seq_lens_k=starts)


def test_packed_queries_are_the_last_of_their_own_keys():
    """Documents with more keys than queries, as with a cache: causal within each, aligned at its end."""
    layer = MistralAttention(configuration(NAME), 0)
    q, k, v = torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 9, 8), torch.eye(9).expand(1, 4, 9, 9)
    rows, cols = (torch.tensor(t, dtype=torch.int32) for t in ([0, 1, 4], [0, 3, 9]))
    found = attention_forward(layer, q, k, v, None, cu_seq_lens_q=rows, cu_seq_lens_k=cols)[0][0, :, 0]
    expected = torch.zeros(4, 9)
    expected[0, :3] = 1
    for i in range(3):
        expected[1 + i, 3 : 7 + i] = 1
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True))
