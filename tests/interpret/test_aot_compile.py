"""Kernels compiled for GPUs that are not here: they fit in shared memory, use the tensor cores, spill nothing.

One case of every schedule always; all of them, which take minutes, with the slow tests.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from monoidreduce.engines.triton.schedules import gluon_parts
from tests.support.aot_compile import ASKED, CASES, FAMILIES, STORED_WIDTHS, WIDTHS, calls, count_shared

# Bytes that may spill, with the Triton of constraints.txt. Two accumulators of 128 x 128, or one of 128 x 256, and the
# tiles in flight: smaller tiles would not spill, and are 4 to 30 % slower (benchmarks/tiles.py on an H200).
SPILLS = {"attention 128": 64, "causal attention 128": 416, "capped attention 64": 160, "cross-entropy 256": 4}
SPILLS |= {"grouped heads 128": 64}
# Heads wider than 128, of which the row gradients spill most.
SPILLS |= {"attention 192": 132, "attention 256": 728, "causal attention 192": 196, "causal attention 256": 1044}
SPILLS |= {"FP8 attention 256": 200, "FP8 causal attention 256": 336}
SPILLS |= {"causal attention 64": 16}  # a softmax that is held to 128 registers; none with Triton 3.6
SPILLS |= {"wide cross-entropy": 8, "wide contrastive": 36}  # of tiles that are compared with labels
SPILLS |= {"contrastive 128": 8, "gated mlp 128": 4, "wide cross-entropy, in little memory": 52}  # none with Triton 3.6
SPILLS |= {"wide cross-entropy, stowed": 8}  # nor here
SPILLS |= {"dropped attention 128": 444}  # its forward; with Triton 3.6 that spills 36
SPILLS |= {"wide cross-entropy, 256 rows": 8}
SPILLS |= {
    "attention over blocks 128": 416
}  # as where the end of the columns is ragged: of the first tile, and a retry
SPILLS |= {"biased attention over blocks 128": 176}  # its column gradients
WIDE = tuple(f"attention {d}" for d in {*WIDTHS, *STORED_WIDTHS} if d > 128)  # for Hopper alone
STAGED = {  # whose forward is hand-scheduled
    *(f"{name} {d}" for d in WIDTHS if d > 64 for name in ("attention", "causal attention")),
    *(case.name for case in ASKED),
    *(f"{name} {d}" for d in STORED_WIDTHS for name in ("FP8 attention", "FP8 causal attention")),
    "wide contractions",
    "wide contrastive",
    "wide cross-entropy, 256 rows",
    "gated mlp 128",
    "gelu mlp 128",
    "grouped heads 128",
    "mlp 128",
    "capped attention 128",
    "sloped attention 128",
    "relative attention 128",
    "block attention 128",
    "attention 128, float16",
    "attention over blocks 128",
    "gradients of pages 128, 64 rows",
}


# At least one kernel of every schedule. All the ready-made ones take five minutes in empty caches: with the slow tests.
QUICK = {
    80: ["causal attention 64", "wide cross-entropy"],
    90: [
        "causal attention 128",
        "gated mlp 128",
        "gaussian 64",
        "indexer 64",
        "wide argmax, 256 rows",
        "wide cross-entropy, 256 rows",
        "own monoid 16, float32",
        "handmade loss 64",
        "stored attention 128, float8_e4m3fn",
        "decoding from float8_e4m3fn 128",
        "biased attention over blocks 128",
    ],
}


def chosen(capability, which):
    """The cases to compile: ``quick``, the ready-made ones (``ready-made``), or all the others (``others``)."""
    if which == "quick":
        return [c for c in CASES if c.name in QUICK[capability]]
    return [c for c in CASES if c.lean == (which == "ready-made") and (capability >= 90 or not c.hopper)]


def _private(folder):
    """Caches of a process's own, empty: what the compiler says of a kernel must not depend on what it met before."""
    caches = {"MONOIDREDUCE_CACHE": "ours", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "other"}
    return {name: f"{folder}/{where}" for name, where in caches.items()} | {"PYTHONWARNINGS": "ignore"}


