"""Jobs on a real Ray cluster of this machine: workers killed, the job stopped and called again, datasets."""

import os
import signal
import tempfile
from pathlib import Path

import numpy
import pyarrow
import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.integrations import ray as mr_ray
from monoidreduce.integrations.ray.driver import start_here

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # Ray's, of itself


@pytest.fixture(scope="module")
def cluster():
    """Two workers; a small object store, no dashboard, files of its own."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="mr-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets: short
        start_here(2, folder)
        yield
        ray.shutdown()


def find_workers() -> list[int]:
    """The processes of workers that descend from this one."""
    parents = {}
    names = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = path.joinpath("stat").read_text()
            names[int(path.name)] = path.joinpath("cmdline").read_bytes()
        except OSError:
            continue
        parents[int(path.name)] = int(status.rpartition(")")[2].split()[1])

    def is_own(process: int) -> bool:
        while process > 1 and process != os.getpid():
            process = parents.get(process, 0)
        return process == os.getpid()

    return [p for p, name in names.items() if name.startswith(b"ray::Worker") and is_own(p)]


def make_search():
    @mr.op
    def search(x: mr.Row["d"], y: mr.Col["d"]):  # defined where no worker can import it
        s = x @ y
        mean = mr.mean(s)
        return {"best": mr.topk(s, 3).indices, "above": mr.sum(torch.relu(s - mean)) + mr.row_index}

    return search


class Stopped(Exception):
    pass


def test_a_killed_worker_and_a_stopped_job_change_no_bit(cluster, tmp_path):
    gen = torch.Generator().manual_seed(5)
    x, y = torch.randn(1500, 16, generator=gen), torch.randn(6000, 16, generator=gen)
    for k in range(3):
        numpy.save(tmp_path / f"x{k}.npy", x[500 * k : 500 * (k + 1)].numpy())
    columns = pyarrow.table({"y": pyarrow.array(list(y.numpy())), "name": ["other"] * len(y)})
    columns = ray.data.from_arrow([columns[:2500], columns[2500:]])
    given = {"rows": str(tmp_path / "x*.npy"), "cols": columns, "row_block": 400, "col_chunk": 1500, "quiet": True}
    killed: list[int] = []

    def kill_then_stop(progress: mr_ray.Progress) -> None:
        share = progress.pairs_done / progress.pairs
        if not killed and share > 0.1:
            killed.extend(find_workers()[:1])
            os.kill(killed[0], signal.SIGKILL)
        if progress.lost and share > 0.5:
            raise Stopped

    search = make_search()
    with pytest.raises(Stopped):
        mr_ray.run(search, out=tmp_path / "a", workers=2, on_progress=kill_then_stop, **given)
    assert killed and list((tmp_path / "a" / "states").iterdir())

    seen: list[mr_ray.Progress] = []
    found = mr_ray.run(search, out=tmp_path / "a", workers=1, on_progress=seen.append, **given)
    assert seen[0].pairs_before > 0.4 * seen[0].pairs and seen[-1].pairs_done == seen[-1].pairs
    assert sorted(p.name for p in (tmp_path / "a").glob("*.npy")) == sorted(
        f"{n}-{b:06d}.npy" for n in ("above", "best") for b in range(4)
    )
    assert not (tmp_path / "a" / "states").exists()
    again = mr_ray.run(search, out=tmp_path / "a", workers=1, **given)  # all there: nobody is started
    assert again.lost == 0 and all(torch.equal(again.load()[n], found.load()[n]) for n in ("best", "above"))

    whole = search(x, y)
    assert torch.equal(found.load()["best"], whole["best"])
    torch.testing.assert_close(found.load()["above"], whole["above"], rtol=1e-5, atol=1e-3)
    undisturbed = run_in_process(search, tmp_path, given)
    assert all(torch.equal(undisturbed[n], found.load()[n]) for n in ("best", "above"))


def run_in_process(search, tmp_path, given):
    """The same job by one worker that nobody disturbs, in this process."""
    from monoidreduce.integrations.ray import driver
    from monoidreduce.integrations.ray.worker import Worker, name_outputs

    threads = torch.get_num_threads()
    (tmp_path / "b").mkdir()
    job, probe, stages = driver._make_job(
        search, given["rows"], given["cols"], tmp_path / "b", 1, 0, given["row_block"], given["col_chunk"], {}
    )
    job = driver._begin(job)
    schedule, worker = driver._find_what_is_done(job, list(name_outputs(probe)), stages), Worker(job)
    while (task := schedule.next(None, ())) is not None:
        assert getattr(worker, task.kind)(task.node)[0] == "done"
        schedule.complete(task)
    torch.set_num_threads(threads)
    return {
        n: torch.cat([torch.from_numpy(numpy.load(job.output_path(n, b))) for b in range(4)])
        for n in name_outputs(probe)
    }


@pytest.mark.slow
def test_a_worker_s_mistake_is_told_as_ours(cluster, tmp_path):
    x = torch.randn(300, 4)
    numpy.save(tmp_path / "x.npy", x.numpy())

    def change(progress: mr_ray.Progress) -> None:
        if progress.pairs_done:
            numpy.save(tmp_path / "x.npy", x.numpy() + 1)

    with pytest.raises(mr.StreamError, match=r"x\.npy has changed since the job began"):
        mr_ray.run(ops.knn, rows=str(tmp_path / "x.npy"), cols=str(tmp_path / "x.npy"), k=2, out=tmp_path / "o",
                   workers=1, row_block=20, col_chunk=20, quiet=True, on_progress=change)  # fmt: skip


def test_workers_that_do_not_fit_are_refused(cluster, tmp_path):
    x = torch.randn(30, 4)
    with pytest.raises(mr.ArgumentError, match="no worker of 64 cores and 0 GPUs fits in the cluster, which has 2"):
        mr_ray.run(ops.knn, rows=x, cols=x, k=2, out=tmp_path / "o", cpus=64)
    with pytest.raises(mr.ArgumentError, match="the dataset given as cols has no column y"):
        data = ray.data.from_items([{"a": 1.0, "b": 2.0}])
        mr_ray.run(ops.knn, rows=x, cols=data, k=2, out=tmp_path / "o")


@pytest.mark.slow
def test_without_a_cluster_one_is_started_and_a_killed_job_goes_on(tmp_path):
    """The whole job, driver and all, is killed with SIGKILL and called again; see tests/support/ray_job.py."""
    import subprocess
    import sys

    from tests.support import ROOT

    x = torch.randn(4000, 16)
    numpy.save(tmp_path / "x.npy", x.numpy())
    command = [sys.executable, "-m", "tests.support.ray_job", str(tmp_path / "x.npy"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([*command, "0.3"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    out, _ = first.communicate(timeout=300)
    assert first.returncode == -signal.SIGKILL and "killing" in out
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) > 0.25  # of the pairs were done before
    found = torch.cat([torch.from_numpy(numpy.load(f)) for f in sorted((tmp_path / "out").glob("indices-*.npy"))])
    assert torch.equal(found, ops.knn(x, x, 5, exclude_self=True).indices)
