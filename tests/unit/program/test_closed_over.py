"""What a body reads besides its arguments: numbers are read anew for each call, tensors are refused."""

import functools
import types

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.program import trace

SCALE = 2.0
SETTINGS = {"shift": 1.0, "square": False}
LIMITS = (0.0, 10.0)
KIND = torch.float32


@mr.op
def of_helpers(x: Row["d"], y: Col["d"]):
    return mr.sum(scaled(x @ y))


def scaled(s):  # below the op that calls it
    return shifted(s) * SCALE


def shifted(s):
    low, high = LIMITS
    s = torch.clamp(s + SETTINGS["shift"], low, high)
    return s.square() if SETTINGS["square"] else s


@pytest.fixture
def ones():
    return torch.ones(1, 2), torch.ones(3, 2)


@pytest.mark.parametrize("engine", ["reference", "eager", "panel", "auto"])
def test_globals_that_helpers_read(ones, monkeypatch, engine):
    here = globals()
    with mr.use(engine=engine):
        assert of_helpers(*ones).item() == 18.0
        monkeypatch.setitem(here, "SCALE", 3.0)
        assert of_helpers(*ones).item() == 27.0
        monkeypatch.setitem(SETTINGS, "shift", 2.0)
        assert of_helpers(*ones).item() == 36.0
        monkeypatch.setitem(SETTINGS, "square", True)
        assert of_helpers(*ones).item() == 144.0
        monkeypatch.setitem(here, "LIMITS", (0.0, 1.0))
        assert of_helpers(*ones).item() == 9.0
        monkeypatch.setitem(here, "SETTINGS", {"shift": 0.0, "square": False})
        assert of_helpers(*ones).item() == 9.0
        monkeypatch.setitem(here, "shifted", lambda s: s)
        assert of_helpers(*ones).item() == 18.0
        monkeypatch.undo()
        assert of_helpers(*ones).item() == 18.0


def test_a_closure(ones):
    scale, power = 1.0, 1

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum((x @ y) ** power) * scale + sum(scale for _ in range(2))

    assert layer(*ones).item() == 8.0
    scale = 2.0
    assert layer(*ones).item() == 16.0
    power = 2
    assert layer(*ones).item() == 28.0
    assert layer.total(*ones).item() == 28.0
    scale, power = 1.0, 1
    assert layer.total(*ones).item() == 8.0
    assert layer.stream(ones[0]).over(mr.chunks(ones[1], size=2)).item() == 8.0
    scale = 2.0
    assert layer.stream(ones[0]).over(mr.chunks(ones[1], size=2)).item() == 16.0


def test_numbers_that_are_equal_but_not_the_same(ones):
    value: object = 1

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(x @ y) * 0 + value

    assert layer(*ones).item() == 1.0
    value = True
    assert layer(*ones).item() == 1.0
    value = -0.0

    @mr.op
    def sign(x: Row["d"], y: Col["d"]):
        return mr.sum(x @ y) * value

    assert sign(*ones).item() == 0.0
    value = float("nan")
    assert sign(*ones).isnan().all()
    value = float("nan")  # another object
    programs = sum(map(len, sign._programs.traces.values()))
    assert sign(*ones).isnan().all() and sum(map(len, sign._programs.traces.values())) == programs


def test_attributes(ones):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = 1.0

            @mr.op
            def layer(x: Row["d"], y: Col["d"]):
                return mr.sum(x @ y) / self.temperature * self.factor()

            self.layer = layer
            self.config = types.SimpleNamespace(factor=1.0)

        def factor(self):
            return self.config.factor

    layer = Layer()
    assert layer.layer(*ones).item() == 6.0
    layer.temperature = 2.0
    assert layer.layer(*ones).item() == 3.0
    layer.config.factor = 10.0
    assert layer.layer(*ones).item() == 30.0
    layer.config = types.SimpleNamespace(factor=1.0)
    assert layer.layer(*ones).item() == 3.0


def test_partial_functions(ones):
    factor = 1.0

    def times(by, s):
        return s * by * factor

    double = functools.partial(times, 2)

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(double(x @ y))

    assert layer(*ones).item() == 12.0
    factor = 2.0
    assert layer(*ones).item() == 24.0
    double = functools.partial(times, 1)
    assert layer(*ones).item() == 12.0


