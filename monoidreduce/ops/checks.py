"""Checks that the declarations of an op cannot express (labels, options, ranks), and helpers shared by the layers.

Every mistake is raised here, before any work, with the name of the user's argument. Sizes, number types and devices
that must agree are left to ``@mr.op``, which knows them from the declarations.

``ops.NAME.explain`` says what the ops of a ready-made layer would run: a layer is Python around ops (checks, views,
defaults). It is called once while ops answer with zeros, so that no pair is computed, and every call of an op is
explained (``explain.py``).
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import arrays
from ..domains import Domain, jagged
from ..domains.base import wrong_domain_error
from ..engines.ranks import agreement, dtensors
from ..engines.ranks.dtensors import Axes
from ..errors import ArgumentError, DeviceError, DTypeError, LabelError, MonoidReduceError, ShapeError, TopKError, shown
from ..explain import Explanation, measure
from ..op import Calls, explained_calls
from ..plan import settings
from ..plan.budget import format_ceil
from ..runtime import dispatch, torch_replay
from ..runtime.dispatch import PLAIN
from ..stored_vectors import Scaled
from ..stream import Stream
from .streaming import LayerStreams

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from .kernels import Sinkhorn, SinkhornArrays
    from .neighbours import NeighbourArrays, Neighbours

    Array: TypeAlias = NDArray[Any]

# Layers on DTensors: the axes of their arguments, so that a whole layer runs on the local shards.
#
# A layer flattens rows, looks at labels and averages; on local tensors, under the layout that the placements mean, it
# does so without sending anything but what its folds send. Layers that are not listed call their op with the DTensors
# they are given.

_LOSSES = ("cross_entropy_given", "linear_cross_entropy", "linear_cross_entropy_soft", "linear_jsd", "linear_kl")
_DTENSOR_CHOICES = ("linear_argmax", "linear_entropy", "linear_logprobs", "linear_sample", "linear_topk")
_LAYERS = frozenset({*_LOSSES, *_DTENSOR_CHOICES, "mlp", "gated_mlp"})
_ROW_VECTORS = frozenset({"x", "teacher_x", "ids", "low_rank 0"})
_ROW_NUMBERS = frozenset({"target", "token_weights", "mask", "temperature"})
_COLUMN_VECTORS = frozenset({"weight", "teacher_weight", "p", "q", "gate", "up", "down", "low_rank 1"})
_COLUMN_NUMBERS = frozenset({"bias", "teacher_bias", "class_weights", "gate_bias", "up_bias"})
_ORDERED = frozenset({"gated_mlp", "linear_sample", "mlp"})  # their noise counts rows through all leading dimensions


def run_layer(layer: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """A layer on arguments among which are DTensors."""
    if layer.__name__ not in _LAYERS:
        return layer(*args, **kwargs)
    try:
        values = dict(_signature(layer).bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise ArgumentError(detail=f"{layer.__name__}: {error}") from None
    if not isinstance(values["x"], Tensor) or not values["x"].dim():
        return layer(*args, **kwargs)  # which says so
    pairs = [name for name, value in values.items() if isinstance(value, tuple)]
    for name in pairs:  # a pair of tensors, each with its own placement
        values.update({f"{name} {k}": part for k, part in enumerate(values.pop(name))})
    axes = {name: _find_axes(name, value, values, layer.__name__) for name, value in values.items()}

    @functools.wraps(layer)
    def call(**local: Any) -> Any:
        for name in pairs:
            local[name] = tuple(local.pop(part) for part in [*local] if part.startswith(f"{name} "))
        return layer(**local)

    return dtensors.run_layer_on_dtensors(call, {n: a for n, a in axes.items() if a is not None}, values, "x")


@functools.cache
def _signature(layer: Callable) -> inspect.Signature:
    return inspect.signature(layer)


def _find_axes(name: str, value: Any, values: Mapping[str, Any], layer: str) -> Axes | None:
    """The axes of an argument's dimensions; None for what is no tensor."""
    if not isinstance(value, Tensor):
        return None
    leading = values["x"].dim() - 1
    rows: Axes = tuple(("rows", k) for k in range(leading))
    if layer in _ORDERED:  # rows of another rank would come between those of this one
        rows = tuple(key if k == 0 else None for k, key in enumerate(rows))
    elif values.get("shift") and rows:  # the next token may lie on another rank
        rows = (*rows[:-1], None)
    if name in _ROW_VECTORS:
        axes: Axes = (*rows, None)
    elif name in _ROW_NUMBERS and value.dim() == leading and leading:
        axes = rows
    elif name in ("probs", "target"):
        axes = (*rows, ("cols", 0))
    elif name in _COLUMN_VECTORS:
        axes = (("cols", 0), None)
    elif name in _COLUMN_NUMBERS:
        axes = (("cols", 0),)
    else:
        axes = ()
    return axes if len(axes) == value.dim() else (None,) * value.dim()  # of a wrong shape: the layer says so


