"""The benchmark of a training step: every contender, eager and compiled, has the same loss."""

import pytest

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
