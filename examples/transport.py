"""Optimal transport between two clouds of points by Sinkhorn's iterations, and the way each point goes.

The plan is a matrix of points × points, π_ij = a_i b_j exp((f_i + g_j - C_ij) / ε); it is never there. Its two
marginals, and where the plan sends each point on average, are ops of three lines.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

import monoidreduce as mr
from examples.shared import NAIVE, OURS, OUT, command, save
from monoidreduce import Col, Row, ops


class Result(NamedTuple):
    """The cost; how far the plan's marginals are from the masses (total variation); the points and where they go."""

    cost: float
    row_error: float
    col_error: float
    points: Tensor
    moved: Tensor


@mr.op
def marginals(x: Row["d"], f: Row, a: Row, y: Col["d"], g: Col, b: Col, eps: float):
    plan = a * b * torch.exp((f + g - mr.sqdist(x, y)) / eps)
    return mr.sum(plan), mr.sum(plan, over="rows")


@mr.op
def destination(x: Row["d"], y: Col["d"], g: Col, log_b: Col, eps: float):
    return mr.softmax_mean(log_b + (g - mr.sqdist(x, y)) / eps, y)  # Σ_j π_ij y_j / Σ_j π_ij


def ring(points: int) -> Tensor:
    angle, radius = 2 * math.pi * torch.rand(points), 1 + 0.08 * torch.randn(points)
    return torch.stack([angle.cos(), angle.sin()], -1) * radius[:, None]


def moons(points: int) -> Tensor:
    """Two crescents; the second has twice as many points as the first."""
    angle, second = math.pi * torch.rand(points), torch.rand(points) < 2 / 3
    turned = torch.where(second, -1.0, 1.0)
    crescents = torch.stack([angle.cos() - 0.5 * turned, turned * (angle.sin() - 0.25)], -1)
    return crescents + 0.06 * torch.randn(points, 2)


def main(points: int = 1200, eps: float = 0.05, iterations: int = 300, out: Path = OUT) -> Result:
    torch.manual_seed(0)
    x, y = ring(points), moons(points + points // 3)
    a, b = (torch.full((len(cloud),), 1 / len(cloud)) for cloud in (x, y))
    cost, f, g = ops.sinkhorn(x, y, a, b, eps=eps, iterations=iterations)[:3]
    rows, cols = marginals(x, f, a, y, g, b, eps)
    errors = [(found - mass).abs().sum().item() / 2 for found, mass in ((rows, a), (cols, b))]
    moved = destination(x, y, g, b.log(), eps)
    print(f"cost {cost:.4f}; marginals off by {errors[0]:.1e} and {errors[1]:.1e} of the mass")
    draw(x, y, moved, out)
    return Result(cost.item(), *errors, x, moved)


def draw(x: Tensor, y: Tensor, moved: Tensor, out: Path) -> None:
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplot_mosaic("AAB;AAC;AAD")
    some = slice(None, None, max(len(x) // 300, 1))
    way = moved[some] - x[some]
    axes["A"].scatter(*y.T, s=4, color=NAIVE, label="to")
    axes["A"].scatter(*x.T, s=4, color=OURS, label="from")
    axes["A"].quiver(*x[some].T, *way.T, angles="xy", scale_units="xy", scale=1, width=0.002, alpha=0.5)
    axes["A"].set_title("Where each point goes")
    axes["A"].legend(loc="upper right")
    for name, share in (("B", 0.3), ("C", 0.6), ("D", 1.0)):
        axes[name].scatter(*(x + share * (moved - x)).T, s=1, color=OURS)
        axes[name].set_title(f"{share:.0%} of the way", fontsize=9)
    for ax in axes.values():
        ax.set(aspect="equal", xticks=[], yticks=[])
    save(figure, out, "transport")


if __name__ == "__main__":
    command(main)
