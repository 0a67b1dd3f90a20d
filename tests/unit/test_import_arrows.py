"""Which room may import which: the arrows of the design, read from the source with ast, nothing imported.

A room is a file or folder directly under the package. A new one is a new row in ROOMS.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "monoidreduce"
MOST_LINES = 600

# room: the rooms it may import, besides itself and the version. From the bottom of the house to the top.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "algebra": {"errors"},
    "program": {"errors", "algebra"},
    "plan": {"errors", "algebra", "program"},
    "engine": {"errors", "algebra", "program", "plan"},
    "elementwise": {"errors", "engine"},  # the definition, pair by pair
    "blockwise": {"errors", "algebra", "elementwise", "engine"},
    "sources": {"errors"},
    "stream": {"errors", "algebra", "program", "plan", "engine", "sources"},
    "tuning": {"errors", "plan", "engine", "sources"},
    "explain": {"errors", "program", "plan", "engine"},
    "op": {
        "errors",
        "algebra",
        "program",
        "plan",
        "engine",
        "stream",
        "tuning",
        "explain",
    },  # the decorator: ties program, plan and engine together
    "ops": {"errors", "algebra", "program", "plan", "engine", "op"},
    "nn": {"errors", "ops"},  # modules: no mathematics
    "integrations": {"errors", "nn", "ops"},  # doors to other libraries
}
EVERYTHING = {"__init__", "__main__", "cli"}  # the doors of the house: they may import any room, and the package itself
ENGINES = {"reference", "eager", "triton", "distributed"}  # <name>.py, <name>_*.py or <name>/, perhaps in a room
IMPORTS_NOTHING = {"errors", "_version"}  # not even the standard library
OPTIONAL = {
    "rich",
    "matplotlib",
    "triton",
    "safetensors",
    "pyarrow",
}  # dependencies that may be imported inside a function


@dataclass(frozen=True)
class Import:
    """One imported module, by its full name, and where it stands."""

    module: str
    line: int
    in_function: bool


def problems(package: Path) -> list[str]:
    """Every broken rule in the package, one line each."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package.parent)
        source = path.read_text()
        lines = len(source.splitlines())
        if lines > MOST_LINES:
            found.append(f"{place}: {lines} lines, more than {MOST_LINES}: split it")
        here = path.relative_to(package).with_suffix("").parts
        if here[0] not in ROOMS and here[0] not in EVERYTHING:
            found.append(f"{place}: {here[0]} is no room of the house: add it to ROOMS")
            continue
        for imported in imports(ast.parse(source), path, package):
            found += [f"{place}:{imported.line}: {problem}" for problem in broken(here, imported, package.name)]
    return found


def broken(here: tuple[str, ...], imported: Import, package: str) -> Iterator[str]:
    """What is wrong with one import in the module with the path ``here`` (below the package)."""
    room = here[0]
    top, *there = imported.module.split(".")
    if imported.in_function and top not in OPTIONAL:
        yield f"{imported.module} is imported inside a function: move it to the top"
    if room in IMPORTS_NOTHING:
        yield f"{room} imports nothing, not even {imported.module}"
    if top != package or room in EVERYTHING:
        return
    if not there:
        yield f"{room} imports the package itself: import the room"
        return
    if there[0] not in ROOMS[room] | {room, "_version"}:
        yield f"{room} may not import {there[0]}"
    target = engine_of(there)
    if target and room == "ops":
        yield f"ops names the engine {target}: engines are chosen by the plan"
    if target and engine_of(here) not in (None, target):
        yield f"the engine {engine_of(here)} imports the engine {target}: engines do not know each other"


def engine_of(parts: tuple[str, ...] | list[str]) -> str | None:
    """Which engine a module belongs to: ("engine", "triton", "emit") is triton's, ("engine", "ranks", "distributed") is
    distributed; ("engine", "registry") is no one's."""
    names = [part.split("_")[0] for part in parts[1:3]] if parts[0] == "engine" else []
    return next((name for name in names if name in ENGINES), None)


