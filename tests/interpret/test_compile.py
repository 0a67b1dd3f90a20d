"""Kernels compiled for GPUs that are not here: they fit in shared memory, use the tensor cores, spill nothing."""

import json
import os
import subprocess
import sys

import pytest

from tests.interpret.aot import CASES, LIMITS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("capability", sorted(LIMITS))
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernels_compile(case, capability, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"MONOIDREDUCE_CACHE": str(tmp_path / "kernels"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.interpret.aot", f"cuda:{capability}", case.name]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    found = [k for k in map(json.loads, said.stdout.splitlines()) if k["case"] == case.name]
    assert found
    for kernel in found:
        assert kernel["shared"] <= LIMITS[capability], kernel
        if case.lean and capability == 90:
            assert kernel["spills"] == 0, kernel
            assert kernel["tensor_cores"] > 0 or case.name.startswith(("gaussian", "wide")), kernel
