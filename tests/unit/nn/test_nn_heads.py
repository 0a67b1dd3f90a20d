"""Modules over the vocabulary heads: the functions' results, torch's state dicts, copies, pickles, files."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import monoidreduce as mr
from monoidreduce import ops

D, E, V, M = 5, 3, 11, 7
X, Y, TARGET, WEIGHTS = torch.randn(M, D), torch.randn(M, E), torch.randint(V, (M,)), torch.rand(M)
CLASS_WEIGHTS = torch.rand(V)
HEAD = {"softcap": 5.0, "temperature": 0.7}

# a module, what its forward is given, and the same by the function
CASES = {
    "cross_entropy": (
        mr.nn.LinearCrossEntropyLoss(D, V, bias=True, weight=CLASS_WEIGHTS, label_smoothing=0.1, z_loss=1e-2, **HEAD),
        (X, TARGET, WEIGHTS),
        lambda m: ops.linear_cross_entropy(
            X, m.linear.weight, TARGET, bias=m.linear.bias, class_weights=CLASS_WEIGHTS, token_weights=WEIGHTS,
            label_smoothing=0.1, z_loss=1e-2, **HEAD,
        ),
    ),
    "logprobs": (
        mr.nn.LinearLogProbs(D, V, return_entropy=True, top_k=2, **HEAD),
        (X, TARGET),
        lambda m: ops.linear_logprobs(X, m.linear.weight, TARGET, return_entropy=True, top_k=2, **HEAD),
    ),
    "entropy": (mr.nn.LinearEntropy(D, V), (X,), lambda m: ops.linear_entropy(X, m.linear.weight)),
    "sample": (
        mr.nn.LinearSample(D, V, bias=True, temperature=2.0),
        (X, 7),
        lambda m: ops.linear_sample(X, m.linear.weight, 7, bias=m.linear.bias, temperature=2.0),
    ),
    "topk": (mr.nn.LinearTopK(D, V, 3), (X,), lambda m: ops.linear_topk(X, m.linear.weight, 3)),
    "argmax": (
        mr.nn.LinearArgmax(D, V, bias=True), (X,), lambda m: ops.linear_argmax(X, m.linear.weight, bias=m.linear.bias)
    ),
    "kl": (
        mr.nn.LinearKLLoss(D, V, E, direction="reverse", bias=True, teacher_bias=True),
        (X, Y, WEIGHTS),
        lambda m: ops.linear_kl(
            X, m.linear.weight, Y, m.teacher.weight, bias=m.linear.bias, teacher_bias=m.teacher.bias,
            direction="reverse", token_weights=WEIGHTS,
        ),
    ),
    "jsd": (
        mr.nn.LinearJSDLoss(D, V, E, beta=0.3, train_teacher=True),
        (X, Y),
        lambda m: ops.linear_jsd(X, m.linear.weight, Y, m.teacher.weight, beta=0.3),
    ),
    "soft": (
        mr.nn.LinearSoftCrossEntropyLoss(D, V, E, reduction="none", teacher_softcap=2.0),
        (X, Y),
        lambda m: ops.linear_cross_entropy_soft(
            X, m.linear.weight, Y, m.teacher.weight, reduction="none", teacher_softcap=2.0
        ),
    ),
}  # fmt: skip
CASE = pytest.mark.parametrize(("module", "args", "function"), [pytest.param(*c, id=n) for n, c in CASES.items()])


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@CASE
def test_a_module_is_its_function(module, args, function):
    assert_close(module(*args), function(module), equal_nan=True)


@CASE
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), saved], ids=range(3))
def test_copies_pickles_and_files_are_the_same_module_with_weights_of_their_own(module, args, function, again):
    other = again(module)
    assert_close(other(*args), module(*args))
    assert repr(other) == repr(module)
    with torch.no_grad():
        other.linear.weight.zero_()
    assert module.linear.weight.any()


@CASE
def test_gradients_reach_the_weights(module, args, function):
    result = module(*args)
    floats = [r for r in (result if isinstance(result, tuple) else (result,)) if r is not None and r.requires_grad]
    asked = [p for p in module.parameters() if p.requires_grad]
    if not floats:
        return
    sum(f.sum() for f in floats).backward()
    assert all(p.grad is not None and p.grad.any() for p in asked)
    module.zero_grad()


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"weight": CLASS_WEIGHTS, "label_smoothing": 0.1}])
def test_a_state_dict_goes_from_torch_to_here_and_back(options):
    theirs, ours = nn.LinearCrossEntropyLoss(D, V, **options), mr.nn.LinearCrossEntropyLoss(D, V, **options)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_close(ours(X, TARGET), theirs(X, TARGET))
    assert theirs.load_state_dict(ours.state_dict()).missing_keys == []
    known = inspect.signature(mr.nn.LinearCrossEntropyLoss).parameters
    missing = set(inspect.signature(nn.LinearCrossEntropyLoss).parameters) - set(known)
    assert missing == {"out_features", "options"}


def test_a_head_of_a_layer_shares_its_weights():
    layer, teacher = nn.Linear(D, V), nn.Linear(E, V, bias=False)
    loss = mr.nn.LinearCrossEntropyLoss.of(layer, reduction="sum")
    assert loss.linear is layer and loss.reduction == "sum"
    assert_close(loss(X, TARGET), ops.linear_cross_entropy(X, layer.weight, TARGET, bias=layer.bias, reduction="sum"))
    distil = mr.nn.LinearKLLoss.of(layer, teacher, direction="reverse")
    assert distil.linear is layer and distil.teacher is teacher
    expected = ops.linear_kl(X, layer.weight, Y, teacher.weight, bias=layer.bias, direction="reverse")
    assert_close(distil(X, Y), expected)


def test_a_temperature_may_be_learned():
    loss = mr.nn.LinearCrossEntropyLoss(D, V, temperature=nn.Parameter(torch.tensor(0.7)))
    loss(X, TARGET).backward()
    assert "temperature" in loss.state_dict() and loss.temperature.grad != 0


def test_teachers_are_frozen_unless_asked():
    frozen, trained = mr.nn.LinearKLLoss(D, V, E), mr.nn.LinearKLLoss(D, V, E, train_teacher=True)
    assert [p.requires_grad for p in frozen.teacher.parameters()] == [False]
    assert [p.requires_grad for p in trained.teacher.parameters()] == [True]


def test_options_are_attributes_and_mistakes_are_those_of_the_function():
    loss = mr.nn.LinearCrossEntropyLoss(D, V, dtype=torch.float64)
    assert "label_smoothing=0.0" in repr(loss) and loss.linear.weight.dtype == torch.float64
    loss.reduction = "avg"
    with pytest.raises(mr.ArgumentError, match="'avg'"):
        loss(X.double(), TARGET)
    loss.reduction = "none"
    assert loss(X.double(), TARGET).shape == (M,)
    with pytest.raises(mr.DTypeError, match="x is float32, weight is float64"):
        loss(X, TARGET)
    with pytest.raises(mr.ArgumentError, match="Embedding"):
        mr.nn.LinearCrossEntropyLoss.of(torch.nn.Embedding(V, D))
    with pytest.raises(TypeError, match="teacher"):
        mr.nn.LinearJSDLoss(D, V, teacher=torch.nn.Linear(E, V))
    with pytest.raises(mr.LabelError, match="label 11"):
        loss(X.double(), torch.full((M,), V))


def test_every_public_name_is_a_documented_module():
    for name in mr.nn.__all__:
        module = getattr(mr.nn, name)
        assert issubclass(module, nn.Module) and module.__doc__, name
