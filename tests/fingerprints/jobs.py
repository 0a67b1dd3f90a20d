"""Runs the parts, each in a process of its own that forks once for every case.

Triton decides when it is imported whether it interprets, so parts cannot share a process. A fork per case makes every
case cold: nothing that another one compiled, cached or traced is there, and each has empty caches on disk.
"""

import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

PARTS = ("visited", "launches", "replays", "aten", "profiled", "h200", "ptx")
_CACHES = {"MONOIDREDUCE_CACHE": "ours", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "other"}

Job = tuple[str, Callable[[], dict[str, str]]]  # a name, and what returns texts by the names of fingerprints


def run(part: str, folder: Path, only: list[str], level: str, processes: int) -> list[str]:
    """Run one part in a new process; the names of cases that failed."""
    left_out = {"TRITON_INTERPRET", "MONOIDREDUCE_ENGINE", *_CACHES}
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    if part not in ("ptx", "h200"):
        environment["TRITON_INTERPRET"] = "1"
    shutil.rmtree(folder / "failed" / part, ignore_errors=True)
    command = [sys.executable, "-m", "tests.fingerprints.jobs", part, str(folder), level, str(processes)]
    with tempfile.TemporaryDirectory() as spare:
        environment |= {name: f"{spare}/{where}" for name, where in _CACHES.items()}
        code = subprocess.run([*command, *only], env=environment).returncode
    failed = sorted(str(p.relative_to(folder / "failed"))[:-4] for p in folder.glob(f"failed/{part}/**/*.txt"))
    return failed or ([f"{part} (exit code {code})"] if code else [])


def _jobs(part: str, level: str) -> Iterator[Job]:
    """The cases of a part. Imported here: each part has its own idea of what Triton is."""
    if part == "ptx":
        from . import ptx

        yield from ptx.jobs(level)
    elif part == "h200":
        from . import h200

        yield from h200.jobs()
    else:
        from . import record

        yield from record.jobs(part)


def _fork(part: str, job: Job, folder: Path) -> int:
    """Start a case in a copy of this process."""
    child = os.fork()
    if child:
        return child
    name, work = job
    spare = tempfile.mkdtemp(prefix="fingerprints-")
    code = 1
    try:
        os.environ.update({variable: f"{spare}/{where}" for variable, where in _CACHES.items()})
        for written, text in work().items():
            path = folder / f"{written}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        code = 0
    except BaseException:
        path = folder / "failed" / part / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
    finally:
        shutil.rmtree(spare, ignore_errors=True)
        sys.stdout.flush()
        os._exit(code)


def main(part: str, folder: Path, level: str, processes: int, only: list[str]) -> int:
    """Run the cases of a part, some at a time."""
    running: set[int] = set()
    failures = 0
    (folder / "cases").mkdir(exist_ok=True)
    ran = (folder / "cases" / f"{part}.txt").open("w")  # tells a comparison of some cases which they are

    def wait() -> int:
        child, status = os.wait()
        running.discard(child)
        return int(status != 0)

    for name, work in _jobs(part, level):
        full = f"{part}/{name}"
        if only and not any(word in full or fnmatch.fnmatch(full, word) for word in only):
            continue
        print(full, file=ran, flush=True)
        while len(running) >= processes:
            failures += wait()
        running.add(_fork(part, (name, work), folder))
    while running:
        failures += wait()
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:]))
