"""Hugging Face transformers: our attention in its models, and the loss of a language model without its logits.

    register()                                    # once; then attn_implementation="monoidreduce" is a choice
    fuse_loss(model)                              # its loss then never builds [tokens, vocabulary]
    model.generate(..., past_key_values=PagedKeyValueCache(model.config))  # keys and values in pages

Masks are said by indices and by a few numbers per key (``transformers_masks.py``); only those of another form reach us
as a matrix, which is then read tile by tile. The attention and its pages are in ``transformers_attention.py``,
the loss is in ``transformers_loss.py``.
"""

from __future__ import annotations

from .transformers_attention import NAME, PagedKeyValueCache, attention_forward, mask, register
from .transformers_loss import causal_lm_loss, fuse_loss, token_logprobs, unfuse_loss

__all__ = [
    "NAME",
    "PagedKeyValueCache",
    "attention_forward",
    "causal_lm_loss",
    "fuse_loss",
    "mask",
    "register",
    "token_logprobs",
    "unfuse_loss",
]
