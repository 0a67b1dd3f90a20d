"""No kernel reads or writes where it should not, and no two threads race: NVIDIA's checker on a sample."""

import os
import shutil
import subprocess
import sys

import pytest
import torch

TOOL = shutil.which("compute-sanitizer")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or TOOL is None, reason="needs a GPU and compute-sanitizer"
)


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool):
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor an allocation with its own ends
    sample = [sys.executable, "-m", "tests.gpu.sample"]
    subprocess.run(sample, check=True, env=environment, timeout=300)  # compiled before it is watched
    command = [str(TOOL), "--tool", tool, "--error-exitcode", "9", "--target-processes", "all", *sample]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "done" in done.stdout
