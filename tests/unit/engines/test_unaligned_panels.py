"""Panels whose number of columns is no multiple of 16 bytes: the vendor's GEMMs see an aligned part of them."""

import pytest
import torch

from monoidreduce.engines.common import matmul


@pytest.fixture
def products(monkeypatch):
    """The operands of all products, on a device that wants them aligned."""
    found = []
    monkeypatch.setattr(matmul, "_wants_alignment", lambda device: True)
    for name in ("mm", "addmm"):
        at, real = int(name == "addmm"), getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *given, at=at, real=real, **out: (found.append(given[at : at + 2]), real(*given, **out))
        )
    return found


@pytest.mark.parametrize("add", [False, True])
def test_all_three_products_of_a_panel(products, add):
    rows, cols, width, pitch = 5, 37, 16, 48
    make = torch.Generator().manual_seed(1)
    x, y = (torch.randn(n, width, generator=make).bfloat16() for n in (rows, cols))
    panel = torch.full((rows, pitch), torch.nan, dtype=torch.bfloat16)[:, :cols]
    matmul.multiply_into_panel(panel, x, y)
    torch.testing.assert_close(panel, (x.float() @ y.float().mT).bfloat16(), rtol=1e-2, atol=1e-2)
    for weights, vectors in ((panel, y), (panel.mT, x)):
        out = torch.ones(len(weights), width, dtype=torch.bfloat16)
        matmul.contract_into(out, weights, vectors, add)
        wanted = weights.float() @ vectors.float() + add
        torch.testing.assert_close(out.float(), wanted, rtol=2e-2, atol=2e-1)
    assert len(products) == 6 and not any(cols in t.shape for pair in products for t in pair)


def test_aligned_panels_are_one_product(products):
    x, y = torch.ones(3, 16, dtype=torch.bfloat16), torch.ones(40, 16, dtype=torch.bfloat16)
    panel = torch.empty(3, 48, dtype=torch.bfloat16)[:, :40]
    matmul.multiply_into_panel(panel, x, y)
    matmul.contract_into(torch.empty_like(x), panel, y, False)
    assert len(products) == 2
