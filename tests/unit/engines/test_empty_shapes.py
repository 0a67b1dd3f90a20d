"""No batch, no rows, no columns, no features: identities, zero gradients and empty results, not errors."""

import inspect

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support import empty_shape_cases
from tests.support.empty_shape_cases import EMPTY, LAYERS, REDUCTIONS, check, check_layer


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction(name, engine):
    for kind in EMPTY:
        check(name, engine, kind)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_of_the_reference(name):
    for kind in ("no batch", "no columns", "no features"):
        check(name, "reference", kind)


def test_every_public_reduction_has_a_case():
    """But those that refuse fewer than k columns."""
    functions = {n: getattr(mr, n) for n in mr.__all__ if inspect.isfunction(getattr(mr, n))}
    public = [n for n, f in functions.items() if "over" in inspect.signature(f).parameters]
    written = inspect.getsource(empty_shape_cases)
    assert "mean" in public and [n for n in public if f"mr.{n}(" not in written] == ["topk", "topk_mean"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("engine", ["eager", "auto"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer(name, engine):
    for kind in EMPTY:
        check_layer(name, engine, kind)


def test_the_largest_of_no_features_is_an_error():
    @mr.op
    def largest(x: Row["f"], y: Col):
        return mr.sum(x.amax() * y)

    with pytest.raises(mr.ShapeError, match='largest feature was asked of a vector over "f", which has none'):
        largest(torch.ones(2, 0), torch.ones(3))
