"""Kernels in a model's layout: results and gradients lie in memory as their inputs do, and the gradients of keys that
several query heads share are summed over these inside the kernel."""

import json
import subprocess
import sys

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from tests.support import gluon_simulator, internals
from tests.support.model_layout_cases import Model, attend, check, gather

SPLIT = (4 * 70 * 16, 16, 64, 1)  # of [2, 4, 70, 16] in the order of [2, 70, 4, 16]


@pytest.fixture
def launches(monkeypatch):
    """The kernels that are launched."""
    found = []
    internals.forget_launches(monkeypatch)
    internals.replace_launch(monkeypatch, lambda launch, call: (found.append(call), launch(call))[1])
    return found


def folds_heads(call):
    return "for turn in" in call.kernel.text or "next_step %" in call.kernel.text


@pytest.mark.parametrize(
    ("fused", "options"),
    [(False, {"causal": True, "sinks": torch.linspace(-1, 1, 4)}), (True, {"lengths": torch.tensor([50, 70])})],
    ids=["causal", "fused"],
)
def test_split_heads_that_share_keys(fused, options, launches):
    model = Model(2, 4, 2, 70, 16, fused)
    layer, found = gather(model, "triton", torch.float32, **options)
    check(model, found, torch.float32, **options)
    assert layer.stride() == SPLIT
    assert [folds_heads(c) for c in launches if c.kernel.name == "fold_over_rows"] == [True]


def test_too_few_instances_are_summed_afterwards(launches, monkeypatch):
    internals.pretend_device(monkeypatch, processors=132)
    model = Model(2, 4, 2, 70, 16)
    check(model, gather(model, "triton", torch.float32)[1], torch.float32)
    assert not any(map(folds_heads, launches))


def test_heads_that_differ_in_a_number_are_summed_afterwards(launches):
    model, slopes = Model(2, 4, 2, 70, 16), {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}
    check(model, gather(model, "triton", torch.float32, **slopes)[1], torch.float32, **slopes)
    assert not any(map(folds_heads, launches))


@pytest.mark.slow
def test_second_derivatives():
    """Of gradients that were summed over heads: their cotangents broadcast."""
    model = Model(2, 4, 2, 33, 16)

    def twice(engine, dtype):
        given, y = model.inputs(dtype)
        with mr.use(engine=engine):
            flat = attend(engine)(*model.split(given)).transpose(1, 2).reshape(y.shape)
            first = torch.autograd.grad(flat, given, y, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    for got, right in zip(twice("triton", torch.float32), twice("reference", torch.float64), strict=True):
        assert (got.double() - right).norm() <= 1e-5 * right.norm()


@mr.op
def hidden(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@pytest.mark.parametrize("rows", [64, 70])
def test_a_product_that_waits_for_the_next_tile(rows, launches, monkeypatch):
    """Gradients of columns that all batch elements share, by descriptors: the last product of one element is computed
    with the first tile of the next."""
    internals.pretend_device(monkeypatch, descriptors=True)
    gen = torch.Generator().manual_seed(0)
    shapes = (3, rows, 16), (1, 300, 16), (1, 300, 256), (3, rows, 256)
    x, p, q, y = (torch.randn(s, generator=gen).half() for s in shapes)
    weights = p.requires_grad_(), q.requires_grad_()  # too many features for one kernel
    with (
        mr.use(engine="triton"),
        use_plan({"rows": KernelPlan(32, 32, rendering=Rendering.DESCRIPTORS), "cols": KernelPlan(32, 32)}),
    ):
        found = torch.autograd.grad(hidden(x, p, q), weights, y)
    x, p, q, y = (t.detach().double() for t in (x, p, q, y))
    s = x @ p.mT
    exact = ((s > 0) * (y @ q.mT)).mT @ x, torch.relu(s).mT @ y
    for got, right in zip(found, exact, strict=True):
        assert (got.double() - right.sum(0, keepdim=True)).norm() <= 2**-9 * right.sum(0).norm()
    both = [c for c in launches if c.kernel.name == "fold_over_rows"]
    assert all(map(folds_heads, both)) and ["gone_group" in c.kernel.text for c in both] == [False, True]


@pytest.mark.parametrize("causal", [False, True])
def test_hand_scheduled_kernels(causal, monkeypatch):
    """Forward, row gradients, and column gradients of one warp group, on the simulator."""
    model = Model(1, 2, 1, 330, 128)
    plans = {
        "cols": KernelPlan(128, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED),
        "rows": KernelPlan(64, 64, 4, 2, splits=1, rendering=Rendering.HAND_SCHEDULED),
    }
    with use_plan(plans):
        launches = gluon_simulator.simulate(monkeypatch)
        layer, found = gather(model, "triton", torch.bfloat16, causal=causal)
    check(model, found, torch.bfloat16, causal=causal)
    assert layer.stride()[1:] == (128, 256, 1)
    assert [c.kernel.name for c in launches if c.kernel.hand_scheduled] == ["fold_over_cols"] * 2 + ["fold_over_rows"]
    assert [folds_heads(c) for c in launches if c.kernel.hand_scheduled] == [False, False, True]


def test_nothing_is_copied_on_a_gpu():
    """A call on an H200 that is not there: no copy and no sum, and no memory for column gradients of every head."""
    command = [sys.executable, "-m", "tests.support.model_layout_pretended"]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    for case in map(json.loads, said.stdout.splitlines()):
        assert case["strides"] == case["wanted"], case
        assert not [name for name in case["operators"] if not name.startswith(("empty", "zeros_like"))], case
        assert case["bytes"] <= case["gradients"] * 1.3 + case["sums"], case
