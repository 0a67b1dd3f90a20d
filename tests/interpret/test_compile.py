"""Kernels compiled for GPUs that are not here: they fit in shared memory, use the tensor cores, spill nothing.

The ready-made layers always; the others, which take minutes, with the slow tests.
"""

import json
import os
import subprocess
import sys

import pytest

from monoidreduce.engine.triton import plan
from tests.interpret.aot import CASES, FAMILIES, calls

# Bytes that may spill, with the Triton of constraints.txt. Two accumulators of 128 x 128, or one of 128 x 256, and the
# tiles in flight: smaller tiles would not spill, and are 4 to 30 % slower (benchmarks/tiles.py on an H200).
SPILLS = {"attention 128": 64, "causal attention 128": 304, "capped attention 64": 160, "cross-entropy 256": 4}
SPILLS |= {"causal attention 64": 16}  # a softmax that is held to 128 registers; none with Triton 3.6
SPILLS |= {"wide cross-entropy": 8, "wide contrastive": 36}  # of tiles that are compared with labels
SPILLS |= {"contrastive 128": 8, "gated mlp 128": 4, "wide cross-entropy, in little memory": 52}  # none with Triton 3.6
SPILLS |= {"wide cross-entropy, stowed": 8}  # nor here
SPILLS |= {"dropped attention 128": 444}  # its forward; with Triton 3.6 that spills 36
SPILLS |= {"wide cross-entropy, 256 rows": 8}
STAGED = {
    True: [
        "wide contractions",
        "wide contrastive",
        "wide cross-entropy, 256 rows",
        "gated mlp 128",
        "gelu mlp 128",
        "mlp 128",
        "capped attention 128",
        "sloped attention 128",
        "causal attention 128",
        "attention 128",
    ],
    False: ["attention 128, float16"],
}


def chosen(capability, ready):
    """The cases to compile: for 8.0 every second of the ready-made ones, since minutes count; all of 8.9 when slow."""
    mine = [c for c in CASES if c.lean == ready and (capability >= 90 or not c.hopper)]
    return mine[::2] if capability == 80 and ready else mine


def _private(folder):
    """Caches of a process's own, empty: what the compiler says of a kernel must not depend on what it met before."""
    caches = {"MONOIDREDUCE_CACHE": "ours", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "other"}
    return {name: f"{folder}/{where}" for name, where in caches.items()} | {"PYTHONWARNINGS": "ignore"}


def compiled(capability, ready, folder):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= _private(folder)
    names = [c.name for c in chosen(capability, ready)]
    command = [sys.executable, "-m", "tests.interpret.aot", f"cuda:{capability}", *names]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    return list(map(json.loads, said.stdout.splitlines()))


@pytest.mark.parametrize("ready", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ready-made", "others"])
@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), 90])
def test_kernels_compile(capability, ready, tmp_path):
    found = compiled(capability, ready, tmp_path)
    for case in chosen(capability, ready):
        mine = [k for k in found if k["case"] == case.name]
        assert mine, case.name
        for kernel in mine:
            assert kernel["shared"] <= FAMILIES[capability].shared, kernel
            if ready:
                plain = kernel["kernel"] == "side" or case.name.startswith(("gaussian", "wide"))
                assert kernel["tensor_cores"] > 0 or plain, kernel
                most = SPILLS.get(case.name, 0) if capability == 90 else max(SPILLS.values())
                assert kernel["spills"] <= most, kernel
            assert not (kernel["staged"] and kernel["crumbs"]), kernel
    forward = {k["case"]: k["staged"] for k in found[::-1]}
    assert [c for c, staged in forward.items() if staged] == (STAGED[ready] if capability == 90 else [])


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_small_kernels_compile(capability, tmp_path):
    """Those that no program writes: nothing spills."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= _private(tmp_path)
    command = [sys.executable, "-m", "tests.interpret.small", f"cuda:{capability}"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    found = list(map(json.loads, said.stdout.splitlines()))
    assert {kernel["kernel"] for kernel in found} == {"best_listed", "shift", "unite_best", "unite_sum"}
    assert not [kernel for kernel in found if kernel["spills"]]


@pytest.mark.parametrize("capability", sorted(FAMILIES))
def test_the_tiles_that_ship_fit_as_they_are_counted(capability):
    """Before anything is compiled: 16-bit kernels of the ready-made layers keep a pipeline, and tiles of some size."""
    family = FAMILIES[capability]
    for case in (c for c in CASES if c.lean and c.dtype.itemsize == 2 and not c.name.startswith(("wide", "handmade"))):
        for call in (c for c in calls(case, capability) if c.kernel.name != "side"):
            assert plan.shared(call.plan, call.kernel, 2, family) <= family.shared * family.spare, (
                case.name,
                call.plan,
            )
            assert call.plan.num_stages > family.ahead, (case.name, call.plan)
            assert call.plan.block_kept * call.plan.block_folded >= 64 * 64, (case.name, call.plan)
