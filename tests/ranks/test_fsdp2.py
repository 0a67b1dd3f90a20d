"""FSDP2, DDP, tensor parallelism: the losses of one process, saved and resumed runs, fused models of transformers."""

import json
import os
import subprocess
import sys

import pytest

from tests.support import ROOT

STEPS = 4


def check(found, saved, near=1e-5):
    """The losses of one process by every way, to the last digit from where a run was resumed."""
    assert found["none"][-1] < found["none"][0] - 0.1  # something is learned
    for way in ("ddp", "fsdp2"):
        assert found[way] == pytest.approx(found["none"], rel=near), way
        if f"{way} resumed" in found:
            assert found[f"{way} resumed"] == found[way][saved:], way


def test_torchrun_starts_the_example(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["examples.train_fsdp2", f"--steps={STEPS}", f"--losses={tmp_path / 'losses'}"]
    command += ["--wrap", "none", "fsdp2", "ddp", f"--save={tmp_path}", f"--resume={tmp_path}", "--save_at=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fsdp2 resumed: loss" in done.stdout
    check(json.loads((tmp_path / "losses").read_text()), 2)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 4])
def test_runs_have_the_losses_of_one_process(peers, world, precision, tmp_path):
    answers = peers.run("tests.support.fsdp_tasks:runs", world, str(tmp_path), STEPS, precision)
    for found in answers:
        assert found == answers[0]
        check(found, 2, 1e-5 if precision == "float32" else 1e-2)


@pytest.mark.parametrize("world", [2, 4])
def test_a_fused_model_of_transformers_under_fully_shard(peers, world):
    for found in peers.run("tests.support.fsdp_tasks:fused_transformers", world):
        assert set(found.values()) == {"same"}, found


def test_heads_of_peft_and_trl_that_are_wrapped_by_themselves(peers):
    for found in peers.run("tests.support.fsdp_tasks:heads_wrapped_alone", 2):
        assert set(found.values()) == {"same"}, found


def test_a_fused_model_of_transformers_in_tensor_parallelism(peers, tmp_path):
    for found in peers.run("tests.support.fsdp_tasks:tensor_parallel_transformers", 4, str(tmp_path)):
        assert set(found.values()) == {"same"}, found


def test_two_ranks_take_the_steps_of_one(peers):
    here, there = peers.run("tests.support.fsdp_tasks:fused_steps", 2)
    expected, has_no_logits = here.pop("alone")
    assert not has_no_logits
    for name, (losses, without_logits) in here.items():
        assert without_logits and there[name][1], name
        mean = [(a + b) / 2 for a, b in zip(losses, there[name][0], strict=True)]
        assert mean == pytest.approx(expected, rel=1e-6), name


def test_data_and_tensor_ranks_and_a_loss_outside_the_model(peers):
    for found in peers.run("tests.support.fsdp_tasks:data_and_tensor_ranks", 4):
        assert set(found.values()) == {"same"}, found
