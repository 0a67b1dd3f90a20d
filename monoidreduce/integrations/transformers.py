"""Hugging Face transformers: our attention in its models, and the loss of a causal language model without its logits.

    register()                                    # once; then attn_implementation="monoidreduce" is a choice
    fuse_loss(model)                              # its loss then never builds [tokens, vocabulary]

Causal, sliding and padded attention are said by indices and by one truth value per key; only masks of another form (a
prefix, packed documents, a static cache) reach us as a matrix, which is then read tile by tile.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import ArgumentError
from ..ops import attention, linear_cross_entropy, linear_logprobs

NAME = "monoidreduce"
_IGNORED = -100
_LOSS_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")


# Attention


def register() -> None:
    """Make ``attn_implementation="monoidreduce"`` a choice for every model of transformers.

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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` [B, H, M, f], ``key`` and ``value`` [B, Hkv, N, f] give [B, M, H, f].

    ``attention_mask`` is what :func:`mask` made: None, one truth value per key [B, N] (both beside causal and sliding,
    the last query standing beside the last key), or a matrix [B, 1, M, N] that says all there is to say.
    """
    asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    by_index = attention_mask is None or attention_mask.dim() == 2
    causal = bool(asked) and by_index
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]
    found = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal="lower_right" if causal else False,
        window=(sliding_window - 1, None) if causal and sliding_window is not None else None,
        scale=scaling,
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask that :func:`attention_forward` needs: nothing or a vector where indices say the rest, else a matrix."""
    aligned = q_offset + q_length == kv_offset + kv_length
    if not (aligned and _by_index(mask_function)):
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs | skips
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:].bool()


def _by_index(function: Callable) -> bool:
    """Whether a mask is causal, or causal in a sliding window: what our indices say."""
    if function is causal_mask_function:
        return True
    cells = getattr(function, "__closure__", None) or ()
    parts = cells[0].cell_contents if len(cells) == 1 and isinstance(cells[0].cell_contents, tuple) else ()
    others = [p for p in parts if p is not causal_mask_function]
    return len(parts) == 2 and len(others) == 1 and others[0].__qualname__.startswith("sliding_window_overlay.")


# The loss


def fuse_loss(model: PreTrainedModel, *, check: bool = True) -> PreTrainedModel:
    """Make a causal language model compute its loss from hidden states, never its logits, where labels are given.

    The model (returned, and changed in place) then answers ``model(input_ids, labels=labels)`` with the same ``loss``
    and with ``logits=None``; without labels (generation, evaluation of logits) nothing changes. Soft caps and scales of
    the logits are read from the configuration. ``check`` compares both roads on a few random tokens first, so that a
    model which does something else to its logits is refused; turn it off where the weights are not there yet.

    Raises :class:`ArgumentError` for a model without a linear head, or whose loss is not the cross-entropy of its head.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import fuse_loss
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(0, 50, (2, 9))
    >>> expected = model(tokens, labels=tokens).loss
    >>> torch.allclose(fuse_loss(model)(tokens, labels=tokens).loss, expected)
    True
    """
    _head(model)

    @functools.wraps(type(model).forward)
    def forward(self: PreTrainedModel, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None and kwargs.get("shift_labels") is None:
            return type(self).forward(self, *args, **kwargs)
        return _forward(self, args, labels, kwargs)

    if check:
        _check(model, functools.partial(forward, model))
    model.forward = types.MethodType(forward, model)
    return model


def causal_lm_loss(
    model: PreTrainedModel, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """The loss of a batch (``input_ids``, ``labels`` and what else the model takes), for a trainer's ``compute_loss``.

    The same as ``model(**inputs).loss``, without ever allocating the logits, and without changing the model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import causal_lm_loss
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(0, 50, (2, 9))
    >>> torch.allclose(
    ...     causal_lm_loss(model, dict(input_ids=tokens, labels=tokens)), model(tokens, labels=tokens).loss
    ... )
    True
    """
    options = {k: v for k, v in inputs.items() if k != "labels"}
    if num_items_in_batch is not None:
        options["num_items_in_batch"] = num_items_in_batch
    return _forward(model, (), inputs.get("labels"), options).loss


def token_logprobs(model: PreTrainedModel, inputs: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The log-probability of each token [B, T] under the logits at its place, for preference and policy losses.

    The same as ``torch.log_softmax(model(**inputs).logits, -1).gather(-1, tokens[..., None])[..., 0]``, without ever
    allocating the logits; position t of ``tokens`` belongs to position t of the logits (shift them beforehand).
    Differentiable.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import token_logprobs
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(0, 50, (2, 9))
    >>> found = token_logprobs(model, dict(input_ids=tokens), tokens)
    >>> expected = torch.log_softmax(model(tokens).logits, -1).gather(-1, tokens[..., None])[..., 0]
    >>> torch.allclose(found, expected, atol=1e-5)
    True
    """
    hidden = _base(model)(**inputs).last_hidden_state
    head, options = _head(model)
    return linear_logprobs(hidden, head.weight, tokens, bias=head.bias, **options)


def _forward(model: PreTrainedModel, args: tuple, labels: Tensor | None, kwargs: dict) -> CausalLMOutputWithPast:
    """A causal language model's forward with labels: the base model, then the loss of its head."""
    loss_options = {k: kwargs.pop(k) for k in _LOSS_OPTIONS if k in kwargs}
    kwargs.pop("logits_to_keep", None)
    kwargs.pop("return_dict", None)
    outputs = _base(model)(*args, **kwargs)
    return CausalLMOutputWithPast(
        loss=_loss(model, outputs.last_hidden_state, labels, **loss_options),
        logits=None,
        past_key_values=outputs.get("past_key_values"),
        hidden_states=outputs.get("hidden_states"),
        attentions=outputs.get("attentions"),
    )


def _loss(
    model: PreTrainedModel,
    hidden: Tensor,
    labels: Tensor | None,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    ignore_index: int = _IGNORED,
) -> Tensor:
    """As transformers defines it: the mean over the tokens that count, or the sum over a given number."""
    head, options = _head(model)
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.to(hidden.device)
    common = dict(bias=head.bias, ignore_index=ignore_index, **options)
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, head.weight, target, reduction="mean", **common)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(hidden.device)
    return linear_cross_entropy(hidden, head.weight, target, reduction="sum", **common) / num_items_in_batch


def _base(model: PreTrainedModel) -> nn.Module:
    base = model.base_model
    if base is model:
        raise ArgumentError(detail=f"{type(model).__name__} has no base model under a head", fix="Give a causal LM")
    return base


def _head(model: PreTrainedModel) -> tuple[nn.Linear, dict[str, float]]:
    """The head, and what the configuration says is done to its logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ArgumentError(
            detail=f"the head of {type(model).__name__} is {type(head).__name__}, not nn.Linear",
            fix="Give a causal language model with a plain linear head",
        )
    config = model.config.get_text_config()
    options: dict[str, float] = {}
    if getattr(config, "final_logit_softcapping", None):  # Gemma
        options["softcap"] = float(config.final_logit_softcapping)
    if getattr(config, "logits_scaling", None):  # Granite
        options["temperature"] = float(config.logits_scaling)
    if getattr(config, "logit_scale", None):  # Cohere
        options["temperature"] = 1 / float(config.logit_scale)
    return head, options


@torch.no_grad()
def _check(model: PreTrainedModel, fused: Callable) -> None:
    """Both roads on a few random tokens, dropout off."""
    head, _ = _head(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, head.out_features, (2, 8), generator=generator).to(head.weight.device)
    training = model.training
    model.eval()
    try:
        expected = model(input_ids=tokens, labels=tokens).loss
        found = fused(input_ids=tokens, labels=tokens).loss
    finally:
        model.train(training)
    if not torch.allclose(found.float(), expected.float(), rtol=2e-2 if head.weight.dtype.itemsize < 4 else 1e-4):
        raise ArgumentError(
            detail=f"{type(model).__name__}'s own loss is {expected:.6f} where its linear head's is {found:.6f}",
            fix="It does more than a linear head to its logits or its loss: keep its own forward",
        )
