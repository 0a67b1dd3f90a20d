"""The heads of language models: what their logits are made of, where PEFT wrapped them too.

A head is an ``nn.Linear``, alone or wrapped by PEFT: a copy that is trained (``modules_to_save``), or LoRA, which adds
``scaling * dropout(hidden) @ A.T @ B.T`` to the logits. The rows ``scaling * dropout(hidden) @ A.T`` [..., r] and the
columns B [V, r] become a second product of the fold. Neither ``W + B @ A`` nor the concatenation ``[W, B]`` is built:
both are as large as the head, and with both a frozen W would get a gradient.

This file may import the errors and the ops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError, DTypeError
from ..ops import linear_cross_entropy, linear_logprobs

ADVICE = "call unfuse_loss(model) to let the model build its logits and compute its own loss"


@dataclasses.dataclass(frozen=True)
class Head:
    """A head's parameters: ``weight`` [V, D], ``bias`` [V] or None, and low-rank terms that are added to the product.

    A low-rank term is a function from hidden states [..., D] to rows [..., r], and columns [V, r].
    """

    weight: Tensor
    bias: Tensor | None
    low_rank: tuple[tuple[Callable[[Tensor], Tensor], Tensor], ...] = ()


def read_head(head: nn.Module | None, owner: str, placed: bool = True) -> Head:
    """What a model's head multiplies with. ``owner`` is the name of the model's class, for errors. ``placed`` is False
    where weights may still come (a model on the meta device)."""
    if any(hasattr(p, "ds_id") for p in (() if head is None else head.parameters())):
        raise ArgumentError(
            detail=f"the head of {owner} is partitioned by DeepSpeed ZeRO-3, which gathers weights only while their "
            "module is called, and a loss without logits does not call the head",
            fix=f"Shard with FSDP2 (fully_shard) or ZeRO-2, or {ADVICE}",
        )
    if _class_before_sharding(head).__module__.startswith("peft."):
        return _read_wrapper(head, owner, placed)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise ArgumentError(
            detail=f"{owner} has no head of a language model"
            if head is None
            else f"the head of {owner} is a {kind}, not a plain nn.Linear",
            fix="Only a linear head's loss can be computed without its logits: give a language model with an nn.Linear "
            "head that is not quantised, or keep the model's own loss",
        )
    _check_untouched(head, owner)
    weight = head.weight
    if not weight.is_floating_point():
        raise ArgumentError(
            detail=f"the head of {owner} has weights of type {str(weight.dtype)[6:]}",
            fix="Leave the head unquantised (llm_int8_skip_modules, modules_to_not_convert)",
        )
    if weight.is_meta and placed:
        raise ArgumentError(
            detail=f"the head of {owner} is on the meta device: its weights are not loaded, or offloaded",
            fix="Load them first, and keep the head out of offloading. A model that gets its weights after fuse_loss "
            "is fused by fuse_loss(model, check=False)",
        )
    return Head(weight, head.bias)


def _class_before_sharding(module: Any) -> type:
    """A module's class: ``fully_shard`` puts one of its own, derived from it, in its place."""
    return type(module).__bases__[-1] if hasattr(module, "unshard") else type(module)


def _check_untouched(head: nn.Module, owner: str) -> None:
    """Refuse a head whose call does more than its class says: hooks, or a forward that was replaced.

    A head that accelerate placed on a device, that FSDP2 sharded, or whose classes tensor parallelism (torch's or
    transformers') spread over ranks, is taken: its weights are read where they lie.
    """
    added = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    added += [head.__dict__["forward"]] if "forward" in head.__dict__ else []
    if hasattr(head, "_hf_hook") or hasattr(head, "unshard") or all(map(_places_classes, added)):
        return
    raise ArgumentError(
        detail=f"the head of {owner} has hooks or a forward of its own, which a loss without logits would pass by",
        fix=f"Remove them, or {ADVICE}",
    )


def _places_classes(function: Any) -> bool:
    """Whether a hook, or what replaced a forward, is tensor parallelism's."""
    return getattr(function, "__module__", "").startswith(("torch.distributed.tensor.", "transformers.distributed."))


