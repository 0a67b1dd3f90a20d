"""Ranks over NCCL. One GPU holds one rank, so these are groups of one: every collective and its types, no transport."""

import pytest
import torch
import torch.distributed as dist

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
