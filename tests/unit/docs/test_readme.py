"""The README's python blocks run, in order, in one namespace: a README that is wrong fails here.

A block that cannot run here is marked with ``<!-- not run -->`` on the line before it (blank lines between are fine).
"""

import pytest

from benchmarks.readme import Entry, best_peer, filled, headline, pages
from tests.support import ROOT
from tests.support.doc_pages import DOCS, MARK, blocks, run

README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("internals/*.md"))]
ELSEWHERE = {"gallery.md", "moving.md", "recipes.md"}  # run by tests of their own


def test_the_readme_shows_python():
    assert blocks(README.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in ELSEWHERE], ids=lambda p: p.name)
def test_every_block_runs(page):
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


def test_the_readme_has_one_table_of_results():
    text = README.read_text(encoding="utf-8")
    assert text.count("<!-- results:") == 1 and headline() in text


def test_the_best_peer_is_the_fastest_within_the_memory():
    times = {"ours": (1.0, 9.0), "the products alone": (1.0,), "slow": (1.0, 8.0), "fast": (2.0, 5.0)}
    entries = [Entry("work", who, t, 10.0 if who == "slow" else 100.0) for who, t in times.items()]
    assert best_peer(entries).who == "fast"
    assert best_peer(entries, within=50).who == "slow"
