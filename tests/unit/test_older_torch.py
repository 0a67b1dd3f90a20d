"""What the package may not use, since the oldest torch that it supports cannot compile it."""

import ast
from pathlib import Path

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
