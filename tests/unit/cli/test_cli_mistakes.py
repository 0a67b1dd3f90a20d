"""Mistakes on the command line: each is one clear line and exit code 2, never a traceback."""

import contextlib
import io
import os
import sys

import pytest

from monoidreduce.cli import app, main
from tests.support.command_line import call

LAYERS = """
import torch
import monoidreduce as mr
from monoidreduce import Col, Row


class Raises(mr.Monoid):
    v: mr.Scalar = 0.0

    def combine(a, b):
        raise ValueError("no such thing")


class Misspelt(mr.Monoid):
    v: mr.Scalar = 0.0

    def combine(a, b):
        return Misspelt(v=a.w + b.v)


class PullbackRaises(mr.Monoid):
    v: mr.Scalar = 0.0

    def combine(a, b):
        return PullbackRaises(v=a.v + b.v)

    def pullback(c, a, g):
        raise RuntimeError("not written yet")


class Exits(mr.Monoid):
    v: mr.Scalar = 0.0

    def combine(a, b):
        raise SystemExit(0)


class Halves(mr.Monoid):
    v: mr.Scalar = 0.0

    def combine(a, b):
        return Halves(v=(a.v + b.v) / 2)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def with_raises(x: Row["f"], y: Col["f"]):
    return mr.reduce(Raises, v=x @ y).v


@mr.op
def with_halves(x: Row["f"], y: Col["f"]):
    return mr.reduce(Halves, v=x @ y).v


def two(x, y):
    return x
"""
SMALL = ("--size", "4x5", "--large", "16x16", "--cases", "4")
HUGE = "9" * 5000  # more digits than int() takes


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "layers.py").write_text(LAYERS)
    (tmp_path / "imported.py").write_text("from layers import Raises\n")
    (tmp_path / "fails.py").write_text("\n1 / 0\n")
    (tmp_path / "syntax.py").write_text("def (\n")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("layers", "fails"):
        sys.modules.pop(name, None)


def mistake(*argv):
    """The one line that these arguments are answered with."""
    code, out, err = call(*argv)
    assert code == 2 and not out, (code, out, err)
    lines = [line for line in err.splitlines() if line.startswith("monoidreduce: error: ")]
    assert len(lines) == 1 and err.strip().endswith(lines[0]), err
    assert "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.py:Raises", "layers.py, line 11: ValueError: no such thing"),
        ("layers.py:Misspelt", "layers.py, line 18: AttributeError: 'Misspelt' object has no attribute 'w'"),
        ("layers.py:PullbackRaises", "layers.py, line 28: RuntimeError: not written yet"),
        ("layers.py:Exits", "layers.py, line 35: SystemExit: 0"),
        ("layers.py:with_raises", "layers.py, line 11: ValueError: no such thing"),
        ("imported.py:Raises", "layers.py, line 11: ValueError: no such thing"),
    ],
)
def test_a_monoid_that_raises(folder, name, words):
    assert words in mistake("check", name, *SMALL)


@pytest.mark.parametrize("command", ["check", "explain", "profile", "tune"])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("../x:y", "'../x' is neither a .py file nor an importable module (a file's path ends in .py)"),
        ("./layers:attention", "'./layers' is neither a .py file nor an importable module"),
        ("..:y", "Give FILE.py:NAME"),
        ("/nowhere/x:y", "a file's path ends in .py"),
        ("a..b:c", "Give FILE.py:NAME"),
        ("fails:x", "fails cannot be imported"),
        ("fails.py:x", "fails.py, line 2: ZeroDivisionError"),
        ("syntax.py:x", "line 1: invalid syntax"),
        ("bytes.py:x", "cannot be read as Python"),
        ("folder.py:x", "is a folder"),
        ("missing.py:x", "does not exist"),
        ("x" * 5000 + ".py:y", "there is no file"),
        ("a\0b.py:y", "a"),
    ],
    ids=lambda x: x[:20].replace("\0", "0"),
)
def test_targets_that_name_nothing(folder, command, target, words):
    assert words in mistake(command, target)


@pytest.mark.parametrize("number", ["99999999999999999999", HUGE, "0", "-1", "1.5", "f=" + HUGE, "f=0"], ids=len)
@pytest.mark.parametrize("command", ["check", "explain", "profile", "tune"])
def test_numbers_of_features(folder, command, number):
    line = mistake(command, "layers.py:attention", "--features", number)
    assert "is no size of features. Give one number from 1 to" in line and len(line) < 300


@pytest.mark.parametrize("size", ["99999999999999999999", HUGE, "0x4", "4x" + HUGE, "4x", "x", "1x2x3"], ids=len)
def test_sizes(folder, size):
    assert "is no size. Give ROWSxCOLS" in mistake("check", "layers.py:attention", "--size", size)
    assert "is no size. Give ROWSxCOLS" in mistake("check", "layers.py:attention", "--large", size)


@pytest.mark.parametrize("option", ["--rows", "--cols", "--batch"])
@pytest.mark.parametrize("number", ["99999999999999999999", HUGE, "0", "-1", "x"], ids=len)
def test_counts(folder, option, number):
    assert option in mistake("explain", "layers.py:attention", option, number)


def test_what_does_not_fit_in_memory(folder):
    for argv in (("--features", "999999999999999"), ("--size", "999999999999999x999999999999999")):
        assert "out of memory" in mistake("check", "layers.py:attention", *argv)


def test_a_dense_form_of_other_arguments(folder):
    line = mistake("check", "layers.py:attention", *SMALL, "--dense", "two")
    assert "two, which --dense names, is called with 3 arguments" in line


def test_an_op_whose_monoid_is_refused_fails_its_check(folder):
    code, out, err = call("check", "layers.py:with_halves", *SMALL)
    assert code == 1 and "Halves breaks the law of associativity" in out.replace("\n", " ") and "Traceback" not in err


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["text", "json"])
def test_a_reader_that_goes_away(folder, more):
    read, write = os.pipe()
    os.close(read)
    errors = io.StringIO()
    with open(write, "w") as gone, contextlib.redirect_stdout(gone), contextlib.redirect_stderr(errors):
        code = main(["explain", "layers.py:attention", "--rows", "4", "--cols", "4", *more])
    assert code == app.PIPE and not errors.getvalue()
