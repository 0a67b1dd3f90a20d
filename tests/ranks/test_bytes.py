"""What is sent, counted by the kernel, against the model; and beside torch's and Megatron's ways."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.plan import communication as model
from tests.ranks.tasks import _scores

SLACK = 0.06  # headers, acknowledged markers and barriers beside the payload


def one_fold(op, *args):
    (only,) = op.program(*args).passes
    return only.fold


def gradient_of(fold):
    """The fold of the backward, all gradients asked for."""
    from monoidreduce.engine.sharded import _gradient_program

    (only,) = _gradient_program(fold, (True,) * len(fold.leaves), (False, True, False, False))[0].passes
    return only


def expected(which, world, rows, cols, features):
    """Bytes of one rank, forward and backward, by the model."""
    q, k = torch.ones(3, features), torch.ones(4, features)
    fold = one_fold(_scores, q, k, k)
    of = {"f": features}.__getitem__
    widths = {"rows": 4 * features, "cols": 4 * features}  # k and v are one tensor, and so one leaf... of two
    widths["cols"] = 4 * features * sum(e.cols for e in fold.leaves)
    back = gradient_of(fold)
    wide = {
        side: 4 * sum(1 if f.feature is None else features for f in back.feeds if getattr(f, side))
        for side in ("rows", "cols")
    }
    if which == "ring":
        forward = model.sent_in_a_ring(fold, of, widths, 4, (rows, cols), world)
        return forward, model.sent_in_a_ring(back.fold, of, wide, 4, (rows, cols), world)
    forward = model.sent(fold, of, 4, (rows, cols), (1, world))
    return forward, model.sent(back.fold, of, 4, (rows, cols), (1, world))


@pytest.mark.parametrize("which", ["ring", "cols"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_sent_are_those_of_the_model(pool, which, world):
    rows, cols, features = 1024, 1536, 64
    answers = pool.run("traffic", world, which, rows, cols, features)
    forward, backward = expected(which, world, rows, cols, features)
    for name, bytes_ in (("forward", forward), ("backward", backward)):
        mean = sum(a[name] for a in answers) / world
        assert mean == pytest.approx(bytes_, rel=SLACK, abs=20_000), (name, mean, bytes_)


def test_megatron_style_loss_is_the_same_and_sends_as_much(pool):
    for answer in pool.run("megatron", 4, 512, 1000, 64):
        ours, theirs = answer["ours"], answer["theirs"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        torch.testing.assert_close(ours["x"], theirs["x"], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(ours["w"], theirs["w"], atol=1e-6, rtol=1e-4)
        assert ours["bytes"] <= 1.1 * theirs["bytes"]


def test_torchs_loss_parallel_is_the_same(pool):
    assert pool.run("torch_loss_parallel", 8, 32, 64) == ["same"] * 8


def test_the_papers_equations():
    sizes = dict(L=100, R=200, A=4, B=8, P=12)
    assert model.forward_cost(1, 1, **sizes) == 100 * 4 + 200 * 8
    assert model.forward_cost(2, 4, **sizes) == 4 * 100 * 4 + 2 * 200 * 8 + 3 * 100 * 12
    assert model.backward_cost(2, 4, **sizes) == 2 * 4 * 100 * 16 + 2 * 2 * 200 * 8
    grouped = model.forward_cost(2, 4, **sizes, W=2)
    saved = (4 - 1) - (4 - 2) / 2  # (r - 1) becomes (r - W) / W
    assert model.forward_cost(2, 4, **sizes) - grouped == saved * 100 * (4 + 12)
    assert model.best_mesh(8, **sizes)[0] * model.best_mesh(8, **sizes)[1] == 8
    assert issubclass(mr.ShardError, ValueError)
