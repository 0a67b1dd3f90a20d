"""Weights stowed in the memory of column gradients, in the interpreter: three products to four, however little is left."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce.engine.triton import KernelPlan
from monoidreduce.engine.triton.wide import epilogue
from monoidreduce.engine.triton.wide.panel import KernelStep
from monoidreduce.plan import panels, tail
from tests.interpret.test_epilogue_kernels import FAR, SMALL, compared, head, own_index, plain_head, pulled, vectors

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::monoidreduce.errors.FallbackWarning")


@pytest.fixture(autouse=True)
def used(monkeypatch, tmp_path_factory, exact_products):
    """Small tiles and panels, of which no rows are few enough; the kernels that were launched, and the plans."""
    found, plans = [], []
    launch, begin = epilogue._Ready._launch, KernelStep.begin
    monkeypatch.setattr(
        epilogue._Ready, "_launch", lambda self, name, *given: found.append(name) or launch(self, name, *given)
    )
    monkeypatch.setattr(KernelStep, "begin", lambda self, panel: plans.append(panel) or begin(self, panel))
    monkeypatch.setattr(epilogue, "on", lambda device: True)
    monkeypatch.setattr(epilogue, "PLANS", SMALL)
    monkeypatch.setattr(epilogue, "SHALLOW", {})
    monkeypatch.setattr(panels, "FEW", 10**6)
    monkeypatch.setattr(panels, "ROUND", 4)
    monkeypatch.setattr(panels, "MOST", 128)
    for name, value in {"_ROUND": 64, "_LEAST": 4, "_MORE": 8}.items():
        monkeypatch.setattr(tail, name, value)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path_factory.getbasetemp() / "kernels"))
    return found, plans


@pytest.mark.parametrize("peaked", [0.0, 8.0])
@pytest.mark.parametrize(("rows", "cols", "features", "limit"), [(24, 500, 264, 4000), (300, 700, 272, 40_000)])
def test_heads(rows, cols, features, limit, peaked, seed, used):
    x, w, target = vectors(rows, cols, features, peaked)
    bias = torch.randn(cols).bfloat16()
    got = pulled(lambda x, w: head.total(x, w, target, bias), (x, w), limit)
    names, (plan,) = used
    print(plan, names)
    assert plan.tail.stowed
    compared(got, plain_head(target, bias), (x, w))