Reduction = Literal["mean", "sum", "none"]
Given = ParamSpec("Given")
Result = TypeVar("Result", covariant=True)
_REDUCTIONS = ("mean", "sum", "none")


# Options


def one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ArgumentError(
            detail=f"{name} was given {_shown(value)}", fix=f"Use one of {', '.join(map(repr, choices))}"
        )


def reduction(value: str) -> None:
    """Raise ArgumentError unless ``value`` is "mean", "sum" or "none"."""
    one_of("reduction", value, _REDUCTIONS)


def whole(name: str, value: Any, least: int = -(2**63)) -> None:
    """Raise ArgumentError unless ``value`` is a 64-bit integer of at least ``least``, or a 0-dim integer tensor, whose
    value is not read."""
    if type(value) is int and least <= value < 2**63:
        return
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_floating_point() and not value.is_complex():
        return
    count = isinstance(value, bool) and least > 0  # True is no number of things
    if count or not isinstance(value, numbers.Integral) or not least <= int(value) < 2**63:
        above = "" if least < 0 else f", {least} or more"
        raise ArgumentError(
            detail=f"{name} was given {_shown(value)}", fix=f"Give an integer that fits in 64 bits{above}"
        )


def at_most(k: Any, classes: int) -> None:
    """Raise TopKError where more classes are asked for than there are, and all of them are here."""
    if isinstance(k, int) and k > classes and is_undivided() and agreement.streamed_call() is None:
        raise TopKError(k=k, size=classes, axis="classes")


def positive(name: str, value: Any) -> None:
    """Raise ArgumentError unless ``value`` is finite and above 0, or a 0-dim tensor, whose value is not read."""
    if type(value) is float and 0 < value < math.inf:
        return
    if isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex():
        return
    if not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(
            detail=f"{name} was given {describe_value(value)}",
            fix="Give a number above 0, or a 0-dim tensor of one",
        )


