"""The numbers of the comparison are those of the recorded results."""

import re

from tests.support import ROOT
from tests.support.doc_pages import DOCS

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([\w-]+-\d{8}-\d{4}) \|$", re.MULTILINE)


def find_lines(recorded: str, work: str) -> list[str]:
    """The rows about a work: those that begin with it, or those below a heading that is it."""
    below = re.search(rf"^\*\*{re.escape(work)}\*\*.*\n\n((?:\|.*\n)+)", recorded, re.MULTILINE)
    own = [line for line in recorded.splitlines() if line.startswith(f"| {work} |")]
    return own or (below[1].splitlines() if below else [])


def find_wrong(text: str) -> list[str]:
    """The rows of which a number stands in no line about that work in the file they name."""
    wrong = []
    for against, work, ours, theirs, file in ROW.findall(text):
        lines = find_lines((ROOT / "benchmarks" / "results" / f"{file}.md").read_text(encoding="utf-8"), work)
        for side in (ours, theirs):
            numbers = re.findall(r"\d[\d.,]*", side)
            pattern = r"(?<![\d.,]){}(?![\d.,])"
            if not any(all(re.search(pattern.format(re.escape(n)), line) for n in numbers) for line in lines):
                wrong.append(f"{against}, {work}: {side} is not in {file}")
    return wrong


def test_every_number_is_recorded():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    assert len(ROW.findall(text)) >= 20
    assert find_wrong(text) == []
    assert len(find_wrong(text.replace("0.793", "0.703").replace("3717.6", "3717.7").replace("1,513", "1,531"))) == 3


def test_bold_is_where_theirs_is_smaller():
    for against, work, ours, theirs, _ in ROW.findall((DOCS / "comparison.md").read_text(encoding="utf-8")):
        pairs = zip(ours.replace(",", "").split(" / "), theirs.replace(",", "").split(" / "), strict=True)
        for mine, other in pairs:
            assert (float(other.strip("*")) < float(mine)) == other.startswith("**"), f"{against}, {work}"


def test_every_library_of_the_page_is_compared():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    names = "FlexAttention", "FlashAttention 4", "Liger", "QuACK", "Cut Cross-Entropy", "KeOps", "GeomLoss", "faiss"
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", text, re.MULTILINE))
    for name in (*names, "scikit-learn"):
        assert all(f"- **{part}**: " in sections[name] for part in ("Theirs", "Ours", "To move")), name
