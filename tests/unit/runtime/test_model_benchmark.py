"""The benchmark of a training step: every contender, eager and compiled, has the same loss."""

import dataclasses

import pytest
import torch

from benchmarks import model


def test_every_contender_has_the_same_loss(monkeypatch):
    monkeypatch.setattr(model, "WARM_UP", 1)
    monkeypatch.setattr(model, "ROUNDS", 1)
    (shape,) = model.TINY.values()
    found = model.measure(shape, "cpu", backend="aot_eager")
    assert {"torch, eager", "torch, compiled", "ours, eager", "ours, compiled"} <= found.keys()
    losses = [row["loss"] for row in found.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)
    table = model.markdown({"environment": {}, "models": {str(shape): found}})
    assert table.count("| ours") == 2 and "nan" not in table


def test_a_head_of_its_own():
    (shape,) = model.TINY.values()
    shape = dataclasses.replace(shape, tied=False)
    made = model.Model(shape)
    tokens = torch.randint(shape.vocabulary, (2, shape.batch, shape.length))
    losses = [made(*tokens, attend, loss) for _, attend, loss in model.contenders()]
    torch.testing.assert_close(losses[-1], losses[0])
    losses[-1].backward()
    assert made.head.weight.grad is not None and made.head.weight is not made.table.weight


def test_the_8b_has_its_sizes():
    """Those of a Llama of eight billion weights, fewer layers apart: 218 million a layer, two tables of 525 million."""
    (shape,) = (s for name, s in model.SHAPES.items() if name.startswith("8B"))
    with torch.device("meta"):
        counted = sum(p.numel() for p in model.Model(shape).parameters())
    assert counted == shape.layers * (218_103_808 + 2 * 4096) + 2 * 128256 * 4096 + 4096
    assert str(shape) == f"4×4096 tokens, 32/8 heads of 128, {shape.layers} layers of width 4096"
