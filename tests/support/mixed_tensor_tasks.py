"""Plain tensors beside DTensors, on every rank of a world: what is accepted is the call of one process."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

import monoidreduce as mr
from benchmarks.ranks import bytes_sent
from tests.support.allocations import Watch

WHOLE = "whole"  # a plain tensor, the same on all ranks
R = Replicate()


def own(dim: int, mesh: Any) -> tuple[str, int, Any]:
    """A plain tensor: this rank's chunk of a dimension, over a mesh of one dimension."""
    return "own", dim, mesh


def _place(value: Tensor, how: Any) -> Tensor:
    if how == WHOLE:
        found = value.clone()
    elif how[0] == "own":
        parts = value.chunk(how[2].size(), how[1])
        mine = how[2].get_local_rank()
        found = parts[mine].clone() if mine < len(parts) else value.narrow(how[1], 0, 0).clone()
    else:
        mesh, placements = how
        kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
        found = distribute_tensor(value, mesh, kept)
        if kept != list(placements):  # parts that add up: of two ranks, twice and minus once
            over = next(m for m, p in enumerate(placements) if isinstance(p, Partial))
            share = {0: 2.0, 1: -1.0}.get(mesh.get_local_rank(over), 0.0)
            found = DTensor.from_local(found.to_local() * share, mesh, placements, run_check=False)
    return found.detach().requires_grad_() if value.is_floating_point() else found


def _gather(value: Tensor, how: Any) -> Tensor:
    """The whole of a placed tensor or gradient, after a look at its kind."""
    if how == WHOLE or how[0] == "own":
        assert not isinstance(value, DTensor), "a plain tensor got a DTensor"
        if how == WHOLE:
            return value
        group = how[2].get_group()
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, value, group=group)
        return torch.cat(parts, how[1])
    assert isinstance(value, DTensor) and value.device_mesh == how[0], "no DTensor on its mesh"
    expected = [Replicate() if isinstance(p, Partial) else p for p in how[1]]
    assert list(value.placements) == expected, f"placed {value.placements}, expected {expected}"
    return value.full_tensor()


def _compare(
    call: Callable[..., Any], given: dict[str, tuple[Tensor, Any]], result: Any, rows: Any = None, wide: float = 1e-9
) -> str:
    """Values and gradients of a call on placed tensors, against those of one process."""
    whole = {n: v.clone().requires_grad_() if v.is_floating_point() else v for n, (v, _) in given.items()}
    placed = {n: _place(v, how) for n, (v, how) in given.items()}
    floats = [n for n, v in whole.items() if v.is_floating_point()]
    expected = call(**whole)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape).exp()
    (expected * weights).sum().backward()
    with mr.shard(rows=rows):
        found = call(**placed)
    if result == WHOLE or result[0] == "own":
        assert not isinstance(found, DTensor), "the result is a DTensor"
        (found * _place(weights, result).detach()).sum().backward()
    else:
        (found * distribute_tensor(weights, result[0], result[1])).sum().full_tensor().backward()
    pairs = [("value", _gather(found, result), expected)]
    pairs += [(n, _gather(placed[n].grad, given[n][1]), whole[n].grad) for n in floats]
    for name, a, b in pairs:
        if a.shape != b.shape or not torch.allclose(a.detach(), b.detach(), rtol=wide, atol=wide):
            return f"{name}: {tuple(a.shape)} {tuple(b.shape)} {(a - b).abs().max() if a.shape == b.shape else ''}"
    return "same"


def _numbers(rows: tuple[int, ...] = (5, 6), classes: int = 23, features: int = 7) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(4)
    make = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
    target = torch.randint(0, classes, rows, generator=gen)
    target[0, 1] = -100
    return {
        "x": make(*rows, features),
        "weight": make(classes, features),
        "target": target,
        "bias": make(classes),
        "token_weights": make(*rows).abs(),
    }


def _loss(**given: Any) -> Tensor:
    return mr.ops.linear_cross_entropy(**given, label_smoothing=0.1, z_loss=1e-3)


def _token_losses(**given: Any) -> Tensor:
    return mr.ops.linear_cross_entropy(**given, reduction="none", softcap=5.0)


def _logprobs(**given: Any) -> Tensor:
    found = mr.ops.linear_logprobs(**given, return_entropy=True, top_k=3)
    return found.log_prob + found.entropy + found.topk_log_probs.sum(-1)


def _chosen(**given: Any) -> Tensor:
    return mr.ops.linear_logprobs(**given, top_k=2).ids_log_probs


