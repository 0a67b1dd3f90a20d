"""Where the numbers come from: this machine and these versions."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .._version import __version__


@dataclass(frozen=True)
class Environment:
    """What a reader must know to compare the numbers with theirs."""

    version: str
    python: str
    torch: str
    cpu: str
    threads: str
    date: str
    gpu: str = ""  # where one was used


def surroundings(device: torch.device | None = None) -> Environment:
    """The environment of this process, for something that ran on ``device`` (the CPU, if left out)."""
    date = f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    gpu = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else ""
    return Environment(__version__, platform.python_version(), torch.__version__, _cpu(), threads, date, gpu)


def _cpu() -> str:
    """The processor's name where Linux tells it, else its architecture, and the instructions that torch uses."""
    name = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    capability = torch.backends.cpu.get_cpu_capability()
    return (name or platform.machine()) + (f" ({capability})" if capability != "DEFAULT" else "")
