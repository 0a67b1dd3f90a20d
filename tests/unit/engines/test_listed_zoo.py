"""Every layer of the zoo over each of the four domains, against the dense call with the same mask."""

import pytest
import torch

import monoidreduce as mr
from tests.support.comparison import assert_equal, assert_error_rule, cast, is_float, flatten, run, Result
from tests.support.layers import DIFFERENTIABLE, ZOO
from tests.support.masked_twin import Case, make_domain

KINDS = ("edges", "blocks", "jagged", "pages")


def cases():
    for kind in KINDS:
        for layer in ZOO:
            if kind == "pages" and any(p.axis == "pairs" for p in layer.parameters):
                continue  # columns in pages have no numbers per pair
            yield pytest.param(Case(layer, *make_domain(kind)), id=f"{layer.name}-{kind}")


def where_defined(got: Result, truth: Result) -> Result:
    """The gradients with the truth's NaN in place: a masked pair of a row without pairs is inf × 0 in the dense call,
    and is never computed here."""
    return Result(got.values, {n: torch.where(truth.grads[n].isnan(), truth.grads[n], g) for n, g in got.grads.items()})


@pytest.mark.parametrize("case", list(cases()))
def test_zoo(case):
    args = case.args(1)
    truth = run(case.dense, args)
    for engine in ("eager", "reference"):
        with mr.use(engine=engine):
            got = run(case.listed, args)
            assert_equal(where_defined(got, truth), truth)
            if not all(g.isfinite().all() for g in got.grads.values()):
                print("NOTFINITE", case.layer.name, case.domain.kind, engine, [n for n,g in got.grads.items() if not g.isfinite().all()])
