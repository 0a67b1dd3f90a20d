"""The README's python blocks run, in order, in one namespace: a README that is wrong fails here.

A block that cannot run here is marked with ``<!-- not run -->`` on the line before it (blank lines between are fine).
"""

import json
import re

import pytest

from benchmarks import limits, readme
from benchmarks.readme import Entry, best_peer, filled, front, pages
from tests.support import ROOT
from tests.support.doc_pages import DOCS, MARK, blocks, run

README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("internals/*.md"))]
ELSEWHERE = {"domains.md", "gallery.md", "moving.md", "points.md", "recipes.md"}  # run by tests of their own


def test_the_readme_shows_python():
    assert blocks(README.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_every_block_runs(page, monkeypatch):
    if page != README:  # nor is each fold of the pages compiled
        monkeypatch.setenv("MONOIDREDUCE_CPP", "never")
    run(page)


def test_blocks_share_a_namespace_and_marked_ones_are_left_out(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        f"# T\n```python\nx = 1\n```\ntext\n{MARK}\n\n```python\n1 / 0\n```\n```bash\nls\n```\n```python\ny = x\n```\n"
    )
    assert [line for line, _ in blocks(page.read_text())] == [3, 15]
    assert run(page)["y"] == 1


def test_a_wrong_block_fails_at_its_own_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# T\n\n```python\nx = 1\n\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run(page)
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(page), 6)


def test_the_readme_and_the_benchmarks_show_results():
    assert {"README.md", "benchmarks.md"} <= {page.name for page in pages()}


@pytest.mark.parametrize("page", pages(), ids=lambda p: p.name)
def test_the_numbers_are_the_newest_results(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run: python -m benchmarks.readme"


def test_results_are_the_newest_of_their_kind_and_read_somewhere():
    """What a newer file of its kind replaces, or no page, picture or test reads, is deleted."""
    sources = [*pages(), *DOCS.rglob("*.md"), *(DOCS / "draw").glob("*.py"), *(ROOT / "tests").rglob("*.py")]
    text = "\n".join(p.read_text(encoding="utf-8") for p in sources)
    for file in readme.RESULTS.glob("*.json"):
        kind = re.sub(r"-\d{8}-\d{4}$", "", file.stem)
        assert readme.newest(kind) == file, f"a newer file replaces {file.name}"
        shown = re.search(rf"<!-- results: {kind}[ ,]|{file.stem}|[\"']{kind}[\"']", text)
        assert shown or kind in [h.kind for h in readme.HEADLINES], f"nobody reads {file.name}"


def test_the_readme_has_one_table_of_results():
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- results:") == 1 and front() in text
    assert {"training step", "longest context", "largest vocabulary"} <= set(re.findall(r"^\| (\w+ \w+)", text, re.M))


def test_the_readme_is_two_screens():
    words = re.sub(r"```.*?```|<!-- results.*?end results -->", "", README.read_text(encoding="utf-8"), flags=re.S)
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90 and len(words.split()) <= 550


def test_the_best_peer_is_the_fastest_within_the_memory():
    times = {"ours": (1.0, 9.0), "the products alone": (1.0,), "slow": (1.0, 8.0), "fast": (2.0, 5.0)}
    entries = [Entry("work", who, t, 10.0 if who == "slow" else 100.0) for who, t in times.items()]
    assert best_peer(entries).who == "fast"
    assert best_peer(entries, within=50).who == "slow"


def test_what_fits_is_measured_written_and_read_back(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limits, "QUESTIONS", limits.QUESTIONS[2:])
    arguments = ["limits", "--memory", "8MiB", "--seconds", "0.2", "--commit", "abc1234", "--out", str(tmp_path / "a")]
    monkeypatch.setattr("sys.argv", arguments)
    limits.main()
    (tmp_path / "said.txt").write_text(capsys.readouterr().out)
    (found,) = (tmp_path / "a").glob("limits-cpu-*.json")
    results = json.loads(found.read_text())
    assert (
        results["limits"][0]["ours"]["largest"] >= 512 and "| Largest batch |" in found.with_suffix(".md").read_text()
    )
    monkeypatch.setattr("sys.argv", ["limits", "--read", str(tmp_path / "said.txt"), "--out", str(tmp_path / "b")])
    limits.main()
    assert [json.loads(p.read_text()) for p in (tmp_path / "b").glob("*.json")] == [results]


def test_a_kind_whose_name_begins_with_another_is_not_taken_for_it(tmp_path, monkeypatch):
    for name in ("model-20261118-0110", "model-20261117-0110", "model-8b-20261119-0110"):
        (tmp_path / f"{name}.json").write_text("{}")
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    assert [p.stem for p in map(readme.newest, ("model", "model-8b"))] == [
        "model-20261118-0110",
        "model-8b-20261119-0110",
    ]
    assert readme.newest("mode") is None
