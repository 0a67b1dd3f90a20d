"""``linear_cross_entropy(low_rank=...)``: a second product in the logits, as LoRA on a head has it."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops

OPTIONS = {
    "plain": {},
    "softcap": dict(softcap=2.0, bias=True, temperature=1.5),
    "smoothing": dict(label_smoothing=0.2, reduction="sum", z_loss=0.01),
    "rows": dict(reduction="none", shift=1, return_accuracy=True, return_lse=True),
    "probabilities": dict(probabilities=True),
}


def draw(dtype, seed=0, rank=3):
    generator = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.5).to(dtype)
    target = torch.randint(0, 59, (3, 13), generator=generator)
    target[0, :4] = -100
    return dict(x=new(3, 13, 8), weight=new(59, 8), rows=new(3, 13, rank), cols=new(59, rank), bias=new(59)), target


def call(inputs, target, bias=False, probabilities=False, merged=False, **options):
    x, weight, rows, cols, b = inputs.values()
    if probabilities:
        shares = torch.rand(3, 13, 59, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        target = (shares / shares.sum(-1, keepdim=True)).to(x.dtype)
    options["bias"] = b if bias else None
    if merged:
        return ops.linear_cross_entropy(torch.cat([x, rows], -1), torch.cat([weight, cols], -1), target, **options)
    return ops.linear_cross_entropy(x, weight, target, low_rank=(rows, cols), **options)


def gradients(found, inputs):
    loss = found if isinstance(found, torch.Tensor) else found.loss
    used = [v for v in inputs.values() if v.requires_grad]
    return torch.autograd.grad(loss.sum(), used, allow_unused=True)


@pytest.mark.parametrize("engine", ["eager", "reference", "panel"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_as_more_features(name, engine):
    inputs, target = draw(torch.float64)
    inputs = {k: v.requires_grad_(k != "weight") for k, v in inputs.items()}  # a frozen head, as with LoRA
    with mr.use(engine=engine):
        found = call(inputs, target, **OPTIONS[name])
        given = gradients(found, inputs)
    with mr.use(engine="reference"):
        expected = call(inputs, target, merged=True, **OPTIONS[name])
        wanted = gradients(expected, inputs)
    if name == "rows":
        torch.testing.assert_close(found.accuracy, expected.accuracy)
        torch.testing.assert_close(found.lse, expected.lse)
    pairs = zip(given, wanted, strict=True)
    torch.testing.assert_close(getattr(found, "loss", found), getattr(expected, "loss", expected))
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_errors_stay_within_twice_plain_torch(dtype):
    def plain(x, weight, rows, cols, bias):
        s = F.linear(x, weight) + F.linear(rows, cols)
        return F.cross_entropy(s.flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), target.flatten())

    totals = [0.0, 0.0]
    for seed in range(4):
        inputs, target = draw(dtype, seed)
        results = []
        for which in ("ours", "plain", "exact"):
            made = {k: v.clone().double() if which == "exact" else v.clone() for k, v in inputs.items()}
            made = {k: v.requires_grad_() for k, v in made.items()}
            loss = call(made, target) if which == "ours" else plain(**made)
            results.append([loss.detach(), *(g for g in gradients(loss, made) if g is not None)])
        for i in range(2):
            pairs = zip(results[i], results[2], strict=True)
            totals[i] += sum(float((a.double() - b.double()).norm() / b.norm()) for a, b in pairs)
    assert totals[0] <= 2 * totals[1], totals


def test_a_low_rank_term_without_rank_changes_nothing():
    inputs, target = draw(torch.float64, rank=0)
    expected = ops.linear_cross_entropy(inputs["x"], inputs["weight"], target)
    torch.testing.assert_close(call(inputs, target), expected)


def test_each_call_uses_its_own_tensors():
    """Calls alike in shape are recorded and replayed."""
    for seed in range(4):
        inputs, target = draw(torch.float32, seed)
        torch.testing.assert_close(call(inputs, target), call(inputs, target, merged=True))


@pytest.mark.parametrize(
    "low_rank, error, message",
    [
        (torch.zeros(3), mr.ArgumentError, r"low_rank was given float32\[3\].*pair of tensors"),
        ((torch.zeros(3, 13, 2), torch.zeros(58, 2)), mr.ShapeError, r"\(58, 2\) beside x \(3, 13, 8\)"),
        ((torch.zeros(3, 12, 2), torch.zeros(59, 2)), mr.ShapeError, r"low_rank has shapes"),
        ((torch.zeros(3, 13, 2), torch.zeros(59, 3)), mr.ShapeError, r"low_rank has shapes"),
        ((torch.zeros(3, 13, 2).half(), torch.zeros(59, 2)), mr.DTypeError, r"low_rank\[0\] is float16"),
    ],
)
def test_mistakes(low_rank, error, message):
    inputs, target = draw(torch.float32)
    with pytest.raises(error, match=message):
        ops.linear_cross_entropy(inputs["x"], inputs["weight"], target, low_rank=low_rank)
