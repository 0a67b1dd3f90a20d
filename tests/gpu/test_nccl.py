"""Ranks over NCCL, DTensors and FSDP2. One GPU holds one rank, so these are groups of one: every collective and its
types, no transport."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common import shard
from monoidreduce.engines.ranks import agreement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("nccl") / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


@mr.op
def mixed(q: Row["f"], k: Col["f"], v: Col["d"]):
    """All that is exchanged in its own way: sums, softmax, the best, the ten best; for rows and for columns."""
    s = q @ k
    causal = torch.where(mr.col_index <= mr.row_index, s, -torch.inf)
    top = mr.topk(s, 3)
    return mr.softmax_mean(causal, v), mr.sum(torch.tanh(s), over="rows"), mr.argmax(s), top.values, top.indices


def results(layout=None):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=gen).cuda().requires_grad_() for n in (200, 333, 333))
    with agreement.use_layout(layout or agreement.Layout()):
        values = mixed(q, k, v)
    total = sum((t * torch.linspace(-1, 1, t.numel(), device="cuda").view(t.shape)).sum() for t in values[:2])
    return [*(t.detach() for t in values), *torch.autograd.grad(total + values[3].sum(), (q, k, v))]


@pytest.mark.parametrize("axes", [("rows",), ("cols",), ("rows", "cols")], ids="+".join)
def test_a_group_of_one_is_one_process(group, axes):
    """Through the collectives, which ``mr.shard`` itself leaves out for a group of one."""
    layout = agreement.Layout(**{name: group for name in axes})
    for got, expected in zip(results(layout), results(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [("rows",), ("cols",), ("rows", "cols")], ids="+".join)
def test_shard_over_a_group_of_one(group, axes):
    x = torch.randn(50, 8, device="cuda")
    with mr.shard(**{name: group for name in axes}):
        y = mr.ops.attention(x, x, x)
    torch.testing.assert_close(y, mr.ops.attention(x, x, x))


def test_tensors_are_passed_on(group):
    """To the next rank, which here is this one; of every type that travels."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = [torch.ones(5, 3, device="cuda").to(dtype), torch.zeros(0, 3, device="cuda", dtype=dtype)]
        received = shard.RingTransfer(sent, [torch.empty_like(t) for t in sent], group, 0, 0).wait()
        assert all(torch.equal(a, b) for a, b in zip(sent, received, strict=True)), dtype


def test_what_one_rank_refuses(group):
    """Its own error, which the others are told; the group is still good."""
    x = torch.ones(3, 4, device="cuda")
    with agreement.use_layout(agreement.Layout(cols=group)):
        with pytest.raises(mr.ShapeError):
            mixed(x, torch.ones(5, 3, device="cuda"), torch.ones(5, 2, device="cuda"))
        assert mr.ops.attention(x, x, x).shape == (3, 4)


@pytest.mark.parametrize("placement", ["rows", "cols", "both", "neither"])
def test_dtensors_on_a_mesh_of_one(group, placement):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = DeviceMesh("cuda", [0])
    x = torch.randn(40, 8, device="cuda")
    rows, cols = placement in ("rows", "both"), placement in ("cols", "both")
    q, k = (distribute_tensor(x, mesh, [Shard(0) if d else Replicate()]).requires_grad_() for d in (rows, cols))
    y = mr.ops.attention(q, k, k)
    y.sum().backward()
    assert isinstance(y, DTensor)
    plain = x.clone().requires_grad_()
    expected = mr.ops.attention(plain, x, x)
    expected.sum().backward()
    torch.testing.assert_close(y.full_tensor(), expected)
    torch.testing.assert_close(q.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_placed", ["Shard", "Replicate"])
@pytest.mark.parametrize("activations", ["plain", "Replicate", "Shard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixed_tensors_of_a_head(group, activations, weight_placed, dtype):
    """A DTensor weight beside a plain activation, a replicated one or a shard of the tokens: FSDP2's and tensor
    parallelism's mixes."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh, gen = DeviceMesh("cuda", [0]), torch.Generator("cuda").manual_seed(3)
    x = torch.randn(300, 64, device="cuda", generator=gen).to(dtype)
    w = torch.randn(777, 64, device="cuda", generator=gen).to(dtype)
    target = torch.randint(0, 777, (300,), device="cuda", generator=gen)
    ids = torch.randint(0, 777, (300, 5), device="cuda", generator=gen)
    low = [torch.randn(n, 8, device="cuda", generator=gen).to(dtype) for n in (300, 777)]
    place = {"plain": None, "Replicate": [Replicate()], "Shard": [Shard(0)]}

    def losses(x, w, target, ids, low):
        found = mr.ops.linear_logprobs(x, w, target, ids=ids, return_entropy=True, return_lse=True, temperature=0.7)
        adapted = mr.ops.linear_cross_entropy(x, w, target, reduction="none", low_rank=low)
        return [found.log_prob, found.entropy, found.lse, found.ids_log_probs.sum(-1), adapted]

    def run(x, w, *rest):
        x, w = (t.detach().clone().requires_grad_() for t in (x, w))
        values = losses(x, w, *rest)
        whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in values]
        sum((v.float() * torch.linspace(-1, 1, 300, device="cuda")).sum() for v in whole).backward()
        return [v.detach() for v in whole], x.grad, w.grad

    how = place[activations]
    rows = (lambda t: t) if how is None else (lambda t: distribute_tensor(t, mesh, how))
    cols = lambda t: distribute_tensor(t, mesh, place[weight_placed])
    values, gx, gw = run(rows(x), cols(w), rows(target), rows(ids), (rows(low[0]), cols(low[1])))
    expected, ex, ew = run(x, w, target, ids, tuple(low))
    assert isinstance(gw, DTensor) and gw.placements == tuple(place[weight_placed])
    assert isinstance(gx, DTensor) == (how is not None)
    pairs = [*zip(values, expected, strict=True), (gw.full_tensor(), ew), (gx if how is None else gx.full_tensor(), ex)]
    wide = 1e-5 if dtype is torch.float32 else 1e-2
    for got, right in pairs:
        assert (got.float() - right.float()).norm() <= wide * right.float().norm()


class Small(nn.Module):
    """Attention between an embedding and a head that owns its loss."""

    def __init__(self, width=64, vocabulary=500):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.attend = mr.nn.MultiheadAttention(width, 4, batch_first=True)
        self.loss = mr.nn.LinearCrossEntropyLoss(width, vocabulary)

    def forward(self, tokens, target):
        x = self.tokens(tokens)
        return self.loss(x + self.attend(x, x, x, need_weights=False)[0], target)


@pytest.mark.parametrize("head_alone", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_under_fully_shard(group, dtype, head_alone):
    """Three steps of a model whose weights FSDP2 shards and casts, beside those of the model alone."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    with torch.device("cuda"):
        alone = Small()
        tokens = torch.randint(0, 500, (4, 129))
    sharded = copy.deepcopy(alone)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = DeviceMesh("cuda", [0])
    fully_shard(sharded.attend, mesh=mesh, mp_policy=policy)
    if head_alone:
        fully_shard(sharded.loss, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    found = []
    for model in (sharded, alone):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(3):
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    assert found[1][-1] < found[1][0]
    assert found[0] == pytest.approx(found[1], rel=1e-5 if dtype is torch.float32 else 1e-2)
