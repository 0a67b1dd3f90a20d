"""``bench``, ``profile``, ``explain``, ``cache`` and ``doctor``: end to end at tiny sizes, and what they write."""

import dataclasses
import json
import struct
from pathlib import Path

import pytest
import torch

import monoidreduce as mr
from monoidreduce.cli import bench, profile, report, workload
from monoidreduce.cli.bench import Measurement
from monoidreduce.cli.layers import LAYERS
from monoidreduce.cli.measure import describe_environment
from tests.support import ROOT, internals
from tests.support.command_line import assert_self_contained, call, progress_of

FILE = ROOT / "tests" / "support" / "wrong_layers.py"
CPU = torch.device("cpu")
ORIGIN = report.Origin(describe_environment(), 1.0, "command <x>")


def is_png(path: Path) -> bool:
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    return data[:8] == b"\x89PNG\r\n\x1a\n" and width > 400 and height > 300


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """One small benchmark of three layers, and the folder with its files."""
    folder = tmp_path_factory.mktemp("bench")
    layers = ("attention", "cross-entropy", f"{FILE}:attention")
    options = ["--size", "24x40", "--size", "48x80", "--seconds", "0", "--out", str(folder)]
    code, out, err = call("bench", *layers, *options, "--peer", "naive", "--peer", "sdpa", "--peer", "torch-ce",
                          "--peer", "liger", "--json")  # fmt: skip
    assert code == 0 and "attention 24 × 40, naive torch: first run" in progress_of(err)
    return json.loads(out), folder


def test_every_contender_is_measured_at_every_size(measured):
    data, _ = measured
    found = {(r["layer"], r["rows"], r["who"]) for r in data["rows"]}
    for rows in (24, 48):
        for who in ("ours", "naive torch", "SDPA"):
            assert ("attention", rows, who) in found
        assert ("cross-entropy, mean", rows, "F.linear_cross_entropy") in found
    for row in data["rows"]:
        assert 0 < row["forward_ms"] <= row["total_ms"] and row["extra_bytes"] > 0 and row["note"] == "", row
        assert (row["error"] is not None) == (row["rows"] == 24)
        assert row["error"] is None or row["error"] < 1e-5, row
    assert data["not_measured"] == {"Liger": "runs on GPUs only"}


def test_all_files_are_written_and_the_page_needs_nothing_else(measured):
    data, folder = measured
    assert sorted(Path(f).name for f in data["files"]) == ["bench.html", "bench.json", "bench.md", "bench.png"]
    assert all(Path(f).parent == folder for f in data["files"]) and is_png(folder / "bench.png")
    page = assert_self_contained((folder / "bench.html").read_text(encoding="utf-8"))
    assert page.elements.count("svg") == 6  # time and memory of three layers, of which two are named attention
    for word in ("SDPA", "F.linear_cross_entropy", "24 × 40", "monoidreduce bench attention", "runs on GPUs only"):
        assert word in page.words
    kept = json.loads((folder / "bench.json").read_text())
    assert kept["rows"] == data["rows"]
    text = (folder / "bench.md").read_text()
    assert text.count("| 24 × 40 |") == sum(r["rows"] == 24 for r in data["rows"])


def test_a_peer_that_fails_is_told_of_and_stops_nobody():
    layer = workload.find("attention")
    no_backward = lambda q, k, v: layer.dense(q, k, v).detach()

    def fails(*args):
        raise RuntimeError("no kernel image\nfor this device")

    def half(q, k, v):
        if torch.is_grad_enabled() and q.requires_grad:
            y = layer.dense(q, k, v)
            y.register_hook(lambda g: fails())
            return y
        return layer.dense(q, k, v)

    calls = {"ours": layer.call, "detached": no_backward, "broken": fails, "half": half}
    rows = bench.measure_contenders(layer, calls, (16, 24), torch.float32, CPU, 0.0, True, lambda stage: None)
    found = {r.who: r for r in rows}
    assert found["ours"].total_ms and found["ours"].error < 1e-5
    assert found["detached"].total_ms is None and found["detached"].forward_ms
    assert found["broken"].note == "failed: RuntimeError: no kernel image" and found["broken"].ms is None
    assert found["half"].note.startswith("forward only: RuntimeError: no kernel image") and found["half"].forward_ms