def _read_wrapper(head: Any, owner: str, placed: bool) -> Head:
    """The parameters of a wrapped head, as its wrapper would use them now: active, disabled or merged adapters."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    _check_untouched(head, owner)
    if isinstance(head, ModulesToSaveWrapper):
        used = not head.disable_adapters and head.active_adapters and head.active_adapters[0] in head.modules_to_save
        return read_head(head.modules_to_save[head.active_adapters[0]] if used else head.original_module, owner, placed)
    if isinstance(head, (TrainableTokensWrapper, TrainableTokensLayer)):
        return _read_trained_tokens(getattr(head, "token_adapter", head), owner, placed)
    kind = _class_before_sharding(head)
    if kind is not LoraLinear:
        raise ArgumentError(
            detail=f"the head of {owner} is {kind.__module__}.{kind.__name__}, of which only LoRA's linear "
            "layer, modules_to_save and trainable_token_indices can be used without logits",
            fix=f'Leave the head out of target_modules, use LoRA or modules_to_save=["lm_head"] for it, or {ADVICE}',
        )
    base = read_head(head.base_layer, owner, placed)
    if head.disable_adapters:
        if head.merged:
            head.unmerge()  # as PEFT does
            base = read_head(head.base_layer, owner, placed)
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
        scaling = head.scaling[name]
        up: Any = head.lora_B[name]
        make_rows = functools.partial(_rows, head, owner, head.lora_A[name], head.lora_dropout[name], scaling)
        terms.append((make_rows, up.weight))
        if up.bias is not None:
            added = (up.bias * scaling).to(base.weight.dtype)
            bias = added if bias is None else bias + added
    return Head(base.weight, bias, tuple(terms))


def _read_trained_tokens(layer: Any, owner: str, placed: bool) -> Head:
    """A head of which PEFT trains the weights of some tokens (``trainable_token_indices``): their difference from the
    head's is a term of rank K, whose columns say which tokens they are."""
    base = read_head(layer.base_layer, owner, placed)
    if layer.disable_adapters and layer.merged:
        layer.unmerge()  # as PEFT does
    if layer.disable_adapters or layer.merged or not layer.active_adapters:
        return base
    layer._check_overlapping_tokens(layer.active_adapters)  # PEFT's own error
    terms = []
    for name in layer.active_adapters:
        tokens = torch.tensor(layer.token_indices[name], device=base.weight.device)
        trained = layer.trainable_tokens_delta[name]
        columns = torch.zeros(base.weight.shape[0], len(tokens), dtype=base.weight.dtype, device=tokens.device)
        columns[tokens, torch.arange(len(tokens), device=tokens.device)] = 1
        terms.append((functools.partial(_token_rows, layer, owner, base.weight, tokens, trained), columns))
    return Head(base.weight, None, tuple(terms))  # PEFT leaves a bias out


def _token_rows(layer: Any, owner: str, weight: Tensor, tokens: Tensor, trained: Tensor, hidden: Tensor) -> Tensor:
    """``hidden @ (trained - weight[tokens]).T`` [..., K]."""
    weight = gather_weight(weight, layer.base_layer, hidden, owner)
    return F.linear(hidden, (trained.to(weight.dtype) - weight[tokens]).to(hidden.dtype))


def _rows(
    layer: Any, owner: str, down: Any, dropout: Callable[[Tensor], Tensor], scaling: float, hidden: Tensor
) -> Tensor:
    """``scaling * dropout(hidden) @ A.T``, in the type that PEFT would use."""
    weight = gather_weight(down.weight, layer, hidden, owner)
    return F.linear(dropout(layer._cast_input_dtype(hidden, weight.dtype)), weight) * scaling


# Logits that are never built: what stands for them between a model's head and its loss.
#
# A fused model runs its own ``forward``; only its head is replaced, for that call, by one that returns a
# :class:`HeadLogits`. This remembers the hidden states and the head's weights, and what the model then does: it selects
# or reshapes rows (done to the hidden states), scales, caps (kept as numbers), adds a bias. At the end stands a
# cross-entropy, which becomes :func:`ops.linear_cross_entropy`. All else that a model's forward does (router losses,
# images, its outputs) stays its own. What cannot be remembered is refused with the model's class and what to do.

# Functions of torch that are methods here
_METHODS = {name: name for name in ("add", "clone", "div", "flatten", "mul", "permute", "reshape", "tanh", "transpose")}
_METHODS |= {"true_divide": "div", "multiply": "mul", "divide": "div"}
_FIELDS = ("owner", "hidden", "weight", "bias", "low_rank", "divisor", "softcap", "factor", "classes_second")


