"""Layers over several processes beside what torch users write: ``torchrun --nproc-per-node=4 -m benchmarks.ranks``.

Each contender gives the same loss or output and gradients (checked first, against ours); what is compared is what one
rank sends (counted by the kernel on its sockets), the growth of its memory and the time, forward and backward.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import monoidreduce as mr

from .cpu import RESULTS, environment
from .measure import peak_growth

Outcome = list[Tensor]  # a value and the gradients of this rank's tensors


def bytes_sent() -> int:
    """What this process has sent over its sockets so far, as the kernel counts it (Linux), each byte once."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as s:
                    info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    sent, again = struct.unpack_from("QQ", info, 200) if len(info) >= 216 else (0, 0)
                    total += sent - again  # on a busy machine some are sent twice
    return total


# Cross-entropy, the vocabulary over the ranks


def our_vocabulary(x: Tensor, w: Tensor, target: Tensor, start: int, group: Any) -> Outcome:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    with mr.shard(cols=group):
        loss = mr.ops.cross_entropy(x, w, target)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w))]


def megatron_vocabulary(x: Tensor, w: Tensor, target: Tensor, start: int, group: Any) -> Outcome:
    """As in Megatron-LM: the local logits are there; a maximum, a sum and the target's logit are all-reduced."""
    logits = x @ w.T
    top = logits.amax(1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    inside = (target >= start) & (target < start + len(w))
    at = (target - start).clamp(0, len(w) - 1)
    picked = torch.where(inside, logits.gather(1, at[:, None])[:, 0] - top, 0.0)
    dist.all_reduce(picked, group=group)
    p = torch.exp(logits - top[:, None])
    total = p.sum(1)
    dist.all_reduce(total, group=group)
    p /= total[:, None]
    p[torch.arange(len(x))[inside], at[inside]] -= 1
    p /= len(x)
    grad = p @ w
    dist.all_reduce(grad, group=group)
    return [(total.log() - picked).mean(), grad, p.T @ x]


def torch_loss_parallel(x: Tensor, w: Tensor, target: Tensor, start: int, group: Any) -> Outcome:
    """torch's loss_parallel on logits that are a DTensor, sharded over classes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cpu", (group.size(),))
    place: Any = lambda t, p: DTensor.from_local(t, mesh, [p], run_check=False)
    mine, local = place(x.clone(), Replicate()).requires_grad_(), place(w.clone(), Shard(0)).requires_grad_()
    with loss_parallel():
        loss: Any = F.cross_entropy(mine @ local.T, place(target, Replicate()))
        loss.backward()
    grads = [t.grad.redistribute(mesh, [p]).to_local() for t, p in ((mine, Replicate()), (local, Shard(0)))]
    return [loss.full_tensor().detach(), *grads]


# Attention, the sequence over the ranks


def our_ring(q: Tensor, k: Tensor, v: Tensor, group: Any, slices: int | None = None) -> Outcome:
    q, k, v = (t.clone().requires_grad_() for t in (q, k, v))
    with mr.shard(rows=group, cols=group, slices=slices):
        y = mr.ops.attention(q, k, v)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (q, k, v))]


def our_grid(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Outcome:
    """Each rank takes the keys and values of two."""
    return our_ring(q, k, v, group, slices=2)


@contextlib.contextmanager
def _rotating(method: str) -> Iterator[Any]:
    """The module of torch's context_parallel with its options set, and put back afterwards. Its load balance is for
    causal masks only."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as module

    options = module._cp_options
    before = options.rotate_method, options.enable_load_balance
    module.set_rotate_method(method)
    options.enable_load_balance = False
    try:
        yield module
    finally:
        options.rotate_method, options.enable_load_balance = before


def context_parallel(q: Tensor, k: Tensor, v: Tensor, group: Any, rotate: str) -> Outcome:
    """torch's ring attention, forward and backward, on the CPU's attention.

    ``context_parallel`` itself puts this ring in the place of three CUDA operators (flash, efficient, cuDNN) and of no
    CPU one; attention on CPU tensors is refused inside it. So its ring is called here with the operators that it does
    not know.
    """
    aten = torch.ops.aten
    forward: Any = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    with _rotating(rotate) as torchs, torch.no_grad():
        y, lse = torchs._templated_ring_attention(group, 2, forward, q, k, v)
        grads = torchs._templated_ring_attention_backward(
            group, 2, backward, 2 * y, "grad_out", q, k, v, y, lse, is_causal=False, dropout_p=0.0
        )
    return [y, *grads]


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Outcome:
    """Keys and values gathered on every rank, their gradients summed and scattered back."""
    world, me = group.size(), group.rank()

    def whole(t: Tensor) -> Tensor:
        parts = [torch.empty_like(t) for _ in range(world)]
        dist.all_gather(parts, t, group=group)
        return torch.cat(parts, -2).requires_grad_()

    q, ks, vs = q.clone().requires_grad_(), whole(k), whole(v)
    y = F.scaled_dot_product_attention(q, ks, vs)
    grads = list(torch.autograd.grad(y.square().sum(), (q, ks, vs)))
    for g in grads[1:]:
        dist.all_reduce(g, group=group)
    return [y.detach(), grads[0], *(g.chunk(world, -2)[me] for g in grads[1:])]


def cases(group: Any) -> list[tuple[str, tuple, dict[str, Callable[..., Outcome]]]]:
    me, world = group.rank(), group.size()
    gen = torch.Generator().manual_seed(0)
    rows, classes, width = 1024, 65536, 128
    x, w = torch.randn(rows, width, generator=gen), torch.randn(classes, width, generator=gen) / 8
    target = torch.randint(0, classes, (rows,), generator=gen)
    heads, tokens, features = 8, 4096, 64
    q, k, v = (
        torch.randn(1, heads, tokens, features, generator=gen).chunk(world, -2)[me].contiguous() for _ in range(3)
    )
    return [
        (
            f"cross-entropy {rows} × {width} × {classes}, classes divided",
            (x, w.chunk(world)[me].clone(), target, me * (classes // world), group),
            {"ours": our_vocabulary, "Megatron's way": megatron_vocabulary, "loss_parallel": torch_loss_parallel},
        ),
        (
            f"attention {heads} × {tokens} × {features}, sequence divided",
            (q, k, v, group),
            {
                "ours (ring)": our_ring,
                "ours (grid, slices=2)": our_grid,
                "context_parallel (alltoall)": functools.partial(context_parallel, rotate="alltoall"),
                "context_parallel (allgather, its default)": functools.partial(context_parallel, rotate="allgather"),
                "all-gather and SDPA": gathered_attention,
            },
        ),
    ]


def measured(call: Callable[[], Outcome], group: Any) -> dict[str, float]:
    """Megabytes sent, megabytes grown and seconds (best of two) of one rank, after the call that was checked."""
    times = []
    for _ in range(2):
        dist.barrier(group)
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    dist.barrier(group)
    before = bytes_sent()
    grown = peak_growth(call)
    dist.barrier(group)
    return {"sent MB": (bytes_sent() - before) / 1e6, "grown MB": grown, "seconds": min(times)}


def run(group: Any) -> list[dict[str, Any]]:
    found = []
    for name, args, contenders in cases(group):
        expected: Outcome | None = None
        for who, call in contenders.items():
            got = call(*args)
            for a, b in zip(got, expected or got, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
            expected = expected or got
            values = measured(lambda call=call, args=args: call(*args), group)  # type: ignore[misc]
            most = torch.tensor(list(values.values()), dtype=torch.float64)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
            found.append({"case": name, "who": who, **dict(zip(values, most.tolist(), strict=True))})
    return found


def markdown(results: dict[str, Any]) -> str:
    """The results as a table: the largest of all ranks."""
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += ["", f"{results['ranks']} processes of one thread; the most of any rank, forward and backward.", ""]
    lines += ["| work | who | sent, MB | memory grown, MB | seconds |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        cells = (
            row["case"],
            row["who"],
            *(f"{row[n]:.{d}f}" for n, d in (("sent MB", 1), ("grown MB", 0), ("seconds", 2))),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    group = dist.group.WORLD
    rows = run(group)
    if dist.get_rank() == 0:
        told = {**environment(), "command": f"torchrun --nproc-per-node={dist.get_world_size()} -m benchmarks.ranks"}
        results = {"environment": told, "ranks": dist.get_world_size(), "rows": rows}
        stem = RESULTS / f"ranks-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(results))
        print(markdown(results))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
