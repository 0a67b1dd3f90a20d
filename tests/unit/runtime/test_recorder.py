"""Folds on a CPU that are replayed as recorded torch calls: the same bits, and only where data decides nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines.eager import cpp
from monoidreduce.runtime import recorder as recorders
from tests.support import internals
from tests.support.layers import ZOO

NAMED = [layer for layer in ZOO if layer.differentiable][::6]


@pytest.fixture
def made(monkeypatch):
    """The recordings of folds that were made, None for those that could not be."""
    found = []
    real = recorders.Recorder.function

    def function(self, *given):
        replay = real(self, *given)
        found.extend([replay] if type(self) is recorders.Recorder else [])  # not of layers
        return replay

    monkeypatch.setattr(recorders.Recorder, "function", function)
    return found


def results(call, args):
    args = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]
    value = call(*args)
    found = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    values = [v for v in found if v.requires_grad]
    tensors = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    grads = torch.autograd.grad([v.square().sum() for v in values], tensors, allow_unused=True)
    return [*values, *(g for g in grads if g is not None)]


def by_engine(call, args, monkeypatch):
    with monkeypatch.context() as patch:
        internals.run_engines(patch)
        return results(call, args)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layer", NAMED, ids=repr)
def test_layers_give_the_same_bits_on_new_numbers(layer, monkeypatch):
    with mr.use(engine="eager"):
        for seed in range(4):
            args = layer.args(19, 37, seed, torch.float32)
            assert_same(results(layer.op, args), by_engine(layer.op, args, monkeypatch))


def test_attention_is_replayed_forward_and_backward(made):
    with mr.use(engine="eager"):
        for _ in range(4):
            results(ops.attention, torch.randn(3, 2, 24, 8).unbind())
    assert len(made) == 2 and None not in made


def test_a_fold_that_looks_at_its_data_is_not_replayed(made, monkeypatch):
    @mr.op
    def packed(x: mr.Row["d"], y: mr.Col["d"], own: mr.Row, other: mr.Col):
        return mr.sum(torch.where(own == other, torch.relu(x @ y), 0.0))

    with mr.use(engine="eager"):
        for seed in range(4):
            gen = torch.Generator().manual_seed(seed)
            own, other = (torch.randint(3, (n,), generator=gen).sort()[0] for n in (24, 30))
            args = torch.randn(24, 4), torch.randn(30, 4), own, other
            assert_same(results(packed, args), by_engine(packed, args, monkeypatch))
    assert made and made.count(None) == len(made)


def test_numbers_strides_and_tensors_given_twice(monkeypatch):
    @mr.op
    def scaled(x: mr.Row["d"], y: mr.Col["d"], by: float):
        return mr.logsumexp(x @ y * by)

    with mr.use(engine="eager"):
        for by in (0.5, 0.5, 0.5, -0.0, 0.0, 2.0, 0.5):
            x = torch.randn(12, 6)
            for args in ((x, x, by), (x, torch.randn(12, 6), by), (torch.randn(6, 12).T, x, by)):
                assert_same(results(scaled, args), by_engine(scaled, args, monkeypatch))


def test_tiles_are_counted_in_every_call():
    q, k, v = torch.randn(3, 2, 24, 8).unbind()
    with mr.use(engine="eager"):
        for _ in range(4):
            with mr.tally() as seen:
                ops.attention(q, k, v)
            assert seen.computed == 1
            ops.attention(q, k, v)


def test_what_can_be_recorded():
    x = torch.randn(4)
    with recorders.Recorder([x]) as recorder:
        first = x + 1
        second = first.exp()
        third = second[:2].mul_(2)
    calls = recorder.function([third])
    assert calls is not None
    torch.testing.assert_close(calls(x)[0], ((x + 1).exp() * 2)[:2], rtol=0, atol=0)
    assert [len(step.made) for step in recorder.steps] == [1, 1, 1, 0]
    with recorders.Recorder([x]) as recorder:
        float(x.sum())
    assert recorder.function([]) is None
    with recorders.Recorder([x]) as recorder:
        found = torch.ones(3)[torch.tensor([True, False, True])]
    assert recorder.function([found]) is None


@pytest.fixture
def recorded(made):
    """An op, and tensors whose kind was recorded, forward and backward."""

    @mr.op
    def peaked(x: mr.Row["d"], y: mr.Col["d"], v: mr.Col["d"]):
        return mr.softmax_mean(x @ y, v)

    args = torch.randn(3, 16, 4).unbind()
    with mr.use(engine="eager"):
        for _ in range(3):
            results(peaked, args)
        assert len(made) == 2 and None not in made
        yield peaked, args


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_numbers_that_only_the_replay_meets(value, recorded, monkeypatch):
    peaked, given = recorded
    for place in range(3):
        args = [t.clone() for t in given]
        args[place][1] = value
        assert_same(results(peaked, args), by_engine(peaked, args, monkeypatch))


@pytest.mark.parametrize(
    "changed",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: mr.use(budget="16kB"),
        lambda: mr.use(engine="reference"),
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    ],
    ids=["autocast", "budget", "engine", "hooks"],
)
def test_settings_that_changed_since(changed, recorded, monkeypatch):
    peaked, args = recorded
    with changed():
        assert_same(results(peaked, args), by_engine(peaked, args, monkeypatch))
    assert_same(results(peaked, args), by_engine(peaked, args, monkeypatch))


def test_torch_settings_that_changed_since(recorded, monkeypatch):
    peaked, args = recorded
    try:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        assert_same(results(peaked, args), by_engine(peaked, args, monkeypatch))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        found = peaked(*args)
    assert found.is_inference()
    torch.testing.assert_close(found.clone(), results(peaked, args)[0].detach(), rtol=0, atol=0)


def test_c_plus_plus_is_asked_for_later(recorded, monkeypatch):
    (peaked, args), seen = recorded, []
    monkeypatch.setenv("MONOIDREDUCE_CPP", "always")
    monkeypatch.setattr(cpp, "run", lambda *given: seen.append(given))  # None: tiles run
    results(peaked, args)
    assert seen


def test_transforms_and_second_derivatives(recorded):
    peaked, args = recorded
    x, y, v = (t.double() for t in args)
    for _ in range(3):
        batched = torch.vmap(peaked, in_dims=(0, None, None))(torch.stack([x, -x]), y, v)
        torch.testing.assert_close(batched[1], peaked(-x, y, v))
    _, tangent = torch.func.jvp(lambda x: peaked(x, y, v), (x,), (torch.ones_like(x),))
    assert tangent.shape == x.shape
    torch.autograd.gradgradcheck(lambda x: peaked(x, y[:4], v[:4]), x[:3].clone().requires_grad_())


def test_threads_record_and_replay_at_once():
    @mr.op
    def sums(x: mr.Row["d"], y: mr.Col["d"]):
        return mr.logsumexp(x @ y)

    x, y = torch.randn(16, 4), torch.randn(24, 4)
    expected = torch.logsumexp(x @ y.T, -1)

    def call(_):
        with mr.use(engine="eager"):
            return [sums(x, y) for _ in range(6)]

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(call, range(8)):
            for one in found:
                torch.testing.assert_close(one, expected)
