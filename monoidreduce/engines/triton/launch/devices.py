"""Where kernels run. Nothing else of this engine is imported to answer: a process without a GPU needs no more of it."""

from __future__ import annotations

import functools
import importlib.util

import torch

from ....plan import settings


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def runs_on(device: torch.device) -> bool:
    """Whether kernels run there: on a GPU, or in Triton's interpreter."""
    return (device.type == "cuda" or settings.interprets_kernels()) and available()


def launches_on(device: torch.device) -> bool:
    """Whether kernels run there, and not in an interpreter."""
    return device.type == "cuda" and runs_on(device)
