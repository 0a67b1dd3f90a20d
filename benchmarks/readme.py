"""Put the newest results into the README: every number there comes from a results file, by this script."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from . import cpu, gpu
from .cpu import RESULTS

README = Path(__file__).parent.parent / "README.md"


def newest(kind: str) -> Path | None:
    """The newest results file of a kind (their names sort by date)."""
    return max(RESULTS.glob(f"{kind}-[0-9]*.json"), default=None, key=lambda p: p.name)


def filled(text: str) -> str:
    """The README's text with each ``<!-- results: KIND -->`` block replaced by the newest table of that kind."""

    def table(match: re.Match[str]) -> str:
        found = newest(match.group(1))
        tables = {"cpu": cpu.markdown, "gpu": gpu.markdown}
        body = "Not measured yet.\n"
        if found is not None:
            body = tables[match.group(1)](json.loads(found.read_text(encoding="utf-8")))
        return f"<!-- results: {match.group(1)} -->\n{body}<!-- end results -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end results -->", table, text, flags=re.S)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    README.write_text(filled(text), encoding="utf-8")
    sys.stderr.write("README.md holds the newest results\n")
