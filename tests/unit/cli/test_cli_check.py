"""``monoidreduce check``: it finds what is wrong, in the right words, and nothing where nothing is wrong."""

import json
import os

import pytest
import torch

import monoidreduce as mr
from monoidreduce.cli import check as checks
from monoidreduce.cli import measure, workload
from monoidreduce.cli.workload import Target
from tests.support import ROOT, internals
from tests.support.command_line import call
from tests.support.comparison import flatten, is_float, named
from tests.support.layers import ZOO

FILE = ROOT / "tests" / "support" / "wrong_layers.py"
QUICK = ("--size", "5x7", "--size", "33x65")


def check(name: str, *more: str) -> tuple[int, dict]:
    code, out, err = call("check", f"{FILE}:{name}", "--json", *more)
    assert "Traceback" not in err, err
    return code, json.loads(out)


def failed(data: dict) -> dict[str, str]:
    return {c["name"]: c["words"] for c in data["checks"] if c["answer"] == "FAILED"}


# What is wrong is found, and said


@pytest.mark.parametrize(
    ("name", "law", "words"),
    [
        ("Halves", "associativity", "it is not associative"),
        ("Affine", "commutativity", "it is not commutative"),
        ("WrongPullback", "local gradient", "its pullback is wrong"),
        ("WrongIdentity", "left identity", "its identity is wrong"),
    ],
)
def test_a_broken_law_is_named_with_a_counterexample(name, law, words):
    code, data = check(name)
    assert code == 1 and data["passed"] is False
    assert list(failed(data)) == [law]
    assert (
        words in failed(data)[law] and f"{name} breaks the law of" in failed(data)[law] and "a = " in failed(data)[law]
    )


@pytest.fixture
def small(monkeypatch):
    """Memory is measured at a size that takes less time, where tiles are smaller still."""
    internals.set_tiles(monkeypatch, pairs=2**14)
    return ("--size", "9x13", "--large", "512x1024")


def test_a_layer_that_materialises_is_found_by_its_memory(small):
    code, data = check("Whole", *small)
    assert code == 1 and list(failed(data)) == ["memory"]
    assert "it materialises" in failed(data)["memory"] and "largest tensor was 8.39 MB" in failed(data)["memory"]
    answers = {c["name"]: c["answer"] for c in data["checks"]}
    assert answers["values"] == "ok" and answers["gradients"] == "ok" and answers["second gradients"] == "not tried"


def test_the_same_layer_in_tiles_does_not_materialise(small):
    code, data = check("Tiled", *small)
    assert (code, failed(data)) == (0, {})


def test_a_mask_alone_is_a_matrix_too(small):
    code, data = check("masked", *small)
    assert code == 1 and "it materialises" in failed(data)["memory"]


def test_an_engine_that_materialises_is_found(small, monkeypatch):
    monkeypatch.setenv("MONOIDREDUCE_ENGINE", "reference")
    code, data = check("attention", *small, "--features", "4")
    assert code == 1 and list(failed(data)) == ["memory"]


def test_a_branch_on_a_pair_is_shown_with_its_line():
    code, data = check("branches")
    assert code == 1 and list(failed(data)) == ["trace"]
    assert "Use torch.where" in failed(data)["trace"] and "if s > 0:" in failed(data)["trace"]


def test_a_wrong_monoid_inside_an_op_is_found():
    code, data = check("with_wrong_monoid", *QUICK)
    assert code == 1 and "its pullback is wrong" in failed(data)["laws of WrongPullback"]
    assert "gradients" in failed(data)


def test_wrong_gradients_and_values_are_found():
    code, data = check("doubled", *QUICK, "--large", "64x64")
    assert code == 1 and "by 1.0e+00" in failed(data)["gradients"]
    code, data = check("shifted", *QUICK, "--large", "64x64")
    assert code == 1 and "differ from the dense form's" in failed(data)["values"]