def describe_value(value: Any) -> str:
    """A value as an error message names it: a tensor by its shape."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else _shown(value)


def _shown(value: Any) -> str:
    """A choice as it was written; anything else by its type and shape."""
    return repr(value) if isinstance(value, str) else shown(value)


def between(name: str, value: Any, least: float, most: float) -> None:
    """Raise ArgumentError unless ``value`` is a plain number from ``least`` to ``most``."""
    if type(value) is float and least <= value <= most and value < math.inf:
        return
    if not isinstance(value, numbers.Real) or not least <= float(value) <= most or math.isinf(value):
        bounds = f"from {least:g} to {most:g}" if most < math.inf else f"of {least:g} or more"
        raise ArgumentError(detail=f"{name} was given {describe_value(value)}", fix=f"Give a number {bounds}")


_CHOICES = frozenset({bool, int, float, str, type(None)})
_MOST = 256


def cache_check(check: Callable) -> Callable:
    """Decorate a check that reads only types, shapes, devices and options: its answer is cached by these."""
    known: dict[tuple, Any] = {}

    @functools.wraps(check)
    def checked(*given: Any) -> Any:
        key = _check_key(given)
        if key is None:
            return check(*given)
        if key not in known:
            if len(known) >= _MOST:
                known.clear()
            known[key] = check(*given)
        return known[key]

    return checked


def _check_key(given: tuple) -> tuple | None:
    """What such a check depends on, as a key; None where there is no cheap key."""
    if torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled() or dispatch.is_divided():
        return None
    found: list[Any] = []
    for value in given:
        kind = type(value)
        if kind in PLAIN:
            found += (value.dtype, value.shape, value.device)
        elif kind in _CHOICES:
            found += (kind, value)
        else:
            return None
    return tuple(found)


# Tensors


def tensor(
    name: str, value: Any, shape: str, least: int, most: int | None = None, kinds: tuple[Any, ...] = (Tensor,)
) -> None:
    """A tensor with at least ``least`` and at most ``most`` dimensions; ``shape`` says which, for the message.
    ``kinds``: what it may be."""
    if not isinstance(value, kinds):
        raise ArgumentError(
            detail=f"{name} was given {shown(value)}",
            fix=f"Give a tensor, a numpy array or an array with DLPack, of shape {shape}",
        )
    if value.dim() < least or (most is not None and value.dim() > most):
        if hasattr(value, "ds_id"):
            raise ArgumentError(
                detail=f"{name} is a parameter that DeepSpeed ZeRO-3 has partitioned: nothing of it is here now",
                fix="ZeRO-3 gathers weights while their own module is called. Make the module that calls this layer a "
                "leaf (deepspeed.utils.set_z3_leaf_modules(model, [its class])), or shard with FSDP2 or ZeRO-2",
            )
        raise ShapeError(
            detail=f"{name} has shape {tuple(value.shape)}, but {shape} was expected", fix="Add or drop dimensions"
        )


def vectors(name: str, value: Any, shape: str, least: int, most: int | None = None) -> None:
    """The same of vectors, which may be stored as small numbers (``mr.scaled``)."""
    tensor(name, value, shape, least, most, (Tensor, Scaled))


def domain(name: str, value: Any, *kinds: str) -> None:
    """Raise ArgumentError unless ``value`` says which columns exist; ``kinds``: in one of these ways."""
    if not isinstance(value, Domain) or (kinds and value.kind not in kinds):
        raise wrong_domain_error(name, value, *((kinds,) if kinds else ()))


def listed(cols: Any) -> dict[str, Any]:
    """The keyword that says which pairs exist, checked; none where all do."""
    if cols is None:
        return {}
    domain("cols", cols)
    return {"cols": cols}


def own_keys(q: Any, k: Any) -> None:
    """Raise ShapeError where k has fewer heads, as if q's shared them, and nobody said so."""
    if isinstance(q, Tensor) and isinstance(k, Tensor) and min(q.dim(), k.dim()) > 2:
        many, few = q.shape[-3], k.shape[-3]
        if many > few > 1 and not many % few:
            raise ShapeError(
                detail=f"q has {many} heads and k {few}", fix="Give enable_gqa=True where heads of q share one of k"
            )


def head(x: Any, weight: Any, bias: Any, prefix: str = "") -> None:
    """The arguments of a linear head, whose logits are ``x @ weight.T + bias``; ``prefix`` of their names."""
    vectors(f"{prefix}x", x, "[..., D]", 1)
    vectors(f"{prefix}weight", weight, "[V, D]", 2, 2)
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise DTypeError(detail=f"{prefix}x is {str(x.dtype)[6:]}, but a head multiplies floating numbers")
    alike(**{f"{prefix}x": x, f"{prefix}weight": weight})
    if x.shape[-1] != weight.shape[-1]:
        raise ShapeError(
            detail=f"{prefix}x {tuple(x.shape)} and {prefix}weight {tuple(weight.shape)} differ in their features",
            fix="Both have one feature axis, the last: x is [..., D] and weight [V, D], one vector per class",
        )
    if bias is not None:
        per_class(f"{prefix}bias", bias, weight)


def per_class(name: str, value: Any, weight: Tensor) -> None:
    """Raise unless ``value`` is one number for each class."""
    tensor(name, value, "[V]", 1, 1)
    alike(**{"weight": weight, name: value})
    if len(value) != len(weight):
        raise ShapeError(
            detail=f"weight has {len(weight)} classes, but {name} has {len(value)}",
            fix="Give one number for each class, that is, for each row of weight",
        )


