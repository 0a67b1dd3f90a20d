"""Vectors of more than 256 features, no multiple of 8 of them: kernels and GEMMs see padded copies."""

import pytest
import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.engines import panel
from monoidreduce.engines import triton as engine
from monoidreduce.engines.common import matmul
from monoidreduce.engines.triton.kernels import prepared_fold
from monoidreduce.program import lower

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROWS, COLS, WIDTH = 9, 70, 260 + 3


def head(dtype):
    make = torch.Generator().manual_seed(2)
    x, w = (torch.randn(n, WIDTH, generator=make).div(8).to(dtype).requires_grad_() for n in (ROWS, COLS))
    return x, w, torch.randint(0, COLS, (ROWS,), generator=make)


def test_loss_and_gradients(monkeypatch):
    seen, real = [], matmul.multiply_into_panel
    monkeypatch.setattr(matmul, "multiply_into_panel", lambda *given: seen.append(given) or real(*given))
    x, w, target = head(torch.bfloat16)
    with mr.use(engine="panel"):
        monkeypatch.setattr("monoidreduce.engines.panel.TorchStep.aligns_features", True)
        loss = ops.linear_cross_entropy(x, w, target)
        found = torch.autograd.grad(loss, (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    wanted = F.cross_entropy(wide[0] @ wide[1].mT, target)
    torch.testing.assert_close(loss.double(), wanted, rtol=3e-3, atol=3e-3)
    for t, g in zip(found, torch.autograd.grad(wanted, wide), strict=True):
        torch.testing.assert_close(t.double(), g, rtol=0, atol=0.02 * g.abs().max().item())
    assert seen and all(t.shape[-1] == 264 for given in seen for t in given[1:])


@pytest.mark.parametrize("limit, padded", [(2**20, True), (2**17, False)])
def test_copies_are_part_of_the_budget(monkeypatch, limit, padded):
    """Copies and padded gradients of ``2 * (ROWS + COLS) * 264`` 16-bit numbers: 83 kB."""
    seen, real = [], panel.pad_features
    monkeypatch.setattr(panel, "pad_features", lambda *given: seen.append(real(*given)) or seen[-1])
    monkeypatch.setattr("monoidreduce.engines.panel.TorchStep.aligns_features", True)
    x, w, target = head(torch.bfloat16)
    with mr.use(engine="panel"), mr.budget(limit):
        torch.autograd.grad(ops.linear_cross_entropy(x, w, target), (x, w))
    assert seen and all((sizes.letters["d"] == 264) == padded for _, sizes, _ in seen)
    assert all(0 < left < limit for _, _, left in seen) or not padded


def test_a_forward_in_one_kernel_reads_padded_copies(monkeypatch):
    monkeypatch.setattr(prepared_fold, "_PREPARED", {})
    x, w, target = (t.detach() for t in head(torch.float16))
    with mr.use(engine="triton"):
        found = ops.linear_cross_entropy(x, w, target)
    launches = [one for ready in engine.prepared_folds().values() for one in ready.launches if one.spec.k_loop]
    assert launches and all(one.spec.descriptor_dims for one in launches)
    wanted = F.cross_entropy(x.double() @ w.double().mT, target)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-3, atol=1e-3)


@mr.op
def norms_beside(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.sum(torch.relu(x @ torch.exp(y)))


@mr.op
def plain(x: mr.Row["d"], y: mr.Col["d"]):
    return mr.sum(torch.relu(x @ (2.0 * y)) * y)


@pytest.mark.parametrize("op, letters", [(plain, ("d",)), (norms_beside, ())])
def test_features_are_padded_where_zeros_stay_zeros(op, letters):
    program = op.program(torch.zeros(2, WIDTH), torch.zeros(3, WIDTH))
    lowered = program if isinstance(program, lower.Lowered) else program.lowered
    assert panel._letters(lowered) == letters