def _low_rank(rows: Any, cols: Any, **given: Any) -> Tensor:
    return mr.ops.linear_cross_entropy(**given, low_rank=(rows, cols))


def _under_autocast(**given: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return mr.ops.linear_cross_entropy(**given)


def _attend(q: Any, k: Any, v: Any, bias: Any) -> Tensor:
    return mr.ops.attention(q, k, v, bias=bias)


def mixes(group: Any, ranks: int) -> dict[str, str]:
    """Every mix that has one meaning, on a mesh of data × tensor ranks and on dimensions of it: of the first ranks, but
    made by all."""
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(2, -1), mesh_dim_names=("dp", "tp"))
    flat = DeviceMesh("cpu", torch.arange(ranks))
    if group.rank() >= ranks:
        return {}
    dp, tp = mesh["dp"], mesh["tp"]
    n = _numbers()
    x, weight, target, bias, tokens = n.values()
    gen = torch.Generator().manual_seed(7)
    q, k = (torch.randn(3, 5, length, 7, generator=gen, dtype=torch.float64) for length in (4, 6))
    ids = torch.arange(90).view(5, 6, 3) % 23
    S = Shard
    cols = tp, [S(0)]
    cases: dict[str, tuple] = {
        "plain rows, sharded classes": (
            _loss,
            dict(x=(x, WHOLE), weight=(weight, cols), target=(target, WHOLE), bias=(bias, cols)),
            WHOLE,
        ),
        "... a plain bias of all classes": (
            _token_losses,
            dict(x=(x, WHOLE), weight=(weight, cols), target=(target, WHOLE), bias=(bias, WHOLE)),
            WHOLE,
        ),
        "... a plain bias of the rank's classes": (
            _logprobs,
            dict(x=(x, WHOLE), weight=(weight, cols), target=(target, WHOLE), bias=(bias, own(0, tp))),
            WHOLE,
        ),
        "replicated rows, plain targets": (
            _token_losses,
            dict(x=(x, (tp, [R])), weight=(weight, cols), target=(target, WHOLE)),
            (tp, [R]),
        ),
        "sharded rows, plain targets of all": (
            _logprobs,
            dict(x=(x, (mesh, [S(0), R])), weight=(weight, (mesh, [R, S(0)])), target=(target, WHOLE)),
            (mesh, [S(0), R]),
        ),
        "sharded rows, plain targets of the rank, weights over both dimensions": (
            _token_losses,
            dict(x=(x, (mesh, [S(0), R])), weight=(weight, (mesh, [S(0), S(0)])), target=(target, own(0, dp))),
            (mesh, [S(0), R]),
        ),
        "sequence parallel rows, weights on the tensor ranks alone": (
            _loss,
            dict(
                x=(x, (mesh, [S(0), S(1)])),
                weight=(weight, cols),
                target=(target, (mesh, [S(0), R])),
                token_weights=(tokens, WHOLE),
            ),
            (mesh, [R, R]),
        ),
        "sequence alone, over the ranks of the weight": (
            _token_losses,
            dict(x=(x, (tp, [S(1)])), weight=(weight, cols), target=(target, WHOLE)),
            (tp, [S(1)]),
        ),
        "parts that add up": (
            _loss,
            dict(x=(x, (tp, [Partial()])), weight=(weight, cols), target=(target, (tp, [R]))),
            (tp, [R]),
        ),
        "sharded features": (
            _logprobs,
            dict(x=(x, (mesh, [S(0), S(2)])), weight=(weight, (tp, [S(1)])), target=(target, own(0, dp))),
            (mesh, [S(0), R]),
        ),
        "no rows on the last of many ranks, plain targets": (
            _token_losses,
            dict(
                x=(x, (flat, [S(0)])), weight=(weight, WHOLE), target=(target, own(0, flat)), bias=(bias, (flat, [R]))
            ),
            (flat, [S(0)]),
        ),
        "plain LoRA beside a sharded head": (
            _low_rank,
            dict(
                x=(x, WHOLE),
                weight=(weight, cols),
                target=(target, WHOLE),
                rows=(x[..., :2] * 2, WHOLE),
                cols=(weight[:, 3:5], WHOLE),
            ),
            WHOLE,
        ),
        "ids, a temperature of each row": (
            _chosen,
            dict(
                x=(x, (mesh, [S(0), R])),
                weight=(weight, cols),
                ids=(ids, WHOLE),
                temperature=(tokens + 0.5, own(0, dp)),
            ),
            (mesh, [S(0), R]),
        ),
        "autocast, of plain rows": (
            _under_autocast,
            dict(x=(x.float(), WHOLE), weight=(weight.float(), cols), target=(target, WHOLE)),
            WHOLE,
            None,
            2e-3,
        ),
        "plain weight, sharded rows": (
            _loss,
            dict(x=(x, (dp, [S(0)])), weight=(weight, WHOLE), target=(target, (dp, [S(0)]))),
            (dp, [R]),
        ),
        "own rows by mr.shard, classes over other ranks": (
            _loss,
            dict(x=(x, own(0, dp)), weight=(weight, cols), target=(target, own(0, dp))),
            WHOLE,
            dp,
        ),
        "own rows by mr.shard, classes over the same ranks": (
            _token_losses,
            dict(x=(x, own(0, dp)), weight=(weight, (dp, [S(0)])), target=(target, own(0, dp))),
            own(0, dp),
            dp,
        ),
        "own rows by mr.shard, weights over both": (
            _loss,
            dict(x=(x, own(0, dp)), weight=(weight, (mesh, [S(0), S(0)])), target=(target, own(0, dp))),
            WHOLE,
            dp,
        ),
        "rows and classes on different dimensions of one mesh": (
            _loss,
            dict(x=(x, (dp, [S(0)])), weight=(weight, cols), target=(target, WHOLE)),
            (dp, [R]),
        ),
        "attention, batch sharded, plain keys and bias": (
            _attend,
            dict(q=(q, (mesh, [S(0), R])), k=(k, WHOLE), v=(k[..., :4], own(0, dp)), bias=(q[0, 0, :, :1], WHOLE)),
            (mesh, [S(0), R]),
        ),
        "attention, heads over tensor ranks, plain values": (
            _attend,
            dict(q=(q, (tp, [S(1)])), k=(k, (tp, [S(1)])), v=(k, own(1, tp)), bias=(q[0, 0] @ k[0, 0].T, WHOLE)),
            (tp, [S(1)]),
        ),
        "attention, plain queries, keys over tensor ranks": (
            _attend,
            dict(q=(q, WHOLE), k=(k, (tp, [S(2)])), v=(k, (tp, [S(2)])), bias=(q[0, 0] @ k[0, 0].T, WHOLE)),
            WHOLE,
        ),
        "MLP of plain rows": (mr.ops.mlp, dict(x=(x, WHOLE), p=(weight, cols), q=(weight, cols)), WHOLE),
        "MLP of sharded rows": (
            mr.ops.mlp,
            dict(x=(x, (mesh, [S(0), S(1)])), p=(weight, cols), q=(weight, cols), bias=(bias, WHOLE)),
            (mesh, [S(0), R]),
        ),
    }
    return {name: _caught(lambda case=case: _compare(*case)) for name, case in cases.items()}


