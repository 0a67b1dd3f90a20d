"""The benchmark of layers that nobody tuned: its draws are the same in every run, and its layers are right."""

import pytest
import torch

from benchmarks import generality


def test_draws_are_seeded_and_of_every_kind():
    layers = generality.draw_layers(0, 30)
    assert layers == generality.draw_layers(0, 30) != generality.draw_layers(1, 30)
    assert len(set(layers)) == 30 and len({layer.name for layer in layers}) == 30
    many = generality.draw_layers(2, 300)
    assert {layer.reduction for layer in many} == set(generality.REDUCTIONS)
    assert {layer.score for layer in many} == set(generality.SCORES)
    assert {f for layer in many for f in layer.functions} == set(generality.FUNCTIONS)


@pytest.mark.parametrize("score", generality.SCORES)
def test_both_forms_of_a_layer_agree(score):
    reduction = {"x · y": "topk", "x · y + b": "sum of vectors"}.get(score, "logsumexp")
    layer = generality.Layer(score, ("softplus",), True, reduction, (2,), 20, 24, 8)
    layer = generality.Layer(score, ("mish",), False, reduction, (), 20, 24, 8) if reduction == "topk" else layer
    assert generality.check(layer, "cpu", torch.float32) == []


def test_a_wrong_layer_is_outside_the_rule(monkeypatch):
    layer = generality.Layer("x · y", ("tanh",), False, "sum", (), 20, 24, 8)
    dense = generality.make_dense(layer)
    monkeypatch.setattr(generality, "make_ours", lambda layer: lambda *given: dense(*given) * 1.01)
    assert [text.partition(":")[0] for text in generality.check(layer, "cpu", torch.float32)] == [
        "value",
        "gradient 0",
        "gradient 1",
    ]


def test_the_table_has_a_row_for_each_layer():
    own = {"ours": 1.0, "dense": 2.0, "ratio": 0.5}
    times = {"device": own, "alone": own | {"ratio": 0.7}}
    row = {"layer": "max of |x|", "forward": times, "both": times, "MB": {"ours": 1.0, "dense": 9.0}, "wrong": []}
    rows = [row, {"layer": "other", "wrong": ["not reached"]}]
    table = generality.markdown({"environment": {}, "rows": rows, "summary": generality.summarize(rows)})
    assert "median 0.50, worst 0.50" in table and "median 0.70, worst 0.70" in table
    assert "| max of abs x | 1.000 / 1.000 |" in table
    assert "other (not reached)" in table
