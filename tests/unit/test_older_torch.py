"""What the package may not use, since the oldest torch that it supports cannot compile it."""

import ast
import dataclasses
from pathlib import Path

import pytest

import monoidreduce

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


@pytest.mark.parametrize("kind", [monoidreduce.blocks, monoidreduce.pages, monoidreduce.jagged, monoidreduce.edges])
def test_constructors_of_lists_set_every_field(kind):
    """In torch 2.6, ``torch.compile`` gives the first argument to a field that the constructor does not take."""
    assert all(field.init for field in dataclasses.fields(kind))
