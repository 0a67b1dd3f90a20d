"""Attention for Hugging Face transformers: the attention function, its mask function, and which models they can serve.

transformers asks a registered mask function for the mask of a forward pass and hands the result, through the model's
own code, to the registered attention function. Masks that indices can express (causal, sliding window, one truth value
per key) are not built as a matrix, so the two functions must agree on what a missing matrix means. Models differ in how
much of that agreement they keep; that is read from what the model
classes declare (``_FLASH``, ``_SDPA``, ``_EAGER``), and models that never
call the attention function are refused (:func:`check_dispatch`).

``transformers.py`` re-exports the public names. This file may import the errors and the ops.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from ..errors import ArgumentError, FallbackWarning
from ..ops import attention

recorded_outputs: Any = None
with contextlib.suppress(ImportError):  # what a forward pass records; not all models pass `output_attentions` on
    from transformers.utils.output_capturing import _active_collector as recorded_outputs

NAME = "monoidreduce"

# What a model class declares that its attention layers understand, from most to least:
_FLASH = "flash"  # None or a 2-dim padding mask, beside `is_causal` and `sliding_window`, as FlashAttention has it
_SDPA = "sdpa"  # None beside `is_causal`, or a boolean matrix, as torch's scaled_dot_product_attention has it
_EAGER = "eager"  # only a matrix that is added to the scores; None means that nothing is masked


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
    _check_models_when_made()


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
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: ``query`` [B, H, M, f], ``key`` and ``value`` [B, Hkv, N, f] give [B, M, H, f].

    ``attention_mask`` is what :func:`mask` returned: None (causal if the layer is, in its sliding window), one truth
    value per key [B, N] (causal besides, in the sliding window; the last query is aligned with the last key), or a
    matrix [B, 1, M, N] that contains everything.

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
    if attention_mask is None:
        asked = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        config = getattr(module, "config", None)
        form = _mask_form_of_layer_class(type(module)) if config is None else _mask_form_of_config_class(type(config))
        # A layer that says `is_causal` may also be used for cross-attention, where nothing is masked.
        causal = bool(asked) and (form == _FLASH or (form == _SDPA and query.shape[2] == key.shape[2]))
        windowed = causal and form == _FLASH
    else:
        causal = windowed = attention_mask.dim() == 2
        if causal:
            attention_mask = attention_mask[:, None, None, :]
    found = attention(
        query,
        key,
        value,
        attention_mask,
        dropout,
        causal="lower_right" if causal else False,
        window=(sliding_window - 1, None) if windowed and sliding_window is not None else None,
        scale=scaling,
        softcap=softcap,
        bias=position_bias,
        sinks=s_aux,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found.transpose(1, 2).contiguous(), None


def _records_attentions() -> bool:
    """Whether the model was called with ``output_attentions`` (or has it in its configuration)."""
    if recorded_outputs is None or torch.compiler.is_dynamo_compiling():
        return False
    asked = recorded_outputs.get()
    return bool(asked) and any(name.endswith("attentions") for name in asked)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for :func:`attention_forward`: None or a vector where indices say the rest, else a matrix.

    Raises :class:`ArgumentError` for a model that does not call the attention function.
    """
    form = _FLASH if config is None else _mask_form_of_config_class(type(config))
    # A static cache counts its tokens in a tensor: reading it would synchronise, and break a compiled model's graph.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if aligned and allow_is_causal_skip and form != _EAGER:
        windowed = mask_function is not causal_mask_function
        if not windowed and attention_mask is None and (q_length == kv_length or q_length == 1):
            return None
        if form == _FLASH and (not windowed or _is_sliding_window(mask_function, local_size, config)):
            if attention_mask is None:
                return None
            if attention_mask.shape[-1] == kv_offset + kv_length:
                return attention_mask[:, -kv_length:].bool()
    kwargs.update(local_size=local_size, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    build = eager_mask if form == _EAGER else sdpa_mask
    return build(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs)


def _is_sliding_window(function: Callable, local_size: int | None, config: Any) -> bool:
    """Whether a mask function is causal in a sliding window, and nothing else."""
    if torch.compiler.is_dynamo_compiling():
        # Dynamo cannot read a closure. transformers sets `allow_is_causal_skip`, which the caller asked, only for masks
        # that consist of causal order and `local_size`: a sliding window, or the size of a chunk.
        window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
        return local_size is not None and local_size == window and local_size != chunk
    cells: Any = getattr(function, "__closure__", None) or ()
    parts = cells[0].cell_contents if len(cells) == 1 and isinstance(cells[0].cell_contents, tuple) else ()
    others = [p for p in parts if p is not causal_mask_function]
    return len(parts) == 2 and len(others) == 1 and others[0].__qualname__.startswith("sliding_window_overlay.")


# Which models can be served


def check_dispatch(model_class: type) -> None:
    """Raise :class:`ArgumentError` for a model class whose attention layers do not call the attention function.

    Such a model would take the mask of :func:`mask`, which leaves causal order to the attention function, and then
    compute attention with code of its own: a causal model would see the future. Encoders of images and sounds, parts of
    larger models, compute what they always do, with a :class:`FallbackWarning`.
    """
    found = _dispatch(model_class)
    if found is Dispatch.REFUSED:
        raise ArgumentError(
            detail=f'{model_class.__name__} was given attn_implementation="{NAME}", but its attention layers have code '
            "of their own and do not call the attention function that is registered with transformers",
            fix='Use attn_implementation="eager" (or "sdpa" where the model has it) for this model. Where it is a part '
            f'of a larger one, choose for each part: dict(text_config="{NAME}", vision_config="eager")',
        )
    if found is Dispatch.IGNORED:
        warnings.warn(
            f'{model_class.__name__} has attention code of its own: attn_implementation="{NAME}" does not change it',
            FallbackWarning,
            stacklevel=2,
        )


def check_attention(model: PreTrainedModel) -> None:
    """:func:`check_dispatch` for a model and its submodels, those of them that are set to our attention."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "_attn_implementation", None) == NAME:
            check_dispatch(type(part))


class Dispatch(enum.Enum):
    """What becomes of a model class that is set to our attention."""

    SERVED = enum.auto()  # its layers look the attention function up, or it has no attention
    IGNORED = enum.auto()  # its layers have code of their own, and are given the masks that they can read
    REFUSED = enum.auto()  # its layers have code of their own


class Reading(NamedTuple):
    """What the bytecode of a model class, and of the layers that it constructs, says about its attention."""

    classes: frozenset[type]  # the model class, its layers, and models inside it that share its configuration
    has_attention: bool
    uses_interface: bool  # transformers' AttentionInterface, where our function is registered
    own_choice: bool  # among layers of its own, by the name of the implementation: it does not know ours
    has_parts: bool  # models with configurations of their own, which are looked at when they are made


@functools.cache
def _dispatch(model_class: type) -> Dispatch:
    """What becomes of a model class that is set to our attention."""
    found = _read(model_class)
    if found.own_choice:
        return Dispatch.REFUSED
    if found.uses_interface or not found.has_attention:
        return Dispatch.SERVED
    config_class = getattr(model_class, "config_class", None)
    if any(_read(c).uses_interface and model_class in _read(c).classes for c in _models(config_class)):
        return Dispatch.IGNORED  # an encoder, say, beside a decoder that looks the attention function up
    if found.has_parts:
        return Dispatch.SERVED
    of_tokens = "input_ids" in inspect.signature(model_class.forward).parameters  # type: ignore[attr-defined]
    return Dispatch.REFUSED if of_tokens else Dispatch.IGNORED


@functools.cache
def _read(model_class: type) -> Reading:
    has_attention = uses_interface = own_choice = has_parts = False
    pending, seen = [model_class], set()
    while pending:
        found = pending.pop()
        if found in seen:
            continue
        seen.add(found)
        has_attention |= "Attention" in found.__name__ and not issubclass(found, PreTrainedModel)
        for name, value in _globals_used(found):
            uses_interface |= name == "ALL_ATTENTION_FUNCTIONS"
            own_choice |= isinstance(value, dict) and "eager" in value and all(map(_is_layer, value.values()))
            if _is_layer(value) and _shares_config(value, model_class):
                pending.append(value)
            elif _is_layer(value) or name.startswith("AutoModel"):
                has_parts = True
    return Reading(frozenset(seen), has_attention, uses_interface, own_choice, has_parts)


def _models(config_class: type | None) -> list[type]:
    """The model classes that have a configuration of this class."""
    return [c for c in _subclasses(PreTrainedModel) if getattr(c, "config_class", None) is config_class]


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _shares_config(layer: type, model_class: type) -> bool:
    """False for a model with a configuration of its own, which has an attention implementation of its own."""
    return not issubclass(layer, PreTrainedModel) or layer.config_class is getattr(model_class, "config_class", None)


def _globals_used(layer: type) -> Iterator[tuple[str, Any]]:
    """The global names that the methods of a class use, those of its bases included, and their values."""
    bases = [c for c in layer.__mro__ if c not in PreTrainedModel.__mro__]
    # `_init_weights` names layers that other models construct
    members = [m for c in bases for name, m in vars(c).items() if name != "_init_weights"]
    functions = [inspect.unwrap(getattr(m, "__func__", m)) for m in members if callable(getattr(m, "__func__", m))]
    for function in filter(inspect.isfunction, functions):
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
            codes += [c for c in code.co_consts if inspect.iscode(c)]  # comprehensions and inner functions


def _classes(module_name: str) -> list[type]:
    """The classes that a module defines."""
    module = sys.modules.get(module_name)
    found = [] if module is None else [c for c in vars(module).values() if isinstance(c, type)]
    return [c for c in found if c.__module__ == module_name]


def _mask_form(model_class: Any) -> str:
    """The form of masks that a model class declares to understand."""
    return _FLASH if model_class._supports_flash_attn else _SDPA if model_class._supports_sdpa else _EAGER


@functools.cache
def _mask_form_of_module(name: str) -> str:
    """The form of masks of a layer that has no configuration: the best that a model in the same module understands."""
    forms = [_mask_form(c) for c in _classes(name) if issubclass(c, PreTrainedModel)]
    return next((form for form in (_FLASH, _SDPA, _EAGER) if form in forms), _FLASH)


@functools.cache
def _mask_form_of_config(config_class: type) -> str:
    """The form of masks of the models that have a configuration of this class, some of which must be served."""
    models = next(filter(None, map(_models, config_class.__mro__)), [])
    outcomes = {c: _dispatch(c) for c in models if _read(c).has_attention or _read(c).own_choice}
    if outcomes and Dispatch.SERVED not in outcomes.values():
        for model_class in outcomes:
            check_dispatch(model_class)
    if any(found is not Dispatch.SERVED for found in outcomes.values()):
        return _EAGER  # what attention code of their own can read
    forms = [_mask_form(c) for c in outcomes]
    return next((form for form in (_EAGER, _SDPA) if form in forms), _FLASH)


# Dynamo runs these once and takes the answers for constants: they depend on classes alone.


@torch.compiler.assume_constant_result
def _mask_form_of_config_class(config_class: type) -> str:
    return _mask_form_of_config(config_class)


@torch.compiler.assume_constant_result
def _mask_form_of_layer_class(layer_class: type) -> str:
    return _mask_form_of_module(layer_class.__module__)


def _subclasses(parent: type) -> list[type]:
    found: list[type] = list(parent.__subclasses__())
    return found + [c for child in found for c in _subclasses(child)]


def _check_models_when_made() -> None:
    """Have transformers' own check of a model's attention implementation refuse what :func:`check_dispatch` refuses.

    transformers has no hook for it: any registered name is valid for any model. The check runs in a model's constructor
    and in ``set_attn_implementation``, before any layer is made.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "_checks_dispatch", False):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            check_dispatch(type(self))
        return check(self, requested_attention, *args, **kwargs)

    checked._checks_dispatch = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]
