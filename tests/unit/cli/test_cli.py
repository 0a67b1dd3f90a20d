"""The command line: the demo end to end at tiny sizes, its page, its instrument, and what a mistake looks like."""

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from monoidreduce import __version__
from monoidreduce.cli import app, execute, report
from monoidreduce.cli import demo as demo_module
from monoidreduce.cli.demo import Findings, Result, Side, measure_layer, print_limits, print_results, render_page
from monoidreduce.cli.layers import PAPER_LAYERS as LAYERS
from monoidreduce.cli.layers import TIME_LAYERS
from monoidreduce.cli.limits import QUESTIONS, Growth, Limit, Run
from monoidreduce.cli.measure import MemoryProfile, Moment, describe_environment, profile_memory
from monoidreduce.cli.report import format_number
from tests.support.command_line import Page, assert_self_contained, call, progress_of


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One quick demo: its exit code, what it printed, and the page."""
    folder = tmp_path_factory.mktemp("demo") / "deep" / "report"
    code, out, err = call("demo", "--quick", "--json", "--out", str(folder))
    return code, out, err, (folder / "index.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def result():
    return measure_layer(LAYERS[0], LAYERS[0].quick, seconds=0)


def test_the_page_is_valid_and_needs_nothing_else(demo):
    assert_self_contained(demo[3])


def test_the_page_has_all_layers_and_figures(demo):
    page = Page(demo[3])
    for layer in (*TIME_LAYERS, *LAYERS):
        assert layer.name in page.words and layer.dense in page.words
    for question in QUESTIONS:
        assert question.title in page.words and question.torch_code in page.words
    assert page.elements.count("figure") == page.elements.count("svg") == len(QUESTIONS) + 2
    assert "Memory of MonoidReduce attention" in page.words and "Memory of naive attention" in page.words
    assert page.words.count("peak ") >= 2
    environment = describe_environment()
    for fact in (environment.version, environment.python, environment.torch, environment.cpu, environment.threads):
        assert fact in page.words
    assert "python -m monoidreduce demo --quick" in page.words and "mean little" in page.words


def test_json_is_all_that_stdout_gets(demo):
    code, out, err, _ = demo
    data = json.loads(out)
    assert code == 0 and progress_of(err)[-1].endswith(": memory")
    assert [layer["name"] for layer in data["layers"]] == [layer.name for layer in LAYERS]
    assert [limit["name"] for limit in data["limits"]] == [question.key for question in QUESTIONS]
    assert [layer["name"] for layer in data["wins"]] == [layer.name for layer in TIME_LAYERS]
    assert data["report"].endswith("index.html") and data["environment"]["version"] == __version__
    for layer in data["layers"]:
        for side in (layer["ours"], layer["naive"]):
            assert 0 < side["forward_ms"] <= side["total_ms"] and side["extra_bytes"] > 0


def test_charts_tables_and_numbers_agree(demo):
    data, page = json.loads(demo[1]), demo[3]
    rows = re.findall(r"<tr[^>]*><th scope=.row.>([\d,]+)</th>(.*?)</tr>", page)
    listed = [[size, *re.findall(r"<td[^>]*>(.*?)</td>", cells)] for size, cells in rows]
    drawn = re.findall(r"<title>(MonoidReduce|torch): (\d+) (\w+), ([\d.]+) MiB</title>", page)
    runs = [
        (who, run["size"], limit["unit"], format_number(run["peak_bytes"] / 2**20), run["peak_bytes"], limit)
        for limit in data["limits"] for who in ("ours", "torch") for run in limit[who]["runs"]
    ]  # fmt: skip
    assert len(runs) == len(listed) == len(drawn) >= 6
    named = {"ours": "MonoidReduce", "torch": "torch"}
    assert sorted((named[who], str(n), unit, mib) for who, n, unit, mib, *_ in runs) == sorted(drawn)
    for who, n, _, mib, peak, limit in runs:
        fits = "yes" if peak <= limit["memory_bytes"] else "no"
        assert any(row[:3] + row[4:] == [f"{n:,}", who, mib, fits] for row in listed)
    tiles = page[page.index('class="tiles"') : page.index("<dl>")]
    for limit in data["limits"]:
        for who in ("ours", "torch"):
            fitting = [r["size"] for r in limit[who]["runs"] if r["peak_bytes"] <= data["memory_bytes"]]
            assert limit[who]["largest"] == max(fitting, default=None)
            shown = f"{max(fitting):,}" if fitting else f"fewer than {min(r['size'] for r in limit[who]['runs']):,}"
            assert shown in tiles
    first = data["layers"][0]  # its memory is drawn over time, and is a cell of the table
    for who in ("ours", "naive"):
        megabytes = format_number(first[who]["extra_bytes"] / 1e6)
        assert f": {megabytes} MB beyond inputs and gradients" in page and f"<span>{megabytes}</span>" in page


@pytest.mark.parametrize("k", range(len(TIME_LAYERS) + len(LAYERS)), ids=[x.name for x in (*TIME_LAYERS, *LAYERS)])
def test_ours_is_as_exact_as_the_dense_form(demo, k):
    data = json.loads(demo[1])
    layer = [*data["wins"], *data["layers"]][k]
    assert layer["ours"]["error"] <= 2 * layer["naive"]["error"] + 1e-7, layer


def test_the_table_and_the_path_are_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = call("demo", "--quick", "--out", str(tmp_path))
    assert code == 0 and progress_of(err)
    for layer in (*TIME_LAYERS, *LAYERS):
        assert layer.name in out
    for question in QUESTIONS:
        assert f"{question.title} in 16 MiB" in out
    assert f"report: {tmp_path / 'index.html'}" in out
    assert out.startswith("--quick: these sizes are too small to tell.") and "Geometric means" not in out


def test_in_a_pipe_every_step_is_a_line_before_it_begins(demo):
    sides = [f"{question.title} in 16 MiB: {side}" for question in QUESTIONS for side in ("torch", "ours")]
    found = progress_of(demo[2])
    assert found[: len(sides)] == sides
    assert len(found) == len(sides) + 3 * len((*TIME_LAYERS, *LAYERS))


def test_a_quick_demo_ends_in_time_on_a_machine_that_compiles_long(tmp_path, monkeypatch):
    """Whatever the first of each list took, the rest is left out and named."""
    monkeypatch.setattr(demo_module, "QUICK_SECONDS", 0.0)
    code, out, _ = call("demo", "--quick", "--json", "--out", str(tmp_path))
    data = json.loads(out)
    assert code == 0 and [len(data[part]) for part in ("limits", "wins", "layers")] == [1, 1, 1]
    assert len(data["left_out"]) == len(QUESTIONS) + len(TIME_LAYERS) + len(LAYERS) - 3
    assert "Left out, for want of time: Largest vocabulary in 16" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("width", [30, 71, 72, 80, 111, 112, 200])
def test_the_table_fits_the_terminal(result, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    growth = Growth((Run(1024, 10**6, 0.1), Run(131072, 2**27, 9.0)), 2**28, "time")
    print_limits(report.make_console(), [Limit(question, growth, growth) for question in QUESTIONS])
    print_results(
        report.make_console(),
        [result],
        ["a note that is longer than a narrow terminal is wide, so that it must be folded"],
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert "attention" in "".join(lines)


def test_no_color_is_respected(result, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    print_results(report.make_console(), [result], [])
    assert "\x1b[3" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_results(report.make_console(), [result], [])
    assert "\x1b[3" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dmeo"], "No such command 'dmeo'"),
        (["demo", "--fast"], "No such option"),
        (["demo", "--out"], "requires an argument"),
        (["demo", "--memory", "much"], "'much' is no memory. Give a number of bytes"),
        (["demo", "--memory", "9999999GiB"], "is too much"),
        (["demo", "--device", "toaster"], "'toaster' is no device"),
        (["demo", "--out", "{file}"], "is a file"),
        (["demo", "--out", "{file}/below"], "cannot make the folder"),
    ],
)
def test_a_mistake_is_answered_without_a_traceback(arguments, message, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = call(*(a.format(file=tmp_path / "file") for a in arguments))
    assert code == 2 and out == ""
    assert message in err and "Traceback" not in err


def test_an_unknown_engine_is_answered_without_a_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "steam")
    code, _, err = call("demo", "--quick", "--out", str(tmp_path))
    assert code == 2 and "steam" in err and "Traceback" not in err


@pytest.mark.parametrize("name", ["click", "rich"])
def test_a_missing_extra_is_named(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    code, out, err = call("demo", "--quick", "--out", str(tmp_path))
    assert (code, out) == (2, "") and f"needs {name}" in err and 'pip install "monoidreduce[cli]"' in err
    assert not list(tmp_path.iterdir())


def test_pictures_without_matplotlib_say_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    for command in ("profile", "bench"):
        code, _, err = call(command, "mlp", "--out", str(tmp_path / "report"))
        assert code == 2 and "matplotlib" in err and "monoidreduce[cli]" in err
    assert not list(tmp_path.iterdir()), "said before the work"


def test_the_module_runs_and_knows_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "monoidreduce", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"monoidreduce {__version__}\n"


def test_no_command_shows_what_there_is():
    code, out, _ = call()
    assert code == 0
    places = [out.index(f"\n  {command.name} ") for command in app.COMMANDS]
    assert places == sorted(places), "in the order of the table"
    assert "..." not in out.split("Commands:")[1], "a command's first line is too long for the list"


@pytest.mark.parametrize("command", app.COMMANDS, ids=lambda c: c.name)
def test_every_command_has_help_and_json(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(command.name, "--help")
    assert (code, err) == (0, "") and "--json" in out and command.help.splitlines()[0] in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80 and "{" not in out
    takes = inspect.signature(execute.find_function(command)).parameters
    assert "given" in takes or {p.name for p in command.params} == set(takes)


def test_a_reader_that_goes_away_is_no_traceback():
    done = subprocess.run(
        f"set -o pipefail; {sys.executable} -m monoidreduce demo --help | head -c 0",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, app.PIPE) and "Traceback" not in done.stderr, done


def test_an_interruption_is_told_in_a_word(monkeypatch):
    def interrupted(**_):
        """Somebody presses Ctrl-C."""
        raise KeyboardInterrupt

    monkeypatch.setattr("monoidreduce.cli.demo.demo", interrupted)
    code, out, err = call("demo")
    assert (code, out, err) == (130, "", "monoidreduce: interrupted\n")


# The instrument


def test_every_category_is_found():
    x = torch.randn(100, 50, requires_grad=True)

    def forward():
        scratch = torch.ones(1000, 50)  # gone before the forward returns
        return ((x * scratch.mean()).exp(),)

    profile = profile_memory(forward, lambda y: torch.autograd.grad(y[0].sum(), x), [x])
    size = 100 * 50 * 4
    before, after = profile.moments[0], profile.moments[-1]
    assert (before.gradients, before.extra) == (size, 0)
    assert after.gradients == 2 * size  # the input and its gradient
    assert max(m.temporary for m in profile.moments) >= 1000 * 50 * 4
    returned = [m for m in profile.moments if m.seconds <= profile.forward_end][-1]
    assert returned.kept >= size and returned.temporary == 0  # the exponential, which is also saved
    assert 0 < profile.forward_end < profile.end
    assert profile.peak.total == max(m.total for m in profile.moments)


def test_the_dense_form_is_seen_to_hold_the_pair_matrix():
    rows, cols = 300, 400
    q, k = torch.randn(rows, 8, requires_grad=True), torch.randn(cols, 8, requires_grad=True)
    profile = profile_memory(
        lambda: ((q @ k.T).softmax(-1) @ k,), lambda y: torch.autograd.grad(y[0].sum(), (q, k)), [q, k]
    )
    assert profile.extra >= 2 * rows * cols * 4


def test_memory_is_read_from_the_trace_alone(monkeypatch):
    """An object for each event, of which nothing is read, would take longer than the run."""
    profiler = torch.autograd.profiler.profile
    if not hasattr(profiler, "_ensure_function_events"):
        pytest.skip("this torch makes them when a profile ends")
    monkeypatch.setattr(profiler, "_parse_kineto_results", lambda *_: pytest.fail("events were made"))
    assert profile_memory(lambda: (torch.zeros(1000) + torch.zeros(1000),), None, []).extra == 12000


def test_memory_that_was_there_before_does_not_count():
    held = [torch.ones(1000)]
    profile = profile_memory(lambda: (held.pop() * 2,), None, [])
    assert all(m.extra >= 0 for m in profile.moments) and 4000 <= profile.extra < 4100


# The figures


def synthetic(*levels: int) -> MemoryProfile:
    """A moment each millisecond with so many temporary bytes; the forward is the first half."""
    moments = tuple(Moment(k * 1e-3, 10, 5, level) for k, level in enumerate(levels))
    return MemoryProfile(moments, len(levels) * 0.5e-3, len(levels) * 1e-3)


def test_a_short_peak_is_not_lost_in_the_drawing():
    levels = [0] * 5000
    levels[1234] = 700
    drawn = list(report.highest_moments(synthetic(*levels), 100))
    assert len(drawn) == 100
    assert max(moment.total for _, moment in drawn) == 715
    assert [at for at, moment in drawn if moment.total == 715] == [pytest.approx(1.2)]


def test_a_low_profile_is_also_drawn_enlarged():
    low, high = synthetic(*[10_000_000] * 8), synthetic(*[300_000_000] * 8)
    top = report.memory_axis_top([low, high])
    assert "enlarged" in report.draw_memory(low, top, "low")
    assert "enlarged" not in report.draw_memory(high, top, "high")
    assert "peak 300 MB" in report.draw_memory(high, top, "high")


def test_a_page_escapes_and_survives_a_slower_larger_result():
    side = Side(1.0, 2.0, synthetic(1, 2, 3), 1e-7)
    worse = Result(LAYERS[0], LAYERS[0].quick, Side(2.0, 4.0, synthetic(10, 20, 30), 1e-7), side, rounds=1)
    odd = dataclasses.replace(describe_environment(), cpu="'<&>'")
    none = Growth((Run(512, None, 0.1),), 2**20, "memory")
    unfit = Limit(QUESTIONS[0], none, none)
    page = Page(render_page(Findings([unfit], [], [worse], 2**20, 1.0, ["<a layer>"]), odd))
    assert "fewer than 512 tokens" in page.words and "Left out, for want of time: <a layer>" in page.words
    assert "2.00× slower" in page.words and "larger" in page.words and odd.cpu in page.words
    assert "--quick" not in page.words


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = call("demo", "--quick", "--out", str(tmp_path))
    assert code == 2 and "cannot write" in err
