"""The command that measures a GPU's tables anew: which come first, and what is stopped."""

import os
import sys
import time
from pathlib import Path

from benchmarks import refresh


def test_the_oldest_table_comes_first_and_one_never_measured_before_all(tmp_path):
    for name in ("model-20260101-0000", "gpu-20250101-0000", "gpu-20270101-0000", "gpu-wide-20250101-0000"):
        (tmp_path / f"{name}.json").touch()
    order = [table.kind for table in refresh.in_order("gpu|model", tmp_path)]
    assert order[-3:] == ["gpu-wide", "model", "gpu"]
    assert set(order[:-3]) == {"gpu-works", "model-8b-width-128"}  # another kind's file is not theirs
    assert refresh.date_of("gpu", tmp_path) == "20270101-0000"


def test_a_table_that_runs_too_long_is_stopped_with_all_it_started(tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    assert refresh.run([sys.executable, "-c", code], 3.0, tmp_path / "log") is None
    child = int((tmp_path / "log").read_text())
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            break
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":  # ended, and waited for by nobody
            break
        time.sleep(0.05)
    else:
        raise AssertionError("the process that it started still runs")


def test_the_status_of_a_command_is_returned_and_its_output_kept(tmp_path):
    assert refresh.run([sys.executable, "-c", "print('told'); raise SystemExit(3)"], 30.0, tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "told\n"
