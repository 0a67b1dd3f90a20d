"""A user's script with ``Row["f"]`` and ``@mr.op`` runs, and passes the type checkers and ruff."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from tests.support import ROOT, typed_script

SCRIPT = ROOT / "tests" / "support" / "typed_script.py"
BIN = Path(sys.executable).parent


def run(*command: object, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def check_with_pyright(*scripts: Path) -> list[list[str]]:
    """Pyright's errors in each; skips where it cannot start (its wheel has no node, and asks the network for one)."""
    program = BIN / "pyright"
    if not program.exists():
        pytest.skip("pyright is not installed")
    done = run(program, "--outputjson", "--pythonpath", sys.executable, *scripts)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        pytest.skip(f"pyright does not start here: {done.stderr.strip()[-200:]}")
    assert told["summary"]["filesAnalyzed"] == len(scripts)
    found = [
        (Path(d["file"]), f"{d['range']['start']['line'] + 1}: {d['message']}") for d in told["generalDiagnostics"]
    ]
    return [[line for file, line in found if file == script] for script in scripts]


def test_the_script_runs():
    assert typed_script.main()[-1] == 3
    assert typed_script.arrays(numpy.random.default_rng(0).random((50, 3))) == (2, 2, 1, 1, 0, 1, 1, 1, 1)


def test_pyright_passes_and_knows_the_types(tmp_path):
    planted = tmp_path / "planted.py"
    text = SCRIPT.read_text().replace("text: str = attention.explain", "text: int = attention.explain")
    planted.write_text(text.replace("lse: Tensor = unannotated", "lse: str = unannotated"))
    planted.write_text(planted.read_text().replace("total: Array = ops", "total: Tensor = ops"))
    right, found = check_with_pyright(SCRIPT, planted)  # at once: most of its time goes into reading torch
    assert right == []
    told = [line.splitlines()[0].split(": ")[1] for line in found]
    assert 'Type "Explanation" is not assignable to declared type "int"' in told
    assert 'Type "Tensor" is not assignable to declared type "str"' in told
    assert 'Type "Array" is not assignable to declared type "Tensor"' in told


def test_ruff_passes_with_one_line_of_settings():
    done = run(BIN / "ruff", "check", "--isolated", "--select", "E,F,W,I,B,UP,SIM,RUF", "--line-length", 120,
               "--per-file-ignores", "**/typed_script.py:F821", SCRIPT)  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.slow  # mypy reads all of torch first: half a minute of CPU time
def test_mypy_strict_passes(tmp_path):
    cache = ("--cache-dir", tmp_path / "cache")
    strict = ("--strict", "--config-file=", *cache)
    done = run(BIN / "mypy", *strict, "--follow-imports=silent", SCRIPT)
    assert done.returncode == 0, done.stdout
    planted = tmp_path / "planted.py"
    planted.write_text(
        "import torch\nfrom monoidreduce import ops\n"
        "x = torch.ones(3, 2)\n"
        "a: str = ops.knn(x, x, 1)\nb: str = ops.attention(x, x, x)\nc: str = ops.attention(x, x, x, return_lse=True)\n"
    )
    done = run(BIN / "mypy", *strict, "--follow-imports=silent", planted)
    for name in ("Neighbours", "Tensor", "AttentionOutput"):
        assert f'(expression has type "{name}"' in done.stdout, done.stdout


@pytest.mark.slow
def test_mypy_knows_what_an_op_returns_by_the_plugin(tmp_path):
    settings, script = tmp_path / "mypy.ini", tmp_path / "script.py"
    settings.write_text(
        "[mypy]\nstrict = true\nfollow_imports = silent\nplugins = monoidreduce.integrations.mypy_plugin\n"
    )
    script.write_text(
        "import torch\nfrom torch import Tensor\nimport monoidreduce as mr\nfrom monoidreduce import Col, Row\n\n"
        "class Head(torch.nn.Module):\n"
        "    @staticmethod\n"
        "    def make() -> mr.Op[Tensor]:\n"
        "        @mr.op\n"
        '        def score(x: Row["h", "d"], w: Col["d"], bias: mr.Col | None = None) -> Tensor:\n'
        "            return mr.logsumexp((x @ w).sum() if bias is None else (x @ w).sum() + bias)\n"
        "        return score\n\n"
        "@mr.op\n"
        'def total(x: Row["d"], y: Col["d"]) -> Tensor:\n    return mr.sum(x @ y)\n\n'
        "def call(x: Tensor) -> Tensor:\n    return total(x, x)\n\n"  # strict: returning Any would be an error
        "wrong: str = total(torch.ones(2, 3), torch.ones(2, 3))\n"
        "@mr.op\n"
        'def broken(x: Row["d"], y: Col["d"]) -> Tensor:\n    return mr.sum(x.no_such_method())\n'
    )
    done = run(BIN / "mypy", "--config-file", settings, "--cache-dir", tmp_path / "cache", script)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert told[0].startswith('error: Incompatible types in assignment (expression has type "Tensor"'), done.stdout
    assert told[1].startswith('error: "Row" has no attribute "no_such_method"') and len(told) == 3, done.stdout


def test_no_layer_returns_any():
    """Every layer of ``ops`` says what it returns; where options decide, by overloads."""
    import ast

    from monoidreduce import ops

    vague = []
    for path in sorted((ROOT / "monoidreduce" / "ops").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", ())]
            if isinstance(node, ast.FunctionDef) and node.name in ops.__all__ and "no_type_check" not in decorators:
                is_overload = "overload" in decorators
                returns = "" if node.returns is None else ast.unparse(node.returns)
                overloaded = path.read_text().count(f"@overload\ndef {node.name}(") > 1
                if (not returns or "Any" in returns) and (is_overload or not overloaded):
                    vague.append(f"{path.name}: {node.name} -> {returns}")
            if (
                isinstance(node, ast.ClassDef)
                and node.name in ops.__all__
                and "NamedTuple" in map(ast.unparse, node.bases)
            ):
                fields = [f for f in node.body if isinstance(f, ast.AnnAssign) and "Any" in ast.unparse(f.annotation)]
                vague += [f"{path.name}: {node.name}.{ast.unparse(f.target)}" for f in fields]
    assert vague == []
