"""The heads of language models: what their logits are made of, where PEFT wrapped them too.

A head is an ``nn.Linear``, alone or wrapped by PEFT: a copy that is trained (``modules_to_save``), or LoRA, which adds
``scaling * dropout(hidden) @ A.T @ B.T`` to the logits. The rows ``scaling * dropout(hidden) @ A.T`` [..., r] and the
columns B [V, r] become a second product of the fold. Neither ``W + B @ A`` nor the concatenation ``[W, B]`` is built:
both are as large as the head, and with both a frozen W would get a gradient.

This file may import the errors.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError

ADVICE = "call unfuse_loss(model) to let the model build its logits and compute its own loss"


@dataclasses.dataclass(frozen=True)
class Head:
    """A head's parameters: ``weight`` [V, D], ``bias`` [V] or None, and low-rank terms that are added to the product.

    A low-rank term is a function from hidden states [..., D] to rows [..., r], and columns [V, r].
    """

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[tuple[Callable[[Tensor], Tensor], Tensor], ...] = ()


def read_head(head: nn.Module | None, owner: str) -> Head:
    """What a model's head multiplies with. ``owner`` is the name of the model's class, for errors."""
    if any(hasattr(p, "ds_id") for p in (() if head is None else head.parameters())):
        raise ArgumentError(
            detail=f"the head of {owner} is partitioned by DeepSpeed ZeRO-3, which gathers weights only while their "
            "module is called, and a loss without logits does not call the head",
            fix=f"Shard with FSDP2 (fully_shard) or ZeRO-2, or {ADVICE}",
        )
    if type(head).__module__.startswith("peft."):
        return _read_wrapper(head, owner)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = "missing" if head is None else type(head).__name__
        raise ArgumentError(
            detail=f"the head of {owner} is {kind}, not a plain nn.Linear",
            fix="Only a linear head's loss can be computed without its logits: give a language model with an nn.Linear "
            "head that is not quantised, or keep the model's own loss",
        )
    _check_untouched(head, owner)
    weight = head.weight
    if not weight.is_floating_point() or weight.is_meta:
        raise ArgumentError(
            detail=f"the head of {owner} has weights of type {str(weight.dtype)[6:]} on {weight.device}",
            fix="Leave the head unquantised (llm_int8_skip_modules, modules_to_not_convert) and not offloaded",
        )
    return Head(weight, head.bias)


def _check_untouched(head: nn.Module, owner: str) -> None:
    """Refuse a head whose call does more than its class says: hooks, or a forward that was replaced.

    A head that accelerate placed on a device, or that FSDP2 sharded, is taken: its weights are read where they lie.
    """
    placed = hasattr(head, "_hf_hook") or hasattr(head, "unshard")
    if not placed and (head._forward_pre_hooks or head._forward_hooks or "forward" in head.__dict__):
        raise ArgumentError(
            detail=f"the head of {owner} has hooks or a forward of its own, which a loss without logits would pass by",
            fix=f"Remove them, or {ADVICE}",
        )


def _read_wrapper(head: Any, owner: str) -> Head:
    """The parameters of a wrapped head, as its wrapper would use them now: active, disabled or merged adapters."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper

    _check_untouched(head, owner)
    if isinstance(head, ModulesToSaveWrapper):
        used = not head.disable_adapters and head.active_adapters and head.active_adapters[0] in head.modules_to_save
        return read_head(head.modules_to_save[head.active_adapters[0]] if used else head.original_module, owner)
    if type(head) is not LoraLinear:
        raise ArgumentError(
            detail=f"the head of {owner} is {type(head).__module__}.{type(head).__name__}, of which only LoRA's linear "
            "layer and modules_to_save can be used without logits",
            fix=f'Leave the head out of target_modules, use LoRA or modules_to_save=["lm_head"] for it, or {ADVICE}',
        )
    base = read_head(head.base_layer, owner)
    if head.disable_adapters:
        if head.merged:
            head.unmerge()  # as PEFT does
            base = read_head(head.base_layer, owner)
        return base
    if head.merged:
        return base
    bias, terms = base.bias, list(base.low_rank)
    for name in head.active_adapters:
        if name not in head.lora_A:
            continue
        if name in head.lora_variant:
            raise ArgumentError(
                detail=f"adapter {name!r} of the head of {owner} is not plain LoRA but "
                f"{type(head.lora_variant[name]).__name__}, whose logits are more than low-rank terms",
                fix=f"Leave the head out of target_modules, leave that option (DoRA, say) out, or {ADVICE}",
            )
        scaling, down = head.scaling[name], head.lora_A[name]
        up: Any = head.lora_B[name]
        make_rows = functools.partial(_rows, head, down, head.lora_dropout[name], scaling)
        terms.append((make_rows, up.weight))
        if up.bias is not None:
            added = (up.bias * scaling).to(base.weight.dtype)
            bias = added if bias is None else bias + added
    return Head(base.weight, bias, tuple(terms))


def _rows(layer: Any, down: nn.Module, dropout: Callable[[Tensor], Tensor], scaling: float, hidden: Tensor) -> Tensor:
    """``scaling * dropout(hidden) @ A.T``, in the type that PEFT would use."""
    return down(dropout(layer._cast_input_dtype(hidden, down.weight.dtype))) * scaling