def test_a_wrong_peer_is_seen_by_its_error():
    layer = workload.find("mlp")
    wrong = lambda x, p, q: layer.dense(x, p, q) * 1.01
    rows = bench.measure_contenders(
        layer, {"wrong": wrong}, (16, 24), torch.float32, CPU, 0.0, True, lambda stage: None
    )
    assert rows[0].error == pytest.approx(0.01, rel=1e-3)


def test_what_would_not_fit_is_not_tried(monkeypatch):
    internals.pretend_free_memory(monkeypatch, 1000)
    layer = workload.find("mlp")
    calls = {"ours": layer.call, "naive torch": layer.dense}
    rows = bench.measure_contenders(layer, calls, (16, 24), torch.float32, CPU, 0.0, True, lambda stage: None)
    assert rows[0].ms and rows[1].ms is None and "GB free" in rows[1].note


@pytest.mark.sampled(3)
@pytest.mark.parametrize("key", LAYERS)
def test_every_ready_made_layer_is_its_dense_form(key):
    layer = workload.find(key, features={"": 5})
    calls = {"ours": layer.call, "naive torch": layer.dense}
    rows = bench.measure_contenders(layer, calls, (20, 20), torch.float32, CPU, 0.0, True, lambda stage: None)
    assert all(r.ms for r in rows)
    assert key == "sample" or all(r.error < 1e-5 for r in rows), rows


def test_peers_say_why_they_are_not_there():
    layer, loss = workload.find("attention"), workload.find("cross-entropy")
    table = {p.key: p for p in bench.PEERS}
    assert table["cce"].reason(loss, CPU) == "runs on GPUs only"
    absent = dataclasses.replace(table["keops"], package="no_such_package_at_all")
    assert absent.reason(layer, CPU) == "not installed: pip install no_such_package_at_all"
    assert not table["sdpa"].fits(loss) and table["naive"].fits(loss)
    target = workload.find(f"{FILE}:attention")
    assert "attention_dense" in table["compile"].reason(target, CPU)


@pytest.mark.slow
def test_compiled_peers_run_here(tmp_path):
    """torch.compile and FlexAttention take a C++ compiler's time."""
    options = ["--size", "64", "--peer", "compile", "--peer", "flex", "--seconds", "0", "--out", str(tmp_path)]
    code, out, _ = call("bench", "attention", "--json", *options)
    rows = {r["who"]: r for r in json.loads(out)["rows"]}
    assert code == 0 and rows["torch.compile"]["total_ms"] and rows["FlexAttention"]["forward_ms"]


# The page and its charts


def rows_of(**changes) -> list[Measurement]:
    base = [
        Measurement("a <layer>", n, n, who, 1.0 * n, 3.0 * n, 1000 * n, 1e-7)
        for n in (10, 20, 40)
        for who in ("ours", "naive torch", "x & y")
    ]
    return [dataclasses.replace(r, **changes) if r.who == "x & y" else r for r in base]


@pytest.mark.parametrize(
    "changes", [{}, {"total_ms": None}, {"forward_ms": None, "total_ms": None, "extra_bytes": None}, {"extra_bytes": 0}]
)
def test_a_page_survives_what_was_not_measured(changes):
    rows = rows_of(**changes)
    text = bench.render_page(rows, {"<b>": "1 & 2"}, "how", ORIGIN)
    page = assert_self_contained(text)
    assert "a <layer>" in page.words and "<b>" in page.words and page.elements.count("svg") == 2
    assert "| x & y |" in bench.render_markdown(rows, {}, "how", ORIGIN)


