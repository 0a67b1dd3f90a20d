"""The Triton engine: generated kernels for GPUs.

``engine.py`` holds what the rest of the package calls. It is imported when one of its names is first used, with the
sixty files below it: they are a third of ``import monoidreduce``, and nothing of them runs without a GPU. Where kernels
run, and how the arguments of a call are told apart, is known without them.
"""

import importlib
from typing import TYPE_CHECKING

from .launch.devices import available as available
from .launch.devices import launches_on as launches_on
from .launch.devices import runs_on as runs_on
from .prepared import describe_leaves as describe_leaves
from .prepared import prepared_folds as prepared_folds

if TYPE_CHECKING:
    from .engine import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(".engine", __name__), name)
        return found
