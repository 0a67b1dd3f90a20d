"""The commands that the docs show still work, at tiny sizes, with the exit codes that the docs show."""

import re
import shlex

import pytest

from docs import transcripts
from tests.support import ROOT, internals
from tests.support.command_line import call

DOCS = ROOT / "docs"
SHOWN = [(page, shown) for page in transcripts.PAGES for shown in transcripts.shown((DOCS / page).read_text())]
SMALL = {"--rows": "40", "--cols": "60", "--features": "8"}


def smaller(arguments: list[str], code: int) -> list[str]:
    """The same command at tiny sizes, without a compiler's time."""
    command, *rest = arguments
    for option, value in SMALL.items():
        if option in rest and rest[rest.index(option) + 1].isdecimal():
            rest[rest.index(option) + 1] = value
    if command == "bench":
        pairs = zip(["", *rest], rest, strict=False)
        kept = ["24" if before == "--size" and word.isdecimal() else word for before, word in pairs]
        rest = [w for k, w in enumerate(kept) if w != "compile" and kept[k : k + 2] != ["--peer", "compile"]]
        rest += ["--seconds", "0"]
    if command == "check" and "Whole" in rest[0]:
        rest += ["--large", "512x1024", "--size", "9x13"]
    elif command == "check":
        rest += ["--large", "64x64", *(["--size", "9x13", "--size", "1x5"] if code == 0 else [])]
    return [command, *rest]


@pytest.mark.parametrize(("page", "shown"), SHOWN, ids=[f"{p} {s.command[:60]}" for p, s in SHOWN])
def test_a_command_of_the_docs_works(page, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONOIDREDUCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MONOIDREDUCE_ENGINE", raising=False)
    monkeypatch.setenv("COLUMNS", str(transcripts.WIDTH))
    if "Whole" in shown.command:
        internals.set_tiles(monkeypatch, pairs=2**14)
    for name, source in shown.files.items():
        (tmp_path / name).write_text(source)
    program, *arguments = shlex.split(shown.command)
    assert program == "monoidreduce", "only our own commands are shown"
    for earlier in shown.before if arguments[0] == "cache" else ():  # what is in the cache, they put there
        call(*smaller(shlex.split(earlier)[1:], 0))
    tried = smaller(arguments, shown.code) if not arguments[0].startswith("-") else arguments
    code, out, err = call(*tried)
    assert code == shown.code, (tried, out, err)
    printed = out + err
    labels = re.findall(r"^([A-Za-z][\w. -]*?)(?:  |:|$)", shown.output, re.MULTILINE)
    labels = [re.sub(r"^runs \w+$", "runs ", label) for label in labels]  # small ones may run by another schedule
    missing = [label for label in labels if label not in printed and not label[-1].isdecimal()]
    assert not missing, f"the docs show lines that begin with {missing}; run: python docs/transcripts.py"


def test_every_command_is_documented():
    shown = {shlex.split(s.command)[1] for _, s in SHOWN}
    assert {"check", "explain", "bench", "profile", "tune", "cache", "doctor"} <= shown
    assert "monoidreduce demo" in (DOCS / "cli.md").read_text()


def test_the_script_fills_a_page(tmp_path):
    page = (
        "<!-- file: a.txt.py -->\n```python\nx = 1\n```\nin <!-- seconds -->?<!-- end -->\n"
        "```console\n$ cat a.txt.py\nold\n$ false\n```\n"
    )
    done = transcripts.filled(page)
    assert "```console\n$ cat a.txt.py\nx = 1\n\n$ false\n[exit code 1]\n```" in done
    assert re.search(r"<!-- seconds -->\d+ s<!-- end -->", done)
    assert [(s.command, s.code) for s in transcripts.shown(done)] == [("cat a.txt.py", 0), ("false", 1)]
