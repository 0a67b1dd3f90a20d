"""The Triton engine: generated kernels for GPUs.

``engine.py`` holds what the rest of the package calls. It is imported when one of its names is first used, with the
sixty files below it: they are a third of ``import monoidreduce``, and nothing of them runs without a GPU. Where kernels
run, and what a call asks for on every device, is here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .launch import start_triton  # noqa: F401

if TYPE_CHECKING:
    from .engine import *  # noqa: F403
    from .kernels.prepared_fold import PreparedFold
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(".engine", __name__), name)
        return found


_PREPARED: dict[tuple, PreparedFold] = {}


def prepared_folds() -> dict[tuple, PreparedFold]:
    """The cache of prepared folds; another object after it was cleared by replacing it."""
    return _PREPARED


def describe_leaves(leaves: Sequence[Any]) -> tuple:
    """What kernels depend on in leaves besides their values: dtype, shape, strides, alignment."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found.append(type(v))
    return tuple(found)
