"""Vectors of any number of features: in slices, by the compiler's schedule and by the hand-scheduled kernels."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines import triton as engine
from monoidreduce.engines.triton import KernelPlan, Rendering, use_plan
from monoidreduce.engines.triton.codegen.kernel_spec import slice_width
from monoidreduce.engines.triton.kernels import prepared_fold
from monoidreduce.engines.triton.schedules import attention
from monoidreduce.engines.triton.schedules.attention import AttentionSchedule
from tests.support import gluon_simulator, internals


def test_slices_are_powers_of_two_with_little_padding():
    for width in range(9, 257):
        slices = slice_width(width)
        ends = [first + size for first, size in slices]
        assert [first for first, _ in slices] == [0, *ends[:-1]] and ends[-1] >= width
        assert all(size >= 16 and size & (size - 1) == 0 for _, size in slices)
        assert ends[-1] - width < 16 or 8 * (width + 15) >= 7 * ends[-1], width


def _gradients(q, k, v, weights, causal, engine=None, dtype=None):
    """An attention's values and gradients, on copies of the inputs."""
    q, k, v = (t.detach().to(dtype or t.dtype).requires_grad_() for t in (q, k, v))
    with mr.use(engine=engine or "triton"):
        out = ops.attention(q, k, v, causal=causal)
        out.backward(weights.to(out.dtype))
    return [t.double() for t in (out.detach(), q.grad, k.grad, v.grad)]


def _plain(q, k, v, weights, causal):
    """The same in plain torch."""
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    out = (s.masked_fill(~torch.ones(s.shape[-2:]).tril().bool(), -torch.inf) if causal else s).softmax(-1) @ v
    out.backward(weights)
    return out.detach(), q.grad, k.grad, v.grad


SCHEDULES = [s for s in attention.SCHEDULES if s.runs_by_default]
KEPT = max(s.kept for s in SCHEDULES)  # kept indices: fewer than these are left to the compiler's schedule


def _check(width, values, dtype, causal, rising=False, strided=False, launched=None):
    """Values and gradients have at most twice the error of plain torch in the same type. ``strided``: of vectors whose
    features are not contiguous. ``launched``: asserts what ran, before numbers are compared."""
    gen = torch.Generator().manual_seed(width)
    rows, cols = KEPT + (22 if causal else 2), KEPT + 22
    made = lambda n, w: torch.randn(1, n, w, generator=gen).to(dtype)
    q, k, v, weights = made(rows, width), made(cols, width), made(cols, values), made(rows, values)
    if strided:
        q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    if rising:  # the maximum that is guessed from the first tile proves too low
        q[..., -1], k[..., -1] = 12, torch.linspace(0, 400, cols).to(dtype)
    got = _gradients(q, k, v, weights, causal)
    if launched:
        launched()
    exact = _gradients(q, k, v, weights, causal, "reference", torch.float64)
    for ours, theirs, want in zip(got, _plain(q, k, v, weights, causal), exact, strict=True):
        error, other = ((x.double() - want).norm() for x in (ours, theirs))
        assert error <= 2 * other, (width, values, causal, float(error), float(other))


@pytest.mark.parametrize("width, said", [(40, True), (56, True), (48, False), (64, False)])
def test_strides_of_eight_are_said(width, said, monkeypatch):
    """Heads split from one projection: strides are multiples of the width, and Triton looks for multiples of 16."""
    monkeypatch.setattr(prepared_fold, "_PREPARED", {})
    gen = torch.Generator().manual_seed(width)
    x = torch.randn(1, 150, 3 * 2 * width, generator=gen).half()
    q, k, v = (t.unflatten(-1, (2, width)).transpose(1, 2) for t in x.chunk(3, -1))
    weights = torch.randn(1, 2, 150, width, generator=gen).half()
    got, exact = _gradients(q, k, v, weights, True), _gradients(q, k, v, weights, True, "reference", torch.float64)
    plain = _plain(*(t.detach().clone() for t in (q, k, v)), weights, True)
    for ours, theirs, want in zip(got, plain, exact, strict=True):
        assert (ours - want).norm() <= 2 * (theirs.double() - want).norm()
    specs = [one.spec for ready in engine.prepared_folds().values() for one in ready.launches]
    assert specs and all(any(spec.strides_of_eight) == said for spec in specs)


WIDTHS = [(72, 72), (96, 96), (80, 112), (192, 128), (256, 256)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("width", "values"), WIDTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_hand_scheduled(width, values, causal, monkeypatch, tmp_path):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path))
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=0, saved_row_gradients=0, float32_split=0)

    def launched():  # values; row gradient; both column gradients
        assert [call.kernel.hand_scheduled for call in seen] == [True] * 3, "the compiler's schedule ran instead"

    _check(width, values, torch.bfloat16, causal, rising=causal and width == values, launched=launched)
    sizes = {tuple(box.block_shape[-2:]) for call in seen for box in call.arguments if hasattr(box, "block_shape")}
    widths = {size for w in (width, values) for _, size in slice_width(w)}
    assert {size for _, size in sizes} == widths


@pytest.mark.parametrize(("width", "values", "boxes"), [(72, 24, 0), (96, 160, 1)])
def test_by_the_compilers_schedule(width, values, boxes):
    plan = KernelPlan(64, 32, 4, 2, splits=1, rendering=Rendering(boxes))
    with use_plan({"cols": plan, "rows": plan}):
        _check(width, values, torch.float16, causal=True, strided=not boxes)


def test_schedules_of_every_width_fit():
    assert [s.widest for s in SCHEDULES] == sorted(s.widest for s in SCHEDULES) and SCHEDULES[-1].widest == 256
    with pytest.raises(ValueError, match="as many as there are groups"):
        AttentionSchedule(widest=64, groups=3, folded=64, ring=2, registers=(160, 160, 24))


@pytest.mark.parametrize(("width", "taken"), [(64, False), (96, True), (128, True)])
def test_fewer_pairs_pay_for_descriptors_where_vectors_are_wide(width, taken, monkeypatch):
    """Short sequences of many heads: an eighth of the pairs that narrow vectors need."""
    seen = gluon_simulator.simulate(monkeypatch)
    internals.set_pair_thresholds(monkeypatch, many=0, very_many=8 * KEPT**2, saved_row_gradients=0, float32_split=0)
    q = torch.zeros(1, KEPT, width, dtype=torch.bfloat16)
    with mr.use(engine="triton"), torch.no_grad():
        ops.attention(q, q + 1, q + 2)
    assert bool(seen) is taken