def test_a_table_that_is_too_small_is_one_failure(tmp_path):
    file = tmp_path / "tables.py"
    file.write_text(
        "import monoidreduce as mr\n\n\n@mr.op\n"
        'def far(x: mr.Row["d"], y: mr.Col["d"], t: mr.Table["n"]):\n'
        "    return mr.sum(x @ y * mr.lookup(t, (mr.row_index - mr.col_index).abs().clamp(max=20)))\n"
    )
    code, out, _ = call("check", f"{file}:far", "--json", *QUICK, "--large", "64x64")
    (verdict,) = json.loads(out)["checks"]
    assert code == 1 and "has 16 entries" in verdict["words"] and "--features n=SIZE" in verdict["words"]
    assert call("check", f"{file}:far", "--json", *QUICK, "--large", "64x64", "--features", "n=21")[0] == 0


def test_chance_is_no_determinism():
    code, data = check("random", *QUICK, "--large", "64x64")
    assert code == 1 and "hidden seed" in failed(data)["determinism"]
    assert {c["name"]: c["answer"] for c in data["checks"]}["memory"] == "not tried"  # of 64 × 64 pairs


def test_without_a_dense_form_gradients_are_held_against_differences():
    code, data = check("undocumented", *QUICK, "--large", "64x64")
    words = {c["name"]: c["words"] for c in data["checks"]}
    assert code == 0 and "finite differences" in words["gradients"] and "undocumented_dense" in words["values"]


# Nothing is found where nothing is wrong


def test_a_good_layer_passes_everything():
    code, data = check("attention", *QUICK)
    assert code == 0 and data["passed"] is True
    assert [c["name"] for c in data["checks"]] == [c.name for c in checks.CHECKS]
    assert {c["answer"] for c in data["checks"]} == {"ok"}


def test_a_ready_made_layer_is_checked_and_steps_are_told():
    code, out, err = call("check", "sample", "--size", "5x7", "--large", "64x64")
    assert code == 0 and "it draws at random" in " ".join(out.split())
    assert err.splitlines()[0].endswith(" s  1/8 values") and len(err.splitlines()) == 8


def test_a_good_monoid_passes_every_law():
    code, data = check("Total", "--cases", "28")
    assert code == 0 and {"associativity", "commutativity", "left identity", "local gradient"} <= {
        c["name"] for c in data["checks"] if c["answer"] == "ok"
    }


GOOD = [layer for layer in ZOO if layer.name in ("causal_attention", "swiglu", "topk", "pooling", "sinkhorn_step")]


@pytest.mark.parametrize("layer", named(GOOD))
def test_layers_of_the_zoo_pass(layer):
    target = Target("op", layer.op, __import__(__name__), __file__)
    trials = checks.LayerUnderTest(workload.from_target(target), ((5, 7), (33, 65)), (64, 64), torch.device("cpu"))
    for check in checks.CHECKS[:4]:
        verdict = checks.run_check(check, trials)
        assert verdict.answer != checks.FAILED, verdict


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layer", named(ZOO))
def test_the_dense_form_made_of_a_program_is_the_layer(layer):
    args = layer.make(17, 29, torch.Generator().manual_seed(0), torch.float64)
    args = tuple(a.detach().requires_grad_() if is_float(a) else a for a in args)
    ours, dense = measure.run_once(layer.op, args), measure.run_once(workload.make_dense(layer.op), args)
    assert (
        measure.relative_error(ours.values, dense.values) < 1e-9
        and measure.relative_error(ours.gradients, dense.gradients) < 1e-8
    )
    assert len(flatten(layer.op(*args))) == len(ours.values) + len(ours.discrete)


# What an op is given


@mr.op
def asks(
    x: mr.Row["d"], w: mr.Col["e"], at: mr.Row, group: mr.Row, own: mr.Col, mask: mr.Pair, bias: mr.Col | None = None
):
    same = (group == own) & (mr.col_index == at)
    return mr.sum(torch.where(mask & same, x.sum() * w.sum(), 0.0))


