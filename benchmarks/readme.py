"""Put the newest results into the README and the docs: every number there comes from a results file, by this script."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from . import cpu, gpu, ranks, stream_gpu
from .cpu import RESULTS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "ranks.md", ROOT / "docs" / "streams.md"]
TABLES = {"cpu": cpu.markdown, "gpu": gpu.markdown, "ranks": ranks.markdown, "stream": stream_gpu.summary}


def newest(kind: str) -> Path | None:
    """The newest results file of a kind (their names sort by date)."""
    return max(RESULTS.glob(f"{kind}-[0-9]*.json"), default=None, key=lambda p: p.name)


def filled(text: str) -> str:
    """A page's text with each ``<!-- results: KIND -->`` block replaced by the newest table of that kind."""

    def table(match: re.Match[str]) -> str:
        found = newest(match.group(1))
        body = "Not measured yet.\n"
        if found is not None:
            body = TABLES[match.group(1)](json.loads(found.read_text(encoding="utf-8")))
        return f"<!-- results: {match.group(1)} -->\n{body}<!-- end results -->"

    return re.sub(r"<!-- results: (\w+) -->\n.*?<!-- end results -->", table, text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write(f"{', '.join(p.name for p in PAGES)} hold the newest results\n")