def per_row(name: str, value: Any, x: Tensor) -> None:
    """Raise unless ``value`` is one real number for each row of x."""
    tensor(name, value, "[...]", 0)
    if value.shape != x.shape[:-1]:
        raise ShapeError(
            detail=f"{name} has shape {tuple(value.shape)}, but x {tuple(x.shape)} asks for {tuple(x.shape[:-1])}",
            fix="Give one number for each row of x",
        )
    if value.is_complex():
        raise DTypeError(detail=f"{name} is {str(value.dtype)[6:]}", fix="Give real numbers")
    one_device({"x": x, name: value})


def truths(name: str, value: Any, x: Any) -> None:
    """Raise unless ``value`` is one truth value for each row of x."""
    per_row(name, value, x)
    if value.dtype is not torch.bool:
        raise DTypeError(detail=f"{name} is {str(value.dtype)[6:]}", fix="Give truth values: mask != 0")


def alike(**tensors: Tensor) -> None:
    """Raise unless the tensors have one dtype (autocast makes it so) and one device."""
    kinds = {t.dtype for t in tensors.values() if not isinstance(t, Scaled)}
    if len(kinds) > 1 and dispatch.autocast_device(tensors.values()) is None:
        mixed = ", ".join(f"{name} is {str(t.dtype)[6:]}" for name, t in tensors.items())
        raise DTypeError(detail=f"arguments mix number types: {mixed}")
    one_device(tensors)


def one_device(tensors: dict[str, Tensor]) -> None:
    """Raise DeviceError unless the tensors are on one device."""
    first, *rest = tensors.values()
    if any(t.device != first.device for t in rest):
        mixed = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise DeviceError(detail=f"arguments are on different devices: {mixed}")


def classes(x: Tensor, weight: Tensor, target: Any) -> None:
    """Raise unless ``target`` holds class indices, one per row of x."""
    tensor("target", target, "[...]", 0)
    if target.is_floating_point() or target.is_complex() or target.dtype is torch.bool:
        raise DTypeError(
            detail=f"target is {str(target.dtype)[6:]}{list(target.shape)}, but class indices are integers",
            fix=f"Give integers {list(x.shape[:-1])}, or floating probabilities {[*x.shape[:-1], len(weight)]}",
        )
    per_row("target", target, x)


class Labels(NamedTuple):
    """Class indices as int64 [M], whether their values were checked, and the rows not ignored (None: all)."""

    classes: Tensor
    seen: bool
    kept: Tensor | None = None


def labels(target: Tensor, count: int, ignore_index: Any, first: int = 0) -> Labels:
    """Class indices below ``count``; their values are checked where reading them is free (see :func:`can_inspect`).

    ``first``: where the target begins in what the user gave, for the message.
    """
    flat = target if target.dim() == 1 else target.reshape(-1)
    flat = flat if flat.dtype is torch.int64 else flat.long()
    if not can_inspect(flat):
        return Labels(flat, False)
    streamed = agreement.streamed_call()
    if streamed is not None and streamed.totals[1] is None:  # looked at again when all classes have come
        return Labels(flat, False)
    count = agreement.total_sizes(flat.numel(), count)[1] if agreement.divides_cols() else count
    if not flat.numel():
        return Labels(flat, True)
    least, most = map(int, torch.aminmax(flat))
    if least < 0 or most >= count:
        _out_of_range(flat, target, count, ignore_index, first)
    if streamed is not None:  # rows come in blocks, of which each must have as many results as rows
        return Labels(flat, False)
    if not least <= ignore_index <= most:
        return Labels(flat, True)
    counted = flat != ignore_index
    return Labels(flat, True, None if bool(counted.all()) else counted.nonzero().squeeze(1))


def _out_of_range(flat: Tensor, target: Tensor, classes: int, ignore_index: Any, first: int) -> None:
    bad = ((flat < 0) | (flat >= classes)) & (flat != ignore_index)
    if bool(bad.any()):
        at = int(bad.to(torch.uint8).argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), target.shape))
        place = (*place[:-1], place[-1] + first) if first else place
        fix = "" if classes else "weight has no rows, so there are no classes"
        raise LabelError(
            label=int(flat[at]), position=place[0] if len(place) == 1 else place, last=classes - 1, fix=fix
        )


