"""Which models of transformers our attention can serve, and the form of masks that their layers understand.

Read from what model classes declare and from the bytecode of their layers, before any number is computed: a model whose
layers never call the attention function that is registered is refused (:func:`check_dispatch`), and so is one with a
layer of somebody's own in their place (:func:`check_layers`). This file may import the errors alone.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import ArgumentError, FallbackWarning

NAME = "monoidreduce"


class MaskForm(enum.IntEnum):
    """What a model class declares that its attention layers understand as a mask, from least to most."""

    EAGER = 0  # only a matrix that is added to the scores; None means that nothing is masked
    SDPA = 1  # None beside `is_causal`, or a boolean matrix, as torch's scaled_dot_product_attention has it
    FLEX = 2  # None as for SDPA, or a mask that the model hands on without looking into it
    FLASH = 3  # None or a 2-dim padding mask, beside `is_causal` and `sliding_window`, as FlashAttention has it


# Layers of some models (Phi-3.5-MoE, Qwen2-MoE) declare FlashAttention and do not tell the attention function of their
# window: it is lost with FlashAttention. We take these models for FLEX, whose windows are in their masks.


def check_dispatch(model_class: type) -> None:
    """Raise :class:`ArgumentError` for a model class whose attention layers do not call the attention function.

    Such a model would take the mask of :func:`mask`, which leaves causal order to the attention function, and then
    compute attention with code of its own: a causal model would see the future. Encoders of images and sounds, parts of
    larger models, compute what they always do, with a :class:`FallbackWarning`.
    """
    found = dispatch(model_class)
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
    """:func:`check_dispatch` and :func:`check_layers` for a model and its submodels that are set to our attention."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and getattr(part.config, "_attn_implementation", None) == NAME:
            check_dispatch(type(part))
            check_layers(part)


def check_layers(model: PreTrainedModel) -> None:
    """Raise :class:`ArgumentError` for a model that has an attention layer that is not of transformers, put into its
    place by a subclass, by hand or by a changed ``forward``, and that does not call the attention function."""
    for path, layer in _layers_within(model):
        if _replaces_attention(path, layer) and not any(map(_calls_interface, layer.modules())):
            raise ArgumentError(
                detail=f'{type(model).__name__} was given attn_implementation="{NAME}", but its layer {path}, a '
                f"{type(layer).__name__}, has attention code of its own and does not call the attention function that "
                "is registered with transformers",
                fix='Use attn_implementation="eager" or "sdpa" for this model, or have the layer\'s forward call '
                "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]",
            )


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
    asks_for_matrix: bool  # of transformers' mask functions: its layers compute with the mask themselves
    loses_window: bool  # it makes masks with a window, of which some layer does not tell the attention function


@functools.cache
def dispatch(model_class: type) -> Dispatch:
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
    has_attention = uses_interface = own_choice = has_parts = asks_for_matrix = has_window = tells_none = False
    pending, seen = [model_class], set()
    while pending:
        found = pending.pop()
        if found in seen:
            continue
        seen.add(found)
        has_attention |= "Attention" in found.__name__ and not issubclass(found, PreTrainedModel)
        for name, value in _globals_used(found):
            uses_interface |= name == "ALL_ATTENTION_FUNCTIONS"
            has_window |= name.startswith("create_") and "sliding_window" in name
            own_choice |= isinstance(value, dict) and "eager" in value and all(map(_is_layer, value.values()))
            if _is_layer(value) and _shares_config(value, model_class):
                pending.append(value)
            elif _is_layer(value) or name.startswith("AutoModel"):
                has_parts = True
        codes = [code for _, code in _codes(found)]
        asks_for_matrix |= any(_passes(code, "allow_is_causal_skip", "allow_is_bidirectional_skip") for code in codes)
        calls = [code for code in codes if "ALL_ATTENTION_FUNCTIONS" in code.co_names]
        tells_none |= not all(_passes(code, "sliding_window") for code in calls)
    loses_window = has_window and tells_none
    return Reading(frozenset(seen), has_attention, uses_interface, own_choice, has_parts, asks_for_matrix, loses_window)


def _models(config_class: type | None) -> list[type]:
    """The model classes that have a configuration of this class."""
    return [c for c in _subclasses(PreTrainedModel) if getattr(c, "config_class", None) is config_class]


