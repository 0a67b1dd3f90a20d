"""``op.explain``: words and data that agree, nothing run unless it is to be measured."""

import json

import pytest
import torch

import monoidreduce as mr


@pytest.fixture(autouse=True)
def auto():
    with mr.use(engine="auto"):
        yield


@mr.op
def attention(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def causal(q: mr.Row["f"], k: mr.Col["f"], v: mr.Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k, -torch.inf), v)


@mr.op
def loss(x: mr.Row["d"], w: mr.Col["d"], label: mr.Row):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == label, s, 0.0))


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, device="meta", dtype=dtype)


def test_words_and_data_say_the_same():
    text = attention.explain(meta(4000, 64), meta(5000, 64), meta(5000, 64))
    data = text.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert f"runs {data['runs']}: {data['why']}" in text
    assert data["rows"] == 4000 and data["cols"] == 5000 and data["engine"] == "auto"
    assert [f["backward"] for f in data["folds"]] == [False, True]
    assert sum(f["flops"] for f in data["folds"]) == 14 * 4000 * 5000 * 64
    for schedule in data["schedules"]:
        assert f"  {schedule['schedule']}" in text
    dense = next(s for s in data["schedules"] if s["schedule"] == "dense")
    assert not dense["allowed"] and "not allowed" in text


def test_what_is_skipped_and_what_is_sent_is_told():
    text = causal.explain(*[meta(8192, 64)] * 3)
    assert "% of the pairs skipped" in text
    assert 0.4 < text.as_dict()["folds"][0]["skipped"] < 0.55


def test_alternatives_that_lost_say_by_how_much():
    data = attention.explain(*[meta(6000, 32)] * 3).as_dict()
    runs = next(s for s in data["schedules"] if s["schedule"] == data["runs"])
    allowed = [s for s in data["schedules"] if s["allowed"]]
    assert len(data["schedules"]) >= 3 and runs["seconds"] == min(s["seconds"] for s in allowed)


def test_a_budget_is_named():
    args = [meta(6000, 32)] * 3
    with mr.budget("32MB"):
        text = attention.explain(*args)
    assert text.as_dict()["budget"] == 32_000_000 and "the budget of 32MB" in text


def test_the_gradient_in_the_forward_is_told_of():
    text = loss.explain(meta(4096, 1024), meta(32000, 1024), meta(4096, dtype=torch.int64))
    assert "by op.total" in text and text.as_dict()["runs"] != "total"


@pytest.mark.parametrize("engine", ["eager", "panel", "reference"])
def test_engines_that_were_asked_for(engine):
    with mr.use(engine=engine):
        data = attention.explain(*[meta(50, 8)] * 3).as_dict()
    assert data["why"] == f"the engine {engine} was asked for" and data["runs"] != "dense"


def test_what_was_measured_stands_beside_what_was_predicted():
    args = [torch.randn(200, 16, requires_grad=True) for _ in range(3)]
    before = attention.explain(*args).as_dict()
    assert before["measured"] is None
    with_run = attention.explain(*args, measure=True)
    found = with_run.as_dict()
    predicted = next(s for s in found["schedules"] if s["schedule"] == found["runs"])
    assert "measured: " in with_run and found["measured"]["seconds"] > 0
    assert found["measured"]["peak"] == pytest.approx(predicted["peak"], rel=0.1)
    assert attention.explain(*args).as_dict()["measured"] == found["measured"]  # later calls know
    assert attention.explain(*(a[:100] for a in args)).as_dict()["measured"] is None  # others do not
    assert all(a.grad is None for a in args)


def test_wrong_arguments_are_told_before_any_work():
    with pytest.raises(mr.ShapeError, match="features"):
        attention.explain(meta(5, 3), meta(5, 4), meta(5, 4))
    with pytest.raises(mr.ShapeError, match="features"):
        attention.cost(meta(5, 3), meta(5, 4), meta(5, 4))


def test_no_pairs_at_all():
    @mr.op
    def apart(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.sum(x.sum() * y.sum())

    assert "everything is one-sided" in apart.explain(meta(5, 3), meta(7, 3))
    assert "there are no pairs" in attention.explain(meta(0, 3), meta(7, 3), meta(7, 3))


def test_what_a_pass_is_fed_with_is_named():
    """An earlier pass's result by its kind, what is made of it by what that is, inputs by their names."""

    @mr.op
    def best_mean(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["e"]):
        return mr.topk_mean(x @ y, v, 3)

    args = [torch.randn(20, 4) for _ in range(3)]
    for options in ({}, {"cols": mr.edges.from_neighbours(torch.randint(0, 20, (20, 9)))}):
        said = str(best_mean.explain(*args, **options))
        assert "gather 2: pick over cols; fed topk.indices, (made of topk.values), v\n" in said