def can_inspect(t: Tensor) -> bool:
    """True where reading values is free: on a CPU. Elsewhere it would be a host sync; under a compiler or a function
    transform there are no values.
    """
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and dispatch.are_plain([t])


def is_distribution(x: Tensor, weight: Tensor, target: Any) -> bool:
    """Whether a target is floating and of the logits' shape: probabilities for every class."""
    return (
        isinstance(target, Tensor)
        and target.is_floating_point()
        and target.shape == _distribution_shape(x, weight, target)
    )


def _distribution_shape(x: Tensor, weight: Tensor, target: Tensor) -> tuple[int, ...]:
    """The shape of one distribution per row of x. In a ring, its classes are those of all ranks."""
    return (*x.shape[:-1], target.shape[-1] if agreement.pairs_have_all_columns() and target.dim() else len(weight))


def probabilities(name: str, x: Tensor, weight: Tensor, probs: Any) -> None:
    """Raise unless ``probs`` is a distribution over the classes for each row of x, of its dtype and device."""
    tensor(name, probs, "[..., V]", 1)
    if probs.shape != _distribution_shape(x, weight, probs):
        raise ShapeError(
            detail=f"{name} has shape {tuple(probs.shape)}, but x {tuple(x.shape)} and weight {tuple(weight.shape)} "
            f"ask for {(*x.shape[:-1], len(weight))}",
            fix="Give one number for each row of x and each row of weight",
        )
    alike(**{"x": x, name: probs})


# Rows


def flatten_rows(x: Any, *columns: Any) -> Any:
    """x [..., D] as [M, D] where the columns are shared by all rows, so that products are large; else x as it is."""
    shared = all(isinstance(c, (Tensor, Scaled)) and c.dim() == 2 for c in columns)
    if not shared or not isinstance(x, Tensor) or x.dim() in (0, 2):
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def unflatten_rows(y: Tensor, x: Any, rows: Tensor) -> Tensor:
    """A result [M] or [M, N] of ``rows = flat(x)`` with the leading dimensions of x again."""
    return y if rows is x else y.reshape((*x.shape[:-1], *y.shape[1:]))


def reduce_numbers(value: Tensor, share: Tensor | None, weights: Tensor | None, how: str, axis: str = "rows") -> Tensor:
    """A number per row (or column), times its weight, as it is, added up, or divided by the sum of shares (None: 1) and
    weights."""
    if weights is not None:
        weights = weights.to(value.dtype)
        value, share = value * weights, weights if share is None else share * weights
    if how == "none":
        return value
    if how == "sum":
        return agreement.sum_over_ranks(axis, value.sum())
    if share is None and is_undivided():
        return value.mean()
    count = torch.ones_like(value) if share is None else share
    return agreement.sum_over_ranks(axis, value.sum()) / agreement.sum_over_ranks(axis, count.sum())


def is_undivided() -> bool:
    """True where a call is not sharded: this process has all rows and columns."""
    return not dispatch.is_divided()


class PublicLayer(Protocol[Given, Result]):
    """A ready-made layer: called like the function that it is, or streamed over columns that come in chunks."""

    __name__: str

    @overload  # tried first: what it takes are tensors
    def __call__(self, *args: Given.args, **kwargs: Given.kwargs) -> Result: ...  # type: ignore[overload-overlap]
    @overload  # numpy arrays give numpy arrays: a type checker goes by the first argument, and checks no others then
    def __call__(self: PublicLayer[..., Tensor], array: Array, /, *args: Any, **kwargs: Any) -> Array: ...
    @overload
    def __call__(self: PublicLayer[..., Neighbours], array: Array, /, *args: Any, **kwargs: Any) -> NeighbourArrays: ...
    @overload
    def __call__(self: PublicLayer[..., Sinkhorn], array: Array, /, *args: Any, **kwargs: Any) -> SinkhornArrays: ...
    @overload
    def __call__(
        self: PublicLayer[..., tuple[Tensor, Tensor]], array: Array, /, *args: Any, **kwargs: Any
    ) -> tuple[Array, Array]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def stream(self, *args: Any, **kwargs: Any) -> Stream:
        """A fold over columns that come in chunks: give everything but the columns, then feed it."""
        ...

    def explain(self, *args: Any, backward: bool = True, measure: bool = False, **kwargs: Any) -> Explanation:
        """What the layer's ops would run for this call and why, as :meth:`monoidreduce.Op.explain` says it of one op.

        Nothing is computed, and meta tensors will do; with ``measure`` the layer is run a few times.
        """
        ...


