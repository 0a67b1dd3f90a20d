"""A rank that dies, hangs or fails half-way: a typed error on every survivor, soon, and never a result."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from tests.support.rank_pool import Failure, Pool

LIMIT = 30.0  # seconds, for the survivors of a death, on a busy machine; they are told at once, or after a GROUP's
GROUP = 120.0


def survivors(pool, dead):
    """What the ranks that are left say of their last task, and how long they took."""
    start = time.monotonic()
    answers = {r: pool.receive(r) for r in range(pool.world) if r != dead}
    return answers, time.monotonic() - start


def kill_once(seed):
    """Kill -9 a random rank at a random moment of endless sharded work."""
    chance = random.Random(seed)
    world = chance.choice([2, 3, 4])
    pool = Pool(world, timeout=GROUP)
    try:
        pool.run("warm", world)
        divided = chance.choice([("rows",), ("cols",), ("rows", "cols")])
        grid = divided == ("rows", "cols") and world == 4 and chance.random() < 0.5
        pool.send("work", world, divided, 2 if grid else None)
        time.sleep(chance.uniform(0.05, 0.6))
        dead = chance.randrange(world)
        pool.signal(dead, signal.SIGKILL)
        answers, seconds = survivors(pool, dead)
        for rank, answer in answers.items():
            assert isinstance(answer, Failure) and answer.kind == "RankError", (seed, rank, answer)
            assert pool.pids[rank] and os.path.exists(f"/proc/{pool.pids[rank]}"), "a survivor was aborted"
        assert seconds < LIMIT, (seed, seconds)
    finally:
        pool.close()


@pytest.mark.parametrize("trial", range(3))
def test_a_killed_rank_is_an_error_on_all_others(trial):
    kill_once(trial)


@pytest.mark.slow
def test_fifty_killed_ranks():
    for trial in range(3, 53):
        kill_once(trial)


def test_a_hung_rank_is_an_error_after_the_groups_timeout():
    pool = Pool(3, timeout=8)
    try:
        pool.run("warm", 3)
        pool.send("work", 3, ("rows", "cols"))
        time.sleep(0.3)
        pool.signal(1, signal.SIGSTOP)
        answers, seconds = survivors(pool, 1)
        assert all(isinstance(a, Failure) and a.kind == "RankError" for a in answers.values()), answers
        assert seconds < 8 + LIMIT
    finally:
        pool.signal(1, signal.SIGCONT)
        pool.close()


@pytest.mark.parametrize("divided", [("cols",), ("rows", "cols")], ids="+".join)
def test_a_rank_that_fails_half_way_takes_the_others_along(divided):
    """An error inside one rank's engine: its own kind there, a RankError on all others."""
    pool = Pool(3, timeout=GROUP)
    try:
        pool.send("fail_inside", 3, divided)
        start = time.monotonic()
        kinds = [pool.receive(r).kind for r in range(3)]
        assert kinds == ["RankError", "MemoryError", "RankError"]
        assert time.monotonic() - start < LIMIT
    finally:
        pool.close()


def test_torchrun_starts_again_and_finishes_with_the_same_result(tmp_path):
    """One rank of two dies in the first attempt, at a step that the second attempt passes."""
    script = ROOT / "tests" / "support" / "torchrun_restart.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", str(script), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [(tmp_path / f"result{r}").read_text() for r in range(2)]
    assert (tmp_path / "died").exists() and set(results) == {"same"}
