"""Replay of programs with the kernels for many 16-bit pairs: skipped tiles, and exponent shifts computed beforehand.

What is found from leaves at every launch must follow them: other windows, other documents in the same tensor.
"""

import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row, ops
from monoidreduce.engines.triton.kernels import small_kernels
from monoidreduce.runtime import replay
from tests.interpret.test_program_replay import FORWARD, assert_close, attention, by_torch, drawn, grads, heads
from tests.support import internals

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MADE = [*FORWARD, "side", "fold_over_cols", "shift", "fold_over_rows"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Everything counts as many."""
    internals.set_pair_thresholds(monkeypatch, many=0, saved_row_gradients=0)
    with mr.use(engine="triton"):
        yield


@pytest.fixture
def launched(by_address, monkeypatch):
    """All launches that are made again, shifts too."""
    real = small_kernels._launch_shift

    def seen(out, number, total):
        again = real(out, number, total)
        return None if again is None else lambda *given: by_address.append("shift") or again(*given)

    monkeypatch.setattr(small_kernels, "_launch_shift", seen)
    return by_address


def halves(*shape):
    return drawn(shape, shape, shape, dtype=torch.float16)


def assert_near(y, args, seen=None):
    """Results and gradients are those of torch in float32; ``seen``: which pairs are."""
    raised = [a.detach().float().requires_grad_() for a in args]
    wanted = by_torch(*raised) if seen is None else masked(*raised, seen)
    assert_close([y, *torch.autograd.grad(y, args, torch.cos(wanted[0].detach()).half())], wanted, 0.02)


def masked(q, k, v, seen):
    """As torch does it."""
    y = torch.softmax((q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf), -1) @ v
    return [y, *grads(y, (q, k, v))]


def test_shifts_are_made_by_one_kernel(launched):
    args = halves(2, 9, 16)
    for _ in range(3):
        launched.clear()
        assert_near(attention(*args), args)
    assert launched == MADE


def test_windows_are_followed(launched):
    """Which tiles are visited depends on numbers that a tape is given."""
    args, (i, j) = halves(2, 150, 16), torch.meshgrid(torch.arange(150), torch.arange(150), indexing="ij")
    for width in (20, 100, 3, 20):
        launched.clear()
        assert_near(ops.attention(*args, window=(width, 0)), args, (i >= j) & (i - j <= width))
    assert launched == MADE


def test_documents_are_followed(launched):
    """Another number in the same tensor, and another tensor."""
    args, ids = halves(2, 150, 16), torch.arange(150) // 40
    for change in (None, "in place", "another"):
        if change:
            ids = ids if change == "in place" else torch.arange(150) // 9
            ids[130:] += 1
        for _ in range(2):
            launched.clear()
            assert_near(ops.attention(*args, documents=ids), args, ids[:, None] == ids)
        assert launched == MADE


def test_documents_of_every_batch_element(launched):
    args, ids = halves(2, 3, 90, 16), torch.stack([torch.arange(90) // 40, torch.arange(90) // 7])[:, None]
    for _ in range(2):
        launched.clear()
        assert_near(ops.attention(*args, documents=ids), args, ids[..., :, None] == ids[..., None, :])
    assert launched == MADE


def test_rows_that_see_nothing(launched):
    """Their totals are of nothing: the shifts of their exponents are infinite."""
    args, ids = halves(150, 16), (torch.arange(150) // 40, torch.arange(150) // 40 + 1)
    rows = (ids[0][:, None] == ids[1]).any(-1)
    for _ in range(2):
        launched.clear()
        y = ops.attention(*args, documents=ids)
        found = [y, *grads(y, args)]
        assert not y[~rows].any() and not found[1][~rows].any() and all(t.isfinite().all() for t in found)
        assert y[rows].any() and found[1][rows].any()
    assert launched == MADE


def test_a_loss_that_keeps_its_row_gradients_is_no_tape(by_address):
    @mr.op
    def total(x: Row["d"], y: Col["d"]):
        return mr.logsumexp(x @ y)

    x, y = drawn((7, 32), (9, 32))
    for _ in range(3):
        z = total(x, y)
        assert_close([z, *grads(z, (x, y))], [w := torch.logsumexp(x @ y.mT, -1), *grads(w, (x, y))])
    assert "fold_over_cols" in by_address and type(z.grad_fn).__name__ != "_ReplayedFunctionBackward"


def test_a_tape_is_not_worth_its_first_run_where_pairs_are_too_many(by_address, monkeypatch):
    monkeypatch.setattr(replay, "_PAIRS", 0)
    args = heads()
    y = attention(*args)
    assert_close([y, *grads(y, args)], by_torch(*args), 5e-5)
    assert type(y.grad_fn).__name__ != "_ReplayedFunctionBackward"


def test_shifts_as_torch_makes_them():
    number, total = torch.randn(5, 7), torch.randn(5, 7)
    total[0, :3] = torch.tensor([-torch.inf, torch.inf, torch.nan])
    found = small_kernels.compute_shift(number, total, (5, 7))
    wanted = (number + torch.where(total.isinf(), torch.inf, total)) * math.log2(math.e)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert small_kernels.replay_shift(number, total, (5, 7)) is None, "nothing is launched again by the interpreter"
    assert small_kernels.compute_shift(number[0], total[0], (5, 7)).shape == (5, 7)


@pytest.mark.parametrize("size", [1, 1023, 2500])
def test_shifts_by_a_kernel(by_address, size):
    number, total = torch.randn(size), torch.randn(size)
    total[::5] = -torch.inf
    found = small_kernels.compute_shift(number, total, (size,))
    assert torch.equal(found, (number + total.nan_to_num(neginf=math.inf)).mul_(math.log2(math.e)))
