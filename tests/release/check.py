"""Is the release ready? ``make release-check``: builds the wheel and the source distribution, installs each into a
fresh environment, without and with Triton, and runs ``smoke.py`` there, outside the repository.

Versions are those of constraints.txt, so that torch is the one that was tested (the CPU build, where pip finds it).
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).parent / "smoke.py"
PINNED = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}  # also for what a build brings for itself
CASES = [("wheel", False), ("wheel", True), ("sdist", False)]


def build(folder: Path) -> dict[str, Path]:
    """``python -m build``: the sdist from the repository, the wheel from the sdist."""
    run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], **PINNED)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def contents(found: dict[str, Path]) -> None:
    """Both hold the package, all of it, and nothing that belongs to the repository alone."""
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "monoidreduce").rglob("*.py")}
    package |= {"monoidreduce/py.typed", "monoidreduce/cli/style.css"}
    in_wheel = set(zipfile.ZipFile(found["wheel"]).namelist())
    with tarfile.open(found["sdist"]) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    for name, inside in (("wheel", in_wheel), ("sdist", in_sdist)):
        assert not package - inside, f"the {name} lacks {sorted(package - inside)}"
    strangers = {n.split("/")[0] for n in in_wheel if not n.startswith("monoidreduce")}
    assert not strangers, f"the wheel also holds {strangers}"
    assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= in_sdist


def try_out(artefact: Path, triton: bool, folder: Path) -> str:
    """Install into a fresh environment and run the smoke test from an empty folder."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    wanted = [str(artefact), *(["triton"] if triton else [])]
    run([str(python), "-m", "pip", "install", "-qq", *wanted], **PINNED)
    if not triton:  # torch for CUDA brings it; here it must work without
        run([str(python), "-m", "pip", "uninstall", "-qq", "-y", "triton"])
    empty = folder / "elsewhere"
    empty.mkdir()
    shutil.copy(SMOKE, empty)
    words = run([str(python), "smoke.py", "--triton" if triton else "--no-triton"], cwd=empty, TRITON_INTERPRET="1")
    return words.strip().splitlines()[-1]


def run(command: list[str], cwd: Path | None = None, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    found = build(dist)
    contents(found)
    run([sys.executable, "-m", "twine", "check", "--strict", *map(str, found.values())])
    print(f"built {', '.join(p.name for p in found.values())}", flush=True)
    for kind, triton in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{kind}: {try_out(found[kind], triton, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