def _caught(call: Callable[[], str]) -> str:
    try:
        return call()
    except AssertionError as error:
        return f"AssertionError: {error}"


class _LocalWatch(Watch):
    """Counts what is local: a DTensor has the size of the whole, and no memory."""

    def on_growth(self, t: Tensor, size: int) -> None:
        if not isinstance(t, DTensor):
            super().on_growth(t, size)


def bytes_of_mixes(group: Any, classes: int, features: int) -> dict[str, int]:
    """What is sent and held where the classes of plain rows lie on ranks: never the weights, never the logits."""
    mesh = DeviceMesh.from_group(group, "cpu")
    n = _numbers((4, 4), classes, features)
    x, target = n["x"].float().requires_grad_(), n["target"]
    weight = distribute_tensor(n["weight"].float(), mesh, [Shard(0)]).requires_grad_()
    mr.ops.linear_cross_entropy(x, weight, target).backward()  # connections are made
    with _LocalWatch([x, weight.to_local()]) as watch:
        dist.barrier(group)
        before = bytes_sent()
        mr.ops.linear_cross_entropy(x, weight, target).backward()
        dist.barrier(group)
        sent = bytes_sent() - before
    return {"sent": sent, "largest": watch.largest, "shard": weight.to_local().nbytes, "rows": x.nbytes}


