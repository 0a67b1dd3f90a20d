"""A job's units in one process, without a cluster: the same bits in any order of work and after any loss."""

import random
from pathlib import Path

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import ops
from monoidreduce.integrations import ray as mr_ray
from monoidreduce.integrations.ray import driver
from monoidreduce.integrations.ray.schedule import Grid, Node, Schedule, Task, make_grid
from monoidreduce.integrations.ray.worker import Worker, name_outputs

pytest.importorskip("ray")


@mr.op
def everything(x: mr.Row["d"], label: mr.Row, y: mr.Col["d"], w: mr.Col):
    """Indices of both sides, random numbers by pair, the number of rows and columns, and a second pass."""
    s = x @ y * w
    top, mean = mr.topk(s, 3), mr.mean(s)
    far = mr.sum(torch.where(mr.row_index + mr.col_index > mr.num_rows, torch.relu(s - mean), 0.0))
    labelled = mr.sum(torch.where(mr.col_index == label, s, 0.0))
    drawn = mr.sum(mr.dropout(s, 0.3, 7))
    return {"values": top.values, "at": top.indices, "far": far + mr.row_index, "own": labelled / mr.num_cols,
            "drawn": drawn, "sample": mr.sample(s, 5), "lse": mr.logsumexp(s)}  # fmt: skip


def numbers(rows=27, cols=51, seed=0):
    gen = torch.Generator().manual_seed(seed)
    x, y = torch.randn(rows, 5, generator=gen), torch.randn(cols, 5, generator=gen)
    return x, torch.randint(cols, (rows,), generator=gen), y, torch.rand(cols, generator=gen) + 0.5


def save_parts(folder: Path, name: str, value: torch.Tensor, lengths: list[int]) -> str:
    for k, part in enumerate(value.split(lengths)):
        if not (folder / f"{name}{k}.npy").exists():  # the same files again for a job that goes on
            numpy.save(folder / f"{name}{k}.npy", part.numpy())
    return str(folder / f"{name}*.npy")


def make_job(tmp_path, out="out", fold=everything, rows=None, cols=None, block=10, chunk=8, **options):
    folder = tmp_path / "given"
    if rows is None:
        folder.mkdir(exist_ok=True)
        x, label, y, w = numbers()
        rows = {"x": save_parts(folder, "x", x, [20, 0, 7]), "label": save_parts(folder, "l", label, [26, 1])}
        cols = {"y": save_parts(folder, "y", y, [30, 21]), "w": save_parts(folder, "w", w, [51])}
    (tmp_path / out).mkdir(exist_ok=True)
    with mr.use(engine="auto"):
        job, probe, stages = driver._make_job(fold, rows, cols, tmp_path / out, 1, 0, block, chunk, options)
    assert (job.choices is None) == (not job.grid.cols)
    job = driver._begin(job)
    return job, list(name_outputs(probe)), stages


def work(job, names, stages, seed=0, lose=0.0, damage=0.0, stop=None):
    """All tasks by three workers in some order; some are lost when they are done, some states are damaged."""
    dice = random.Random(seed)
    schedule = driver._find_what_is_done(job, names, stages)
    workers: dict[int, Worker] = {k: Worker(job) for k in range(3)}
    held: dict[int, int | None] = dict.fromkeys(workers)
    running: list[tuple[int, Task]] = []
    done = 0
    while not schedule.finished and (stop is None or done < stop):
        for k in workers:
            others = {b for n, b in held.items() if n != k and b is not None}
            if k not in [n for n, _ in running] and (task := schedule.next(held[k], others)) is not None:
                held[k] = task.node.block
                running.append((k, task))
        k, task = running.pop(dice.randrange(len(running)))
        if dice.random() < lose:
            workers[k], held[k] = Worker(job), None
            if dice.random() < 0.5:  # it had written what it made, and nobody heard of it
                getattr(workers[k], task.kind)(task.node) if task.kind == "fold" else None
            schedule.lose(task)
            continue
        if damage and task.kind == "merge" and dice.random() < damage:
            path = job.state_path(dice.choice(job.grid.children(task.node)))
            path.write_bytes(path.read_bytes()[:-40] if dice.random() < 0.5 else b"nothing")
        answer, told = getattr(workers[k], task.kind)(task.node)
        done += 1
        if answer == "done":
            schedule.complete(task)
            continue
        Path(told).unlink()
        nodes = job.grid.children(task.node) if task.kind == "merge" else (task.node,)
        schedule.find_damaged(task, next(n for n in nodes if str(job.state_path(n)) == told))
    assert not schedule.finished or schedule.pairs_done == schedule.pairs
    return schedule


