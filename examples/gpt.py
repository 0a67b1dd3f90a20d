"""A small GPT on Shakespeare's sonnets, byte by byte: plain torch and MonoidReduce side by side.

Both start from the same weights and see the same batches. Plain torch builds every matrix of attention weights and the
logits of every byte; ours builds neither. The losses are the same numbers, the memory is not.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples.shared import NAIVE, OURS, OUT, command, peak_mb, save
from monoidreduce import ops

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
BYTES = 256


class Result(NamedTuple):
    """The loss of every step and the peak memory of one, of plain torch and of ours; a text written by ours."""

    naive: list[float]
    ours: list[float]
    naive_mb: float
    ours_mb: float
    written: str


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as in a textbook: a matrix of scores, of which half is hidden."""
    s = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return s.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def dense_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((x @ weight.T).flatten(0, 1), target.flatten())


def our_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.attention(q, k, v, causal=True)


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(attention(q, k, v).transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Bytes in, features out; ``head`` [256, width] turns features into logits."""

    def __init__(self, context: int, width: int, heads: int, layers: int):
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Parameter(torch.randn(BYTES, width) * 0.02)

    def forward(self, tokens: Tensor, attention: Callable[..., Tensor]) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x, attention)
        return self.norm(x)


def train(model: GPT, batches: list[Tensor], attention: Callable, loss: Callable) -> tuple[list[float], float]:
    """Adam over the batches: the loss of every step, and one step's peak memory in megabytes."""
    step = lambda b: loss(model(b[:, :-1], attention), model.head, b[:, 1:])
    memory = peak_mb(lambda: step(batches[0]), model.parameters())
    optimiser, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for batch in batches:
        optimiser.zero_grad()
        value = step(batch)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses, memory


@torch.no_grad()
def write(model: GPT, start: str, length: int) -> str:
    """Continue a text; the next byte is drawn without logits too."""
    tokens = torch.tensor([list(start.encode())])
    for seed in range(length):
        x = model(tokens[:, -len(model.places.weight) :], our_attention)[:, -1]
        tokens = torch.cat([tokens, ops.linear_sample(x, model.head, seed, temperature=0.7).index[:, None]], -1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def main(
    steps: int = 100,
    batch: int = 4,
    context: int = 256,
    width: int = 64,
    heads: int = 4,
    layers: int = 2,
    length: int = 200,
    out: Path = OUT,
) -> Result:
    torch.manual_seed(0)
    text = torch.tensor(list(TEXT.read_bytes()))
    starts = torch.randint(len(text) - context, (steps, batch, 1))
    batches = list(text[starts + torch.arange(context + 1)])
    model = GPT(context, width, heads, layers)
    twin = copy.deepcopy(model)
    naive, naive_mb = train(twin, batches, dense_attention, dense_loss)
    ours, ours_mb = train(model, batches, our_attention, ops.linear_cross_entropy)
    result = Result(naive, ours, naive_mb, ours_mb, write(model, "Shall I compare", length))
    apart = max(abs(a - b) for a, b in zip(naive, ours, strict=True))
    print(f"loss {ours[0]:.3f} -> {ours[-1]:.3f}; the two curves differ by at most {apart:.1e}")
    print(f"peak memory of a step: plain torch {naive_mb:.0f} MB, ours {ours_mb:.0f} MB\n{result.written}")
    draw(result, out)
    return result


def draw(r: Result, out: Path) -> None:
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    left.plot(r.naive, color=NAIVE, linewidth=5, label="plain torch")
    left.plot(r.ours, color=OURS, label="MonoidReduce")
    left.set(xlabel="step", ylabel="loss (nats per byte)", title="The same curve")
    left.legend()
    right.bar(["plain torch", "MonoidReduce"], [r.naive_mb, r.ours_mb], color=[NAIVE, OURS])
    right.set(ylabel="MB", title="Peak memory of a step")
    save(figure, out, "gpt")


if __name__ == "__main__":
    command(main)
