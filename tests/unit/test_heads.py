"""The vocabulary heads against plain torch: every pair of options, values and gradients, in float64 and by the rule.

The samples of each function are those of ``tests/heads.py``: all pairs of options, sizes and layouts.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from monoidreduce import ops
from tests.heads import FUNCTIONS, by_name, draw, split
from tests.layers_compare import Result, assert_equal, assert_error_rule, is_float, run
from tests.pairwise import pairwise

F64 = torch.float64


def shown(sample):
    """A sample's id: what differs from the default."""
    return "-".join(f"{name}={value}" for name, value in sample.items())


SAMPLES = [
    pytest.param(name, sample, id=f"{name}-{k}")
    for name, f in FUNCTIONS.items()
    for k, sample in enumerate(f.samples())
]


def evaluate(f, sample, dtype, seed, scale=1.0) -> tuple[Result, Result, Result]:
    """Ours, plain torch's and plain torch's in float64, on the same inputs, with all gradients that torch has."""
    names, args = split(draw(f, sample, dtype, seed, scale))
    exact = [a.double() if is_float(a) else a for a in args]
    asked = [k for k, a in enumerate(args) if is_float(a) and names[k] != "class_weights"]  # of these torch has none
    forms = (f.ours, args), (f.plain, args), (f.plain, exact)
    return tuple(run(by_name(g, names), a, asked=asked) for g, a in forms)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_are_enough_samples(name):
    assert len(FUNCTIONS[name].samples()) >= 25


@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_values_and_gradients_are_those_of_plain_torch(name, sample):
    ours, plain, _ = evaluate(FUNCTIONS[name], sample, F64, seed=1)
    assert ours.values.keys() == plain.values.keys(), shown(sample)
    assert_equal(ours, plain)


def enough(sample):
    """A sample of sizes at which errors are no matter of luck: plain torch is exact on one class, and near it on two."""
    rows = sample["rows"] if len(sample["rows"]) > 1 else (33,)
    return sample | {"rows": rows, "classes": max(sample["classes"], 59), "features": 16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(("name", "sample"), SAMPLES)
def test_errors_stay_within_twice_plain_torch(name, sample, dtype):
    assert_error_rule([evaluate(FUNCTIONS[name], enough(sample), dtype, seed) for seed in (1, 2, 3)])
