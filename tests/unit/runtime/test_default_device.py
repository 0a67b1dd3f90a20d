"""Calls under another default device than that of their tensors, as scripts set it: torch.set_default_device("cuda").

The device here is "meta": what is created there by mistake has no memory, where on a GPU it would be the wrong one.
"""

import ast
import re

import pytest
import torch
from torch.utils._device import _device_constructors

import monoidreduce as mr
from monoidreduce import Col, Row, linalg, ops
from tests.support import ROOT

HOST = {"device": "cpu"}
X, Y = (torch.rand(n, 3, dtype=torch.float64) for n in (30, 9000))
POINTS = torch.rand(20_000, 3)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


class Worst(mr.Monoid):
    z: mr.Scalar = -float("inf")

    def combine(a, b):
        return Worst(z=torch.maximum(a.z, b.z))


CALLS = {
    "own op": lambda x: attention(x, Y, Y),
    "edges": lambda x: attention(x, x, x, cols=mr.edges(torch.arange(31, **HOST), torch.arange(30, **HOST))),
    "blocks": lambda x: attention(x, x, x, cols=mr.blocks(torch.tensor([[0, 1], [2, 0]], **HOST), rows=15, cols=10)),
    "kernel sum": lambda x: ops.kernel_sum(x, Y, Y),
    "index": lambda x: ops.knn.prepare(POINTS)(x.float(), 5).values,
    "neighbours": lambda x: ops.knn(x.float(), POINTS, 5).values,
    "dropout": lambda x: ops.attention(x[None], x[None], x[None], dropout_p=0.3),
    "cg": lambda x: linalg.cg(lambda v: ops.kernel_sum(x, x, v), x[:, 0], ridge=1.0),
    "logdet": lambda x: linalg.logdet(lambda v: ops.kernel_sum(x, x, v), x, ridge=1.0).value,
    "sinkhorn": lambda x: ops.sinkhorn(x, x.detach().flip(0), eps=0.1, iterations=3).value,
}


@pytest.mark.parametrize("name", CALLS)
def test_results_stay_with_their_inputs(name):
    def run():
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        result = CALLS[name](x)
        result.sum().backward()
        return result.detach(), x.grad

    wanted = run()
    torch.set_default_device("meta")
    try:
        found = run()
        report = mr.laws.check(Worst, cases=8) if name == "own op" else None
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, wanted)
    assert report is None or "obeys" in str(report)


def test_the_package_says_where_every_tensor_is():
    names = {f.__name__ for f in _device_constructors()} - {"as_tensor", "nested_tensor"}
    silent = []
    for path in (ROOT / "monoidreduce").rglob("*.py"):
        folder = path.relative_to(ROOT / "monoidreduce").parts[0]
        makes = re.search(rf"torch\.({'|'.join(names)})\(", path.read_text())
        if not makes or folder in ("cli", "algebra"):  # scripts of their own; laws are tried under torch.device("cpu")
            continue
        for n in ast.walk(ast.parse(path.read_text())):
            if not isinstance(n, ast.Call) or not isinstance(n.func, ast.Attribute) or n.func.attr not in names:
                continue
            if ast.unparse(n.func.value) == "torch" and not {"device", None} & {k.arg for k in n.keywords}:
                silent.append(f"{path.relative_to(ROOT)}:{n.lineno}: {ast.unparse(n)}")
    # asks for the default device itself
    assert [s for s in silent if "gradient_program.py" not in s] == []