class HeadLogits:
    """``softcap(hidden @ weight.T + bias) / divisor`` of one head call, as a description.

    It has a tensor's ``shape``, ``dtype`` and ``device``; torch's functions and methods that keep the last dimension
    give another description, a cross-entropy gives its loss, and all else raises :class:`ArgumentError`.
    """

    def __init__(
        self,
        owner: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low_rank: tuple[Tensor, Tensor] | None,
        divisor: Any = 1.0,
        softcap: Any = None,
        factor: Any = 1.0,
        classes_second: bool = False,
    ):
        self.owner = owner  # the name of the model's class
        self.hidden, self.weight, self.bias, self.low_rank = hidden, weight, bias, low_rank
        self.divisor = divisor  # logits are (hidden @ weight.T + bias) / divisor
        self.softcap = softcap  # True after a tanh: logits are then factor * tanh((hidden @ weight.T + bias) / divisor)
        self.factor = factor
        self.classes_second = classes_second  # as cross_entropy takes them: [B, V, T]

    # As a tensor

    @property
    def shape(self) -> torch.Size:
        lead = self.hidden.shape[:-1]
        if self.classes_second:
            return torch.Size((lead[0], self.weight.shape[0], *lead[1:]))
        return torch.Size((*lead, self.weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    def dim(self) -> int:
        return self.hidden.dim()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def _with(self, **changes: Any) -> HeadLogits:
        return HeadLogits(**{name: changes[name] if name in changes else getattr(self, name) for name in _FIELDS})

    def _map_rows(self, change: Callable[[Tensor], Tensor]) -> HeadLogits:
        """The same selection or arrangement of rows, for all that has rows."""
        low_rank = None if self.low_rank is None else (change(self.low_rank[0]), self.low_rank[1])
        return self._with(hidden=change(self.hidden), low_rank=low_rank)

    # What keeps the last dimension

    def to(self, *args: Any, **kwargs: Any) -> HeadLogits:
        """A copy: the arithmetic is float32 in any case, and labels are brought to the hidden states."""
        return self._with()

    float = type = type_as = contiguous = clone = to

    def __getitem__(self, index: Any) -> HeadLogits:
        parts = list(index) if isinstance(index, tuple) else [index]
        taken = sum(p.dim() if isinstance(p, Tensor) and p.dtype is torch.bool else p is not None for p in parts)
        if any(p is Ellipsis for p in parts):
            place = next(i for i, p in enumerate(parts) if p is Ellipsis)
            parts[place : place + 1] = [slice(None)] * (self.ndim - taken + 1)
            taken = self.ndim
        if self.classes_second or taken > self.ndim or (taken == self.ndim and not self._keeps_classes(parts[-1])):
            raise self._refusal("a selection of classes")
        if taken == self.ndim:
            parts[-1] = slice(None)
        return self._map_rows(lambda rows: rows[tuple(parts)])

    def _keeps_classes(self, part: Any) -> bool:
        return isinstance(part, slice) and part.indices(self.shape[-1]) == (0, self.shape[-1], 1)

    def view(self, *shape: Any) -> HeadLogits:
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> HeadLogits:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], (int, torch.SymInt)) else shape
        classes = self.shape[-1]
        if self.classes_second or not sizes or (sizes[-1] != classes and sizes[-1] != -1):
            raise self._refusal(f"a view as {list(sizes)}, where there are {classes} classes,")
        if sizes[-1] == -1 and math.prod(sizes[:-1]) != math.prod(self.shape[:-1]):
            raise self._refusal(f"a view as {list(sizes)}")
        return self._map_rows(lambda rows: rows.reshape(*sizes[:-1], rows.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> HeadLogits:
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if self.classes_second or end == self.ndim - 1:
            raise self._refusal("flatten")
        return self._map_rows(lambda rows: rows.flatten(start, end))

    def transpose(self, dim0: int, dim1: int) -> HeadLogits:
        """Classes to the second place and back, as ``F.cross_entropy`` wants them."""
        if self.ndim != 3 or {dim0 % 3, dim1 % 3} != {1, 2}:
            raise self._refusal("transpose")
        return self._with(classes_second=not self.classes_second)

    def permute(self, *dims: Any) -> HeadLogits:
        order = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
        if tuple(d % self.ndim for d in order) != (0, 2, 1):
            raise self._refusal("permute")
        return self.transpose(1, 2)

    @property
    def mT(self) -> HeadLogits:
        return self.transpose(-1, -2)

    # Scales, soft caps and biases

    def __mul__(self, other: Any) -> HeadLogits:
        number = self._number(other, "a product")
        return (
            self._with(divisor=self.divisor / number)
            if self.softcap is None
            else self._with(factor=self.factor * number)
        )

    def __truediv__(self, other: Any) -> HeadLogits:
        number = self._number(other, "a quotient")
        return (
            self._with(divisor=self.divisor * number)
            if self.softcap is None
            else self._with(factor=self.factor / number)
        )

    __rmul__ = mul = __mul__
    div = __truediv__

    def tanh(self) -> HeadLogits:
        if self.softcap is not None:
            raise self._refusal("a second tanh")
        return self._with(softcap=True)

    def __add__(self, other: Any) -> HeadLogits:
        plain = self.softcap is None and not isinstance(self.divisor, Tensor) and self.divisor == 1
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return self if other == 0 or plain else self._refuse("a sum")  # a constant changes no softmax
        classes = self.weight.shape[0]
        if not plain or not isinstance(other, Tensor) or other.shape[-1:] != (classes,) or other.numel() != classes:
            raise self._refusal("a sum")
        other = other.reshape(-1).to(self.weight.device, self.weight.dtype)
        return self._with(bias=other if self.bias is None else self.bias + other)

    __radd__ = add = __add__

    def _become(self, other: HeadLogits) -> HeadLogits:
        """What an operation in place leaves behind."""
        for name in _FIELDS:
            setattr(self, name, getattr(other, name))
        return self

    def mul_(self, other: Any) -> HeadLogits:
        return self._become(self * other)

    def div_(self, other: Any) -> HeadLogits:
        return self._become(self / other)

    def add_(self, other: Any) -> HeadLogits:
        return self._become(self + other)

    def tanh_(self) -> HeadLogits:
        return self._become(self.tanh())

    __imul__, __itruediv__, __iadd__ = mul_, div_, add_

    def _number(self, value: Any, what: str) -> Any:
        whole = (isinstance(value, Tensor) and value.numel() == 1) or isinstance(value, (int, float))
        if not whole or isinstance(value, bool) or (not isinstance(value, Tensor) and not value > 0):
            raise self._refusal(f"{what} with something else than a positive number")
        return value.reshape(()) if isinstance(value, Tensor) else float(value)

    # Refusals

    def _refusal(self, what: str) -> ArgumentError:
        return ArgumentError(
            detail=f"{self.owner} applies {what} to its logits, which its loss without logits cannot do",
            fix=f"Keep its own loss: leave fuse_loss out, or {ADVICE}",
        )

    def _refuse(self, what: str) -> Any:
        raise self._refusal(what)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(Tensor, name) or name.startswith("__"):
            raise AttributeError(name)  # as of a tensor, which has no such thing either
        raise self._refusal(f"tensor.{name}")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise self._refusal("an assignment")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is F.cross_entropy:
            return cross_entropy(*args, **(kwargs or {}))
        name = getattr(function, "__name__", str(function))
        if name in _METHODS and args and isinstance(args[0], HeadLogits):
            return getattr(args[0], _METHODS[name])(*args[1:], **(kwargs or {}))
        given = [
            *args,
            *(a for part in args if isinstance(part, (tuple, list)) for a in part),
            *(kwargs or {}).values(),
        ]
        raise next(a for a in given if isinstance(a, HeadLogits))._refusal(f"torch.{name}")

    # Results

    def head_options(self) -> dict[str, Any]:
        """The head as options of the vocabulary heads in ``ops``."""
        options: dict[str, Any] = {"bias": self.bias}
        if self.low_rank is not None:
            options["low_rank"] = self.low_rank
        if self.softcap is None:
            return options | {"temperature": self.divisor}
        return options | {"softcap": self.divisor, "temperature": self.divisor / self.factor}

    def logprobs(self, target: Tensor) -> Tensor:
        """The log-probability of each row's token."""
        return linear_logprobs(self.hidden, self.weight, target.to(self.device), **self.head_options())


def cross_entropy(
    input: HeadLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` of logits that were not built."""
    if not isinstance(input, HeadLogits) or size_average is not None or reduce is not None:
        raise next(a for a in (input, target) if isinstance(a, HeadLogits))._refusal("an older form of cross_entropy")
    if input.ndim > 2 and not input.classes_second:
        raise input._refusal(f"a cross-entropy of logits of shape {list(input.shape)}, whose classes are last,")
    probabilities = target.is_floating_point()
    if probabilities and target.dim() < input.ndim:
        raise DTypeError(
            detail=f"{input.owner} was given labels of type {str(target.dtype).removeprefix('torch.')}, but labels are "
            "tokens",
            fix="Give integers: labels.long()",
        )
    return linear_cross_entropy(  # type: ignore[call-overload]
        input.hidden,
        input.weight,
        target.to(input.device),
        class_weights=weight,
        ignore_index=None if probabilities else ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        **input.head_options(),
    )


# A model whose head describes its logits


class DescribedHead:
    """Stands for a head in one call of its model, and returns a :class:`HeadLogits`."""

    def __init__(self, head: nn.Module, owner: str, thread: int | None):
        self.head, self.owner, self.thread = head, owner, thread
        self.called = False

    def forward(self, hidden: Tensor) -> Any:
        # Dynamo knows no threads. It gets here from an uncompiled call too, where it broke the model's graph.
        if self.thread is not None and not torch.compiler.is_compiling() and self.thread != threading.get_ident():
            return self.head(hidden)  # another thread runs the same model: it did not ask for this
        self.called = True
        head = read_head(self.head, self.owner)
        hidden = hidden.to(head.weight.device)
        weight, bias, low_rank = gather_head(head, self.head, hidden, self.owner)
        return HeadLogits(self.owner, hidden, weight, bias, low_rank)

    __call__ = forward  # two names: whoever looks through a model's layers reads `type(layer).forward`

    def __getattr__(self, name: str) -> Any:
        return getattr(self.head, name)  # its weight's type, say, to which some models cast the hidden states


def is_described(owner: nn.Module, name: str) -> bool:
    """Whether this call is inside :func:`call_with_described_head` of the same head."""
    return isinstance(owner.__dict__.get(name), DescribedHead)


def call_with_described_head(owner: nn.Module, name: str, model_name: str, call: Callable[[], Any]) -> Any:
    """Call something during which ``owner.NAME``, a head, describes its logits.

    An attribute of the instance is found before ``nn.Module`` looks among its submodules; Dynamo traces that. Where a
    call is not traced from here, frames inside it may be: what Dynamo compiled for the head itself is guarded by the
    submodule alone, so that the stand-in, which has all attributes of the head, takes that place too.
    """
    traced = torch.compiler.is_compiling()
    head: Any = owner._modules[name]
    head = head.head if isinstance(head, DescribedHead) else head  # in another thread's call
    stand_in: Any = DescribedHead(head, model_name, None if traced else threading.get_ident())
    object.__setattr__(owner, name, stand_in)
    if not traced:
        owner._modules[name] = stand_in
    try:
        found = call()
    finally:
        owner.__dict__.pop(name, None)
        if not traced:
            owner._modules[name] = head
    if not stand_in.called:
        raise ArgumentError(
            detail=f"{model_name} does not call its head {name!r} to make its logits",
            fix=f"Its loss cannot be computed without them: leave fuse_loss out, or {ADVICE}",
        )
    return found


# The weights of a head that ``fully_shard`` wraps by itself, where its loss is computed without calling it.
# FSDP2 gathers a module's weights when the module is called, and averages their gradients over the ranks. A head that
# describes its logits is not called; its weights are then gathered here, to the same effect. Heads that belong to a
# larger wrapped module (the model itself) are gathered with that, and tensor-parallel ones keep their shards.


def gather_head(head: Head, layer: nn.Module, hidden: Tensor, owner: str) -> tuple[Any, Any, tuple[Any, Any] | None]:
    """A head's weight, bias and low-rank term for these hidden states, gathered as :func:`gather_weight` says."""
    gather = lambda p: gather_weight(p, layer, hidden, owner)
    weight, bias = gather(head.weight), None if head.bias is None else gather(head.bias)
    if not head.low_rank:
        return weight, bias, None
    rows = [make_rows(hidden).to(hidden.dtype) for make_rows, _ in head.low_rank]
    columns = [gather(c).to(hidden.dtype) for _, c in head.low_rank]
    one = len(rows) == 1
    return weight, bias, (rows[0], columns[0]) if one else (torch.cat(rows, -1), torch.cat(columns, -1))


def gather_weight(weight: Any, head: nn.Module, hidden: Tensor, owner: str) -> Any:
    """A head's parameter as the head's own forward would see it: whole and of the hidden states' type, if the head is
    wrapped by ``fully_shard``; else as it is. Its gradient is the mean over the ranks, summed in the parameter's type.
    """
    module = sys.modules.get("torch.distributed.tensor")
    wrapped = hasattr(head, "unshard") and module is not None and isinstance(weight, module.DTensor)
    if module is None or not wrapped:
        return weight
    if any(type(p) not in (module.Shard, module.Replicate) for p in weight.placements):
        raise ArgumentError(
            detail=f"the head of {owner} is sharded by tensor parallelism and wrapped by fully_shard on its own, "
            f"placed {tuple(weight.placements)}",
            fix="Leave the head to the fully_shard of the whole model: its classes then stay on the tensor ranks",
        )
    whole = weight.redistribute(placements=[module.Replicate()] * len(weight.placements))
    return whole.to_local(grad_placements=[module.Partial("avg")] * len(weight.placements)).to(hidden.dtype)
