"""The numbers of the comparison are those of the recorded results."""

import re

from tests.support import ROOT
from tests.support.doc_pages import DOCS

ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([\w-]+-\d{8}-\d{4}) \|$", re.MULTILINE)


def find_wrong(text: str) -> list[str]:
    """The rows of which a number stands in no line about that work in the file they name."""
    wrong = []
    for against, work, ours, theirs, file in ROW.findall(text):
        recorded = (ROOT / "benchmarks" / "results" / f"{file}.md").read_text(encoding="utf-8")
        lines = [line for line in recorded.splitlines() if line.startswith(f"| {work} |")]
        for side in (ours, theirs):
            numbers = re.findall(r"[\d.]+", side)
            if not any(all(re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.])", line) for n in numbers) for line in lines):
                wrong.append(f"{against}, {work}: {side} is not in {file}")
    return wrong


def test_every_number_is_recorded():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    assert len(ROW.findall(text)) >= 15
    assert find_wrong(text) == []
    assert len(find_wrong(text.replace("0.793", "0.703").replace("1899.6", "1899.7"))) == 2


def test_bold_is_where_theirs_is_smaller():
    for against, work, ours, theirs, _ in ROW.findall((DOCS / "comparison.md").read_text(encoding="utf-8")):
        pairs = zip(ours.split(" / "), theirs.split(" / "), strict=True)
        for mine, other in pairs:
            assert (float(other.strip("*")) < float(mine)) == other.startswith("**"), f"{against}, {work}"


def test_every_library_of_the_page_is_compared():
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    names = "FlexAttention", "FlashAttention 4", "Liger", "QuACK", "Cut Cross-Entropy", "KeOps", "GeomLoss", "faiss"
    assert all(f"\n| [{name}](" in text for name in (*names, "scikit-learn"))