def test_lists_dictionaries_objects_and_functions(ones):
    weights, table, config, act = [1.0, 2.0], {"a": 1.0}, types.SimpleNamespace(scale=1.0, inner=[1.0]), torch.abs

    def times(given, s):
        return s * given.scale * given.inner[0]

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        s, given = act(x @ y), config
        return mr.sum(sum(w * s for w in weights) + times(config, s) + given.scale * s + table.get("a") * s)

    assert layer(*ones).item() == 36.0  # of 6 for each factor
    weights[0], table["a"] = 2.0, 3.0
    assert layer(*ones).item() == 54.0
    weights, config.scale = [1.0], 2.0
    assert layer(*ones).item() == 48.0
    config.inner.insert(0, 3.0)
    assert layer(*ones).item() == 72.0
    act = torch.neg
    assert layer(*ones).item() == -72.0


def test_contents_are_looked_through_again_only_where_one_is_another(ones, monkeypatch):
    settings = types.SimpleNamespace(weights=[1.0, 2.0], deep={"power": [{"n": 1}]})
    texts = []
    describe = trace._Content._describe
    monkeypatch.setattr(trace._Content, "_describe", lambda self, value: texts.append(value) or describe(self, value))

    @mr.op
    def weighted(x: Row["d"], y: Col["d"]):
        held = settings
        return mr.sum(held.weights[-1] * (x @ y) ** held.deep["power"][0]["n"])

    def step():
        del texts[:]
        return weighted(*ones).item(), bool(texts)

    assert step() == (12.0, True) and step() == step() == (12.0, False)
    settings.weights[-1] = 3.0
    assert step() == (18.0, True) and step() == (18.0, False)
    settings.deep["power"][0]["n"] = 2
    assert step() == (36.0, True) and step() == (36.0, False)
    settings.weights = [4.0]
    settings.deep = {"power": [{"n": 2}]}
    assert step() == (48.0, True) and step() == (48.0, False)
    settings.tensor = torch.ones(1)  # is not kept alive: a text each time
    assert step() == step() == (48.0, True)


def test_an_unchanged_body_is_traced_once_whatever_it_counts(ones):
    traced = []
    count = 0

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        nonlocal count
        count += 1
        traced.append(count)
        return mr.sum(x @ y)

    for length in (1, 2, 3):
        layer(ones[0].expand(length, 2), ones[1])
    assert len(traced) == 2  # each trace is made twice, and compared


def test_functions_that_are_given_as_choices(ones):
    slope = 1.0

    def act(s):
        return s * slope

    x, p, q = ones[0], ones[1], torch.ones(3, 1)
    for expected in (6.0, 12.0, 6.0):
        for _ in range(4):  # layers write down what a call like one before did
            assert mr.ops.mlp(x, p, q, activation=act).item() == expected
        slope = 3.0 - slope


def test_helpers_of_a_function_that_are_defined_below_the_op(ones):
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(later(x @ y))

    def later(s):
        return 2 * s

    assert layer(*ones).item() == 12.0


def test_what_is_kept_is_bounded(ones):
    value = 0

    @mr.op
    def layer(x: Row["d"], y: Col["d"], k: int):
        return mr.sum(x @ y) * float(k) + value

    for value in range(40):
        assert layer(*ones, 1).item() == 6.0 + value
    assert sum(map(len, layer._programs.traces.values())) <= 32
    for k in range(100):
        assert layer(*ones, k).item() == 6.0 * k + value
    (programs,) = layer._programs.traces.values()
    assert len(programs) <= 32
    assert layer(*ones, 99).item() == 594.0 + value
    assert layer._programs.traces and next(iter(layer._programs.traces.values()))[0][1] == {"k": 99}


@pytest.mark.parametrize("shape", [(), (2,)])
@pytest.mark.parametrize("asks", [False, True])
def test_tensors_are_refused_by_name_and_line(ones, shape, asks):
    bias = torch.zeros(shape, requires_grad=asks)

    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        s = x @ y
        return mr.sum(bias * s)

    with pytest.raises(mr.TraceError) as error:
        layer(*ones)
    assert f"the tensor bias of shape {shape}" in str(error.value)
    assert "return mr.sum(bias * s)" in str(error.value)


def test_a_number_made_in_the_body_as_a_tensor_is_a_number(ones):
    @mr.op
    def layer(x: Row["d"], y: Col["d"]):
        return mr.sum(torch.where(x @ y > 0, torch.tensor(2.0), torch.tensor(0.0)))

    assert layer(*ones).item() == 6.0
