"""The name of a fold: a digest of its text, equal for equal folds, on every machine and in every process."""

from __future__ import annotations

import functools
import hashlib
import uuid
from typing import Any

from .expression import Expr, topological
from .lower import Fold

_PROCESS = uuid.uuid4().hex  # part of the names of folds over a user's own classes, whose text is not their meaning
_OWN = "own-"


@functools.lru_cache(maxsize=4096)
def digest(fold: Fold) -> str:
    """The name of a fold, node by node."""
    parts = (fold.leaves, fold.reductions, fold.scales)
    order = topological([e for part in parts for e in part])
    number = {e: k for k, e in enumerate(order)}
    lines = [_line(e, number) for e in order]
    lines += [str([number[e] for e in part]) for part in parts]
    text = "\n".join(lines)
    found = hashlib.sha256(text.encode()).hexdigest()[:24]
    return _OWN + found if _PROCESS in text else found


def lasts(name: str) -> bool:
    """Whether a name means the same fold in another process: not where a user's own class is part of it."""
    return not name.startswith(_OWN)


def _line(e: Expr, number: dict[Expr, int]) -> str:
    return f"{e.op} {[number[a] for a in e.args]} {_text(e.attrs)} {e.rows} {e.cols} {e.feature} {e.dtype}"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else f"{value!r} {id(value)} {_PROCESS}"
