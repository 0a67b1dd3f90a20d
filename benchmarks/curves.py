"""Loss curves: a small Llama of transformers on the sonnets, with torch's own attention and loss and with ours.

    python -m benchmarks.curves [--out DIR] [--steps N]

Three runs in float32 and three under autocast to bfloat16: torch's own (SDPA, cross-entropy of logits) from two seeds,
and ours (``attn_implementation="monoidreduce"``, ``fuse_loss``) from the first. A seed decides the first weights; all
runs see the same batches. What ours changes is to be less than what a seed changes. Without a GPU a minute or two; the
results are drawn by ``python -m docs.draw.curves``. Needs transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from monoidreduce.integrations.transformers import NAME, fuse_loss, register

from .cpu import environment

TEXT = Path(__file__).parents[1] / "examples" / "data" / "sonnets.txt"
RUNS = {"torch": ("sdpa", 0), "torch, another seed": ("sdpa", 1), "ours": (NAME, 0)}
TYPES = {"float32": None, "bfloat16": torch.bfloat16}
BATCH, CONTEXT = 4, 128


def make_model(attention: str, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return fuse_loss(model) if attention == NAME else model


def draw_batches(steps: int) -> list[Tensor]:
    text = torch.tensor(list(TEXT.read_bytes()))
    starts = torch.randint(len(text) - CONTEXT, (steps, BATCH, 1), generator=torch.Generator().manual_seed(7))
    return list(text[starts + torch.arange(CONTEXT)])


def train(model: LlamaForCausalLM, batches: list[Tensor], narrow: torch.dtype | None, name: str) -> list[float]:
    """The loss of each step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, began = [], time.time()
    for step, tokens in enumerate(batches):
        with torch.autocast("cpu", narrow) if narrow else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 7))
        if step % 50 == 49:
            print(f"{name}: step {step + 1}, loss {losses[-1]:.4f}, {time.time() - began:.0f} s", flush=True)
    return losses


def gap(one: list[float], other: list[float]) -> dict[str, float]:
    """How far two curves are apart: the mean and the largest difference at the same step."""
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    return {"mean": float(f"{sum(apart) / len(apart):.3g}"), "largest": float(f"{max(apart):.3g}")}


def measure(steps: int) -> dict[str, Any]:
    """Of each type: the three curves, and how far ours and the other seed are from torch's."""
    register()
    found: dict[str, Any] = {}
    for kind, narrow in TYPES.items():
        batches = draw_batches(steps)
        curves = {name: train(make_model(*how), batches, narrow, f"{kind}, {name}") for name, how in RUNS.items()}
        base, seed, ours = curves.values()
        found[kind] = {"curves": curves, "ours apart": gap(base, ours), "seeds apart": gap(base, seed)}
    return found


def markdown(results: dict[str, Any]) -> str:
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", "Nats per byte: the last loss, and the difference from torch's curve at the same step.", ""]
    lines += ["| type | last loss: torch | ours | ours apart: mean | largest | another seed apart: mean | largest |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind, row in results["types"].items():
        ends = [row["curves"][name][-1] for name in ("torch", "ours")]
        gaps = [row[who][what] for who in ("ours apart", "seeds apart") for what in ("mean", "largest")]
        lines.append(f"| {kind} | " + " | ".join([*(f"{e:.4f}" for e in ends), *(f"{g:.2g}" for g in gaps)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for curves-DATE.json and .md")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    given = sys.argv[1:]
    if options.out is not None:
        given[given.index("--out") + 1] = "DIR"
    about = environment() | {"command": f"python -m benchmarks.curves {shlex.join(given)}".strip()}
    results = {"environment": about, "types": measure(options.steps)}
    print(markdown(results))
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"curves-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
        text = json.dumps(results, indent=1, ensure_ascii=False)
        stem.with_suffix(".json").write_text(_join_numbers(text) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))


def _join_numbers(text: str) -> str:
    """A list of numbers on one line: two hundred lines say no more."""
    return re.sub(r"\[\s*([-\d.,\s]+?)\s*\]", lambda m: "[" + re.sub(r"\s+", " ", m.group(1)) + "]", text)


if __name__ == "__main__":
    main()