def mixed_faults(group: Any) -> dict[str, tuple[str, str, bool]]:
    """What has no single meaning, or differs between ranks: the error of this rank, and whether the group works after
    it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    n = _numbers()
    x, target, me, last = n["x"], n["target"], group.rank(), group.rank() == group.size() - 1
    weight = distribute_tensor(n["weight"], mesh, [Shard(0)])
    rows = distribute_tensor(x, mesh, [Shard(0)])
    lying = distribute_tensor(target, mesh, [Replicate()])
    outside = target.clone()
    outside[0, 0] = 23
    calls: dict[str, Callable[[], Any]] = {
        "own rows": lambda: _loss(x=x + me, weight=weight, target=target),
        "own targets": lambda: _loss(x=x, weight=weight, target=(target + me).clamp(0, 22)),
        "a size of nothing": lambda: _loss(x=rows, weight=weight, target=target[: 4 if last else 5]),
        "a DTensor on one": lambda: _loss(x=x, weight=weight, target=lying if last else target),
        "another type": lambda: _loss(x=x.float() if last else x, weight=weight, target=target),
        "a label on one": lambda: _loss(x=x, weight=weight, target=outside if last else target),
        "a label on all": lambda: _loss(x=x, weight=weight, target=outside),
        "features": lambda: _loss(x=x[..., :5], weight=weight, target=target),
        "an op": lambda: _first_letter(x + me, weight),
        "zigzag": lambda: _in_zigzag(group, weight, x, target),
    }
    found = {}
    for name, call in calls.items():
        try:
            kind, text = "nothing", f"{call()}"
        except mr.MonoidReduceError as error:
            kind, text = type(error).__name__, str(error)
        after = _loss(x=x, weight=weight, target=target).isfinite()
        found[name] = kind, text, bool(after)
    return found


@mr.op
def _first_letter(x: mr.Row["d"], w: mr.Col["d"]):
    return mr.logsumexp(x @ w)


def _in_zigzag(group: Any, weight: Any, x: Any, target: Any) -> Tensor:
    with mr.shard(rows=group, cols=group, order="zigzag"):
        return _loss(x=x, weight=weight, target=target)


def parallel_heads(group: Any) -> dict[str, str]:
    """A head of ours in torch's tensor parallelism: by classes, by features, after sequence parallelism, and beside
    ``loss_parallel`` of torch's own."""
    mesh, n = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), _numbers()
    x, target = n["x"], n["target"]
    alone = mr.nn.LinearCrossEntropyLoss(7, 23, bias=True, dtype=torch.float64)
    alone.load_state_dict({"linear.weight": n["weight"], "linear.bias": n["bias"]})
    mine = x.clone().requires_grad_()
    expected = alone(mine, target)
    expected.backward()
    styles = {"by classes": ColwiseParallel(), "by features": RowwiseParallel(), "by classes, loss_parallel": None}
    found = {}
    for name, style in styles.items():
        head = parallelize_module(copy.deepcopy(alone), mesh, {"linear": style or ColwiseParallel()})
        head.zero_grad()
        for how in ("plain", [Replicate()], [Shard(1)]):
            given = x.clone() if how == "plain" else distribute_tensor(x, mesh, how)
            given = given.detach().requires_grad_()
            with contextlib.nullcontext() if style else loss_parallel():
                loss = head(given, target)
                assert isinstance(loss, DTensor) == (how != "plain")
                loss.backward()
            full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
            pairs = [(full(loss), expected), (full(given.grad), mine.grad)]
            for p, q in zip(head.parameters(), alone.parameters(), strict=True):
                assert p.grad.placements == p.placements, f"{p.grad.placements} of {p.placements}"
                pairs.append((p.grad.full_tensor(), q.grad))
            head.zero_grad()
            good = all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in pairs)
            found[f"{name}, {how}"] = "same" if good else f"{[(a - b).abs().max() for a, b in pairs]}"
    logits = distribute_tensor(alone.linear(x).detach(), mesh, [Shard(2)])
    with loss_parallel():
        theirs = F.cross_entropy(logits.flatten(0, 1), target.flatten()).full_tensor()
    found["theirs"] = "same" if torch.allclose(theirs, expected) else f"{theirs} {expected}"
    return found


def compiled_mixes(group: Any) -> str:
    """A layer and an op inside ``torch.compile``: they break the graph, and are what they are outside."""
    mesh, n = DeviceMesh.from_group(group, "cpu"), _numbers()
    weight = distribute_tensor(n["weight"], mesh, [Shard(0)]).requires_grad_()

    def twice(x: Tensor) -> Tensor:
        loss = mr.ops.linear_cross_entropy(x * 2, weight, n["target"])
        return loss * 2 + _first_letter(x.flatten(0, 1), weight).sum()

    values, grads = [], []
    for call in (twice, torch.compile(twice, backend="aot_eager")):
        x = n["x"].clone().requires_grad_()
        values.append(call(x))
        grads.append(torch.autograd.grad(values[-1], [x, weight]))
    good = torch.equal(*values) and all(
        torch.equal(a if k == 0 else a.full_tensor(), b if k == 0 else b.full_tensor())
        for k, (a, b) in enumerate(zip(*grads, strict=True))
    )
    return "same" if good else f"{values} {grads}"
