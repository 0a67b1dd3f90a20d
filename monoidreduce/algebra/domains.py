"""The states that a monoid can reach, as its class declares them: what examples for the laws are drawn from.

``Monoid.domain`` is one of

- a mapping from field names to :class:`Domain` (bounds and special values) or to a function ``(generator, shape) ->
  Tensor``: each field by itself;
- a predicate ``domain(x)``, a static method: whether the state ``x`` (all its fields) can be reached;
- a sampler ``domain(generator, batch, size)``, a static method: reachable states, as an element or a dict of fields in
  the shapes that ``combine`` sees (``[*batch, 1]`` for a Scalar, ``[*batch, size]`` for a Vector).

Used by ``laws.check`` and by the probe of ``mr.reduce`` and ``mr.fold``. Imports torch and the errors only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Generator, Tensor

from monoidreduce.errors import DeclarationError


def field_domains(monoid: Any) -> Mapping[str, Any]:
    """What is said of single fields."""
    return monoid.domain if isinstance(monoid.domain, Mapping) else {}


def predicate(monoid: Any) -> Callable[[Any], Any] | None:
    """The predicate over all fields, if there is one."""
    return monoid.domain if callable(monoid.domain) and _arity(monoid) == 1 else None


def sampler(monoid: Any) -> Callable[[Generator, tuple[int, ...], int], Any] | None:
    """What draws reachable states, if there is such a function."""
    return monoid.domain if callable(monoid.domain) and _arity(monoid) == 3 else None


def check(monoid: Any) -> None:
    """Whether the class declares its domain in one of the forms above; anything else is a DeclarationError."""
    if isinstance(monoid.domain, Mapping):
        return
    if not callable(monoid.domain) or _arity(monoid) not in (1, 3):
        raise DeclarationError(
            detail=f"{monoid.__name__}.domain is {monoid.domain!r}",
            fix="Give a mapping of fields to Domain(low=..., high=...), a static method domain(x) that says whether a "
            "state can be reached, or a static method domain(generator, batch, size) that draws such states",
        )


def _arity(monoid: Any) -> int:
    try:
        return len(inspect.signature(monoid.domain).parameters)
    except (TypeError, ValueError):
        return 0


def reachable(x: Any, batch: int) -> Tensor:
    """Which of a batch of elements (``batch`` leading axes) can be reached, as far as the class says."""
    first = next((v for v in x.asdict().values() if isinstance(v, Tensor)), torch.zeros(()))  # or all are functions
    shape = first.shape[:batch]
    found = torch.ones(shape, dtype=torch.bool)
    for piece in pieces(x):
        says = predicate(type(piece))
        if says is not None:
            answer = torch.as_tensor(says(piece))
            found = found & answer.expand(torch.broadcast_shapes(answer.shape, shape)).reshape(*shape, -1).all(-1)
    return found


def pieces(x: Any) -> list[Any]:
    """An element of a product as the elements of its factors; any other element by itself."""
    monoid = type(x)
    if not monoid.components:
        return [x]
    values = x.asdict()
    return [
        part(**{old: values[new] for old, new in names.items()})
        for part, names in zip(monoid.components, monoid.component_fields, strict=True)
    ]


def is_sampled(monoid: Any) -> bool:
    """Whether states (or those of a factor) come from a sampler, so that numbers must not be changed one by one."""
    return any(sampler(part) is not None for part in monoid.components or (monoid,))


def is_related(monoid: Any) -> bool:
    """Whether the class, or a factor, relates its fields to each other by a predicate."""
    return any(predicate(part) is not None for part in monoid.components or (monoid,))


__all__ = ["check", "field_domains", "is_related", "is_sampled", "pieces", "predicate", "reachable", "sampler"]
