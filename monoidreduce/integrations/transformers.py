"""Hugging Face transformers: our attention in its models, and the loss of a causal language model without its logits.

    register()                                    # once; then attn_implementation="monoidreduce" is a choice
    fuse_loss(model)                              # its loss then never builds [tokens, vocabulary]

Causal, sliding and padded attention are said by indices and by one truth value per key; only masks of another form (a
prefix, packed documents, a static cache) reach us as a matrix, which is then read tile by tile. The attention is in
``transformers_attention.py``, the loss here.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..errors import ArgumentError
from ..ops import linear_cross_entropy, linear_logprobs
from .transformers_attention import NAME, attention_forward, check_attention, mask, register

__all__ = [
    "NAME",
    "attention_forward",
    "causal_lm_loss",
    "fuse_loss",
    "mask",
    "register",
    "token_logprobs",
]
_IGNORED = -100
_LOSS_OPTIONS = ("num_items_in_batch", "shift_labels", "ignore_index")


# The loss


def fuse_loss(model: PreTrainedModel, *, check: bool = True) -> PreTrainedModel:
    """Make a causal language model compute its loss from hidden states, never its logits, where labels are given.

    The model (returned, and changed in place) then answers ``model(input_ids, labels=labels)`` with the same ``loss``
    and with ``logits=None``; without labels (generation, evaluation of logits) nothing changes. With
    ``return_dict=False``, in the call or in the configuration, the answer is a tuple with None in the logits' place.
    Soft caps and scales of the logits are read from the configuration. ``check`` compares both losses on a few random
    tokens first, so that a model which does something else to its logits is refused; turn it off where the weights are
    not there yet.

    Raises :class:`ArgumentError` for a model without a linear head, whose loss is not the cross-entropy of its head, or
    that is set to our attention and does not call it.

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
    check_attention(model)  # comparing losses would not notice: both would come from the same wrong attention

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
    hidden, loss_options = _hidden(model, (), options)[1:]
    return _loss(model, hidden, inputs.get("labels"), **loss_options)


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
    hidden = _hidden(model, (), inputs)[1]
    head, options = _head(model)
    return linear_logprobs(hidden, head.weight, tokens, bias=head.bias, **options)


def _forward(
    model: PreTrainedModel, args: tuple, labels: Tensor | None, kwargs: dict
) -> CausalLMOutputWithPast | tuple:
    """A causal language model's forward with labels: the base model, then the loss of its head."""
    outputs, hidden, loss_options = _hidden(model, args, kwargs)
    found: Any = _loss(model, hidden, labels, **loss_options)
    rest = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
    return_dict = kwargs.get("return_dict")
    if return_dict is None:
        return_dict = getattr(model.config, "return_dict", True)
    if not return_dict:  # transformers leaves out what is None, but the logits keep their place before the others
        return (found, None, *(value for value in rest.values() if value is not None))
    return CausalLMOutputWithPast(loss=found, logits=None, **rest)


def _hidden(model: PreTrainedModel, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Tensor, dict[str, Any]]:
    """The base model's outputs, its last hidden states, and the options that were meant for the loss."""
    loss_options = {k: v for k, v in kwargs.items() if k in _LOSS_OPTIONS}
    others = {k: v for k, v in kwargs.items() if k not in (*_LOSS_OPTIONS, "logits_to_keep", "return_dict")}
    outputs = _base(model)(*args, **others, return_dict=True)
    return outputs, outputs.last_hidden_state, loss_options


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
    common: dict[str, Any] = dict(bias=head.bias, ignore_index=ignore_index, **options)
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


def _head(model: PreTrainedModel) -> tuple[nn.Linear, dict[str, Any]]:
    """The head, and what the configuration says is done to its logits."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ArgumentError(
            detail=f"the head of {type(model).__name__} is {type(head).__name__}, not nn.Linear",
            fix="Give a causal language model with a plain linear head",
        )
    config = model.config.get_text_config()
    options: dict[str, Any] = {}
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
        expected = model(input_ids=tokens, labels=tokens, return_dict=True).loss
        found = fused(input_ids=tokens, labels=tokens, return_dict=True).loss
    finally:
        model.train(training)
    if not torch.allclose(found.float(), expected.float(), rtol=2e-2 if head.weight.dtype.itemsize < 4 else 1e-4):
        raise ArgumentError(
            detail=f"{type(model).__name__}'s own loss is {expected:.6f} where its linear head's is {found:.6f}",
            fix="It does more than a linear head to its logits or its loss: keep its own forward",
        )