@overload
def public_layer(layer: Callable[Given, Result]) -> PublicLayer[Given, Result]: ...
@overload
def public_layer(
    *,
    rows: Mapping[str, str],
    cols: Mapping[str, str],
    stream: Callable[..., Any] | None = None,
    col_results: Sequence[str] = (),
    dense_only: Mapping[str, str] | None = None,
) -> Callable[[Callable[Given, Result]], PublicLayer[Given, Result]]: ...
def public_layer(
    layer: Any = None,
    *,
    rows: Mapping[str, str] | None = None,
    cols: Mapping[str, str] | None = None,
    stream: Callable[..., Any] | None = None,
    col_results: Sequence[str] = (),
    dense_only: Mapping[str, str] | None = None,
) -> Any:
    """Decorate a layer. Over several ranks, an error that its checks raise on one of them is raised on all; elsewhere
    repeated calls of one kind replay its Python (``runtime/torch_replay.py``). ``rows`` and ``cols``: which arguments
    have an entry for each row or column, and on which axis (``_axis`` of ``streaming.py``), for streams and nested
    tensors; ``stream``: the layer's own, if it has one;
    ``col_results``: which of its results have an entry a column; ``dense_only``: the options that nested rows do not
    have, and what to do instead."""
    if layer is None:
        return lambda found: _public(found, rows or {}, cols or {}, stream, col_results, dense_only or {})
    return _public(layer, {}, {}, stream, (), {})