def test_a_single_size_and_equal_numbers_can_be_drawn():
    drawn = report.draw_curves({"ours": [(100.0, 1.0)], "theirs": [(100.0, 1.0)]}, "ms", "a chart")
    assert "NaN" not in drawn and "nan" not in drawn and drawn.count('class="mark') == 2
    drawn = report.draw_curves({"ours": [(1e2, 1e-3), (1e9, 1e6)]}, "ms", "wide")
    assert drawn.count('class="grid"') <= 12


def test_comparison_is_of_like_with_like():
    rows = rows_of(total_ms=None)
    found = {who: (times, memory) for who, times, memory in bench.compare_with_ours(rows)}
    assert found["naive torch"] == (pytest.approx(1.0), pytest.approx(1.0))
    assert found["x & y"][0] == pytest.approx(1.0)  # forward with forward


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_tables_fit_the_window(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    bench.print_results(report.make_console(), rows_of(note="[odd] " + "words " * 20), {"Liger": "not here"}, [])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width and "[odd] words" in out and "Liger not measured" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "there is no layer nothing. Give FILE.py:NAME, or one of attention"),
        (["attention", "--peer", "nobody"], "--peer nobody: there is no such peer"),
        (["attention", "--set", "q=normal"], "attention is a ready-made layer"),
        (["attention", "--seconds", "-1"], "not in the range"),
        (["attention", "--dtype", "int8"], "'int8' is no floating type here"),
        (["attention", "--out", "{file}"], "is a file"),
    ],
)
def test_a_mistake_is_found_before_the_work(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = call("bench", *(a.format(file=tmp_path / "file") for a in arguments))
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


# profile


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    code, out, err = call("profile", f"{FILE}:attention", "--rows", "300", "--cols", "500", "--features", "8", "--out",
                          str(folder), "--json")  # fmt: skip
    assert code == 0
    assert progress_of(err) == ["ours: first run", "ours: memory", "naive: first run", "naive: memory"]
    return json.loads(out), folder


def test_a_profile_has_both_sides_over_time(profiled):
    data, folder = profiled
    assert data["matrix_bytes"] == 300 * 500 * 4 and data["skipped"] == ""
    assert data["naive"]["extra_bytes"] >= 2 * data["matrix_bytes"]
    for side in (data["ours"], data["naive"]):
        assert 0 < side["forward_seconds"] < side["seconds"] and side["peak_bytes"] >= side["extra_bytes"]
        assert max(p["kept"] + p["temporary"] for p in side["timeline"]) == side["extra_bytes"]
    page = assert_self_contained((folder / "profile.html").read_text(encoding="utf-8"))
    assert page.elements.count("svg") == 2 and "attention (300 × 500, float32)" in page.words
    assert is_png(folder / "profile.png") and json.loads((folder / "profile.json").read_text())["ours"] == data["ours"]


def test_a_profile_without_a_dense_form_says_so(tmp_path):
    code, out, _ = call("profile", f"{FILE}:undocumented", "--rows", "30", "--cols", "50", "--out", str(tmp_path))
    assert code == 0 and "dense form not run: there is none beside it in the file" in " ".join(out.split())
    assert "was not run" in (tmp_path / "profile.html").read_text()
    assert profile.render_page.__doc__


# explain, tune, cache, doctor


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path / "cache"))
    mr.cache.clear()
    return tmp_path


def test_explain_allocates_nothing():
    size = ["--rows", "10000000", "--cols", "10000000", "--features", "64"]
    code, out, err = call("explain", f"{FILE}:attention", *size)
    assert (code, err) == (0, "") and "10000000 rows × 10000000 columns" in out and "runs " in out
    code, out, _ = call("explain", f"{FILE}:attention", "--json", "--forward", "--dtype", "float32")
    data = json.loads(out)
    assert code == 0 and data["rows"] == 4096 and data["backward"] is False and data["schedules"]


