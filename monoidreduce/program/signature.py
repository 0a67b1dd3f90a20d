"""Calls of the language's own functions, checked: a keyword that only torch has is answered with advice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ..errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_AXIS = 'A reduction folds over columns, or with over="rows" over rows; the features of a vector are summed by x.sum()'
_ADVICE = {
    "dim": _AXIS,
    "axis": _AXIS,
    "keepdim": "Leave it out: there are no axes in a body",
    "keepdims": "Leave it out: there are no axes in a body",
    "dtype": "Leave it out, or cast what is reduced: x.to(torch.float32)",
    "out": "Leave it out: nothing is written in place in a body",
    "sorted": "Leave it out: the best come first",
    "unbiased": "Give correction=1 or correction=0",
    "ddof": "Give correction=1 or correction=0",
}


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The same function; a call that does not fit its signature says what to write."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name = function.__name__
            unknown = [k for k in kwargs if k not in signature.parameters]
            given = f"mr.{name} has no keyword {unknown[0]!r}" if unknown else f"mr.{name}: {error}"
            shown = f"mr.{name}({', '.join(map(_plain, signature.parameters.values()))})"
            advice = _ADVICE.get(unknown[0]) if unknown else _AXIS if "too many positional" in str(error) else None
            fix = f"It is {shown}" if advice is None else f"{advice}. It is {shown}"
            raise ArgumentError(detail=given, fix=fix.replace("{", "{{").replace("}", "}}")) from None
        return function(*args, **kwargs)

    return call


def _plain(p: inspect.Parameter) -> str:
    stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
    return f"{stars}{p.name}" if p.default is p.empty else f"{p.name}={p.default!r}"
