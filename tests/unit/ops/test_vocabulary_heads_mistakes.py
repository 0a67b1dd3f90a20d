"""Every wrong argument of every vocabulary head: one typed error that names it, before any work.

A mistake is a change to the arguments of a good call. Most are any head's; the rest belong to an option, and are tried
on every function that has it.
"""

import inspect
import math

import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.errors import ArgumentError, DeviceError, DTypeError, LabelError, ShapeError, TopKError

M, D, V = 3, 4, 5
GOOD = {
    "x": torch.zeros(M, D),
    "weight": torch.zeros(V, D),
    "target": torch.zeros(M, dtype=torch.int64),
    "teacher_x": torch.zeros(M, 2),
    "teacher_weight": torch.zeros(V, 2),
    "seed": 1,
    "k": 2,
}
NAMES = [name for name in ops.__all__ if name.startswith("linear_")]

# what is changed (one argument, or several at once), the error, and a word of its message
MISTAKES = [
    ({"x": None}, ArgumentError, "x was given None"),
    ({"x": [1.0]}, ArgumentError, r"x was given \[1.0\] \(list\)"),
    ({"x": torch.tensor(1.0)}, ShapeError, r"x has shape \(\)"),
    ({"x": torch.zeros(M, D + 1)}, ShapeError, r"x \(3, 5\) and weight \(5, 4\) differ"),
    ({"x": torch.zeros(M, D, dtype=torch.float64)}, DTypeError, "x is float64, weight is float32"),
    ({"x": torch.zeros(M, D, dtype=torch.int64)}, DTypeError, "x is int64"),
    ({"x": torch.zeros(M, D, dtype=torch.complex64)}, DTypeError, "x is complex64"),
    ({"weight": None}, ArgumentError, "weight was given None"),
    ({"weight": torch.zeros(D)}, ShapeError, r"weight has shape \(4,\)"),
    ({"weight": torch.zeros(1, V, D)}, ShapeError, r"weight has shape \(1, 5, 4\)"),
    ({"weight": torch.zeros(D, V)}, ShapeError, r"weight \(4, 5\) differ"),
    ({"weight": torch.zeros(V, D, dtype=torch.bfloat16)}, DTypeError, "weight is bfloat16"),
    ({"weight": torch.zeros(V, D, device="meta")}, DeviceError, "x on cpu, weight on meta"),
    ({"bias": 0.5}, ArgumentError, "bias was given 0.5"),
    ({"bias": torch.zeros(D)}, ShapeError, "weight has 5 classes, but bias has 4"),
    ({"bias": torch.zeros(V, 1)}, ShapeError, r"bias has shape \(5, 1\)"),
    ({"bias": torch.zeros(V, dtype=torch.float64)}, DTypeError, "bias is float64"),
    ({"bias": torch.zeros(V, device="meta")}, DeviceError, "bias on meta"),
    ({"softcap": 0.0}, ArgumentError, "softcap was given 0.0"),
    ({"softcap": math.inf}, ArgumentError, "softcap was given inf"),
    ({"softcap": "30"}, ArgumentError, "softcap was given '30'"),
    ({"temperature": -1.0}, ArgumentError, "temperature was given -1.0.*above 0"),
    ({"temperature": math.nan}, ArgumentError, "temperature was given nan"),
    ({"temperature": None}, ArgumentError, "temperature was given None"),
    ({"temperature": torch.ones(M)}, ArgumentError, r"temperature was given a tensor \(3,\)"),
    ({"target": None}, ArgumentError, "target was given None"),
    ({"target": torch.zeros(M)}, DTypeError, r"target is float32\[3\].*integers \[3\].*probabilities \[3, 5\]"),
    ({"target": torch.zeros(M, dtype=torch.bool)}, DTypeError, "target is bool"),
    ({"target": torch.zeros(M, 1, dtype=torch.int64)}, ShapeError, r"target has shape \(3, 1\).*\(3,\)"),
    ({"target": torch.zeros(M, dtype=torch.int64, device="meta")}, DeviceError, "target on meta"),
    ({"target": torch.tensor([0, 1, V])}, LabelError, "label 5 at position 2.*from 0 to 4"),
    ({"target": torch.tensor([0, -1, 1])}, LabelError, "label -1 at position 1.*ignore_index"),
    ({"ignore_index": 1.5}, ArgumentError, "ignore_index was given 1.5"),
    ({"reduction": "avg"}, ArgumentError, "'avg'.*'mean', 'sum', 'none'"),
    ({"reduction": None}, ArgumentError, "reduction was given None"),
    ({"token_weights": 1.0}, ArgumentError, "token_weights was given 1.0"),
    ({"token_weights": torch.ones(M + 1)}, ShapeError, r"token_weights has shape \(4,\)"),
    ({"token_weights": torch.ones(M, dtype=torch.complex64)}, DTypeError, "token_weights is complex64"),
    ({"token_weights": torch.ones(M, device="meta")}, DeviceError, "token_weights on meta"),
    ({"class_weights": torch.ones(M)}, ShapeError, "weight has 5 classes, but class_weights has 3"),
    ({"class_weights": torch.ones(V, dtype=torch.float64)}, DTypeError, "class_weights is float64"),
    ({"label_smoothing": 1.5}, ArgumentError, "label_smoothing was given 1.5.*from 0 to 1"),
    ({"label_smoothing": torch.tensor(0.1)}, ArgumentError, "label_smoothing was given a tensor"),
    ({"z_loss": -1e-4}, ArgumentError, "z_loss was given -0.0001.*0 or more"),
    ({"shift": -1}, ArgumentError, "shift was given -1.*0 or more"),
    ({"shift": 1, "x": torch.zeros(D), "target": torch.tensor(0)}, ShapeError, "to be shifted"),
    ({"label_smoothing": 0.0, "target": torch.zeros(M, V, dtype=torch.float64)}, DTypeError, "target is float64"),
    ({"label_smoothing": 0.0, "target": torch.zeros(M, V), "ignore_index": 0}, ArgumentError, "probabilities.*weight"),
    ({"top_k": -1}, ArgumentError, "top_k was given -1"),
    ({"top_k": V + 1}, TopKError, "k = 6 of only 5 classes. Ask for at most 5, or give more classes$"),
    ({"seed": 0.5}, ArgumentError, "seed was given 0.5"),
    ({"seed": 2**64}, ArgumentError, "64 bits"),
    ({"k": 0}, ArgumentError, "k was given 0.*1 or more"),
    ({"k": 2.0}, ArgumentError, "k was given 2.0"),
    ({"k": V + 1}, TopKError, "k = 6 of only 5 classes. Ask for at most 5, or give more classes$"),
    ({"direction": "backward"}, ArgumentError, "'backward'.*'forward', 'reverse'"),
    ({"beta": 1.5}, ArgumentError, "beta was given 1.5.*from 0 to 1"),
    ({"teacher_x": torch.zeros(M, 3)}, ShapeError, r"teacher_x \(3, 3\) and teacher_weight \(5, 2\) differ"),
    ({"teacher_x": torch.zeros(M + 1, 2)}, ShapeError, r"the student has x \(3, 4\).*the teacher x \(4, 2\)"),
    ({"teacher_weight": torch.zeros(V + 1, 2)}, ShapeError, r"teacher x \(3, 2\) and weight \(6, 2\)"),
    ({"teacher_weight": None}, ArgumentError, "teacher_weight was given None"),
    ({"teacher_bias": torch.zeros(2)}, ShapeError, "teacher_bias has 2"),
    ({"teacher_softcap": 0}, ArgumentError, "teacher_softcap was given 0"),
    ({k: GOOD[k].double() for k in ("teacher_x", "teacher_weight")}, DTypeError, "teacher_x is float64"),
]  # fmt: skip


