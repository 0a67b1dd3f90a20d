"""Put the newest results into the pages: every number there comes from a results file, by this script.

``<!-- results: KIND -->`` is filled with the newest table of that kind, as the benchmark wrote it; ``<!-- results:
KIND, short -->`` with one row for each work, all contenders side by side.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import stream_gpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- results: ([\w-]+)(, short)? -->\n.*?<!-- end results -->", re.S)
OURS = "ours"


class Entry(NamedTuple):
    """What one contender took for one work: milliseconds (forward, then both, or what there is) and megabytes."""

    work: str
    who: str
    times: tuple[float, ...]
    extra: float | None


def pages() -> list[Path]:
    """The pages that show results."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in every if BLOCK.search(page.read_text(encoding="utf-8"))]


def newest(kind: str) -> Path | None:
    """The newest results file of a kind (their names sort by date)."""
    return max(RESULTS.glob(f"{kind}-[0-9]*.json"), default=None, key=lambda p: p.name)


def filled(text: str) -> str:
    """A page's text with each block replaced by what the newest results of its kind say."""

    def table(match: re.Match[str]) -> str:
        kind, short = match.group(1), match.group(2) or ""
        found, body = newest(kind), "Not measured yet.\n"
        if found is not None:
            results = json.loads(found.read_text(encoding="utf-8"))
            whole = WHOLE.get(kind, lambda _: found.with_suffix(".md").read_text(encoding="utf-8"))
            body = shortened(kind, found) if short else whole(results)
        return f"<!-- results: {kind}{short} -->\n{body}<!-- end results -->"

    return BLOCK.sub(table, text)


def _cpu(results: dict[str, Any]) -> Iterator[Entry]:
    for row in results["rows"]:
        for who, forward in row["times"]["forward"].items():
            name = OURS if who == "MonoidReduce" else who
            times = (forward, *(row["times"][what][who] for what in ("both",) if what in row["times"]))
            yield Entry(row["case"], name, times, row["memory"].get(who))


def _gpu(results: dict[str, Any]) -> Iterator[Entry]:
    for row in results.get("speed", ()):
        for who, times in row.items():
            if who not in ("work", "MB") and isinstance(times, list):
                extra = row["MB"][0] if who == OURS and isinstance(row.get("MB"), list) else None
                yield Entry(row["work"], who, tuple(times), extra)


def _wide(results: dict[str, Any]) -> Iterator[Entry]:
    for row in results["rows"]:
        who = OURS if row["who"].startswith(f"{OURS} ") else row["who"]  # of every budget
        if isinstance(row.get("ms"), int | float) and who not in (
            "the products alone, again",
            "the forward's product alone",
        ):
            yield Entry(row["work"], who, (row["ms"],), row.get("MB"))


SHORT: dict[str, tuple[Callable[[dict[str, Any]], Iterator[Entry]], str]] = {
    "cpu": (_cpu, "forward / forward and backward (or forward alone)"),
    "gpu": (_gpu, "forward / forward and backward (or forward alone)"),
    "gpu-works": (_gpu, "forward / forward and backward (or forward alone)"),
    "gpu-wide": (_wide, "loss and gradients"),
}


WHOLE: dict[str, Callable[[dict[str, Any]], str]] = {"stream": stream_gpu.summary}  # where the table is too long


def shortened(kind: str, path: Path) -> str:
    """One row for each work: ours, and everybody else in one cell."""
    results = json.loads(path.read_text(encoding="utf-8"))
    entries, meaning = SHORT[kind]
    works: dict[str, list[Entry]] = {}
    for entry in entries(results):
        works.setdefault(entry.work, []).append(entry)
    where = results["environment"]
    lines = [
        f"{where['machine']}; {where['versions']}; {where['date']}.",
        f"Milliseconds, {meaning}; in brackets the extra memory.",
        "",
        "| work | ours | others |",
        "|---|---|---|",
    ]
    for work, found in works.items():
        ours = "; ".join(_shown(e) for e in found if e.who == OURS) or "–"
        others = "; ".join(f"{e.who} {_shown(e)}" for e in found if e.who != OURS)
        lines.append(f"| {work} | {ours} | {others} |")
    return "\n".join(lines) + "\n"


def _shown(entry: Entry) -> str:
    times = " / ".join(f"{t:.3g}" if t < 100 else f"{t:.0f}" for t in entry.times)
    return times if entry.extra is None else f"{times} ({entry.extra:.0f} MB)"


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write("the pages hold the newest results\n")


if __name__ == "__main__":
    main()
