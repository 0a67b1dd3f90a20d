"""Layers on DTensors: the axes of their arguments, so that a whole layer runs on the local shards.

A layer flattens rows, looks at labels and averages; on local tensors, under the layout that the placements mean, it
does so without sending anything but what its folds send. Layers that are not listed call their op with the DTensors
they are given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..engines.ranks import dtensors
from ..engines.ranks.dtensors import Axes
from ..errors import ArgumentError

_LOSSES = ("cross_entropy_given", "linear_cross_entropy", "linear_cross_entropy_soft", "linear_jsd", "linear_kl")
_CHOICES = ("linear_argmax", "linear_entropy", "linear_logprobs", "linear_sample", "linear_topk")
_LAYERS = frozenset({*_LOSSES, *_CHOICES, "mlp", "gated_mlp"})
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