def compiled(capability, which, folder):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= _private(folder)
    names = [c.name for c in chosen(capability, which)]
    command = [sys.executable, "-m", "tests.support.aot_compile", f"cuda:{capability}", *names]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    return list(map(json.loads, said.stdout.splitlines()))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("capability", "which"),
    [
        pytest.param(80, "quick", marks=SLOW),
        (90, "quick"),
        *(pytest.param(c, w, marks=SLOW) for c in sorted(FAMILIES) for w in ("ready-made", "others")),
    ],
)
def test_kernels_compile(capability, which, tmp_path):
    found = compiled(capability, which, tmp_path)
    for case in chosen(capability, which):
        mine = [k for k in found if k["case"] == case.name]
        assert mine, case.name
        for kernel in mine:
            assert kernel["shared"] <= FAMILIES[capability].shared, kernel
            if kernel["staged"]:
                assert 0 <= kernel["shared"] - kernel["counted"] <= gluon_parts.SPARE_BYTES, kernel
            if which != "others":
                plain = kernel["kernel"] == "side" or case.name.startswith(("gaussian", "own", "wide"))
                assert kernel["tensor_cores"] > 0 or plain, kernel
                most = SPILLS.get(case.name, 0) if capability == 90 else max(SPILLS.values())
                assert kernel["spills"] <= most, kernel
            assert not (kernel["staged"] and kernel["crumbs"]), kernel
            held = case.name.startswith(("own monoid", "200 best")) and capability == 90
            assert not (held and kernel["spills"]), kernel
    forward = {k["case"]: k["staged"] for k in found[::-1]}
    expected = {name for name in STAGED if name in forward} if capability == 90 else set()
    assert {name for name, staged in forward.items() if staged} == expected


@pytest.mark.slow
def test_instructions_of_functions_are_counted(tmp_path):
    """A hyperbolic tangent is one instruction of the special function unit, and tens where it is exact."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | _private(tmp_path)
    command = [sys.executable, "-m", "tests.support.count_instructions", "cuda:90", "tanh", "add"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    rows = [[int(n) for n in re.findall(r"\d+", line)] for line in said.splitlines()[2:]]
    (exact, special, _, *fast), plain = rows
    assert exact > 20 and special > 0 and fast == [1, 1, 1]
    assert plain == [1, 0, 1] * 2  # an addition


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_small_kernels_compile(capability, tmp_path):
    """Those that no program writes: nothing spills, and none is so long that it compiles for many seconds."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= _private(tmp_path)
    command = [sys.executable, "-m", "tests.support.aot_fixed_kernels", f"cuda:{capability}"]
    said = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert said.returncode == 0, said.stderr[-3000:]
    found = list(map(json.loads, said.stdout.splitlines()))
    assert {kernel["kernel"] for kernel in found} == {
        "best_listed",
        "choose",
        "choose_strips",
        "collect",
        "nearest",
        "run_sums",
        "shift",
        "strip_maxima",
        "unite_best",
        "unite_softmax",
        "unite_sum",
    }
    assert not [kernel for kernel in found if kernel["spills"] or kernel["lines"] > 16_000]


@pytest.mark.parametrize("capability", sorted(FAMILIES))
def test_the_tiles_that_ship_fit_as_they_are_counted(capability):
    """Before anything is compiled: 16-bit kernels of the ready-made layers keep a pipeline, and tiles of some size."""
    family = FAMILIES[capability]
    tried = (c for c in CASES if c.lean and c.dtype.itemsize == 2 and not c.name.startswith(("wide", "handmade")))
    for case in (c for c in tried if capability >= 90 or not c.name.endswith(WIDE)):
        for call in (c for c in calls(case, capability) if c.kernel.name != "side"):
            taken = count_shared(case, call, family)
            most = family.shared if call.kernel.hand_scheduled else int(family.shared * family.spare)
            assert taken <= most, f"{case.name}, {call.kernel.name}: {taken} of {most} bytes of shared memory"
            assert call.plan.num_stages > family.ahead, (case.name, call.plan)
            rows = 16 if case.name.startswith("decoding") else 64
            assert call.plan.block_kept * call.plan.block_folded >= rows * 64, (case.name, call.plan)
