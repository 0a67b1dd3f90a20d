"""TRL's trainers with our fold in the place of their vocabulary head: one line, ``fuse(trainer)``.

    trainer = DPOTrainer(model, args=..., train_dataset=...)
    fuse(trainer)                                 # log-probabilities, entropies and metrics without logits
    trainer.train()

TRL gives the models of its trainers (SFT, DPO, GRPO, RLOO, KTO) a fused head: called with ``fused_lm_head=True`` they
return per-token log-probabilities, and what its metrics need, from tiles of logits of a fixed size. :func:`fuse`
replaces that head, on the models of one trainer, by one fold of this library: in the memory of :func:`mr.budget`,
differentiable to any order, with LoRA on the head. Losses, metrics, generation and all else stay TRL's own.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

try:
    from trl import __version__ as TRL_VERSION
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise ImportError(
        "monoidreduce.integrations.trl needs TRL 1.16 or newer, which has fused heads: pip install 'trl>=1.16'"
    ) from error

from ..errors import ArgumentError
from ..ops.logprobs import token_statistics
from .model_heads import Head, gather_head, read_head

__all__ = ["fuse", "unfuse"]
Trainer = TypeVar("Trainer")
_IGNORED = -100
_OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
_STATE = "_monoidreduce_fused_head"


def fuse(trainer: Trainer) -> Trainer:
    """Make the models of a TRL trainer compute log-probabilities, entropies and metrics by a fold, never their logits.

    The trainer (returned, and changed in place: its policy, and its reference model where it has one) then trains as
    before, with the same losses and the same logged metrics; :func:`unfuse` gives back TRL's own head. Call it after
    the trainer is made and before ``trainer.train()``. Temperature, soft caps and scales of logits, the float32 head
    (``cast_lm_head_to_fp32``) and router losses are those that TRL set up.

    Raises :class:`ArgumentError` for a trainer whose models have no such head (RewardTrainer), for a version of TRL
    that builds it in another way, for a head that is not linear, and under DeepSpeed ZeRO-3, which takes the weights
    away between forward and backward.

    See ``examples/train_trl.py`` for trainers of all kinds.

    >>> from monoidreduce.integrations.trl import fuse
    >>> fuse("a trainer")
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ArgumentError: fuse was given a str, which has no model. Give a trainer of TRL ...
    """
    for model in _models(trainer):
        if _STATE in model.__dict__:
            continue
        settings = _read_settings(model, type(trainer).__name__)
        _read_head(model, settings)
        model.__dict__[_STATE] = settings
        model.forward = types.MethodType(_make_forward(model), model)
    return trainer


def unfuse(trainer: Trainer) -> Trainer:
    """Give the models of a trainer TRL's own fused head again; the trainer is returned.

    >>> from monoidreduce.integrations.trl import unfuse
    >>> unfuse(3)
    Traceback (most recent call last):
    ...
    monoidreduce.errors.ArgumentError: fuse was given a int, which has no model. Give a trainer of TRL ...
    """
    for model in _models(trainer):
        settings = model.__dict__.pop(_STATE, None)
        if settings is not None:
            model.forward = settings.forward
    return trainer


@dataclass(frozen=True)
class _Settings:
    """What TRL set up for a model's fused head, and the forward that it made."""

    forward: Any
    temperature: float
    cast_to_float32: bool
    outputs: tuple[str, ...]


def _models(trainer: Any) -> Iterator[PreTrainedModel]:
    """The policy and the reference model, out of their wrappers."""
    a_model = isinstance(trainer, nn.Module)
    if a_model or not isinstance(getattr(trainer, "model", None), nn.Module):
        more = ". The loss of a model is fused by monoidreduce.integrations.transformers.fuse_loss" if a_model else ""
        raise ArgumentError(
            detail=f"fuse was given a {type(trainer).__name__}, which {'is' if a_model else 'has'} no "
            f"{'trainer' if a_model else 'model'}",
            fix=f"Give a trainer of TRL (SFTTrainer, DPOTrainer, GRPOTrainer, RLOOTrainer, KTOTrainer){more}",
        )
    for model in (trainer.model, getattr(trainer, "ref_model", None)):
        if model is not None:
            yield _unwrap(model)


def _unwrap(model: Any) -> PreTrainedModel:
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def _read_settings(model: PreTrainedModel, trainer: str) -> _Settings:
    """The settings of TRL's fused head, from the closure that it made of them."""
    own = model.__dict__.get("forward")
    function = getattr(own, "__func__", None)
    cells = getattr(function, "__closure__", None) or ()
    known = dict(zip(function.__code__.co_freevars, cells, strict=True)) if function is not None else {}
    names = ("temperature", "cast_lm_head_to_fp32", "outputs")
    if not all(name in known for name in names):
        raise ArgumentError(
            detail=f"the {type(model).__name__} of {trainer} has no fused head as TRL 1.16 builds it "
            f"(this is TRL {TRL_VERSION})",
            fix="Give a trainer that scores tokens (SFT, DPO, GRPO, RLOO, KTO) of TRL 1.16, before it is compiled; "
            "others keep their own loss, for which monoidreduce.ops.linear_logprobs and linear_jsd are the parts",
        )
    temperature, cast, outputs = (known[name].cell_contents for name in names)
    unknown = [name for name in outputs if name not in _OUTPUTS]
    if unknown:
        raise ArgumentError(
            detail=f"{trainer} of TRL {TRL_VERSION} asks its head for {', '.join(unknown)}, which 1.16 does not have",
            fix=f"fuse knows {', '.join(_OUTPUTS)}: use TRL 1.16, or leave fuse out",
        )
    return _Settings(own, float(temperature), bool(cast), tuple(outputs))


