"""No kernel reads or writes where it should not, and no two threads race: NVIDIA's checker on a sample."""

import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from monoidreduce.plan import disk
from monoidreduce.plan.cache import KERNELS as TEXTS
from tests.support.sanitizer_kernels import CASES, KERNELS

TOOL = shutil.which("compute-sanitizer")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or TOOL is None, reason="needs a GPU and compute-sanitizer"
)
SHARES = min(len(CASES), max(1, (os.cpu_count() or 1) - 2))
ENVIRONMENT = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor an allocation with its own ends
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY"}
# where Triton gives groups of warps their work: the checker does not follow the barrier that it does so by
HANDED_OUT = ("def ", "tl.warp_specialize(")
# numbers that a warp stores into a ring, and pairs that a group of four sends to another: a barrier of those who
# store, an arrival of one for all and a wait are between them and who reads, as the PTX shows; the checker reports them
# all the same
RINGED = ("_ring.index(slot).store(", "ring.index(step % 2).load(LAYOUT)", "_here = ", "sent0.index(", "sent1.index(")


def all_shares(*before: str) -> list[tuple[int, str]]:
    """The sample, its shares side by side; what each ended with, and said."""
    sample = [sys.executable, "-m", "tests.support.sanitizer_kernels"]
    commands = [[*before, *sample, f"{k}/{SHARES}"] for k in range(SHARES)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(c, env=ENVIRONMENT, **pipe) for c in commands]
    try:
        said = [p.communicate(timeout=600)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    return [(p.returncode, text) for p, text in zip(running, said, strict=True)]


def races(said: str) -> list[str]:
    """Of the accesses that race, those in a kernel's own lines."""
    found = []
    for access in re.findall(r"(?:Read|Write) access at .*", said):
        named = re.search(r" in (k\w+\.py):(\d+)", access)
        path = (disk.open_folder(TEXTS) or disk.temporary_folder()) / named[1] if named else None
        text = path.read_text().splitlines()[int(named[2]) - 1] if path and named and path.exists() else ""
        if not (text.strip().startswith(HANDED_OUT) or any(words in text for words in RINGED)):
            found.append(f"{access}: {text}")
    return found


@pytest.fixture(scope="module")
def compiled():
    """Every kernel in Triton's cache before it is watched."""
    for code, said in all_shares():
        assert code == 0, said[-4000:]


@pytest.mark.parametrize("tool", sorted(CLEAN))
def test_clean(tool, compiled):
    watched = [word for name in KERNELS for word in ("--kernel-name", f"kns={name}")]
    for code, said in all_shares(str(TOOL), "--tool", tool, *watched):
        assert code == 0 and "done" in said and CLEAN[tool] in said and not races(said), said[-4000:]
