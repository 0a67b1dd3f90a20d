"""What the examples have in common: a step's peak memory, a figure in the output folder, and a command line."""

import argparse
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from monoidreduce.cli.measure import profile_memory

OUT = Path(__file__).parent / "out"
OURS, NAIVE = "#0d74ce", "#a3a8ae"


def peak_mb(loss: Callable[[], Tensor], weights: Iterable[Tensor]) -> float:
    """The most memory that one forward and backward of ``loss()`` holds beside weights and gradients, in megabytes.

    Every allocation that torch makes is counted, also those inside its own kernels.
    """
    weights = list(weights)
    loss()  # what is made once, on the first call, belongs to no step
    profile = profile_memory(lambda: (loss(),), lambda values: torch.autograd.grad(values, weights), weights)
    return profile.extra / 1e6


def save(figure: Figure, out: Path, name: str) -> Path:
    """Write the figure into the folder ``out``, made if need be, and say where it is."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.png"
    figure.savefig(path, dpi=120)
    print(f"drawn: {path}")
    return path


def command(main: Callable[..., Any]) -> None:
    """Run ``main`` with each of its parameters as an option of the command line."""
    parser = argparse.ArgumentParser(description=inspect.getdoc(inspect.getmodule(main)))
    for name, parameter in inspect.signature(main).parameters.items():
        kind = type(parameter.default)
        parser.add_argument(f"--{name}", type=kind, default=parameter.default, help="default: %(default)s")
    main(**vars(parser.parse_args()))
