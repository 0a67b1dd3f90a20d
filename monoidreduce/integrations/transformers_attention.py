"""Attention for Hugging Face transformers: the attention function, and its registration.

transformers asks a registered mask function (``transformers_masks.py``) for the mask of a forward pass and hands the
result, through the model's own code, to the registered attention function here. Models differ in how much of what the
two agree on reaches the attention function; ``transformers_dispatch.py`` reads that from their classes.

``transformers.py`` re-exports the public names. This file may import the errors, the ops and the two files above.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ..domains import Jagged
from ..errors import ArgumentError
from ..ops import attention, attention_paged, checks
from ..ops.attention import attention_in_blocks
from .transformers_dispatch import (
    NAME,
    MaskForm,
    check_attention,
    check_dispatch,
    check_models_when_made,
    mask_form_of_config,
    mask_form_of_layer,
)
from .transformers_masks import mask, read_code
from .transformers_pages import layer_of

__all__ = ["NAME", "attention_forward", "check_attention", "check_dispatch", "mask", "register"]

recorded_outputs: Any = None
with contextlib.suppress(ImportError):  # what a forward pass records; not all models pass `output_attentions` on
    from transformers.utils.output_capturing import _active_collector as recorded_outputs


def register() -> None:
    """Make ``attn_implementation="monoidreduce"`` a choice for every model of transformers.

    A model whose layers do not call the registered attention function (Bloom, MPT, Falcon and others with attention
    code of their own) raises :class:`ArgumentError` when it is made with this choice, or when it first runs where the
    choice was written into its configuration later.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import register
    >>> register()
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> config._attn_implementation = "monoidreduce"
    >>> LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 50])
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    check_models_when_made()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` [B, H, M, f], ``key`` and ``value`` [B, Hkv, N, f] give [B, M, H, f].

    ``attention_mask`` is what :func:`mask` returned: None (causal if the layer is, in its sliding window), one truth
    value per key [B, N] (causal besides, in the sliding window; the last query is aligned with the last key), a coded
    mask of integers, or a matrix [B, 1, M, N] that contains everything. Without one, ``cu_seq_lens_q`` and
    ``cu_seq_lens_k`` say where documents begin, as FlashAttention takes them.

    Raises :class:`ArgumentError` for ``output_attentions`` and for the paged cache of continuous batching.
    """
    if output_attentions or _records_attentions():
        raise ArgumentError(
            detail="output_attentions=True asks for attention weights, which are never built",
            fix='Leave it out, or use attn_implementation="eager" where the weights are needed',
        )
    if cache is not None:
        raise ArgumentError(
            detail="continuous batching passes a paged cache to the attention function, which is not supported",
            fix='Use model.generate, or attn_implementation="sdpa" for generate_batch',
        )
    attend: Any = attention
    options: dict[str, Any] = {}
    layer = layer_of(key)
    if layer is not None and layer.keys is not None:
        options = {} if sliding_window is None else {"window": (sliding_window - 1, None)}
        found = attention_paged(
            query, key, value, layer.pages(), scale=scaling, softcap=softcap, sinks=s_aux, **options
        )
        return found.transpose(1, 2).contiguous(), None
    if layer is not None:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ArgumentError(
                detail="keys in pages are seen as far as a sequence goes, and this mask says more",
                fix="Leave past_key_values out",
            )
        layer.write_prompt(key, value, attention_mask)
    if attention_mask is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        config = getattr(module, "config", None)
        form = mask_form_of_layer(type(module)) if config is None else mask_form_of_config(type(config))
        # A layer that says `is_causal` may also be used for cross-attention, where nothing is masked.
        causal = bool(asked) and (form == MaskForm.FLASH or (form > MaskForm.EAGER and query.shape[2] == key.shape[2]))
        windowed = causal and form == MaskForm.FLASH
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
            options |= _packed(cu_seq_lens_q, cu_seq_lens_k, query, key)
    elif attention_mask.dim() == 2:
        causal = windowed = True
        options["attn_mask"] = attention_mask[:, None, None, :]
    elif attention_mask.dtype is torch.bool or attention_mask.is_floating_point():
        causal = windowed = False
        # A row that stands for all is read once
        options["attn_mask"] = attention_mask[:, :, :1] if attention_mask.stride(2) == 0 else attention_mask
    else:
        code = read_code(attention_mask, query.shape[2])
        causal = windowed = code.causal
        options.update(documents=code.documents, lengths=code.lengths, window=code.window)
        if code.blocks is not None:
            attend, options["blocks"] = attention_in_blocks, code.blocks
    if windowed and sliding_window is not None:
        options["window"] = (sliding_window - 1, None)
    found = attend(
        query,
        key,
        value,
        dropout_p=dropout,
        causal="lower_right" if causal else False,
        scale=scaling,
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux,
        enable_gqa=query.shape[1] != key.shape[1],
        **options,
    )
    return found.transpose(1, 2).contiguous(), None


def _packed(rows: Tensor, cols: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Packed documents, from where they begin and end in the flattened batch. One row of tokens is jagged, and its
    documents' queries are the last of their keys; otherwise queries and keys are the same tokens, with numbers."""
    _check_offsets("cu_seq_lens_q", rows, query)
    _check_offsets("cu_seq_lens_k", cols, key)
    if query.shape[0] == 1 and (rows is cols or query.shape[2] != key.shape[2]):
        return {"cols": Jagged(rows, cols)}
    return {"documents": (_documents(rows, query), _documents(cols, key))}


def _check_offsets(name: str, offsets: Tensor, tokens: Tensor) -> None:
    """Raise unless offsets end with the number of tokens."""
    batch, length = tokens.shape[0], tokens.shape[2]
    if checks.can_inspect(offsets) and (offsets.numel() == 0 or int(offsets[-1]) != batch * length):
        raise ArgumentError(
            detail=f"{name} ends at {int(offsets[-1]) if offsets.numel() else 'nothing'}, but there are "
            f"{batch * length} tokens",
            fix="Give where each document begins and the number of tokens, as DataCollatorWithFlattening does",
        )


def _documents(offsets: Tensor, tokens: Tensor) -> Tensor:
    """The document of each token [B, L]."""
    batch, length = tokens.shape[0], tokens.shape[2]
    places = torch.arange(batch * length, device=offsets.device, dtype=offsets.dtype)
    return torch.bucketize(places, offsets[1:].contiguous(), right=True).view(batch, length)


def _records_attentions() -> bool:
    """Whether the model was called with ``output_attentions`` (or has it in its configuration)."""
    if recorded_outputs is None or torch.compiler.is_dynamo_compiling():
        return False
    asked = recorded_outputs.get()
    return bool(asked) and any(name.endswith("attentions") for name in asked)