def test_explain_measures_if_asked():
    code, out, _ = call("explain", f"{FILE}:attention", "--rows", "40", "--cols", "50", "--measure", "--json")
    assert code == 0 and json.loads(out)["measured"]["seconds"] > 0


def test_tuning_is_remembered(own_cache):
    size = ["--rows", "70", "--cols", "90", "--features", "4", "--forward"]
    code, out, _ = call("tune", f"{FILE}:attention", *size, "--json")
    data = json.loads(out)
    assert code == 0 and data["rows"] == 70 and isinstance(data["folds"], list)
    kept = {fold["key"]["program"] for fold in data["folds"]}
    assert kept <= {p["key"]["program"] for p in json.loads(call("cache", "--json")[1])["plans"]}
    code, out, _ = call("tune", "mlp", *size)
    assert code == 0 and out.strip()


def test_explain_of_what_calls_no_op():
    code, out, err = call("explain", f"{FILE}:Whole")
    assert (code, out) == (2, "") and "calls no op, so there is no plan to explain" in err


@pytest.mark.parametrize(("name", "op"), [("knn", "knn"), ("attention", "attention"), ("linear_entropy", "entropy")])
def test_explain_of_ready_made_layers(name, op):
    code, out, err = call("explain", name, "--rows", "1e8", "--cols", "1e7", "--json")
    (found,) = json.loads(out)["calls"]
    assert (code, err) == (0, "") and (found["op"], found["rows"], found["cols"]) == (op, 10**8, 10**7)


def test_explain_of_a_ready_made_layer_whose_arguments_are_not_known():
    code, out, err = call("explain", "linear_jsd")
    assert (code, out) == (2, "") and "Write a function NAME that calls ops.linear_jsd" in err


def test_the_cache_is_shown_shared_and_cleared(own_cache):
    from monoidreduce.plan.schedule import Key, Record, remember

    remember(Record(Key("abc", "64 × 64", "float32", "cpu", ""), {"schedule": "flash"}))
    code, out, _ = call("cache", "--json")
    assert code == 0 and [p["key"]["program"] for p in json.loads(out)["plans"]] == ["abc"]
    code, out, _ = call("cache")
    assert code == 0 and "schedule flash" in out and "1 plans in" in " ".join(out.split())
    file = str(own_cache / "plans.json")
    assert json.loads(call("cache", "export", file, "--json")[1])["exported"] == 1
    assert json.loads(call("cache", "clear", "--json")[1])["removed"] == 1
    assert json.loads(call("cache", "--json")[1])["plans"] == []
    assert json.loads(call("cache", "import", file, "--json")[1])["imported"] == 1
    assert call("cache", "path")[1].strip() == str(own_cache / "cache")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export"], "needs the name of a FILE"),
        (["clear", "x"], "takes no FILE"),
        (["burn"], "is not one of"),
        (["import", "{folder}/nowhere"], "plans cannot be read from"),
        (["import", "{file}"], "holds no plans"),
        (["export", "{folder}/no/such/folder/x"], "plans cannot be written to"),
    ],
)
def test_a_mistake_with_the_cache(arguments, message, own_cache):
    (own_cache / "garbage").write_text("{]")
    given = [a.format(folder=own_cache, file=own_cache / "garbage") for a in arguments]
    code, out, err = call("cache", *given)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_the_doctor_knows_what_is_here(own_cache, monkeypatch):
    code, out, _ = call("doctor", "--json")
    data = json.loads(out)
    found = {c["name"]: c for c in data["checks"]}
    assert code == 0 and data["ready"] and found["torch"]["words"].startswith(torch.__version__)
    assert found["cache"]["words"].startswith(str(own_cache / "cache")) and data["runs"]
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "steam")
    code, out, _ = call("doctor")
    assert code == 1 and "steam" in out and "FAILED" in out