def imports(tree: ast.Module, path: Path, package: Path) -> Iterator[Import]:
    """All imports of a module, relative ones made absolute, ``from room import file`` taken as that file."""
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, path, package)
            names = sorted({submodule(base, alias.name, package) for alias in node.names})
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in inside)


def absolute(node: ast.ImportFrom, path: Path, package: Path) -> str:
    if not node.level:
        return node.module or ""
    folder = path.relative_to(package.parent).parts[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def submodule(base: str, name: str, package: Path) -> str:
    inner = package.parent.joinpath(*base.split("."), name)
    return f"{base}.{name}" if inner.is_dir() or inner.with_suffix(".py").is_file() else base


def test_the_house_keeps_its_rules():
    assert PACKAGE.is_dir()
    found = problems(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("algebra/sum.py", "from monoidreduce.program import expr", "algebra/sum.py:1: algebra may not import program"),
        ("algebra/sum.py", "import torch\nimport monoidreduce.ops.x", "algebra/sum.py:2: algebra may not import ops"),
        ("program/trace.py", "from ..plan import tiles", "program may not import plan"),
        ("program/deep/trace.py", "from ...plan.tiles import Tile", "program may not import plan"),
        ("plan/cost.py", "if True:\n    from monoidreduce.engines import eager", ":2: plan may not import engine"),
        ("engine/run.py", "from monoidreduce import ops", "engine may not import ops"),
        ("op.py", "from monoidreduce.ops import attention", "op may not import ops"),
        ("blockwise.py", "from monoidreduce.plan import tiles", "blockwise may not import plan"),
        ("ops/attention.py", "import monoidreduce as mr", "ops imports the package itself"),
        ("ops/attention.py", "from monoidreduce.engines import eager", "ops names the engine eager"),
        ("ops/attention.py", "from monoidreduce.engines.triton.emit import text", "ops names the engine triton"),
        ("engine/eager.py", "from . import reference", "the engine eager imports the engine reference"),
        ("engine/triton/emit.py", "from ..eager import run", "the engine triton imports the engine eager"),
        ("engine/triton_emit.py", "from .reference import run", "the engine triton imports the engine reference"),
        ("engine/triton/emit.py", "from ..ranks.distributed import x", "triton imports the engine distributed"),
        ("errors.py", "import math", "errors imports nothing, not even math"),
        ("plan/cost.py", "def f():\n    import math", ":2: math is imported inside a function"),
        ("cli/demo.py", "class A:\n    def f(self):\n        from monoidreduce import op", "inside a function"),
        ("attic.py", "", "attic is no room of the house"),
        ("plan/cost.py", "x = 1\n" * (MOST_LINES + 1), "601 lines, more than 600"),
    ],
)
def test_a_planted_violation_is_found(path, source, problem, tmp_path):
    found = problems(plant(tmp_path, path, source))
    assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nn/modules.py", "from monoidreduce.ops import attention\nfrom monoidreduce.errors import E"),
        ("engine/__init__.py", "from monoidreduce.engines import eager, reference"),
        ("engine/triton/emit.py", "from .launch import go\nfrom monoidreduce.engines.triton import launch"),
        ("engine/eager.py", "from monoidreduce.runtime.registry import register\nfrom monoidreduce.plan import tiles"),
        ("ops/attention.py", "from monoidreduce.engines import choose\nfrom monoidreduce.op import op"),
        ("cli/__init__.py", "import monoidreduce as mr\nfrom monoidreduce._version import __version__"),
        ("cli/demo.py", "def f():\n    from rich.table import Table\n    import matplotlib.pyplot"),
        ("plan/cost.py", "x = 1\n" * MOST_LINES),
    ],
)
def test_what_is_allowed_is_not_reported(path, source, tmp_path):
    assert problems(plant(tmp_path, path, source)) == []


def plant(folder: Path, path: str, source: str) -> Path:
    """A small package with every room, and one file in it as given."""
    package = folder / "monoidreduce"
    for name in (
        "program/expr.py",
        "plan/tiles.py",
        "engine/eager.py",
        "engine/reference.py",
        "engine/triton/launch.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    for name in ("op.py", "ops/attention.py", "engine/registry.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / path).write_text(source)
    return package
