"""The loss of Hugging Face's language models without their logits.

A fused model runs its own forward; its head alone is replaced, in that call, by one that describes its logits
(``model_heads.py``), and the cross-entropy at the end of the model's code is computed from the description.
``transformers.py`` re-exports the public names.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..errors import ArgumentError, shown
from .model_heads import HeadLogits, call_with_described_head, is_described, read_head
from .transformers_attention import check_attention

Model = TypeVar("Model", bound=nn.Module)
When = Literal["training", "always"]
_STATE = "_monoidreduce_loss"  # where a fused model keeps its FusedLoss


@dataclasses.dataclass
class FusedLoss:
    """How a model was fused."""

    when: str  # "training", "always", or "never" after unfuse_loss
    path: str  # the submodule that owns the head: "" is the model itself
    name: str  # of the head, there
    labels_at: int | None  # which positional argument of forward the labels are
    forward: Any  # the forward of this instance before (accelerate's, say); None: that of its class


class BoundMethod:
    """A method of one instance that is copied and pickled with it, which a function of the type ``MethodType`` is not:
    Python pickles that by its name, and finds the method of the class."""

    def __init__(self, function: Callable, instance: nn.Module):
        self.__func__, self.__self__ = function, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.__self__:
            args = args[1:]  # a trainer took this for a function and made a method of it
        return self.__func__(self.__self__, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """Trainers read the names of the arguments here."""
        return inspect.signature(types.MethodType(type(self.__self__).forward, self.__self__))


def fuse_loss(model: Model, *, when: When = "training", check: bool = True) -> Model:
    """Make a language model compute its loss from hidden states, never its logits, while it is trained.

    The model (returned, and changed in place) then answers ``model(input_ids, labels=labels)`` with the same ``loss``
    and with ``logits=None`` (in the tuple of ``return_dict=False`` too). All else is the model's own forward, with its
    router losses, images, soft caps and scales. In evaluation (``model.eval()``) and without labels nothing changes:
    whoever needs logits gets them. ``when="always"`` fuses evaluation too, where only the loss is wanted: a trainer's
    ``compute_metrics`` then has no logits among its predictions.

    The model may be a :class:`PreTrainedModel` or a PEFT model around one, before or after ``get_peft_model``; LoRA on
    the head and ``modules_to_save=["lm_head"]`` are taken as they are, without a merged weight. It may then be wrapped
    (DDP, FSDP2, ``torch.compile``), copied, pickled and saved as before. :func:`unfuse_loss` undoes it.

    ``check`` compares both losses on a few random tokens first; turn it off where the weights are not there yet, or
    where the model cannot be called with tokens alone.

    Raises :class:`ArgumentError` for a model without a plain linear head, with code between its head and its loss that
    has no meaning without logits, or that is set to our attention and does not call it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import fuse_loss
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(0, 50, (2, 9))
    >>> expected = model(tokens, labels=tokens).loss
    >>> torch.allclose(fuse_loss(model)(tokens, labels=tokens).loss, expected)
    True
    >>> model.eval()(tokens, labels=tokens).logits.shape
    torch.Size([2, 9, 50])
    """
    if when not in ("training", "always"):
        raise ArgumentError(detail=f"when was given {shown(when)}", fix='Give when="training" or when="always"')
    inner = _language_model(model)
    path, name = _find_head(inner, placed=check)
    check_attention(inner)  # comparing losses would not notice: both would come from the same wrong attention
    old = inner.__dict__.get(_STATE)
    own = old.forward if old is not None else inner.__dict__.get("forward")
    parameters = list(inspect.signature(type(inner).forward).parameters)[1:]
    labels_at = parameters.index("labels") if "labels" in parameters else None
    state = FusedLoss(when, path, name, labels_at, own)
    if check:
        _check(inner, state)
    inner.__dict__[_STATE] = state
    if old is None:
        inner.__dict__["forward"] = BoundMethod(_forward, inner)
        inner.__dict__["_replicate_for_data_parallel"] = BoundMethod(_replicate, inner)
    for wrapper in model.modules():  # PEFT's AdaptionPromptModel remembers the forward of its model
        remembered = wrapper.__dict__.get("forward")
        if wrapper is not inner and isinstance(remembered, types.MethodType) and remembered.__self__ is inner:
            wrapper.__dict__["forward"] = inner.__dict__["forward"]
    return model


def unfuse_loss(model: Model) -> Model:
    """Undo :func:`fuse_loss`: the model (returned, and changed in place) builds its logits again.

    A model that was not fused is left as it is.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from monoidreduce.integrations.transformers import fuse_loss, unfuse_loss
    >>> config = LlamaConfig(
    ...     vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> model, tokens = LlamaForCausalLM(config), torch.randint(0, 50, (2, 9))
    >>> unfuse_loss(fuse_loss(model))(tokens, labels=tokens).logits.shape
    torch.Size([2, 9, 50])
    """
    inner = _language_model(model)
    state = inner.__dict__.get(_STATE)
    if state is None:
        return model
    state.when = "never"  # a trainer may have wrapped our forward by now
    if isinstance(inner.__dict__.get("forward"), BoundMethod):
        for name in ("forward", "_replicate_for_data_parallel", _STATE):
            del inner.__dict__[name]
        if state.forward is not None:
            inner.__dict__["forward"] = state.forward
    return model


def causal_lm_loss(
    model: nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """The loss of a batch (``input_ids``, ``labels`` and what else the model takes), for a trainer's ``compute_loss``.

    The same as ``model(**inputs).loss``, without ever allocating the logits, and without changing the model.

    Raises what :func:`fuse_loss` does.

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
    options = _named(model, inputs)
    if num_items_in_batch is not None:
        options["num_items_in_batch"] = num_items_in_batch
    if options.get("labels") is None:
        options["labels"] = options.get("shift_labels")
    if options["labels"] is None:
        raise ArgumentError(
            detail=f"the inputs of {type(model).__name__} have no labels, only {', '.join(map(str, inputs))}",
            fix='Give inputs["labels"], or inputs["shift_labels"]',
        )
    return _describe(model, options).loss


def token_logprobs(model: nn.Module, inputs: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The log-probability of each token [B, T] under the logits at its place, for preference and policy losses.

    The same as ``torch.log_softmax(model(**inputs).logits, -1).gather(-1, tokens[..., None])[..., 0]``, without ever
    allocating the logits; position t of ``tokens`` belongs to position t of the logits (shift them beforehand).
    Differentiable.

    Raises what :func:`fuse_loss` does.

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
    return describe_logits(model, inputs).logprobs(tokens)


def describe_logits(model: nn.Module, inputs: Mapping[str, Any]) -> HeadLogits:
    """What ``model(**inputs).logits`` would be, as a description of it, for losses of other trainers."""
    named = _named(model, inputs)
    return _describe(model, {k: v for k, v in named.items() if k not in ("labels", "shift_labels")}).logits


# The forward of a fused model


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a fused model: its own, with a head that describes its logits where they are for the loss."""
    state = self.__dict__.get(_STATE)
    if state is None:  # unfused since: a wrapper remembered this forward
        return self.forward(*args, **kwargs)
    owner = self.get_submodule(state.path)
    wanted = state.when == "always" or (state.when == "training" and self.training)
    if kwargs.get("fused_lm_head"):
        wanted = False  # a trainer of TRL asks for log-probabilities by a head of its own
    if not wanted or not _has_labels(state, args, kwargs) or is_described(owner, state.name):
        return _own_forward(self, state, args, kwargs)
    return _fused_forward(self, state, args, kwargs)


def _fused_forward(model: Any, state: FusedLoss, args: tuple, kwargs: dict[str, Any]) -> Any:
    if kwargs.get("labels") is None and kwargs.get("shift_labels") is not None:
        kwargs = {**kwargs, "labels": kwargs["shift_labels"]}  # models look there, their loss uses the shifted ones
    owner = model.get_submodule(state.path)
    call = lambda: _own_forward(model, state, args, kwargs)
    if getattr(model.config, "return_dict", True) is False:
        call = lambda: _call_with_outputs_by_name(model, state, args, kwargs)
    return _without_logits(call_with_described_head(owner, state.name, type(model).__name__, call))


def _call_with_outputs_by_name(model: Any, state: FusedLoss, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A model whose configuration asks for tuples: transformers' own forward cannot read those of its inner model."""
    config, asked = model.config, kwargs.get("return_dict")
    config.return_dict = True
    try:
        outputs = _own_forward(model, state, args, {**kwargs, "return_dict": True})
    finally:
        config.return_dict = False
    return outputs if asked else outputs.to_tuple()


def _own_forward(model: Any, state: FusedLoss, args: tuple, kwargs: dict[str, Any]) -> Any:
    if state.forward is not None:
        return state.forward(*args, **kwargs)
    return type(model).forward(model, *args, **kwargs)


def _has_labels(state: FusedLoss, args: tuple, kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None or kwargs.get("shift_labels") is not None:
        return True
    return state.labels_at is not None and len(args) > state.labels_at and args[state.labels_at] is not None


def _without_logits(outputs: Any) -> Any:
    """A model's outputs with None in the logits' place."""
    if isinstance(outputs, tuple):
        return tuple(None if isinstance(value, HeadLogits) else value for value in outputs)
    return type(outputs)(**{k: None if isinstance(v, HeadLogits) else v for k, v in outputs.items()})


def _replicate(self: Any) -> Any:
    """A copy for ``nn.DataParallel``: it copies what an instance holds, so that ours would be bound to the first."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name in ("forward", "_replicate_for_data_parallel"):
        replica.__dict__[name] = BoundMethod(self.__dict__[name].__func__, replica)
    return replica


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """A batch as keyword arguments."""
    if not isinstance(inputs, Mapping):
        raise ArgumentError(
            detail=f"the inputs of {type(model).__name__} were given as a {type(inputs).__name__}",
            fix="Give a batch by name, as a tokenizer or a data collator makes it: dict(input_ids=..., labels=...)",
        )
    return dict(inputs)


def _describe(model: nn.Module, options: Mapping[str, Any]) -> Any:
    """A model's outputs with described logits."""
    inner = _language_model(model)
    path, name = _find_head(inner)
    call = lambda: model(**{**options, "return_dict": True})
    return call_with_described_head(inner.get_submodule(path), name, type(inner).__name__, call)


# Which models


def _language_model(model: Any) -> PreTrainedModel:
    """The model of transformers in what was given."""
    found = model
    while isinstance(found, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        found = found.module
    if type(found).__module__.startswith("peft.") and hasattr(found, "get_base_model"):
        found = found.get_base_model()
    if hasattr(found, "_orig_mod"):
        raise ArgumentError(
            detail=f"{type(found._orig_mod).__name__} is compiled already",
            fix="Call fuse_loss(model) first, then torch.compile(model)",
        )
    if not isinstance(found, PreTrainedModel):
        kind = f"{type(found).__module__}.{type(found).__name__}".removeprefix("builtins.")
        if isinstance(found, type):
            kind = f"the class {found.__name__}"
        load = "Load it first: AutoModelForCausalLM.from_pretrained(name). " if isinstance(found, (str, type)) else ""
        if isinstance(getattr(found, "model", None), nn.Module) and not isinstance(found, nn.Module):
            load = "Give its model, before it trains: fuse_loss(trainer.model). "
        raise ArgumentError(
            detail=f"{kind} was given, which is no model of transformers",
            fix=f"{load}Give a language model of transformers (a PreTrainedModel with a head), or a PEFT model around "
            "one. For a model of your own, compute its loss by ops.linear_cross_entropy(hidden, head.weight, labels)",
        )
    return found


def _find_head(model: PreTrainedModel, placed: bool = True) -> tuple[str, str]:
    """The path of the submodule that owns the head, and the head's name there. ``placed``: see :func:`read_head`."""
    head = model.get_output_embeddings()
    read_head(head, type(model).__name__, placed)
    for path, module in model.named_modules():
        for name, child in module._modules.items():
            if child is head:
                return path, name
    raise ArgumentError(
        detail=f"the head of {type(model).__name__} is not one of its submodules",
        fix="Give a language model whose get_output_embeddings() is a submodule",
    )


@torch.no_grad()
def _check(model: PreTrainedModel, state: FusedLoss) -> None:
    """Both losses on a few random tokens, dropout off."""
    name = type(model).__name__
    if hasattr(model, "unshard"):  # its weights are gathered when it is called, not by its forward
        raise ArgumentError(
            detail=f"{name} is sharded by fully_shard already, and cannot be tried on tokens",
            fix="Call fuse_loss(model) first, then fully_shard(model); or leave the trial out: "
            "fuse_loss(model, check=False)",
        )
    tokens = _random_tokens(model)
    inputs = {**_trial_source(model, tokens), "labels": tokens, "return_dict": True}
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        try:
            expected = _own_forward(model, state, (), inputs).loss
            if expected is None:
                raise ValueError("it returned no loss")
        except Exception as error:
            raise ArgumentError(
                detail=f"{name} could not be tried with {next(iter(inputs))} and labels alone: "
                f"{type(error).__name__}: {error}",
                fix="Where it needs other inputs, or its loss_function another length, leave the trial out: "
                "fuse_loss(model, check=False)",
            ) from error
        found = _fused_forward(model, state, (), inputs).loss
    finally:
        for module, mode in modes.items():
            module.training = mode
    narrow = read_head(model.get_output_embeddings(), name).weight.dtype.itemsize < 4
    if not torch.allclose(found.float(), expected.float(), rtol=2e-2 if narrow else 1e-4, equal_nan=True):
        raise ArgumentError(
            detail=f"{name}'s own loss is {float(expected):.6f} where that of its linear head is {float(found):.6f}",
            fix="It does more than a linear head to its logits or its loss: keep its own forward",
        )


def _trial_source(model: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
    """What a trial's labels stand beside: tokens, or for a decoder that listens or looks, states of its encoder."""
    if not model.config.is_encoder_decoder or model.main_input_name == "input_ids":
        return {"input_ids": tokens}
    encoder: Any = model.get_encoder()
    generator = torch.Generator().manual_seed(1)
    states: Any = torch.randn(*tokens.shape, encoder.config.hidden_size, generator=generator, device="cpu")
    states = states.to(tokens.device, model.dtype)
    return {"encoder_outputs": BaseModelOutput(states)}


def _random_tokens(model: PreTrainedModel) -> Tensor:
    """A few tokens, none of them special: those of images and sounds ask for more inputs."""
    weight = read_head(model.get_output_embeddings(), type(model).__name__).weight
    classes = weight.shape[0]
    embeddings = getattr(model.get_input_embeddings(), "weight", None)
    if embeddings is not None:
        classes = min(classes, embeddings.shape[0])
    special: set[int] = set()
    for config in (model.config, model.config.get_text_config()):
        named = {k: v for k, v in config.to_dict().items() if k.endswith(("token_id", "token_index", "token_ids"))}
        for value in named.values():
            special.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    plain = torch.tensor([i for i in range(min(classes, 4096)) if i not in special] or [0], device="cpu")
    chosen = torch.randint(len(plain), (2, 8), generator=torch.Generator().manual_seed(0), device="cpu")
    return plain[chosen].to(weight.device)