def _is_layer(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _shares_config(layer: type, model_class: type) -> bool:
    """False for a model with a configuration of its own, which has an attention implementation of its own."""
    return not issubclass(layer, PreTrainedModel) or layer.config_class is getattr(model_class, "config_class", None)


def _codes(layer: type) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """The code of the methods of a class, those of its bases included, with the functions that hold it."""
    bases = [c for c in layer.__mro__ if c not in PreTrainedModel.__mro__]
    # `_init_weights` names layers that other models construct
    members = [m for c in bases for name, m in vars(c).items() if name != "_init_weights"]
    functions = [inspect.unwrap(getattr(m, "__func__", m)) for m in members if callable(getattr(m, "__func__", m))]
    for function in filter(inspect.isfunction, functions):
        for code in _codes_within(function.__code__):
            yield function, code


def _globals_used(layer: type) -> Iterator[tuple[str, Any]]:
    """The global names that the methods of a class use, those of its bases included, and their values."""
    for function, code in _codes(layer):
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)


# Layers that are not of transformers


def _layers_within(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a model and their paths, without those of submodels that have another attention."""
    pending = [("", model)]
    while pending:
        path, parent = pending.pop()
        for name, layer in reversed(parent._modules.items()):
            if layer is None:
                continue
            if not isinstance(layer, PreTrainedModel):
                yield path + name, layer
            elif getattr(layer.config, "_attn_implementation", None) != NAME:
                continue
            if layer._modules:
                pending.append((f"{path}{name}.", layer))


def _forward_of(layer: nn.Module) -> Any:
    """The function that runs when a layer is called; accelerate and others hang their own before it."""
    found = inspect.unwrap(layer.forward)
    while isinstance(found, functools.partial):
        found = inspect.unwrap(found.func)
    return getattr(found, "__func__", found)


@functools.lru_cache(4096)
def _is_known(forward: Any) -> bool:
    """Whether a function is of transformers, of torch, or of PEFT, whose layers call those that they wrap."""
    return (getattr(forward, "__module__", None) or "").partition(".")[0] in ("transformers", "torch", "peft")


def _replaces_attention(path: str, layer: nn.Module) -> bool:
    """Whether a layer has a ``forward`` that is not of transformers, and takes a mask as an attention layer does."""
    if "forward" not in layer.__dict__ and _is_known(type(layer).forward):
        return False  # most of them
    forward = _forward_of(layer)
    if _is_known(forward):
        return False
    names = set(inspect.signature(forward).parameters)
    if "attention_mask" in names and names & {"past_key_values", "past_key_value", "layer_past", "position_embeddings"}:
        return True
    by_name = any(word in type(layer).__name__.lower() for word in ("attention", "attn"))
    by_place = path.rpartition(".")[2] in ("self_attn", "attn", "attention", "self_attention")
    return (by_name or by_place) and any("mask" in name or name in ("args", "kwargs") for name in names)


def _calls_interface(layer: nn.Module) -> bool:
    """Whether a layer's methods, or functions that they call, name transformers' AttentionInterface.

    Methods that a subclass overrides do not count, unless it calls them.
    """
    members = {name: m for c in reversed(type(layer).__mro__) for name, m in vars(c).items()}
    members["forward"] = _forward_of(layer)
    pending = [(name, m) for name, m in members.items() if not hasattr(nn.Module, name) or name == "forward"]
    seen: set[types.CodeType] = set()
    while pending:
        name, function = pending.pop()
        function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else function
        if not inspect.isfunction(function):
            continue
        for code in _codes_within(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            if "ALL_ATTENTION_FUNCTIONS" in code.co_names or "AttentionInterface" in code.co_names:
                return True
            used = [function.__globals__.get(n) for n in code.co_names]
            used += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
            pending += [("", f) for f in used if inspect.isfunction(f) and not f.__module__.startswith("torch.")]
            if name and name in code.co_names:  # super().forward(...), or Base.forward(self, ...)
                pending += [(name, vars(c)[name]) for c in type(layer).__mro__ if name in vars(c)]
    return False


def _codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of its comprehensions and inner functions."""
    yield code
    for inner in filter(inspect.iscode, code.co_consts):
        yield from _codes_within(inner)


def _passes(code: types.CodeType, *names: str) -> bool:
    """Whether a function passes one of these names on, as an argument or a key."""
    constants = [c for value in code.co_consts for c in (value if isinstance(value, tuple) else (value,))]
    return any(name in constants for name in names)


def _classes(module_name: str) -> list[type]:
    """The classes that a module defines."""
    module = sys.modules.get(module_name)
    found = [] if module is None else [c for c in vars(module).values() if isinstance(c, type)]
    return [c for c in found if c.__module__ == module_name]


def _mask_form(model_class: Any) -> MaskForm:
    """The form of masks that a model class declares to understand."""
    if _read(model_class).asks_for_matrix:
        return MaskForm.SDPA if model_class._supports_sdpa else MaskForm.EAGER
    if model_class._supports_flash_attn:
        return MaskForm.FLEX if _read(model_class).loses_window else MaskForm.FLASH
    if not model_class._supports_sdpa:
        return MaskForm.EAGER
    return MaskForm.FLEX if model_class._supports_flex_attn else MaskForm.SDPA


@functools.cache
def _mask_form_of_module(name: str) -> MaskForm:
    """The form of masks of a layer that has no configuration: the best that a model in the same module understands."""
    return max((_mask_form(c) for c in _classes(name) if issubclass(c, PreTrainedModel)), default=MaskForm.FLASH)


def _mask_form_of_config(config_class: type) -> MaskForm:
    """The form of masks of the models that have a configuration of this class, some of which must be served."""
    found = _form_of_config.get(config_class)
    if found is None:
        models = next(filter(None, map(_models, config_class.__mro__)), [])
        found = _mask_form_of_models(models)
        if models:  # else they may be imported later
            _form_of_config[config_class] = found
    return found


_form_of_config: dict[type, MaskForm] = {}


def _mask_form_of_models(models: list[type]) -> MaskForm:
    outcomes = {c: dispatch(c) for c in models if _read(c).has_attention or _read(c).own_choice}
    if outcomes and Dispatch.SERVED not in outcomes.values():
        for model_class in outcomes:
            check_dispatch(model_class)
    if any(found is not Dispatch.SERVED for found in outcomes.values()):
        return MaskForm.EAGER  # what attention code of their own can read
    return min(map(_mask_form, outcomes), default=MaskForm.FLASH)


# Dynamo runs these once and takes the answers for constants: they depend on classes alone.


@torch.compiler.assume_constant_result
def mask_form_of_config(config_class: type) -> MaskForm:
    return _mask_form_of_config(config_class)


@torch.compiler.assume_constant_result
def mask_form_of_layer(layer_class: type) -> MaskForm:
    return _mask_form_of_module(layer_class.__module__)


def _subclasses(parent: type) -> list[type]:
    found: list[type] = list(parent.__subclasses__())
    return found + [c for child in found for c in _subclasses(child)]


def check_models_when_made() -> None:
    """Have transformers' own check of a model's attention implementation refuse what :func:`check_dispatch` refuses.

    transformers has no hook for it: any registered name is valid for any model. The check runs in a model's constructor
    and in ``set_attn_implementation``, before any layer is made. The layers that a model then has are looked at when it
    asks for a mask (:func:`check_models_of_config`), so models are remembered here, and copies of them.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    if getattr(check, "_checks_dispatch", False):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            check_dispatch(type(self))
        _made.add(self)
        return check(self, requested_attention, *args, **kwargs)

    checked._checks_dispatch = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = checked  # type: ignore[method-assign]
    restore = PreTrainedModel.__setstate__

    @functools.wraps(restore)
    def restored(self: PreTrainedModel, state: Any) -> None:  # of a copy, or from a file
        restore(self, state)
        _made.add(self)

    PreTrainedModel.__setstate__ = restored  # type: ignore[method-assign, assignment]


_made: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
_looked_at: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


@torch.compiler.assume_constant_result
def check_models_of_config(identity: int, again: bool) -> None:
    """:func:`check_layers` for the models that have this configuration, by its ``id``; ``again`` also for those that
    were looked at before. Dynamo asks once, while it compiles.
    """
    for model in list(_made):
        if id(getattr(model, "config", None)) == identity and (again or model not in _looked_at):
            check_layers(model)
            _looked_at.add(model)
