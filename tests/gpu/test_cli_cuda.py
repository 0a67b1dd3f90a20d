"""The command line on a GPU: check, bench beside the peers that are installed, and memory over time."""

import json

import pytest
import torch

from tests.support import ROOT
from tests.support.command_line import call

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FILE = ROOT / "tests" / "support" / "wrong_layers.py"


def answer(*arguments: str) -> dict:
    code, out, err = call(*arguments, "--device", "cuda", "--json")
    assert code == 0, err
    return json.loads(out)


def test_check_finds_nothing_wrong():
    assert answer("check", f"{FILE}:attention")["passed"]


def test_explain_knows_the_device():
    assert answer("explain", f"{FILE}:attention")["device"].startswith("cuda")


@pytest.mark.parametrize("layer", ["attention", "cross-entropy"])
def test_every_peer_agrees(layer, tmp_path):
    data = answer("bench", layer, "--size", "512", "--dtype", "bf16", "--seconds", "0.1", "--out", str(tmp_path))
    assert data["environment"]["gpu"]
    for row in data["rows"]:
        assert row["forward_ms"] and row["error"] < 0.05, row


def test_memory_over_time_is_of_the_gpu(tmp_path):
    data = answer("profile", "mlp", "--rows", "4096", "--cols", "4096", "--out", str(tmp_path))
    assert data["naive"]["extra_bytes"] >= 2 * data["matrix_bytes"] > 4 * data["ours"]["extra_bytes"]
