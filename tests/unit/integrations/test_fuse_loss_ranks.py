"""A fused model under DDP and FSDP2: two real processes over gloo take the steps of one process without us."""

import multiprocessing
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")

from monoidreduce.integrations.transformers import fuse_loss  # noqa: E402

STEPS = 3


def make():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=59, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).double()


def wrap(name):
    """The model as each rank has it; fused before it is wrapped, or after."""
    if name == "none":
        return make()
    if name == "DDP":
        return torch.nn.parallel.DistributedDataParallel(fuse_loss(make()))
    if name == "DDP, then fused":
        return fuse_loss(torch.nn.parallel.DistributedDataParallel(make()))
    model = fuse_loss(make())
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, part):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 59, (4, 9), generator=torch.Generator().manual_seed(step))[part]
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    return losses, outputs.logits is None


def run(rank, folder):
    """One rank's losses, by how the model was wrapped."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        parts = slice(2 * rank, 2 * rank + 2)
        return {name: train(wrap(name), parts) for name in ("DDP", "DDP, then fused", "FSDP2")}
    finally:
        dist.destroy_process_group()


def write(rank, folder):
    torch.save(run(rank, folder), f"{folder}/rank")


def test_two_ranks_take_the_steps_of_one(monkeypatch):
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    with tempfile.TemporaryDirectory() as folder:
        other = multiprocessing.get_context("spawn").Process(target=write, args=(1, folder))
        other.start()
        mine = run(0, folder)
        other.join(120)
        assert other.exitcode == 0
        theirs = torch.load(f"{folder}/rank")
    expected, has_no_logits = train(wrap("none"), slice(None))
    assert not has_no_logits
    for name, (losses, without_logits) in mine.items():
        assert without_logits and theirs[name][1], name
        mean = [(a + b) / 2 for a, b in zip(losses, theirs[name][0], strict=True)]
        assert mean == pytest.approx(expected, rel=1e-6), name
