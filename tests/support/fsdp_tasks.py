"""FSDP2 and DDP on every rank: the example's runs, and a model of transformers whose loss is fused."""

import types
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from trl.trainer.utils import add_fused_lm_head

import monoidreduce as mr
from examples.train_fsdp2 import train
from monoidreduce.integrations.transformers import fuse_loss
from monoidreduce.integrations.trl import fuse


def runs(group: Any, folder: str, steps: int, precision: str) -> dict[str, list[float]]:
    """The losses of one process in float32, of FSDP2 and of DDP; saved half-way, and resumed from there."""
    mesh, found = DeviceMesh.from_group(group, "cpu"), {"none": train("none", None, steps)}
    for way in ("fsdp2", "ddp"):
        dtype = getattr(torch, precision) if way == "fsdp2" else torch.float32  # DDP has no policy of its own
        where = f"{folder}/{way}"
        found[way] = train(way, mesh, steps, save=where, save_at=steps // 2, precision=dtype)
        found[f"{way} resumed"] = train(way, mesh, steps, resume=where, precision=dtype)
    return found


def _model(heads: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=heads
    )
    return LlamaForCausalLM(config)


def fused_transformers(group: Any) -> dict[str, str]:
    """A fused model under ``fully_shard``: loss and gradients are the means over the ranks of the model's own."""
    mesh, me = DeviceMesh.from_group(group, "cpu"), group.rank()
    tokens = torch.randint(0, 61, (2 * group.size(), 9), generator=torch.Generator().manual_seed(3))
    alone = _model()
    losses = [alone(part, labels=part).loss for part in tokens.chunk(group.size())]
    (sum(losses) / len(losses)).backward()
    found = {}
    for head_alone in (False, True):
        for precision in (torch.float32, torch.bfloat16):
            model, policy = fuse_loss(_model()).train(), MixedPrecisionPolicy(param_dtype=precision)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            if head_alone:
                fully_shard(model.lm_head, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            mine = tokens.chunk(group.size())[me]
            outputs = model(mine, labels=mine)
            assert outputs.logits is None, "logits were built"
            outputs.loss.backward()
            wide = 1e-5 if precision is torch.float32 else 3e-2
            good = torch.allclose(outputs.loss.float(), losses[me], rtol=wide)
            for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert p.grad is not None and p.grad.placements == p.placements, name
                gap = (p.grad.full_tensor() - q.grad).abs().max()
                good = good and bool(gap <= wide * max(q.grad.abs().max(), 0.05))
            found[f"head alone {head_alone}, {precision}"] = "same" if good else f"{gap} in {name}"
    return found


def _heads() -> dict[str, Any]:
    """Makers of models with a head that is not a plain one, and what calls them: LoRA on the head, and TRL's."""

    def adapt() -> Any:
        torch.manual_seed(1)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_lora_weights=False)
        return peft.get_peft_model(_model(), lora).train()

    def prepare(model: Any) -> Any:  # as TRL's trainers do
        add_fused_lm_head(model.get_base_model() if hasattr(model, "get_base_model") else model)
        return model

    fused = lambda model: fuse(types.SimpleNamespace(model=prepare(model))).model
    return {
        "LoRA": (adapt, fuse_loss, {}),
        "TRL": (lambda: _model().train(), fused, {"fused_lm_head": True}),
        "TRL, LoRA": (adapt, fused, {"fused_lm_head": True}),
    }


def heads_wrapped_alone(group: Any) -> dict[str, str]:
    """Heads of PEFT and TRL that ``fully_shard`` wraps by themselves: gradients are the means over the ranks."""
    mesh, me = DeviceMesh.from_group(group, "cpu"), group.rank()
    tokens = torch.randint(0, 61, (2 * group.size(), 9), generator=torch.Generator().manual_seed(3))
    found = {}
    for name, (make, fused, more) in _heads().items():
        alone, model = make(), fused(make())
        sum(alone(input_ids=part, labels=part).loss for part in tokens.chunk(group.size())).backward()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        fully_shard(inner.lm_head, mesh=mesh)
        fully_shard(inner, mesh=mesh)
        mine = tokens.chunk(group.size())[me]
        model(input_ids=mine, labels=mine, **more).loss.backward()
        gaps = {"": torch.tensor(0.0)}
        for (key, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            if q.grad is not None:
                gaps[key] = (p.grad.full_tensor() - q.grad / group.size()).abs().max() / q.grad.abs().max()
        worst = max(gaps, key=gaps.__getitem__)
        found[name] = "same" if len(gaps) > 2 and gaps[worst] < 1e-4 else f"{gaps[worst]} in {worst}"
    return found


def tensor_parallel_transformers(group: Any, folder: str) -> dict[str, str]:
    """A fused model in torch's tensor parallelism, of its head, and in transformers' own, of all."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(3))
    alone = _model(4)
    loss = alone(tokens, labels=tokens).loss
    loss.backward()
    head = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    alone.save_pretrained(folder)  # of rank 0
    group.barrier().wait()
    plan = DistributedConfig(tp_plan="auto", tp_size=group.size())
    theirs = lambda: LlamaForCausalLM.from_pretrained(folder, distributed_config=plan)
    ways = {
        "torch's, fused before": lambda: parallelize_module(fuse_loss(_model(4)), mesh, head),
        "torch's, fused after": lambda: fuse_loss(parallelize_module(_model(4), mesh, head)),
        "transformers', fused after": lambda: fuse_loss(theirs()),
    }
    found = {}
    for way, make in ways.items():
        model = make().train()
        outputs = model(tokens, labels=tokens)
        assert outputs.logits is None, "logits were built"
        outputs.loss.backward()
        pairs = [("loss", outputs.loss, loss)]
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            pairs.append((name, p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, q.grad))
        wrong = [name for name, a, b in pairs if not torch.allclose(a, b, rtol=1e-4, atol=1e-6)]
        sharded = isinstance(model.lm_head.weight, DTensor)
        found[way] = "same" if sharded and not wrong else f"sharded {sharded}, wrong {wrong}"
    return found


class _Small(nn.Module):
    """An embedding, a layer and our head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.layer = nn.Embedding(23, 8), nn.Linear(8, 8)
        self.loss = mr.nn.LinearCrossEntropyLoss(8, 23, bias=True)

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.layer(self.tokens(tokens)).tanh()
        return x if target is None else self.loss(x, target)


def data_and_tensor_ranks(group: Any) -> dict[str, str]:
    """FSDP2 over data ranks and a tensor-parallel head; and FSDP2 with a loss outside the model, in a ring."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    gen = torch.Generator().manual_seed(5)
    tokens, target = (torch.randint(0, 23, (4, 5), generator=gen) for _ in range(2))
    alone = _Small()
    expected = alone(tokens, target)
    expected.backward()
    mine = [t.chunk(2)[mesh.get_local_rank("dp")] for t in (tokens, target)]

    def compare(model: nn.Module, loss: Tensor, whole: Tensor) -> str:
        loss.backward()
        pairs = [(loss, whole)]
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(p.grad, DTensor) and p.grad.placements == p.placements
            pairs.append((p.grad.full_tensor(), q.grad))
        good = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)
        return "same" if good else f"{[float((a - b).abs().max()) for a, b in pairs]}"

    both = parallelize_module(_Small(), mesh["tp"], {"loss.linear": ColwiseParallel()})
    for name in ("tokens", "layer"):  # replicated over the tensor ranks
        for key, p in list(getattr(both, name).named_parameters()):
            whole = distribute_tensor(p.detach(), mesh["tp"], [Replicate()])
            setattr(getattr(both, name), key, nn.Parameter(whole))
    fully_shard(both, mesh=mesh["dp"])
    given = [distribute_tensor(t, mesh["tp"], [Replicate()]) for t in mine]
    found = {"head over tensor ranks": compare(both, both(*given).to_local(), alone(*mine))}
    outside = _Small()
    fully_shard(outside.loss, mesh=mesh["dp"])
    fully_shard(outside, mesh=mesh["dp"])
    outside.set_gradient_divide_factor(1.0)
    outside.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
    head = outside.loss.linear
    hidden = outside(mine[0])
    with mr.shard(rows=mesh["dp"]):
        loss = mr.ops.linear_cross_entropy(hidden, head.weight, mine[1], bias=head.bias)
    found["loss outside, in a ring"] = compare(outside, loss, expected)
    return found


def _wrap(name: str, group: Any) -> nn.Module:
    """The model as each rank has it; fused before it is wrapped, or after. With no name, as one process has it."""
    model = _model().double()
    if name == "DDP":
        return nn.parallel.DistributedDataParallel(fuse_loss(model), process_group=group)
    if name == "DDP, then fused":
        return fuse_loss(nn.parallel.DistributedDataParallel(model, process_group=group))
    if name == "FSDP2":
        mesh, model = DeviceMesh.from_group(group, "cpu"), fuse_loss(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def _train(model: nn.Module, part: slice) -> tuple[list[float], bool]:
    """Three steps: the losses, and whether there were no logits."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        tokens = torch.randint(0, 61, (4, 9), generator=torch.Generator().manual_seed(step))[part]
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(outputs.loss.item())
    return losses, outputs.logits is None


def fused_steps(group: Any) -> dict[str, tuple[list[float], bool]]:
    """The steps of a fused model by each way to wrap it, and of the model alone, which sees the rows of both ranks."""
    mine = slice(2 * group.rank(), 2 * group.rank() + 2)
    found = {name: _train(_wrap(name, group), mine) for name in ("DDP", "DDP, then fused", "FSDP2")}
    return found | {"alone": _train(_wrap("", group), slice(None))}
