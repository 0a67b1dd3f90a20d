"""What is sent, counted by the kernel, against the model; and beside torch's and Megatron's ways."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce.plan import candidates
from monoidreduce.plan import communication as model
from tests.support.rank_tasks import _scores

SLACK = 0.04  # markers beside the payload
HEADERS = 8000  # bytes: what ranks agree on before a call, and the barriers of the test


def one_fold(op, *args):
    (only,) = op.program(*args).passes
    return only.fold


def gradient_of(fold):
    """The fold of the backward, all gradients asked for."""
    from monoidreduce.engines.common.gradient_program import build_gradient_program

    made = build_gradient_program(fold, (True,) * len(fold.leaves), (False, True, False, False))
    (only,) = made.program.passes
    return only


def expected(which, world, rows, cols, features, slices=None, heads=1):
    """Bytes of one rank, forward and backward, by the model."""
    q, k = torch.ones(3, features), torch.ones(4, features)
    fold = one_fold(_scores, q, k, k)
    of = {"f": features}.__getitem__
    widths = {"rows": 4 * heads * features, "cols": 4 * heads * features * sum(e.cols for e in fold.leaves)}
    back = gradient_of(fold)
    wide = {
        side: 4 * heads * sum(1 if f.feature is None else features for f in back.feeds if getattr(f, side))
        for side in ("rows", "cols")
    }
    if which == "ring":
        forward = model.count_sent_in_grid(fold, of, widths, 4, (rows, cols), world, slices, heads)
        return forward, model.count_sent_in_grid(back.fold, of, wide, 4, (rows, cols), world, slices, heads)
    ranks = {"rows": (world, 1), "cols": (1, world), "mesh": (2, world // 2)}[which]
    return tuple(model.count_sent(f, of, 4, (rows, cols), ranks, heads) for f in (fold, back.fold))


WORLDS = {"rows": (2, 7), "cols": (3, 8), "ring": (2, 3, 7, 8), "mesh": (8,)}
LAYOUTS = [(which, world) for which, worlds in WORLDS.items() for world in worlds]


@pytest.mark.parametrize(("which", "world"), LAYOUTS)
def test_bytes_sent_are_those_of_the_model(pool, which, world):
    rows, cols, features = 128, 192, 512  # few pairs, many bytes
    answers = pool.run("traffic", world, which, rows, cols, features)
    forward, backward = expected(which, world, rows, cols, features)
    for name, bytes_ in (("forward", forward), ("backward", backward)):
        mean = sum(a[name] for a in answers) / world
        assert mean == pytest.approx(bytes_, rel=SLACK, abs=HEADERS), (name, mean, bytes_)


@pytest.mark.parametrize(("which", "slices"), [("ring", None), ("ring", "best"), ("cols", None)])
def test_bytes_of_many_heads(pool, which, slices):
    """Results of all of the batch are sent, and weighed where it is decided what travels."""
    size = (96, 160, 64)
    answers = pool.run("traffic", 4, which, *size, slices, 8)
    for name, bytes_ in zip(("forward", "backward"), expected(which, 4, *size, slices, 8), strict=True):
        mean = sum(a[name] for a in answers) / 4
        assert mean == pytest.approx(bytes_, rel=SLACK, abs=HEADERS), (name, mean, bytes_)


@pytest.mark.parametrize(("world", "slices"), [(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (8, "best")])
def test_bytes_of_a_grid_are_those_of_the_papers(pool, world, slices):
    """Counted on the sockets, for every number of slices that a worker takes: equation 5, less what each rank has."""
    rows, cols, features = 128, 192, 512  # few pairs, many bytes
    answers = pool.run("traffic", world, "ring", rows, cols, features, slices)
    forward, backward = expected("ring", world, rows, cols, features, slices)
    for name, bytes_ in (("forward", forward), ("backward", backward)):
        mean = sum(a[name] for a in answers) / world
        assert mean == pytest.approx(bytes_, rel=SLACK, abs=HEADERS), (name, mean, bytes_)
    if isinstance(slices, int):
        width, state = 4 * features, 4 * (features + 2)  # of a query, a key, a value; of a softmax mean
        sizes = dict(L=rows, R=cols, A=width, B=2 * width, P=state)
        extra = candidates.forward_cost(slices, world, **sizes, W=slices) - rows * width - cols * 2 * width
        assert forward == pytest.approx(extra / world)


def test_the_best_grid_sends_least():
    fold = one_fold(_scores, torch.ones(3, 8), torch.ones(4, 8), torch.ones(4, 8))
    of, widths = {"f": 8}.__getitem__, {"rows": 32, "cols": 64}
    sent = {w: model.count_sent_in_grid(fold, of, widths, 4, (4096, 4096), 64, w) for w in (1, 2, 4, 8, 16, 32, 64)}
    assert model.count_sent_in_grid(fold, of, widths, 4, (4096, 4096), 64, "best") == min(sent.values()) == sent[8]
    assert sent[8] < 0.3 * model.count_sent_in_grid(fold, of, widths, 4, (4096, 4096), 64)


def test_megatron_style_loss_is_the_same_and_sends_as_much(pool):
    for answer in pool.run("megatron", 4, 128, 250, 256):
        ours, theirs = answer["ours"], answer["theirs"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        torch.testing.assert_close(ours["x"], theirs["x"], atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(ours["w"], theirs["w"], atol=1e-6, rtol=1e-4)
        assert ours["bytes"] <= 1.1 * theirs["bytes"]


def test_torchs_loss_parallel_is_the_same(pool):
    assert pool.run("torch_loss_parallel", 8, 32, 64) == ["same"] * 8


def test_torchs_ring_attention_is_the_same_and_sends_as_much(pool):
    """Its own loop, on the CPU's attention, which ``context_parallel`` itself refuses."""
    for answer in pool.run("rings", 4, 128, 256):
        for name, theirs in answer.items():
            for a, b in zip(answer["ring"]["outcome"], theirs["outcome"], strict=True):
                torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, msg=name)
        assert answer["ring"]["bytes"] <= 1.02 * min(answer[n]["bytes"] for n in ("alltoall", "allgather"))
        assert answer["grid"]["bytes"] < 0.9 * answer["ring"]["bytes"]


def test_the_papers_equations():
    sizes = dict(L=100, R=200, A=4, B=8, P=12)
    assert candidates.forward_cost(1, 1, **sizes) == 100 * 4 + 200 * 8
    assert candidates.forward_cost(2, 4, **sizes) == 4 * 100 * 4 + 2 * 200 * 8 + 3 * 100 * 12
    assert model.backward_cost(2, 4, **sizes) == 2 * 4 * 100 * 16 + 2 * 2 * 200 * 8
    grouped = candidates.forward_cost(2, 4, **sizes, W=2)
    saved = (4 - 1) - (4 - 2) / 2  # (r - 1) becomes (r - W) / W
    assert candidates.forward_cost(2, 4, **sizes) - grouped == saved * 100 * (4 + 12)
    assert model.best_mesh(8, **sizes)[0] * model.best_mesh(8, **sizes)[1] == 8
    assert issubclass(mr.ShardError, ValueError)
