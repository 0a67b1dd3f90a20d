"""Files of partial states and of results: written under another name first, checked when they are read.

A state is what a stream keeps of the columns folded so far: tensors by reduction. Its file names the job it belongs to
and holds a checksum of every tensor. A file that cannot be read, or is another job's, raises ``DamagedState``: whoever
asked folds those columns again.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ...engines.stream import checksum
from ...errors import StreamError

States = list[list[Tensor]]


class DamagedState(Exception):
    """A state file cannot be used; ``args[0]`` is its path."""


def write_whole(path: Path, write: Callable[[Any], None]) -> None:
    """Write a file so that it is there whole or not at all; raises StreamError where it cannot be written."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(part, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise StreamError(
            detail=f"{path} cannot be written: {error.strerror or error}",
            fix="Make room, or let the workers write there, and call run again: it goes on where it stopped",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def save_states(path: Path, job: str, states: States) -> None:
    """Write a state."""
    kept = [[t.detach().cpu().contiguous() for t in s] for s in states]
    sums = [[int(checksum(t)) for t in s] for s in kept]
    write_whole(path, lambda file: torch.save({"job": job, "states": kept, "sums": sums}, file))


def load_states(path: Path, job: str, device: torch.device) -> States:
    """Read a state; raises DamagedState."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        states, sums = found["states"], found["sums"]
        whole = found["job"] == job and [[int(checksum(t)) for t in s] for s in states] == sums
    except Exception:  # cut short, garbage, of another version: torch and zipfile raise a dozen types
        whole = False
    if not whole:
        raise DamagedState(str(path))
    return [[t.to(device) for t in s] for s in states]


def save_array(path: Path, value: Tensor) -> None:
    """Write a result as .npy; bfloat16, which numpy lacks, as float32."""
    value = value.detach().cpu()
    array = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    write_whole(path, lambda file: numpy.save(file, array, allow_pickle=False))
