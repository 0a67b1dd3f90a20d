"""Which package may import which: the arrows of the architecture, read from the source with ast, nothing imported.

A package is a file or folder directly under ``monoidreduce``, under ``engines`` or under ``engines/triton``. A new one
is a new row in PACKAGES.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "monoidreduce"

# package: the packages it may import, besides itself and the version. Lowest first: imports point up this list only.
# The lower floor of ``program``: expressions, symbols and what is known of them. Kinds of reduction are written in
# these; what looks at whole programs (normal form, gradient, lowering, ...) stands above the kinds.
SYMBOLIC = "advice constructors expression intervals philox primitives reverse_mode"
LOWER = ["several", "symbol"]
SYMBOLIC_MODULES = {f"program.{name}" for name in [*SYMBOLIC.split(), *LOWER]}
KINDS = {"errors", "plan.settings", "domains", "arrays", "algebra", *SYMBOLIC_MODULES, "reductions"}
BASE = KINDS | {"program", "plan"}
COMMON = BASE | {"engines.common"}
CODEGEN = COMMON | {"engines.triton.codegen"}
LAUNCH = CODEGEN | {"engines.triton.launch"}
SCHEDULES = LAUNCH | {"engines.triton.schedules"}
KERNELS = SCHEDULES | {"engines.triton.kernels"}
PANEL_KERNELS = KERNELS | {"engines.panel", "engines.triton.panel"}
ENGINES = COMMON | {f"engines.{name}" for name in ("dense", "eager", "listed", "panel", "ranks", "triton")}
PACKAGES: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "plan.settings": {"errors"},
    "domains": {"errors", "plan.settings", "arrays"},  # which pairs exist, as integer tensors
    "arrays": {"errors"},  # numpy and DLPack, at the border of a call
    "algebra": {"errors", "arrays"},
    **{name: {"errors", "algebra", *SYMBOLIC_MODULES} for name in sorted(SYMBOLIC_MODULES)},
    "reductions": KINDS,  # one file a kind; what a kind uses of an engine is handed in
    "program": KINDS,  # symbolic only
    "plan": KINDS | {"program"},
    "engines.common": BASE,  # torch only: evaluation, matrix products, combination of partial results
    "engines.dense": COMMON,
    "engines.eager": COMMON,
    "engines.panel": COMMON | {"engines.eager"},  # panels in torch use the eager engine's accumulators
    "engines.triton.codegen": BASE,
    "engines.triton.launch": CODEGEN,
    "engines.triton.schedules": LAUNCH,
    "engines.triton.kernels": SCHEDULES,
    "engines.triton.panel": KERNELS | {"engines.panel"},
    "engines.triton": PANEL_KERNELS,
    "engines.listed": COMMON,
    "engines.ranks": COMMON,
    "engines.stream": COMMON | {"engines.ranks"},  # a chunk of a stream is a shard that comes later
    "engines.auto": COMMON | {"engines.eager", "engines.panel", "engines.triton"},
    "engines": set(),
    "stored_vectors": {"arrays", "errors", "program", "engines.common"},  # given in place of tensors
    "tuning": COMMON | {"engines.auto", "engines.triton"},
    "runtime": ENGINES | {"engines.auto", "stored_vectors", "tuning"},
    "blockwise": {"errors", "algebra", "runtime", "engines.triton"},
    "files": {"errors", "arrays"},  # readers of .npy, .safetensors and .parquet
    "sources": {"errors", "arrays", "files"},
    "saved_runs": {"errors", "arrays", "plan"},  # states and results on disk
    "block_runs": COMMON | {"engines.stream", "sources", "saved_runs"},
    "stream": COMMON
    | {"engines.ranks", "engines.stream", "files", "sources", "saved_runs", "block_runs", "stored_vectors"},
    "autotune": {"errors", "arrays", "plan", "runtime", "tuning", "sources"},
    "explain": COMMON | {"engines.eager", "engines.triton", "runtime"},
    "op": COMMON
    | {"engines.ranks", "engines.stream", "runtime", "block_runs", "stream", "autotune", "explain", "stored_vectors"},
    "ops": COMMON
    | {"engines.ranks", "runtime", "files", "sources", "block_runs", "stream", "stored_vectors", "explain", "op"},
    "linalg": {"errors", "arrays"},  # solvers over any product; a kernel op is one that is handed in
    "nn": {"errors", "domains", "plan.settings", "ops"},  # modules: no mathematics
    "integrations": {"errors", "domains", "nn", "ops"},  # doors to other libraries
    "integrations.ray": COMMON
    | {
        "block_runs",
        "engines.auto",
        "engines.stream",
        "files",
        "op",
        "ops",
        "saved_runs",
        "sources",
        "stream",
    },  # spread
}
EVERYTHING = {"__init__", "__main__", "cli"}  # they may import any package, and monoidreduce itself
IMPORTS_NOTHING = {"errors", "_version"}  # not even the standard library
OPTIONAL = {
    "rich",
    "matplotlib",
    "megatron",
    "peft",
    "triton",
    "safetensors",
    "pyarrow",
    "ray",
    "scipy",
}  # dependencies that may be imported inside a function
SLOW = {"torch.utils.flop_counter"}  # imports all of Triton: likewise


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
        here = path.relative_to(package).with_suffix("").parts
        if here[0] not in EVERYTHING and package_of(here) not in PACKAGES:
            found.append(f"{place}: {package_of(here)} is no package of the architecture: add it to PACKAGES")
            continue
        for imported in imports(ast.parse(source), path, package):
            found += [f"{place}:{imported.line}: {problem}" for problem in broken(here, imported, package.name)]
    return found


def broken(here: tuple[str, ...], imported: Import, package: str) -> Iterator[str]:
    """What is wrong with one import in the module with the path ``here`` (below the package)."""
    importer = package_of(here)
    top, *there = imported.module.split(".")
    if imported.in_function and top not in OPTIONAL and imported.module not in SLOW:
        yield f"{imported.module} is imported inside a function: move it to the top"
    if importer in IMPORTS_NOTHING:
        yield f"{importer} imports nothing, not even {imported.module}"
    if top != package or here[0] in EVERYTHING:
        return
    if not there:
        yield f"{importer} imports monoidreduce itself: import the package that holds the name"
        return
    if package_of(tuple(there)) not in PACKAGES[importer] | {importer, "_version"}:
        yield f"{importer} may not import {package_of(tuple(there))}"


def package_of(parts: tuple[str, ...]) -> str:
    """The package of a module by its path below ``monoidreduce``: the longest prefix that is a row of PACKAGES.

    ("engines", "triton", "codegen", "philox") is engines.triton.codegen's, ("program", "trace") is program's.
    """
    parts = tuple(part for part in parts if part != "__init__")
    names = [".".join(parts[:length]) for length in range(min(len(parts), 3), 0, -1)]
    return next((name for name in names if name in PACKAGES), ".".join(parts[:1]))


def imports(tree: ast.Module, path: Path, package: Path) -> Iterator[Import]:
    """All imports of a module, relative ones made absolute, ``from room import file`` taken as that file."""
    for node, in_function in statements(tree.body):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, path, package)
            names = sorted({submodule(base, alias.name, package) for alias in node.names})
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, in_function)


def statements(nodes: list[Any], in_function: bool = False) -> Iterator[tuple[Any, bool]]:
    """All statements, however deep, and whether they are in a function."""
    for node in nodes:
        yield node, in_function
        inner = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, field, []), inner)


def absolute(node: ast.ImportFrom, path: Path, package: Path) -> str:
    if not node.level:
        return node.module or ""
    folder = path.relative_to(package.parent).parts[: -node.level]
    return ".".join([*folder, *([node.module] if node.module else [])])


def submodule(base: str, name: str, package: Path) -> str:
    inner = package.parent.joinpath(*base.split("."), name)
    return f"{base}.{name}" if inner.is_dir() or inner.with_suffix(".py").is_file() else base


def test_imports_follow_the_architecture():
    assert PACKAGE.is_dir()
    found = problems(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("algebra/sum.py", "from monoidreduce.program import x", "algebra/sum.py:1: algebra may not import program"),
        ("algebra/sum.py", "import torch\nimport monoidreduce.ops.x", "algebra/sum.py:2: algebra may not import ops"),
        ("program/trace.py", "from ..plan import tiles", "program may not import plan"),
        ("program/symbol.py", "from ..reductions import KINDS", "program.symbol may not import reductions"),
        ("program/symbol.py", "from .x import lower", "program.symbol may not import program"),
        ("reductions/best.py", "from ..program import x", "reductions may not import program"),
        ("reductions/best.py", "from ..plan import tiles", "reductions may not import plan"),
        ("reductions/best.py", "from ..engines.common import evaluate", "reductions may not import engines.common"),
        ("program/deep/trace.py", "from ...plan.tiles import Tile", "program may not import plan"),
        (
            "plan/cost.py",
            "if True:\n    from monoidreduce.engines.eager import x",
            ":2: plan may not import engines.eager",
        ),
        ("engines/common/run.py", "from monoidreduce import ops", "engines.common may not import ops"),
        ("engines/common/run.py", "from ..eager import run", "engines.common may not import engines.eager"),
        ("op.py", "from monoidreduce.ops import attention", "op may not import ops"),
        ("blockwise.py", "from monoidreduce.plan import tiles", "blockwise may not import plan"),
        ("ops/attention.py", "import monoidreduce as mr", "ops imports monoidreduce itself"),
        ("ops/attention.py", "from monoidreduce.engines import eager", "ops may not import engines.eager"),
        ("ops/attention.py", "from monoidreduce.engines.triton.codegen import x", "not import engines.triton.codegen"),
        ("engines/eager/run.py", "from .. import dense", "engines.eager may not import engines.dense"),
        (
            "engines/triton/codegen/x.py",
            "from ...eager import run",
            "engines.triton.codegen may not import engines.eager",
        ),
        ("engines/triton/codegen/x.py", "from ..launch import y", "codegen may not import engines.triton.launch"),
        ("engines/triton/launch/x.py", "from ..schedules import y", "launch may not import engines.triton.schedules"),
        ("engines/triton/kernels/x.py", "from ...ranks import y", "kernels may not import engines.ranks"),
        ("engines/ranks/x.py", "from ...runtime import call", "engines.ranks may not import runtime"),
        ("errors.py", "import math", "errors imports nothing, not even math"),
        ("plan/cost.py", "def f():\n    import math", ":2: math is imported inside a function"),
        ("cli/demo.py", "class A:\n    def f(self):\n        from monoidreduce import op", "inside a function"),
        ("attic.py", "", "attic is no package of the architecture"),
    ],
)
def test_a_planted_violation_is_found(path, source, problem, tmp_path):
    found = problems(plant(tmp_path, path, source))
    assert len(found) == 1 and problem in found[0], found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("nn/modules.py", "from monoidreduce.ops import attention\nfrom monoidreduce.errors import E"),
        ("engines/triton/__init__.py", "from .launch import go\nfrom monoidreduce.engines.triton import kernels"),
        ("engines/eager/run.py", "from ..common import evaluate\nfrom monoidreduce.plan import tiles"),
        ("reductions/best.py", "from ..program import symbol\nfrom ..program.expression import Expr"),
        ("program/lower.py", "from ..reductions import KINDS\nfrom . import symbol"),
        ("runtime/call.py", "from ..engines import eager\nfrom .. import tuning"),
        ("ops/attention.py", "from monoidreduce.runtime import call\nfrom monoidreduce.op import op"),
        ("cli/__init__.py", "import monoidreduce as mr\nfrom monoidreduce._version import __version__"),
        ("cli/demo.py", "def f():\n    from rich.table import Table\n    import matplotlib.pyplot"),
    ],
)
def test_what_is_allowed_is_not_reported(path, source, tmp_path):
    assert problems(plant(tmp_path, path, source)) == []


def plant(folder: Path, path: str, source: str) -> Path:
    """A small package with the named modules, and one file in it as given."""
    package = folder / "monoidreduce"
    modules = "program/x program/symbol program/expression reductions/best plan/tiles op ops/attention runtime/call"
    modules += " tuning engines/dense engines/common/evaluate"
    inner = "engines/eager/run engines/ranks/x engines/triton/launch/go engines/triton/schedules/y"
    inner += " engines/triton/kernels/x engines/triton/codegen/x"
    for name in [*modules.split(), *inner.split()]:
        (package / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (package / f"{name}.py").touch()
    (package / path).parent.mkdir(parents=True, exist_ok=True)
    (package / path).write_text(source)
    return package
