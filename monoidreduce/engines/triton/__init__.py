"""The Triton engine: generated kernels for GPUs.

``engine.py`` holds what the rest of the package calls. It is imported when one of its names is first used, with the
forty files below it: they are a third of ``import monoidreduce``, and nothing of them runs without a GPU. What a call
asks for on every device is here.
"""

import importlib
from typing import TYPE_CHECKING

from ..common.evaluate import describe_leaves  # noqa: F401
from .launch import start_triton  # noqa: F401

if TYPE_CHECKING:
    from .engine import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        engine = importlib.import_module(".engine", __name__)
        globals().update({each: getattr(engine, each) for each in engine.__all__})
        return getattr(engine, name)
