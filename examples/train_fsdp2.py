"""FSDP2, DDP or one process: a small GPT whose attention and loss build no matrix, trained, saved and resumed.

    torchrun --nproc-per-node 2 -m examples.train_fsdp2              # FSDP2; gloo on CPUs, NCCL on GPUs
    torchrun --nproc-per-node 2 -m examples.train_fsdp2 --wrap none fsdp2 ddp           # three ways, the same losses
    torchrun --nproc-per-node 2 -m examples.train_fsdp2 --precision bfloat16 --save run --save_at 10
    torchrun --nproc-per-node 2 -m examples.train_fsdp2 --precision bfloat16 --resume run
    python -m examples.train_fsdp2                                   # FSDP2 with one rank

Nothing here is special to us but two lines, ``ops.attention`` and ``nn.LinearCrossEntropyLoss``. The head is called in
the forward of a module that ``fully_shard`` wraps, so that its weight is whole and plain while it is used.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr

TEXT = Path(__file__).parent / "data" / "sonnets.txt"
WAYS = ("fsdp2", "ddp", "none")


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in; computed again in the backward, not kept."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._forward, x, use_reentrant=False)

    def _forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(mr.ops.attention(q, k, v, causal=True).transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Tokens and the tokens that follow them in, the mean loss out: logits exist nowhere."""

    def __init__(self, context: int = 32, width: int = 32, heads: int = 4, layers: int = 2, vocabulary: int = 256):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.loss = nn.LayerNorm(width), mr.nn.LinearCrossEntropyLoss(width, vocabulary)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(self.norm(x), target)


def wrap(model: GPT, way: str, mesh: DeviceMesh | None, precision: torch.dtype) -> nn.Module:
    """The model as it is trained on the ranks of a mesh of one dimension; None: in this process alone."""
    if way == "none" or mesh is None:
        return model.to(precision)
    if way == "ddp":
        return DistributedDataParallel(model.to(precision), process_group=mesh.get_group())
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train(
    way: str,
    mesh: DeviceMesh | None,
    steps: int,
    *,
    batch: int = 4,
    context: int = 32,
    precision: torch.dtype = torch.float32,
    save: str = "",
    save_at: int = 0,
    resume: str = "",
) -> list[float]:
    """Train; returns the loss of every step of this run, the mean over all ranks.

    Every rank takes its part of each batch. After ``save_at`` steps weights and the optimiser are saved in the folder
    ``save``; a run that resumes from there takes the steps that are left.
    """
    group = None if mesh is None else mesh.get_group()
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = wrap(GPT(context).to(device), way, mesh, precision)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = load(model, optimiser, resume, group) if resume else 0
    text, losses = torch.tensor(list(TEXT.read_bytes()), device=device), []
    for step in range(first, steps):
        chance = torch.Generator().manual_seed(step)  # so that a resumed run sees the same batches
        starts = torch.randint(len(text) - context, (batch, 1), generator=chance).to(device)
        mine = text[starts + torch.arange(context + 1, device=device)].chunk(ranks)[rank]
        loss = model(mine[:, :-1], mine[:, 1:])
        optimiser.zero_grad()
        loss.backward()  # FSDP2 and DDP average gradients over ranks, which have as many tokens each
        optimiser.step()
        mean = loss.detach().clone()
        if group is not None:
            dist.all_reduce(mean, group=group)
        losses.append(mean.item() / ranks)
        if save and step + 1 == save_at:
            write(model, optimiser, step + 1, save, group)
    return losses


def write(model: nn.Module, optimiser: torch.optim.Optimizer, step: int, folder: str, group: Any) -> None:
    """Save weights, optimiser and step; every rank writes its shards."""
    weights, moments = get_state_dict(model, optimiser)
    dcp.save(
        {"model": weights, "optimiser": moments, "step": step},
        checkpoint_id=folder,
        process_group=group,
        no_dist=group is None,
    )


def load(model: nn.Module, optimiser: torch.optim.Optimizer, folder: str, group: Any) -> int:
    """Load what :func:`write` saved; returns the step that comes next."""
    weights, moments = get_state_dict(model, optimiser)
    state = {"model": weights, "optimiser": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    return state["step"]


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Train as the command line says; returns the losses of each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wrap", choices=WAYS, nargs="+", default=["fsdp2"], help="one after the other")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--save", default="", help="a folder for checkpoints")
    parser.add_argument("--save_at", type=int, default=10, help="after how many steps")
    parser.add_argument("--resume", default="", help="a folder with checkpoints; it may be the one just saved")
    parser.add_argument("--losses", default="", help="a file for the losses")
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (int(os.environ.get("WORLD_SIZE", 1)),))
    found = {}
    for way in given.wrap:
        if way == "none" and dist.get_rank():
            continue  # one process, the others wait
        options = dict(batch=given.batch, context=given.context, precision=getattr(torch, given.precision))
        ranks = None if way == "none" else mesh
        if given.save or not given.resume:
            save = f"{given.save}/{way}" if given.save else ""
            found[way] = train(way, ranks, given.steps, save=save, save_at=given.save_at, **options)
        if given.resume:
            found[f"{way} resumed"] = train(way, ranks, given.steps, resume=f"{given.resume}/{way}", **options)
    if dist.get_rank() == 0:
        for way, losses in found.items():
            print(f"{way}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if given.losses:
            Path(given.losses).write_text(json.dumps(found))
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
