"""The python of a page, run: what tests of the documentation share."""

import re
from pathlib import Path

from tests.support import ROOT

DOCS = ROOT / "docs"
MARK = "<!-- not run -->"
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """The first line's number and the source of each block to run."""
    return [
        (text.count("\n", 0, match.start(1)) + 1, match.group(1))
        for match in BLOCK.finditer(text)
        if not text[: match.start()].rstrip().endswith(MARK)
    ]


def run(path: Path) -> dict[str, object]:
    """Run a file's blocks; line numbers in tracebacks (and for inspect.getsource) are those of the file."""
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, source in blocks(path.read_text(encoding="utf-8")):
        exec(compile("\n" * (line - 1) + source, str(path), "exec"), namespace)
    return namespace
