"""A new attention variant in ten lines, trained to beat plain attention.

The variant forgets: from every score it takes a penalty on the distance, a power law and an exponential, whose two
strengths each head learns. The task: a stream of (key, value) pairs, and at each place the value is asked that the
place's key had when it was *last* seen. Plain attention tells time by sinusoids added to the keys; ours needs none.
Both learn the task; asked on streams longer than any they were trained on, only ours still knows what was last.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

import monoidreduce as mr
from examples.shared import NAIVE, OURS, OUT, command, save
from monoidreduce import Batch, Col, Row, ops

KEYS, VALUES = 8, 8


@mr.op
def forgetting_attention(q: Row["f"], k: Col["f"], v: Col["d"], power: Batch, rate: Batch):
    distance = mr.row_index - mr.col_index
    s = q @ k - power * torch.log1p(distance.abs()) - rate * distance
    return mr.softmax_mean(torch.where(distance > 0, s, -torch.inf), v)  # only what came before


def sinusoids(length: int, width: int) -> Tensor:
    angle = torch.arange(length)[:, None] / 1000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angle.sin(), angle.cos()], -1)


class Recall(nn.Module):
    """One layer of attention from keys to values; with ``forgets``, ours in place of the plain one."""

    def __init__(self, heads: int, width: int, forgets: bool):
        super().__init__()
        self.heads, self.forgets = heads, forgets
        self.keys, self.values = nn.Embedding(KEYS, width), nn.Embedding(VALUES, width)
        self.q, self.k, self.out = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, VALUES)
        self.power, self.rate = (nn.Parameter(torch.full((heads,), -2.0)) for _ in range(2))

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        x, v = self.keys(keys), self.values(values)
        x = x if self.forgets else x + sinusoids(*x.shape[-2:])
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for t in (self.q(x), self.k(x), v))
        if self.forgets:
            y = forgetting_attention(q / q.shape[-1] ** 0.5, k, v, F.softplus(self.power), F.softplus(self.rate))
        else:
            y = ops.attention(q[..., 1:, :], k[..., :-1, :], v[..., :-1, :], causal=True)  # only what came before
            y = F.pad(y, (0, 0, 1, 0))
        return self.out(y.transpose(-2, -3).flatten(-2))


def stream(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and what is asked: the value at the key's last appearance before, -100 where there is none."""
    keys, values = torch.randint(KEYS, (batch, length)), torch.randint(VALUES, (batch, length))
    asked, last = torch.full_like(keys, -100), torch.full((batch, KEYS), -100)
    for t in range(length):
        asked[:, t : t + 1] = last.gather(1, keys[:, t : t + 1])
        last.scatter_(1, keys[:, t : t + 1], values[:, t : t + 1])
    return keys, values, asked


class Trained(NamedTuple):
    """The losses of training, and the share of right answers on new streams by their length."""

    losses: list[float]
    right: dict[int, float]


class Result(NamedTuple):
    """Both, trained on the same streams, and ours' learned strengths [power and rate, head]."""

    plain: Trained
    ours: Trained
    strengths: Tensor


def train(model: Recall, steps: int, batch: int, length: int, seed: int) -> Trained:
    torch.manual_seed(seed + 1)  # both see the same streams
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        keys, values, asked = stream(batch, length)
        loss = F.cross_entropy(model(keys, values).flatten(0, 1), asked.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return Trained(losses, {n: answered(model, *stream(batch, n)) for n in (length, 2 * length, 4 * length)})


@torch.no_grad()
def answered(model: Recall, keys: Tensor, values: Tensor, asked: Tensor) -> float:
    return (model(keys, values).argmax(-1) == asked)[asked >= 0].float().mean().item()


def main(
    steps: int = 200,
    batch: int = 16,
    length: int = 64,
    heads: int = 2,
    width: int = 32,
    seed: int = 0,
    out: Path = OUT,
) -> Result:
    models, trained = [], []
    for forgets in (False, True):
        torch.manual_seed(seed)  # both start from the same weights
        models.append(Recall(heads, width, forgets))
        trained.append(train(models[-1], steps, batch, length, seed))
    result = Result(*trained, F.softplus(torch.stack([models[1].power, models[1].rate])).detach())
    for n, plain in result.plain.right.items():
        print(f"streams of {n}: plain attention {plain:.1%} right, forgetting attention {result.ours.right[n]:.1%}")
    draw(result, out)
    return result


def draw(r: Result, out: Path) -> None:
    figure = Figure(figsize=(11, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, color, trained in (("plain", NAIVE, r.plain), ("forgetting", OURS, r.ours)):
        left.plot(trained.losses, color=color, label=name)
        lengths = [str(n) for n in trained.right]
        middle.plot(lengths, list(trained.right.values()), "o-", color=color, label=name)
    left.set(xlabel="step", ylabel="loss", title="Recall the last value of a key")
    middle.set(xlabel="length of the stream", ylabel="right", title="On longer streams", ylim=(0, 1.05))
    distance = torch.arange(1, 33)
    for head, (power, rate) in enumerate(r.strengths.T):
        right.plot(distance, torch.exp(-power * torch.log1p(distance) - rate * distance), label=f"head {head}")
    right.set(xlabel="distance", yscale="log", title="What a head keeps of a weight")
    for ax in (left, middle, right):
        ax.legend()
    save(figure, out, "invented")


if __name__ == "__main__":
    command(main)
