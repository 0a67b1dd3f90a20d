"""A layer to be looked at: something to call, its dense form, and where its arguments come from.

An op brings all three itself: its arguments are drawn from its declarations, its dense form is made from its program.
Any other layer (a ``torch.autograd.Function`` of the papers' factories, a module, a function that calls ops) stands in
its file beside ``NAME_inputs(rows, cols)``, which returns its arguments, and may have a ``NAME_dense(*arguments)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..op import Op
from . import naive
from .command import CommandError
from .draw import Recipe, Sizes, recipe
from .layers import NAMED, SEED, Layer, Size
from .target import Target, check_takes, load, users_code


@dataclass(frozen=True)
class Subject:
    """A layer, and how to make its arguments."""

    name: str
    file: str
    call: Callable[..., Any]
    dense: Callable[..., Any] | None
    make: Callable[..., tuple[Any, ...]]  # (rows, cols, dtype, device, seed) -> arguments
    op: Op | None = None
    written: str = ""  # the dense form in code
    key: str = ""  # the name of a ready-made layer
    by_hand: bool = True  # whether the dense form is code that someone wrote, which torch.compile can read

    def inputs(
        self, rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int = SEED
    ) -> tuple[Any, ...]:
        """Arguments of this size; those of floating type ask for gradients."""
        with users_code(self.file):
            return self.make(rows, cols, dtype, device, seed)


def of(
    target: Target,
    settings: Sequence[tuple[str, str]] = (),
    features: Mapping[str, int] | None = None,
    batch: int | None = None,
    inputs_name: str | None = None,
    dense_name: str | None = None,
) -> Subject:
    """The layer that a target is."""
    if target.is_monoid:
        raise CommandError(f"{target.name} is a monoid, not a layer. monoidreduce check tries its laws")
    op = target.thing if isinstance(target.thing, Op) else None
    makes = target.companion(inputs_name, "inputs")
    dense = target.companion(dense_name, "dense")
    if makes is not None:
        make = _given(target, makes)
    elif op is not None:
        with users_code(target.file):
            made = recipe(op, dict(settings))
        _check_letters(made, features or {})
        make = lambda rows, cols, *how: made.draw(Sizes(rows, cols, batch, features or {}), *how)
    else:
        raise CommandError(
            f"{target.name} is no op, so its arguments are not declared. Put a function {target.name}_inputs(rows, "
            f"cols) that returns them into {target.file}, or name one with --inputs"
        )
    written = getattr(dense, "__name__", "")
    made_dense = dense or (naive.dense(op) if op else None)
    return Subject(target.name, target.file, target.call, made_dense, make, op, written, by_hand=dense is not None)


def resolved(spec: str, features: Mapping[str, int] | None = None, **given: Any) -> Subject:
    """The layer that a name of the table or FILE.py:NAME says."""
    if spec in NAMED:
        extra = [name for name, value in given.items() if value]
        if extra or set(features or {}) - {""}:
            raise CommandError(f"{spec} is a ready-made layer: only --features SIZE changes its arguments")
        return _ready(NAMED[spec], (features or {}).get(""))
    if ":" not in spec and not spec.endswith(".py"):
        raise CommandError(f"there is no layer {spec}. Give FILE.py:NAME, or one of {', '.join(NAMED)}")
    return of(load(spec), features=features, **given)


def _ready(layer: Layer, features: int | None) -> Subject:
    def make(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        given = layer.inputs(Size(rows, cols, features or layer.full.features))
        return tuple(_placed(x, dtype, device, isinstance(x, Tensor) and x.requires_grad) for x in given)

    return Subject(layer.name, "", layer.ours, layer.naive, make, written=layer.dense, key=layer.key)


def _check_letters(made: Recipe, features: Mapping[str, int]) -> None:
    known = {axis for p in made.op.parameters.values() for axis in p.tail} - {"rows", "cols"}
    unknown = sorted(set(features) - known - {""})
    if unknown:
        raise CommandError(f"--features {unknown[0]}={features[unknown[0]]}: there is no such letter. {made.op!r}")


def _given(target: Target, makes: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Arguments from the user's own function, in the type and on the device that are asked for."""

    def make(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Any, ...]:
        torch.manual_seed(seed)
        check_takes(makes, (rows, cols), "--inputs")
        found = makes(rows, cols)
        if not isinstance(found, tuple | list):
            raise CommandError(f"{makes.__name__} returned a {type(found).__name__}. Return a tuple of arguments")
        return tuple(_placed(x, dtype, device) for x in found)

    return make


def _placed(x: Any, dtype: torch.dtype, device: torch.device, learned: bool = True) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = x.detach().to(device)
    return x.to(dtype).requires_grad_(learned) if x.is_floating_point() else x
