"""How fast things start: the command line without torch, and the package beside torch."""

import os
import subprocess
import sys

import pytest

from monoidreduce import __version__, ops
from monoidreduce.cli import options
from monoidreduce.cli.layers import EXPLAINED

PROGRAM = [sys.executable, "-X", "importtime", "-m", "monoidreduce"]
CPU_SECONDS = "import time, torch; start = time.process_time(); import monoidreduce; print(time.process_time() - start)"


def modules(stderr: str) -> set[str]:
    """The modules that a process imported, by ``-X importtime``."""
    return {line.rpartition("|")[2].strip() for line in stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "Show what fits in a given memory"),
        ([], 0, "Show what fits in a given memory"),
        (["--version"], 0, f"monoidreduce {__version__}"),
        (["dmeo"], 2, "No such command 'dmeo'. Did you mean demo?"),
        (["--verion"], 2, "No such option"),
        (["check"], 2, "Missing argument 'FILE.py:NAME'"),
        (["explain", "nowhere.py:layer", "--rows", "10"], 2, "the file nowhere.py does not exist"),
        (["bench", "atention"], 2, "there is no layer atention. Did you mean attention?"),
        (["check", "linear_cross_entropi"], 2, "Did you mean linear_cross_entropy?"),
        (["demo", "--help"], 0, "Writes a page, index.html"),
        (["demo", "--quik"], 2, "No such option '--quik'. Did you mean '--quick'?"),
        (["bench", "--device", "cud"], 2, "'cud' is no device"),
        (["check", "attention", "--size", "4x"], 2, "'4x' is no size"),
        (["tune", "attention", "--rows", "-3"], 2, "'-3' is no whole number"),
        (["profile", "attention", "--dtype", "int"], 2, "'int' is no floating type"),
        (["cache", "shwo"], 2, "'shwo' is not one of 'show'"),
        (["doctor", "more"], 2, "unexpected extra argument"),
    ],
)
def test_help_version_and_typos_answer_without_torch(arguments, code, words):
    done = subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)
    assert done.returncode == code and words in done.stdout + done.stderr
    found = modules(done.stderr)
    assert ("click.core" in found) == (arguments != ["--version"])  # which answers without the command line's packages
    assert not found & {"torch", "numpy", "rich.console", "monoidreduce.op", "monoidreduce.errors"}


def test_the_names_of_layers_are_known_without_torch():
    assert tuple(EXPLAINED) == options.READY_MADE
    assert all(options.parse_target(name) == name for name in (*EXPLAINED, *ops.__all__, "all"))


def test_the_installed_command_starts_without_torch_and_a_layer_file_finds_the_names(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import monoidreduce as mr\nfrom monoidreduce import Row, Col\n"
        "@mr.op\ndef total(x: Row, y: Col):\n    return mr.sum(x * y)\n"
    )
    program = tmp_path / "monoidreduce"  # as pip writes it
    program.write_text("import sys\nfrom monoidreduce.cli import main\nsys.exit(main())\n")
    run = lambda *arguments: subprocess.run(
        [sys.executable, "-X", "importtime", program, *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert "torch" not in modules(run("--help").stderr)
    done = run("explain", "mine.py:total", "--rows", "5", "--cols", "7")
    assert done.returncode == 0 and "5 rows × 7 columns" in done.stdout
    assert "torch" in modules(done.stderr) and "importing torch" not in done.stderr


def test_a_command_that_measures_says_so_before_it_imports_torch():
    """The first line comes through a pipe while torch, which takes seconds on a cold machine, is not yet imported."""
    done = subprocess.run([*PROGRAM, "demo", "--memory", "much"], capture_output=True, text=True)
    before, told, _ = done.stderr.partition("   0 s  importing torch\n")
    assert done.returncode == 2 and told and "torch" not in modules(before)
    done = subprocess.run([*PROGRAM, "demo", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "importing torch" not in done.stderr


def test_a_process_without_a_gpu_does_without_triton_and_its_engine():
    code = (
        "import sys, torch, monoidreduce as mr\n"
        "for _ in range(4):\n"
        "    x = torch.randn(2, 70, 8, requires_grad=True)\n"
        "    mr.ops.attention(x, x, x).sum().backward()\n"
        "    mr.ops.knn(x[0].detach(), x[1].detach(), 3)\n"
        "found = [m for m in sys.modules if m.startswith('monoidreduce.engines.triton.')]\n"
        "assert len(found) <= 3 and 'triton' not in sys.modules, found\n"
        "from monoidreduce.engines import triton\n"
        "assert triton.KernelPlan  # imported when it is first asked for\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})


def test_an_import_that_fails_leaves_the_collector_as_it_was():
    code = (
        "import gc, sys; sys.modules['monoidreduce.nn'] = None\n"
        "try:\n    import monoidreduce\nexcept ImportError:\n    assert gc.isenabled()\n"
        "else:\n    raise SystemExit(3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow  # of a quiet machine
def test_the_package_adds_a_quarter_of_a_second_to_torch(tmp_path):
    """CPU seconds beyond torch's own import, with byte code (the first process writes it): the best of six."""
    cache = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    runs = [subprocess.run([sys.executable, "-c", CPU_SECONDS], stdout=subprocess.PIPE, env=cache) for _ in range(6)]
    assert min(float(run.stdout) for run in runs) <= 0.25
