"""Torch's own tools around a call change no kernel: compilers, autocast, checkpoints, FSDP2."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """The kernels of each call in each way, on an H200 that is not there."""
    spare = tmp_path_factory.mktemp("caches")
    names = ("MONOIDREDUCE_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MONOIDREDUCE_ENGINE")}
    environment |= {name: str(spare / name) for name in names} | {"PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.support.launches_in_torch"]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize("way", ["compiled", "compiled for any length", "autocast", "compiled autocast", "FSDP2"])
def test_attention_launches_the_same_kernels(launches, way):
    plain = launches["attention"]["plain"]
    assert len(plain) == 4 and launches["attention"][way] == plain


@pytest.mark.parametrize("way", ["reentrant checkpoint", "checkpoint", "selective checkpoint"])
def test_a_checkpoint_launches_the_forward_twice(launches, way):
    forward, *backward = launches["attention"]["plain"]
    assert launches["attention"][way] == [forward, forward, *backward]


@pytest.mark.parametrize("way", ["compiled", "autocast", "FSDP2"])
def test_a_head_takes_its_gradient_in_the_forward(launches, way):
    """Three products over the vocabulary, not four: nothing is written again for the backward."""
    plain = launches["head"]["plain"]
    assert launches["head"][way] == plain and not any("write_weights" in line for line in plain)