def _public(
    layer: Callable,
    rows: Mapping[str, str],
    cols: Mapping[str, str],
    stream: Any,
    col_results: Sequence[str],
    dense_only: Mapping[str, str],
) -> Any:
    sides = {**dict.fromkeys(rows, "rows"), **dict.fromkeys(cols, "cols")}
    names = list(inspect.signature(layer).parameters)

    def result_sides(_: Any, result: Any) -> Any:
        if not isinstance(result, tuple):
            return "rows"
        fields = getattr(result, "_fields", [""] * len(result))
        return tuple(["cols" if name in col_results else "rows" for name in fields])

    def of_nested(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, fix in dense_only.items():
            if given.get(name):
                raise ArgumentError(detail=f"{name} was given beside nested tensors", fix=fix)
        return jagged.call_with_values(layer, sides, names, args, kwargs, result_sides, takes_cols="cols" in names)

    def of_any_tensors(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        if jagged.any_nested(given):
            return of_nested(*args, **kwargs)
        divided = dtensors.any_dtensor((*given, *(part for v in given if isinstance(v, tuple) for part in v)))
        return run_layer(layer, args, kwargs) if divided else layer(*args, **kwargs)

    replay = torch_replay.LayerReplay(layer, of_any_tensors)

    @functools.wraps(layer)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if arrays.are_traced(args, kwargs):
                return arrays.call_traced(layer, args, kwargs)
            if dtensors.are_traced([*args, *kwargs.values()]):
                return torch._dynamo.disable(of_any_tensors)(*args, **kwargs)
            if jagged.any_nested([*args, *kwargs.values()]):
                return of_nested(*args, **kwargs)
            return layer(*args, **kwargs)
        if settings.layout.get() is None:
            try:
                return replay(args, kwargs)
            except TypeError as error:
                _explain_arguments(error, layer, names, args, kwargs)
                raise
        if arrays.has_arrays((*args, *kwargs.values())):
            return replay.call_with_arrays(args, kwargs)
        try:
            return of_any_tensors(*args, **kwargs)
        except MonoidReduceError as error:
            agreement.report_failure(error)
            raise

    def explain(*args: Any, backward: bool = True, measure: bool = False, **kwargs: Any) -> Explanation:
        return explain_layer(checked, args, kwargs, backward, measure, checked.__name__)

    checked.stream = stream or LayerStreams(layer, rows, cols).stream  # type: ignore[attr-defined]
    checked.explain = explain  # type: ignore[attr-defined]
    return checked


def _explain_arguments(error: TypeError, layer: Callable, names: list[str], args: tuple, kwargs: Mapping) -> None:
    """Raise ArgumentError in place of Python's bare error for arguments that are unknown, missing or too many."""
    if isinstance(error, MonoidReduceError):
        return
    takes = f"It takes {', '.join(names)}"
    unknown = next((n for n in kwargs if n not in names), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, names, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(detail=f"{layer.__name__} has no argument {unknown!r}{meant}", fix=takes) from None
    try:
        inspect.signature(layer).bind(*args, **kwargs)
    except TypeError as wrong:
        raise ArgumentError(detail=f"{layer.__name__}: {wrong}", fix=takes) from None


def largest_shape(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of tensors that are broadcast together, if they can be.

    >>> largest_shape([(3, 1), (5,), ()])
    (3, 5)
    """
    behind = zip_longest(*(reversed(s) for s in shapes), fillvalue=1)
    return tuple(max(sizes) for sizes in behind)[::-1]


def expands(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of a shape can be broadcast to another, which stays as it is."""
    behind = whole[len(whole) - len(shape) :]
    return len(shape) <= len(whole) and all(m in (1, n) for m, n in zip(shape, behind, strict=True))


def reduce_loss(loss: Tensor, how: Reduction, weights: Tensor | None = None) -> Tensor:
    """A loss per row, averaged, added up or as it is; with weights, their weighted mean, sum or products."""
    return reduce_numbers(loss, None, weights, how)


def integers(name: str, value: Tensor) -> None:
    """Raise DTypeError unless ``value`` holds integers."""
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise DTypeError(detail=f"{name} is {str(value.dtype)[6:]}", fix="Give integers")


def floating(**tensors: Any) -> None:
    """Raise DTypeError for tensors that are not floating; what is no tensor is left to the op."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and not t.is_floating_point():
            raise DTypeError(detail=f"{name} is {str(t.dtype)[6:]}", fix="Give floating numbers")


def drop_unset(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are set: each one passed on costs every call a little time."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


def draw_seed() -> int | Tensor:
    """A seed from torch's default generator of the CPU, so that ``torch.manual_seed`` repeats what is drawn with it."""
    streamed = agreement.streamed_call()
    if streamed is not None and streamed.memo is not None:
        return streamed.memo.setdefault("seed", int(torch.randint(2**63 - 1, (), device="cpu")))
    seed = torch.randint(2**63 - 1, (), device="cpu")
    return seed if torch.compiler.is_compiling() else int(seed)  # a compiled graph draws anew in every run


# What a layer would run


class _Watched(TorchDispatchMode):
    """Changes nothing. Under a dispatch mode no call is a cached plan: ops are called by the long way, and listed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here; torch's guard against it would import Dynamo."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def explain_layer(
    layer: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], backward: bool, timed: bool, name: str
) -> Explanation:
    """What each op of a call would run, and why. ``timed``: the layer is run a few times, and measured."""
    found: dict[str, tuple[Explanation, int]] = {}
    calls = _list_calls(layer, args, kwargs)
    for op, own, named in calls:
        text = op.explain(*own, backward=backward, **named)
        found[str(text)] = text, found.get(str(text), (text, 0))[1] + 1
    lines = [f"{name} calls {len(calls)} op{'s'[: len(calls) != 1]}"]
    lines += [f"{text}\n  ({n} calls like this one)" if n > 1 else str(text) for text, n in found.values()]
    measured = measure(layer, args, kwargs, backward) if timed else None
    if measured is not None:
        lines.append(
            f"measured: {measured.seconds * 1e3:.3g} ms, {format_ceil(measured.peak)} at once, the whole layer"
        )
    made = Explanation("\n".join(lines))
    made.data = {
        "layer": name,
        "calls": [{**text.as_dict(), "times": n} for text, n in found.values()],
        "measured": None if measured is None else vars(measured),
    }
    return made


def _list_calls(layer: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Calls:
    """The calls of ops that a layer makes."""
    calls: Calls = []
    token = explained_calls.set(calls)
    try:
        with _Watched():
            layer(*args, **kwargs)
    finally:
        explained_calls.reset(token)
    return calls