def outputs(job, names):
    return {
        n: torch.cat([torch.from_numpy(numpy.load(job.output_path(n, b))) for b in range(job.grid.blocks)])
        for n in names
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job, names, stages = make_job(tmp_path_factory.mktemp("ray"))
    work(job, names, stages)
    return outputs(job, names)


def test_a_job_gives_what_the_op_gives(undisturbed):
    x, label, y, w = numbers()
    whole = everything(x, label, y, w)
    assert undisturbed.keys() == whole.keys()
    for name, value in undisturbed.items():
        assert value.dtype == whole[name].dtype
        torch.testing.assert_close(value, whole[name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("seed", [1, 2])
def test_lost_workers_and_damaged_states_change_no_bit(seed, tmp_path, undisturbed):
    job, names, stages = make_job(tmp_path)
    assert stages == 2 and job.grid.blocks == 3 and job.grid.stretches == 7
    work(job, names, stages, seed, lose=0.3, damage=0.3)
    assert equal(outputs(job, names), undisturbed)


def test_a_stopped_job_goes_on(tmp_path, undisturbed):
    job, names, stages = make_job(tmp_path)
    total = 0
    for seed in range(60):  # begun anew again and again, as after a kill of everything
        again, *_ = make_job(tmp_path)
        assert again.identity == job.identity and again.choices == job.choices
        schedule = work(again, names, stages, seed, stop=13)
        assert schedule.pairs_done >= total
        total = schedule.pairs_done
        if schedule.finished:
            break
    assert schedule.finished and equal(outputs(job, names), undisturbed)
    assert not list(job.states.glob("pass*"))


@pytest.mark.parametrize("stretches", [*range(1, 10), 16, 17, 100])
def test_the_tree_holds_every_stretch_once(stretches):
    grid = Grid(1, stretches, 1, 1, 1)

    def below(node: Node) -> list[int]:
        if not node.level:
            return [node.index]
        one, other = grid.children(node)
        assert grid.parent(one) == grid.parent(other) == node
        return below(one) + below(other)

    assert below(grid.root(0, 0)) == list(range(stretches))
    assert list(grid.leaves(grid.root(0, 0))) == list(range(stretches))


def test_the_cut_depends_on_sizes_alone():
    for rows, cols in ((0, 5), (3, 0), (1, 1), (10**5, 10**5), (1000, 10**9), (10**9, 10**9)):
        grid = make_grid(rows, cols)
        assert grid.stretch % grid.chunk == 0 and grid.block <= 2**17 and grid.chunk <= 2**16
        assert sum(b - a for k in range(min(grid.stretches, 9)) for a, b in grid.chunks_of(k)) <= cols
    assert make_grid(10**5, 10**5).blocks * make_grid(10**5, 10**5).stretches >= 64
    assert Schedule(Grid(0, 5, 1, 1, 1), 1).finished


def test_files_of_every_kind_and_empty_sides(tmp_path):
    import pyarrow
    import pyarrow.parquet
    from safetensors.torch import save_file

    x, _, y, w = numbers()
    save_file({"x": x, "other": x + 1}, tmp_path / "x.safetensors")
    table = pyarrow.table({"y": list(y.numpy()), "b": w.numpy()})
    pyarrow.parquet.write_table(table, tmp_path / "y.parquet", row_group_size=17)
    files = str(tmp_path / "y.parquet")
    cols = {"y": [files, files], "b": [files, files]}
    job, names, stages = make_job(tmp_path, "a", ops.kernel_sum, str(tmp_path / "x.safetensors"), cols, bandwidth=2.0)
    work(job, names, stages)
    found = outputs(job, names)["result"]
    torch.testing.assert_close(found, ops.kernel_sum(x, y, w, bandwidth=2.0) * 2)
    numpy.save(tmp_path / "none.npy", numpy.zeros((0, 5), "float32"))
    job, names, stages = make_job(
        tmp_path, "b", ops.kernel_sum, str(tmp_path / "x.safetensors"), str(tmp_path / "none.npy")
    )
    work(job, names, stages)
    assert torch.equal(outputs(job, names)["result"], torch.zeros(27))


def test_a_file_that_changes_is_an_error(tmp_path):
    job, names, stages = make_job(tmp_path)
    work(job, names, stages, stop=5)
    given = tmp_path / "given" / "y1.npy"
    numpy.save(given, numpy.load(given) + 1)
    with pytest.raises(mr.StreamError, match=r"y1\.npy has changed since"):
        work(job, names, stages)
    with pytest.raises(mr.StreamError, match=r"holds another job: .*y1\.npy has changed since"):
        make_job(tmp_path)


def test_a_folder_is_of_one_job(tmp_path):
    make_job(tmp_path)
    with pytest.raises(mr.StreamError, match="holds another job: col_chunk was 8, and is 9"):
        make_job(tmp_path, chunk=9)
    files = {"rows": str(tmp_path / "given" / "x*.npy"), "cols": str(tmp_path / "given" / "y*.npy")}
    make_job(tmp_path, "near", fold=mr.ops.knn, **files, k=5)
    with pytest.raises(mr.StreamError, match=r"holds another job: k was 5, and is 4\."):
        make_job(tmp_path, "near", fold=mr.ops.knn, **files, k=4)
    with pytest.raises(mr.ArgumentError, match=r"given.*\.npy of the rows lies in out=.*given"):
        make_job(tmp_path, "given")
    with pytest.raises(mr.ArgumentError, match="sinkhorn is not one fold per row"):
        make_job(tmp_path, "both", fold=mr.ops.sinkhorn)
    (tmp_path / "out" / "job.json").write_text("{")
    with pytest.raises(mr.StreamError, match=r"job\.json cannot be read"):
        make_job(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(mr.StreamError, match="holds files, but no job"):
        make_job(tmp_path, "mine")
    with driver._lock(tmp_path / "out"), pytest.raises(mr.StreamError, match="another process"):  # noqa: SIM117
        with driver._lock(tmp_path / "out"):
            pass


def test_no_partial_file_under_the_final_name(tmp_path, monkeypatch):
    job, names, stages = make_job(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(mr.StreamError, match=r"cannot be written: No space left.*goes on where it stopped"):
            work(job, names, stages)
    assert not list(job.states.iterdir())
    work(job, names, stages, stop=3)
    assert len(list(job.states.iterdir())) >= 2


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(k=52), mr.TopKError, "k = 52 of only 51 columns"),
        (dict(k=0), mr.ArgumentError, "k was given 0"),
        (dict(), mr.ArgumentError, "missing a required argument: 'k'"),
        (dict(k=3, metric="far"), mr.ArgumentError, "metric was given 'far'"),
        (dict(k=3, kk=3), mr.ArgumentError, "unexpected keyword argument 'kk'"),
        (dict(k=3, cols="none/*.npy"), mr.ArgumentError, "no file fits none"),
        (dict(k=3, cols="none.npy"), mr.ArgumentError, "there is no file none.npy"),
        (dict(k=3, cols=7), mr.ArgumentError, r"cols was given 7 for y. Give a path"),
        (dict(k=3, rows={"z": "x"}), mr.ArgumentError, "rows: z is unknown and x is missing"),
        (dict(k=3, chunk=0), mr.ArgumentError, "col_chunk was given 0"),
        (dict(fold=ops.maxsim), mr.StreamError, "this op adds up its rows"),
        (dict(fold=ops.linear_cross_entropy), mr.ArgumentError, "missing a required argument: 'target'"),
        (dict(fold=len), mr.ArgumentError, "len is not one fold per row"),
        (dict(k=3, out=7), mr.ArgumentError, "out was given 7"),
    ],
)
def test_mistakes_are_told_before_any_work(change, error, says, tmp_path):
    x, _, y, _ = numbers()
    paths = {n: save_parts(tmp_path, n, t, [len(t)]) for n, t in (("x", x), ("y", y))}
    given = {"fold": ops.knn, "rows": paths["x"], "cols": paths["y"], "out": tmp_path / "o", "block": 10, "chunk": 7}
    given.update(change)
    keys = ("fold", "rows", "cols", "out", "block", "chunk")
    options = {n: v for n, v in given.items() if n not in keys}
    with pytest.raises(error, match=says):
        driver._make_job(given["fold"], given["rows"], given["cols"], given["out"], 1, 0, given["block"],
                         given["chunk"], options)  # fmt: skip
    assert not (tmp_path / "o").exists()


def test_parts_that_do_not_fit_are_named(tmp_path):
    x, _, y, _ = numbers()
    numpy.save(tmp_path / "a0.npy", x.numpy())
    numpy.save(tmp_path / "a1.npy", x[:, :3].numpy())
    numpy.save(tmp_path / "b0.npy", x.numpy())
    numpy.save(tmp_path / "b1.npy", x.double().numpy())
    y_path = save_parts(tmp_path, "y", y, [51])
    for name, error in (("a", mr.ShapeError), ("b", mr.DTypeError)):
        with pytest.raises(error, match=rf"{name}1\.npy holds .* for x, but the first part holds"):
            make_job(tmp_path, "o", ops.knn, str(tmp_path / f"{name}*.npy"), y_path, k=3)
    (tmp_path / "c.npy").write_bytes(b"\x93NUMPY no")
    with pytest.raises(mr.StreamError, match=r"c\.npy cannot be read"):
        make_job(tmp_path, "o", ops.knn, str(tmp_path / "c.npy"), y_path, k=3)


def test_the_forecast_counts_what_a_job_does():
    given = dict(rows=(10**6, 32), cols=(10**6, 32), k=10, measure=False)
    cost = mr_ray.estimate(ops.knn, workers=4, machines=2, **given)
    grid = make_grid(10**6, 10**6)
    assert cost.units == grid.blocks * grid.stretches
    assert cost.read_bytes == (grid.blocks + 1) * 10**6 * 128 / 2  # all columns for each block, and the rows once
    more = mr_ray.estimate(ops.knn, workers=8, machines=4, **given)
    assert 1.7 < cost.seconds / more.seconds < 2.3
    assert "workers of 2 machines" in str(cost) and "not measured" in str(cost) and not cost.measured
    for bad in (dict(workers=0), dict(rows=(5, 0)), dict(rows={"q": (5, 3)})):
        with pytest.raises(mr.ArgumentError):
            mr_ray.estimate(ops.knn, **{"rows": (9, 3), "cols": (9, 3), "workers": 1, "k": 2, **bad})


def test_the_forecast_of_a_cpu_is_measured_here():
    """How near it comes is in a results file of ``benchmarks.ray``: a loaded machine times anything."""
    sizes = dict(rows=(1000, 8), cols=(40_000, 8), workers=1)
    measured, modelled = (mr_ray.estimate(ops.kernel_sum, measure=m, **sizes) for m in (True, False))
    assert measured.measured and not modelled.measured
    assert measured.compute_seconds > 0
    assert (measured.units, measured.peak) == (modelled.units, modelled.peak)
