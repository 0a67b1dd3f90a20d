"""Run by torchrun: rank 1 dies in the first attempt; the second compares with one process."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import monoidreduce as mr


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = dist.FileStore(
        str(folder / f"store{attempt}"), world
    )  # of this attempt: it knows no address of the last one
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    gen = torch.Generator().manual_seed(1)
    x, w, target = torch.randn(8, 5, generator=gen), torch.randn(40, 5, generator=gen), torch.arange(8)
    part = w.tensor_split(world)[rank].clone().requires_grad_()
    for step in range(3):
        if rank == 1 and step == 1 and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with mr.shard(cols=dist.group.WORLD):
            loss = mr.ops.cross_entropy(x, part, target)
        (grad,) = torch.autograd.grad(loss, part)
    whole = w.requires_grad_()
    expected = mr.ops.cross_entropy(x, whole, target)
    (g,) = torch.autograd.grad(expected, whole)
    same = torch.allclose(loss, expected) and torch.allclose(grad, g.tensor_split(world)[rank], atol=1e-6)
    (folder / f"result{rank}").write_text("same" if same else "different")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
