"""Kernels that no program generates: each launch names a kernel of the text, and each kernel is launched."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import monoidreduce
from monoidreduce.engines.triton.launch.driver import Kernels

ROOT = Path(monoidreduce.__file__).parent
FILES = [
    p
    for p in sorted((ROOT / "engines" / "triton").rglob("*.py"))
    if re.search(r"^_\w* = Kernels\(", p.read_text(), re.M)
]


def test_all_are_found():
    assert len(FILES) >= 10


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_launches_name_kernels(path):
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    sets = {name: v for name, v in vars(module).items() if isinstance(v, Kernels)}
    kernels = {name: set(re.findall(r"(?m)^def (\w+)\(", v.functions)) for name, v in sets.items()}
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in sets]
    named = [(n.func.id, n.args[0].value) for n in calls if isinstance(n.args[0], ast.Constant)]
    assert calls and all(name in kernels[one] for one, name in named)
    if path.stem == "small_kernels":  # kinds of reduction name theirs
        return
    written = {n.value for n in nodes if isinstance(n, ast.Constant)}
    for one, names in kernels.items():
        called = {n for n in names if re.search(rf"(?<!def )\b{n}\b", sets[one].functions)}
        assert names <= written | called, f"{names - written - called} are never launched"