# The forward of a model


def _make_forward(model: PreTrainedModel) -> Any:
    @functools.wraps(type(model).forward)  # generate compares its arguments with this signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        settings = self.__dict__[_STATE]
        given = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
        if not fused_lm_head:
            return settings.forward(*args, **kwargs, **{k: v for k, v in given.items() if v is not None})
        return _score_tokens(self, settings, args, kwargs, **given)

    return forward


def _score_tokens(
    model: PreTrainedModel,
    settings: _Settings,
    args: tuple,
    kwargs: dict[str, Any],
    labels: Tensor | None,
    shift_labels: Tensor | None,
    num_items_in_batch: Any,
) -> FusedCausalLMOutput:
    """TRL's fused output: the base model, then one fold of its head over the tokens that count."""
    config = model.config.get_text_config()
    kwargs = {**kwargs, "use_cache": False}
    if getattr(config, "output_router_logits", False):
        kwargs.setdefault("output_router_logits", True)
    outputs = model.base_model(*args, **kwargs)
    hidden = outputs.last_hidden_state
    if shift_labels is None:
        if labels is None:
            raise ArgumentError(detail="the fused head was called without labels", fix="Give labels or shift_labels")
        hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
    found, mask = _statistics(model, settings, hidden, shift_labels)
    count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss, aux_loss = -found["log_probs"].sum() / count, None
    if kwargs.get("output_router_logits"):
        aux_loss = _router_loss(config, outputs, kwargs.get("attention_mask"))
        loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
    return FusedCausalLMOutput(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)


def _router_loss(config: Any, outputs: Any, attention_mask: Tensor | None) -> Any:
    """The load-balancing loss of a mixture of experts, as transformers and TRL define it for all families."""
    return load_balancing_loss_func(
        outputs.router_logits, config.num_experts, config.num_experts_per_tok, attention_mask
    )


def _statistics(
    model: PreTrainedModel, settings: _Settings, hidden: Tensor, labels: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """What was asked of each token, 0 where its label is ignored, and which tokens count."""
    head, options = _read_head(model, settings)
    hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
    mask = labels != _IGNORED
    plain: Any = contextlib.nullcontext()
    if settings.cast_to_float32:
        hidden, plain = hidden.float(), torch.autocast(hidden.device.type, enabled=False)
    whole = torch.compiler.is_compiling()  # a compiled graph keeps its shapes: every token is scored
    rows = hidden.flatten(0, -2) if whole else hidden[mask]
    target = labels.clamp(min=0).flatten() if whole else labels[mask]
    wanted = {name: name in settings.outputs for name in _OUTPUTS[1:]}
    scaled = options["temperature"]
    given = {"softcap": options["softcap"], "temperature": None if scaled == 1 else scaled}
    with plain:
        weight, bias, low_rank = gather_head(head, model.get_output_embeddings(), rows, type(model).__name__)
        low = {} if low_rank is None else {"low_rows": low_rank[0], "low_cols": low_rank[1]}
        found = token_statistics(rows, weight, target, bias=bias, **wanted, **given, **low)
    found |= {name: found[name].detach() for name in ("log_sum_sq_probs", "mean_logits") if name in found}
    return {name: _spread(y, mask, whole) for name, y in found.items()}, mask


def _spread(y: Tensor, mask: Tensor, whole: bool) -> Tensor:
    """A number per scored token as one per token; connected to the model even where no token counts."""
    if whole:
        return y.view(mask.shape).masked_fill(~mask, 0)
    return y.new_zeros(mask.shape).masked_scatter(mask, y)


def _read_head(model: PreTrainedModel, settings: _Settings) -> tuple[Head, dict[str, Any]]:
    """The head, and what the configuration says is done to its logits, as TRL reads it."""
    if is_deepspeed_zero3_enabled():
        raise ArgumentError(
            detail=f"DeepSpeed ZeRO-3 partitions {type(model).__name__}, and takes the head's weights away between "
            "forward and backward",
            fix="Leave fuse out, or shard with FSDP2 or ZeRO-2",
        )
    layer = model.get_output_embeddings()
    cast = settings.cast_to_float32 and isinstance(layer, nn.Linear)  # TRL gave it a forward that casts
    head = Head(layer.weight, layer.bias) if cast else read_head(layer, type(model).__name__)
    config = model.config.get_text_config()
    softcap, scale = getattr(config, "final_logit_softcapping", None), _logit_scale(config)
    # softcap · tanh(scale · s / softcap) is a cap of softcap / scale on s, times the scale
    return head, {"softcap": softcap and float(softcap) / scale, "temperature": settings.temperature / scale}


def _logit_scale(config: Any) -> float:
    """What multiplies the logits, under the names that families give it."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1 / float(divisor)