def base(name: str) -> dict:
    asked = inspect.signature(getattr(ops, name)).parameters
    return {k: v for k, v in GOOD.items() if k in asked}


# what one function allows, or says otherwise
OWN = {
    "linear_logprobs": {
        r"temperature was given a tensor \(3,\)": (
            {"temperature": torch.ones(M + 1)},
            ShapeError,
            r"temperature.*\(4,\)",
        ),
        "target was given None": ({"target": None}, ArgumentError, "neither target nor ids were given"),
    }
}
TRIED = {
    name: [
        OWN.get(name, {}).get(m, (c, e, m))
        for c, e, m in MISTAKES
        if set(c) <= set(inspect.signature(getattr(ops, name)).parameters)
    ]
    for name in NAMES
}


@pytest.mark.parametrize("name", NAMES)
def test_the_good_call_is_good(name):
    getattr(ops, name)(**base(name))
    assert len(TRIED[name]) >= 15


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [pytest.param(n, *case, id=f"{n}-{k}") for n, cases in TRIED.items() for k, case in enumerate(cases)],
)
def test_mistakes_are_named_before_any_work(name, change, error, message):
    with mr.tally() as seen, pytest.raises(error, match=f"(?s){message}"):
        getattr(ops, name)(**{**base(name), **change})
    assert seen.tiles == 0
