"""Modules that use us under DDP and FSDP2: two real processes over gloo, the same losses as one process."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from monoidreduce import ops

STEPS = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + ops.attention(q, k, v, causal=True)


class Net(nn.Module):
    """A small language model: attention and the loss are ours."""

    def __init__(self, vocabulary=17, width=8):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return ops.linear_cross_entropy(x, self.head.weight, tokens, shift=1)


def make():
    torch.manual_seed(0)
    return Net().double()


def batch(step):
    return torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(step))


def train(net, part):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for step in range(STEPS):
        loss = net(batch(step)[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def wrapped(net, kind):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def rank_main(rank, store, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {}
    for kind in ("ddp", "fsdp2"):
        losses = train(wrapped(make(), kind), slice(2 * rank, 2 * rank + 2))
        dist.all_reduce(losses)
        found[kind] = losses / 2
    if rank == 0:
        torch.save(found, answers)
    dist.destroy_process_group()


@pytest.mark.slow  # the example of tests/ranks/test_fsdp2.py is this in every run
def test_two_ranks_learn_as_one():
    expected = train(make(), slice(0, 4))
    assert expected[-1] != expected[0]
    with tempfile.TemporaryDirectory() as folder:
        answers = os.path.join(folder, "losses")
        mp.spawn(rank_main, (os.path.join(folder, "store"), answers), nprocs=2)
        for kind, losses in torch.load(answers).items():
            torch.testing.assert_close(losses, expected, msg=lambda m, kind=kind: f"{kind}: {m}")
