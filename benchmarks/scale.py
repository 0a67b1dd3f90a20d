"""What the communication model expects of 8 to 1024 GPUs, drawn: ``python -m benchmarks.scale`` -> docs/images/*.svg.

A model, not a measurement. Time is that of the matrix products, and beside it what is sent: bytes over the slowest link
they cross and a latency per message. What travels round a ring or a grid is hidden behind the work; an all-reduce, and
what a grid gathers and sends home, is not. Bytes are those of ``plan/communication.py``, which a test holds against
what sockets count.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from monoidreduce.plan.communication import best_mesh, gather_bytes, grid_bytes, reduce_bytes

PRODUCTS = 400e12  # FLOP/s of bf16 products within a fold
NODE, FABRIC = 400e9, 50e9  # bytes/s of a GPU to its seven neighbours, and beyond
LATENCY = 10e-6  # seconds a message
MEMORY = 80e9  # bytes of a GPU
RANKS = [8, 16, 32, 64, 128, 256, 512, 1024]
RANKS_AND_BELOW = [1, 2, 4, *RANKS]
HERE = Path(__file__).parents[1] / "docs" / "images"


@dataclass(frozen=True)
class Point:
    """Seconds of a step and the bytes that one GPU holds for it beyond weights and activations."""

    seconds: float
    bytes: float


def ring_bytes(moving: float, carried: float, ranks: int) -> float:
    """Bytes sent by a rank in one turn of the ring: shards of ``moving`` bytes in all visit every other rank, and their
    partial results, ``carried`` bytes in all, return."""
    return (ranks - 1) / ranks * (moving + carried)


def wire(sent: float, messages: float, ranks: int) -> float:
    return sent / (NODE if ranks <= 8 else FABRIC) + messages * LATENCY


def grid(ranks: int, work: float, *passes: tuple[float, float]) -> Point:
    """A grid with the number of slices that is fastest, for passes of so many bytes of (all rows, all columns)."""

    def point(slices: int) -> Point:
        still = sum(grid_bytes(rows, 0, ranks, slices) for rows, _ in passes)
        moving = sum(grid_bytes(0, cols, ranks, slices) for _, cols in passes)
        hidden = max(work, wire(moving, len(passes) * slices, ranks))
        held = max(rows / slices + 2 * cols / ranks for rows, cols in passes)
        return Point(hidden + wire(still, 2 * len(passes) * ranks / slices, ranks), held)

    return min((point(w) for w in RANKS_AND_BELOW if ranks % w == 0), key=lambda p: p.seconds)


def attention(ranks: int, layout: str) -> Point:
    """1M tokens, 32 heads of 128, causal, forward and backward in bf16: ring against all-gathered keys and values."""
    tokens, width = 2**20, 32 * 128
    work = 3.5 * 4 * tokens * tokens * width / 2 / ranks / PRODUCTS
    keys = 2 * tokens * width * 2
    if layout == "grid":  # queries and float32 outputs; cotangents and float32 gradients too, in the backward
        one = tokens * width
        return grid(ranks, work, (6 * one, 4 * one), (8 * one, 12 * one))
    if layout == "ring":
        forward, backward = ring_bytes(keys, 0, ranks), ring_bytes(keys, 2 * keys, ranks)
        return Point(max(work, wire(forward + backward, 2 * ranks, ranks)), 2 * keys / ranks)
    there, back = gather_bytes(keys / ranks, ranks), gather_bytes(2 * keys / ranks, ranks)
    return Point(work + wire(there + back, 4, ranks), keys + 2 * keys)


def vocabulary(ranks: int, layout: str) -> Point:
    """A head of 256k classes and 4096 features on a million tokens, forward and backward.

    Ours divides rows and columns over the mesh that the papers' equations find cheapest and holds no logits; Megatron's
    way has the vocabulary over eight, tokens over the rest, and the logits of its part in memory.
    """
    rows, classes, width = 2**20, 256_000, 4096
    work = (4 if layout == "mesh" else 3) * 2 * rows * classes * width / ranks / PRODUCTS
    l, r = best_mesh(ranks, rows, classes, 2 * width, 2 * width, 12) if layout == "mesh" else (ranks // 8, 8)
    head = reduce_bytes(4 * classes / r * width, l)  # the gradient of this part of the weights
    tokens = reduce_bytes(rows / l * (4 * width + 12), r)  # the gradient of these tokens, and their statistics
    held = 0.0 if layout == "mesh" else 2 * rows / l * classes / r * 2
    if layout == "gathered":  # weights divided for memory only: each rank gathers all of them for its own tokens
        head, tokens = gather_bytes(2 * classes * width / ranks, ranks) + reduce_bytes(4 * classes * width, ranks), 0.0
        held = 2 * classes * width
    return Point(work + wire(head + tokens, 6, ranks), held)


def contrastive(ranks: int, layout: str) -> Point:
    """Batches of a million pairs of 1024 features, both directions, forward and backward."""
    pairs, width = 2**20, 1024
    work = (3 if layout == "all-gather" else 4) * 2 * pairs * pairs * width / ranks / PRODUCTS
    one = pairs * width * 2
    if layout == "grid":  # embeddings, their float32 gradients in the backward, and three numbers for each
        return grid(ranks, work, (one + 12 * pairs, one + 12 * pairs), (3 * one + 12 * pairs, 3 * one + 12 * pairs))
    if layout == "ring":
        sent = ring_bytes(one, pairs * 8, ranks) + ring_bytes(one, pairs * width * 4, ranks)
        return Point(max(work, wire(sent, 2 * ranks, ranks)), 2 * one / ranks)
    sent = gather_bytes(one / ranks, ranks) + reduce_bytes(2 * one, ranks)
    return Point(work + wire(sent, 4, ranks), one + 2 * pairs / ranks * pairs * 2)


PLOTS = {
    "attention": (
        attention,
        "attention, 1M tokens",
        {"ring": "ring", "grid": "grid, best W", "all-gather": "keys and values gathered"},
    ),
    "vocabulary": (
        vocabulary,
        "cross-entropy, 256k classes, 1M tokens",
        {
            "mesh": "rows × columns, no logits",
            "megatron": "vocabulary over 8, logits held",
            "gathered": "weights gathered",
        },
    ),
    "contrastive": (
        contrastive,
        "contrastive loss, batch of 1M",
        {"ring": "ring", "grid": "grid, best W", "all-gather": "embeddings gathered"},
    ),
}


def draw(folder: Path) -> list[Path]:
    """One figure for each work: seconds a step, and what one GPU holds for it."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "monoidreduce"  # the same file for the same numbers
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, (model, title, layouts) in PLOTS.items():
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for layout, label in layouts.items():
            points = [model(n, layout) for n in RANKS]
            left.loglog(RANKS, [p.seconds for p in points], "o-", ms=3, label=label)
            right.loglog(RANKS, [max(p.bytes, 1e6) / 1e9 for p in points], "o-", ms=3, label=label)
        right.axhline(MEMORY / 1e9, color="grey", ls=":", lw=1)
        left.set(title=f"{title}: seconds a step", xlabel="GPUs")
        right.set(title="GB held by one GPU (dotted: 80)", xlabel="GPUs")
        left.legend(frameon=False, fontsize=8)
        for axes in (left, right):
            axes.set_xticks(RANKS, [str(n) for n in RANKS], fontsize=7)
            axes.minorticks_off()
            axes.grid(alpha=0.2)
        path = folder / f"scale-{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        made.append(path)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=HERE)
    for path in draw(parser.parse_args().out):
        print(path)


if __name__ == "__main__":
    main()