def test_what_is_not_declared_is_read_from_the_body():
    target = Target("asks", asks, __import__(__name__), __file__)
    x, w, at, group, own, mask, bias = workload.from_target(target, features={"": 3, "e": 5}, batch=2).inputs(
        11, 6, torch.bfloat16, torch.device("cpu")
    )
    assert x.shape == (2, 11, 3) and w.shape == (2, 6, 5) and x.dtype == torch.bfloat16 and x.requires_grad
    assert at.dtype == torch.int64 and at.min() >= 0 and at.max() < 6
    assert torch.equal(group, group.sort(-1).values) and own.shape == (2, 6)
    assert mask.dtype == torch.bool and mask.shape == (2, 11, 6) and bias is None


# Mistakes: one message, no traceback, exit code 2


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:x", "the file nowhere.py does not exist"),
        ("{folder}:x", "is neither a .py file nor an importable module"),
        ("{file}", "names no layer. Give FILE.py:NAME, such as layers.py:attention. The file has: "),
        ("{file}:atention", "has no atention. Did you mean attention?"),
        ("{file}:xyzzy", "has no xyzzy. It has: "),
        ("{file}:NUMBER", "NUMBER is an int. Name an op"),
        ("{file}:helper", "its arguments are not declared. Put a function helper_inputs(rows, cols)"),
        ("{file}:stumbles", "wrong_layers.py, line {line}: ValueError: no such thing"),
        ("{syntax}:x", "line 2: "),
        ("{raises}:x", "line 3: ZeroDivisionError: division by zero"),
        ("{leaves}:x", "line 1: SystemExit: 3"),
        ("{undeclared}:x", "x: parameter q has no annotation"),
        ("{bytes}:x", "cannot be read"),
        ("os:path", "path is a module. Name an op"),
    ],
)
def test_a_mistake_in_the_target(target, message, tmp_path):
    sources = {
        "syntax": b"x = 1\ndef f(:\n",
        "raises": b"\nx = 1\n1 / 0\n",
        "leaves": b"raise SystemExit(3)\n",
        "undeclared": b"import monoidreduce as mr\n@mr.op\ndef x(q):\n    return q\n",
        "bytes": b"\xff\xfe\x00x = '\xff'",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_bytes(source)
    places = {name: str(tmp_path / f"{name}.py") for name in sources} | {"file": str(FILE), "folder": str(tmp_path)}
    line = FILE.read_text().splitlines().index('    raise ValueError("no such thing")') + 1
    code, out, err = call("check", target.format(**places))
    assert (code, out) == (2, "") and "Traceback" not in err
    assert message.format(line=line) in err and err.startswith("monoidreduce: error: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0x3"], "'0x3' is no size. Give ROWSxCOLS"),
        (["--size", "3x4x5"], "is no size"),
        (["--features", "f=x"], "'f=x' is no size of features"),
        (["--features", "z=3"], "--features z=3: there is no such letter. <op attention(q: Row"),
        (["--set", "q=nails"], "Fill it with one of normal"),
        (["--set", "nobody=3"], "--set nobody: there is no such parameter"),
        (["--set", "alone"], "'alone' sets nothing"),
        (["--dense", "nobody"], "has no function nobody, which --dense names"),
        (["--device", "cuda:99"], "there is no cuda:99 here"),
        (["--device", "toaster"], "is no device"),
        (["--batch", "0"], "'0' is no whole number from 1"),
    ],
)
def test_a_mistake_in_the_options(arguments, message):
    code, out, err = call("check", f"{FILE}:attention", *arguments)
    assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_what_the_file_prints_stays_out_of_the_json(tmp_path):
    (tmp_path / "loud.py").write_text(FILE.read_text() + "\nprint('hello from the file')\n")
    code, out, err = call("check", f"{tmp_path / 'loud.py'}:Total", "--cases", "28", "--json")
    assert code == 0 and json.loads(out)["passed"] and "hello from the file" in err


@pytest.mark.parametrize("width", [30, 60, 80, 140])
def test_verdicts_fit_the_window(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, _ = call("check", f"{FILE}:Halves")
    assert code == 1 and "FAILED" in out and "\x1b[" not in out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(os.sep) not in line) <= width
