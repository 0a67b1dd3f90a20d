"""CLIP-style training with a batch that plain torch cannot hold in the same memory.

Pictures and captions are two views of one hidden vector; each picture is to find its caption among all of the batch,
and each caption its picture. In plain torch the loss needs several matrices of batch × batch numbers, ours none: within
one budget of memory (in megabytes) it trains on a batch several times as large.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples.shared import NAIVE, OURS, OUT, command, peak_mb, save
from monoidreduce import ops

HIDDEN, SEEN, WIDTH = 16, 48, 32


class Result(NamedTuple):
    """Peak memory of both forms by batch size; of ours, training on the largest, the losses and found captions."""

    sizes: list[int]
    naive_mb: list[float]
    ours_mb: list[float]
    budget_mb: float
    naive_batch: int
    losses: list[float]
    found_before: float
    found_after: float


def naive_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    s, own = F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T * scale, torch.arange(len(x))
    return (F.cross_entropy(s, own) + F.cross_entropy(s.T, own)) / 2


def our_loss(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return ops.contrastive_loss(x, y, scale=scale, normalize=True)


class World:
    """Where pictures and captions come from: two noisy views of the same hidden vectors."""

    def __init__(self) -> None:
        self.views = [torch.randn(HIDDEN, SEEN) / HIDDEN**0.5 for _ in range(2)]

    def batch(self, size: int) -> list[Tensor]:
        hidden = torch.randn(size, HIDDEN)
        return [torch.tanh(2 * hidden @ view) + 0.2 * torch.randn(size, SEEN) for view in self.views]


class Encoders(nn.Module):
    """One perceptron for pictures, one for captions, and the learned scale of the similarities."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = nn.ModuleList(
            nn.Sequential(nn.Linear(SEEN, 128), nn.ReLU(), nn.Linear(128, WIDTH)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(10.0).log())

    def forward(self, seen: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = (side(view) for side, view in zip(self.sides, seen, strict=True))
        return x, y, self.log_scale.exp()


@torch.no_grad()
def found(model: Encoders, seen: list[Tensor]) -> float:
    """The share of pictures whose caption is the nearest of all."""
    x, y, _ = model(seen)
    return (ops.linear_argmax(x, F.normalize(y, dim=-1)) == torch.arange(len(x))).float().mean().item()


def main(batch: int = 4096, smallest: int = 256, steps: int = 25, budget: float = 32.0, out: Path = OUT) -> Result:
    torch.manual_seed(0)
    world, model = World(), Encoders()
    sizes = [size for k in range(12, -1, -1) if (size := batch >> k) >= smallest]
    memory: dict = {naive_loss: [], our_loss: []}
    for size in sizes:
        x, y, scale = (t.detach().requires_grad_() for t in model(world.batch(size)))
        for loss, peaks in memory.items():
            peaks.append(peak_mb(lambda l=loss, args=(x, y, scale): l(*args), [x, y, scale]))
    fits = [size for size, mb in zip(sizes, memory[naive_loss], strict=True) if mb <= budget]

    optimiser, losses, test = torch.optim.Adam(model.parameters(), lr=3e-3), [], world.batch(batch)
    before = found(model, test)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = our_loss(*model(world.batch(batch)))
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    largest = max(fits, default=0)
    result = Result(sizes, *memory.values(), budget, largest, losses, before, found(model, test))
    print(f"batch {batch}: plain torch takes {result.naive_mb[-1]:.0f} MB, ours {result.ours_mb[-1]:.0f} MB;")
    print(f"within {budget:g} MB the largest batch of plain torch is {largest or f'below {smallest}'}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; captions found {before:.1%} -> {result.found_after:.1%}")
    draw(result, out)
    return result


def draw(r: Result, out: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.loglog(r.sizes, r.naive_mb, "o-", color=NAIVE, label="plain torch", base=2)
    left.loglog(r.sizes, r.ours_mb, "o-", color=OURS, label="MonoidReduce", base=2)
    left.axhline(r.budget_mb, color="black", linestyle=":", label="budget")
    left.set(xlabel="batch", ylabel="MB", title="Peak memory of the loss and its gradient")
    left.legend()
    right.plot(r.losses, color=OURS)
    right.set(xlabel="step", ylabel="loss", title=f"Trained on batches of {r.sizes[-1]}")
    save(figure, out, "clip")


if __name__ == "__main__":
    command(main)
