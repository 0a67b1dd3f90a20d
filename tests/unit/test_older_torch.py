"""What the package may not use, since the oldest torch that it supports cannot compile it; and that layers compile."""

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import monoidreduce
from monoidreduce import ops
from tests.support.layer_streams import LAYERS, flatten

PACKAGE = Path(monoidreduce.__file__).parent


def test_isinstance_takes_tuples():
    """Before torch 2.9, ``torch.compile`` does not follow ``isinstance(x, A | B)``."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        if isinstance(node.args[-1], ast.BinOp)
    ]
    assert not found


def test_layers_join_dictionaries_without_operators():
    """``torch.compile`` of torch 2.6 follows neither ``|`` nor ``|=`` of dictionaries; layers are compiled by it."""
    whole = (ast.Dict, ast.DictComp, ast.Call)
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for folder in ("ops", "nn")
        for path in (PACKAGE / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(getattr(node, "op", None), ast.BitOr)
        and (isinstance(node, ast.AugAssign) or isinstance(node.left, whole) or isinstance(node.right, whole))
    ]
    assert not found


@pytest.mark.parametrize("kind", [monoidreduce.blocks, monoidreduce.pages, monoidreduce.jagged, monoidreduce.edges])
def test_constructors_of_lists_set_every_field(kind):
    """In torch 2.6, ``torch.compile`` gives the first argument to a field that the constructor does not take."""
    assert all(field.init for field in dataclasses.fields(kind))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_one_graph(name):
    """To be run on the oldest torch too, all of them (docs/contributing.md)."""
    layer, args = getattr(ops, name.split()[0]), LAYERS[name]
    tensors = {n: v for n, v in args.items() if isinstance(v, torch.Tensor)}
    others = {n: v for n, v in args.items() if n not in tensors}
    torch._dynamo.reset()
    compiled = torch.compile(lambda **given: layer(**given, **others), fullgraph=True, backend="aot_eager")
    for got, expected in zip(flatten(compiled(**tensors)), flatten(layer(**args)), strict=True):
        torch.testing.assert_close(got, expected)
