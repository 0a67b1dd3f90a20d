"""Fill the tables of README.md and docs/ from the newest files of benchmarks/results: ``python -m benchmarks.readme``.

A page marks the place of a table with a comment. This script writes the lines between it and ``<!-- end results -->``:

- ``<!-- results: KIND -->``: the newest table of that kind, as the benchmark wrote it, without the rows that a newer
  table of the same page has too (of a kind that begins alike, on the same machine, with at least the same contenders);
- ``<!-- results: KIND, short -->``: one row per case, all contenders side by side;
- ``<!-- results: front -->``: the README's table, a model's step and what fits in a given memory;
- ``<!-- results: headline -->``: selected cases beside the best peer.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import limits, stream_gpu

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- results: ([\w-]+)(, short)? -->\n.*?<!-- end results -->", re.S)
OURS = "ours"
HEADLINE, FRONT = "headline", "front"
AIMS = {"goal", "bar"}  # columns of a file that say what was aimed at: not for readers of a page


class Entry(NamedTuple):
    """Time and memory of one contender in one case.

    ``times`` are milliseconds: of the forward, then of forward and backward, or the one that was measured. ``extra``
    is in megabytes.
    """

    work: str
    who: str
    times: tuple[float, ...]
    extra: float | None


class Headline(NamedTuple):
    """One row of the table of selected cases: which case of which results, and how to name it.

    ``who`` is our entry. ``within`` limits peers to those that hold at most so many megabytes.
    """

    kind: str
    work: str
    label: str
    who: str = OURS
    within: float | None = None


HEADLINES = (
    Headline("shapes-long", "full 4×16×4096×128 bfloat16", "attention, 64 heads, 4096 × 4096, D 128"),
    Headline("shapes-long-fa4", "causal 4×16×4096×128 bfloat16", "the same, causal, with FlashAttention 4 in the run"),
    Headline(
        "shapes-long-fa4",
        "causal 4×32/8×4096×64 bfloat16",
        "causal attention, 128 heads on 32 of keys, 4096 × 4096, D 64",
    ),
    Headline("shapes-long", "causal 1×16×16384×128 bfloat16", "causal attention, 16 heads, 16384 × 16384, D 128"),
    Headline("gpu", "attention, sliding window 1024", "attention, sliding window 1024"),
    Headline("gpu", "SwiGLU 16384×16384 D128", "SwiGLU, 16384 rows × 16384 hidden units, D 128"),
    Headline("gpu", "contrastive N32768 D128", "contrastive loss, batch 32768, D 128"),
    Headline("gpu-wide", "cross-entropy g M8192 D2304 V256000, random", "linear cross-entropy, 8192 × 256000, D 2304"),
    Headline(
        "gpu-wide",
        "cross-entropy g M8192 D2304 V256000, random",
        "the same in 64 MB, beside the best below 100 MB",
        "ours 64MB",
        100,
    ),
    Headline("gpu-wide", "Gumbel sampling M1024 D4096 V128256", "sampling, 1024 rows, vocabulary 128256, D 4096"),
    Headline("gpu", "10 nearest N100000 D64 float32", "10 nearest neighbours, 100000 points, D 64, float32"),
    Headline("cpu", "attention float32 1 × 16384 × 16384, D 64", "CPU: attention, 16384 × 16384, D 64"),
    Headline(
        "cpu", "linear cross-entropy float32 4096 × 512 × 131072", "CPU: linear cross-entropy, 4096 × 131072, D 512"
    ),
    Headline("cpu-clouds", "Gaussian sum float32 20000 × 20000, D 64", "CPU: Gaussian kernel sum, 20000 × 20000, D 64"),
)


def pages() -> list[Path]:
    """The pages that show results."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if BLOCK.search(page.read_text(encoding="utf-8"))]


def newest(kind: str) -> Path | None:
    """The newest results file of a kind (their names sort by date)."""
    dated = re.compile(rf"{re.escape(kind)}-\d{{8}}-\d{{4}}")
    return max((p for p in RESULTS.glob("*.json") if dated.fullmatch(p.stem)), default=None, key=lambda p: p.name)


def filled(text: str) -> str:
    """A page's text with each block replaced by the newest results of its kind."""
    shown = {kind: found for kind, _ in BLOCK.findall(text) if (found := newest(kind)) is not None}

    def table(match: re.Match[str]) -> str:
        kind, short = match.group(1), match.group(2) or ""
        found, body = newest(kind), "Not measured yet.\n"
        if kind in (HEADLINE, FRONT):
            body = headline() if kind == HEADLINE else front()
        elif found is not None:
            results = json.loads(found.read_text(encoding="utf-8"))
            whole = WHOLE.get(kind, lambda _: found.with_suffix(".md").read_text(encoding="utf-8"))
            body = shortened(kind, found) if short else drop_aims(whole(results)).replace("\n## ", "\n### ")
            if not short:
                later = [p for k, p in shown.items() if _are_alike(k, kind) and _date(p) > _date(found)]
                body = drop_measured_again(body, [p.with_suffix(".md").read_text(encoding="utf-8") for p in later])
        return f"<!-- results: {kind}{short} -->\n{body}<!-- end results -->"

    return BLOCK.sub(table, text)


def drop_aims(text: str) -> str:
    """The text without the columns of its tables that say what was aimed at.

    >>> drop_aims("| work | ms | goal |\\n|---|---|---|\\n| a | 1 | < 2 |\\n\\n| who | goal |\\n").splitlines()
    ['| work | ms |', '|---|---|', '| a | 1 |', '', '| who |']
    """
    lines, dropped = [], set[int]()
    for line in text.splitlines():
        cells = line.split("|")
        if not line.startswith("|"):
            dropped = set()
        elif not dropped:
            dropped = {k for k, cell in enumerate(cells) if cell.strip() in AIMS}
        lines.append("|".join(cell for k, cell in enumerate(cells) if k not in dropped))
    return "\n".join(lines) + "\n"


def _are_alike(kind: str, other: str) -> bool:
    """Whether two kinds begin alike: ``shapes`` and ``shapes-long``."""
    return kind != other and kind.partition("-")[0] == other.partition("-")[0]


def _date(path: Path) -> str:
    return path.stem[-len("20261118-0108") :]


class Row(NamedTuple):
    """A row of a table: its section and its first cell, and whom it compares."""

    section: str
    work: str
    contenders: frozenset[str]


def _rows(text: str) -> list[Row | None]:
    """What each line is a row of; None for lines that are none."""
    found: list[Row | None] = []
    section, header = "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        section = line.lstrip("# ") if line.startswith("#") else section
        if not cells or not header or set(line) <= set("|-") or header[0] != "work":
            header = header if cells and header else cells
            found.append(None)
            continue
        named = dict(zip(header, cells, strict=False))
        whom = [name for name, cell in named.items() if cell != "–"]
        whom += [re.sub(r"[ \d./]+$", "", peer).strip() for peer in named.get("peers", "").split(";")]
        found.append(Row(section, cells[0], frozenset([*whom, named.get("against", "")])))
    return found


def drop_measured_again(text: str, later: Sequence[str]) -> str:
    """A table without the rows that later ones of the same machine have too; without its sections that are empty then.

    >>> old = ["- machine: A", "", "| work | ours | theirs |", "|---|---|---|", "| a | 1 | 2 |", "| b | 1 | – |"]
    >>> new = [line for line in old if "| a |" not in line]
    >>> print(drop_measured_again("\\n".join(old), ["\\n".join(new)]).strip())
    - machine: A
    <BLANKLINE>
    | work | ours | theirs |
    |---|---|---|
    | a | 1 | 2 |
    """
    machine = re.findall("^- machine: .*", text, re.M)
    again = [
        row for other in later if re.findall("^- machine: .*", other, re.M) == machine for row in _rows(other) if row
    ]
    same = lambda row, other: row[:2] == other[:2] and row.contenders <= other.contenders
    kept = [
        line
        for line, row in zip(text.splitlines(), _rows(text), strict=True)
        if row is None or not any(same(row, other) for other in again)
    ]
    return re.sub(r"(?:^#+ .*\n\n)?^\|.*\n\|[-|]+\n(?!\|)\n?", "", "\n".join(kept) + "\n", flags=re.M)


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


def _shapes(results: dict[str, Any]) -> Iterator[Entry]:
    """Memory is left out: in these files it counts the results, unlike in the others."""
    for row in results["rows"]:
        for who, times in row["ms"].items():
            yield Entry(row["work"], who.replace("FA4", "FlashAttention 4"), tuple(times), None)


def _wide(results: dict[str, Any]) -> Iterator[Entry]:
    for row in results["rows"]:
        if isinstance(row.get("ms"), int | float):
            yield Entry(row["work"], row["who"], (row["ms"],), row.get("MB"))


def _wide_short(results: dict[str, Any]) -> Iterator[Entry]:
    """As ``_wide``; every budget of ours is ours, and repeated references are left out."""
    for entry in _wide(results):
        who = OURS if entry.who.startswith(f"{OURS} ") else entry.who
        if who not in ("the products alone, again", "the forward's product alone"):
            yield entry._replace(who=who)


def _wide_both(results: dict[str, Any]) -> Iterator[Entry]:
    """As ``_wide``, with the time of the forward first where it was measured."""
    for row, entry in zip((r for r in results["rows"] if "ms" in r), _wide(results), strict=True):
        forward = row.get("forward ms")
        yield entry if forward is None else entry._replace(times=(forward, *entry.times))


SHORT: dict[str, tuple[Callable[[dict[str, Any]], Iterator[Entry]], str]] = {
    "cpu": (_cpu, "forward / forward and backward (or forward alone)"),
    "gpu": (_gpu, "forward / forward and backward (or forward alone)"),
    "gpu-wide": (_wide_short, "loss and gradients"),
}
ENTRIES = {"cpu": _cpu, "cpu-clouds": _cpu, "gpu": _gpu, "gpu-wide": _wide_both} | dict.fromkeys(
    ("shapes-long", "shapes-long-fa4"), _shapes
)


WHOLE: dict[str, Callable[[dict[str, Any]], str]] = {"stream": stream_gpu.summary}  # where the table is too long


def shortened(kind: str, path: Path) -> str:
    """One row per case: ours, and everybody else in one cell."""
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


def front() -> str:
    """The README's table: a model's training step, and the largest problems that fit in a given memory."""
    lines = ["| | ours | torch | Liger |", "|---|---|---|---|"]
    sources: dict[str, str] = {}
    for kind in ("model", "limits", "limits-cpu"):
        path = newest(kind)
        if path is None:
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        where = results["environment"]
        sources[path.stem] = f"{where['machine']}; {where['versions']}; {where['date']}"
        lines += _model_rows(results) if kind == "model" else _limit_rows(results)
    said = "\n".join(f"- `{name}`: {machine}" for name, machine in sources.items())
    return "\n".join(lines) + f"\n\n{said}\n"


def _model_rows(results: dict[str, Any]) -> Iterator[str]:
    for model, found in results["models"].items():
        for how in ("eager", "compiled"):
            rows = [found.get(f"{who}, {how}", {}) for who in (OURS, "torch", "Liger")]
            cells = [f"{row['ms']:.0f} ms, {row['GB']:.1f} GB" if "ms" in row else "–" for row in rows]
            yield f"| training step of a 1B Llama-like model, {model}, {how} | {' | '.join(cells)} |"


def _limit_rows(results: dict[str, Any]) -> Iterator[str]:
    where = "GPU" if results["device"] == "cuda" else "CPU"
    memory = f"{results['memory_bytes'] / 2**20:.0f} MiB".replace("1024 MiB", "1 GiB")
    for row in results["limits"]:
        ours, theirs = (limits.format_side(row, who) for who in (OURS, "torch"))
        yield f"| {row['title'].lower()} in {memory} on a {where}: {row['what']} | {ours} | {theirs} | – |"


def headline() -> str:
    """Each case of HEADLINES beside its fastest peer."""
    lines = [
        "| case | ours, ms | best peer, ms | ours ÷ peer | extra memory: ours / peer |",
        "|---|---|---|---|---|",
    ]
    sources: dict[str, str] = {}
    for row in HEADLINES:
        path = newest(row.kind)
        if path is None:
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        where = results["environment"]
        machine = f"{where['machine']}; {where['versions']}; {where['date']}"
        sources.setdefault(path.stem, machine)
        entries = [e for e in ENTRIES[row.kind](results) if e.work == row.work]
        ours = next(e for e in entries if e.who == row.who)
        peer = best_peer(entries, row.within)
        ours, peer = _padded(ours, len(peer.times)), _padded(peer, len(ours.times))
        ratio = " / ".join(_ratio(a, b) for a, b in zip(ours.times, peer.times, strict=True))
        memory = f"{_megabytes(ours.extra)} / {_megabytes(peer.extra)}"
        lines.append(f"| {row.label} | {_times(ours)} | {peer.who} {_times(peer)} | {ratio} | {memory} |")
    said = "\n".join(f"- `{name}`: {machine}" for name, machine in sources.items())
    return "\n".join(lines) + f"\n\n{said}\n"


def best_peer(entries: list[Entry], within: float | None = None) -> Entry:
    """The peer with the least time for all that was asked, among those that hold at most ``within`` megabytes."""
    peers = [e for e in entries if not e.who.startswith(OURS) and "product" not in e.who]
    if within is not None:
        peers = [e for e in peers if e.extra is not None and e.extra <= within]
    return min(peers, key=lambda e: e.times[-1])


def _padded(entry: Entry, length: int) -> Entry:
    """The entry with NaN for a forward that was not measured by itself."""
    return entry._replace(times=(math.nan,) * (length - len(entry.times)) + entry.times)


def _ratio(a: float, b: float) -> str:
    return "–" if math.isnan(a / b) else f"{a / b:.2f}"


def _shown(entry: Entry) -> str:
    return _times(entry) if entry.extra is None else f"{_times(entry)} ({entry.extra:.0f} MB)"


def _times(entry: Entry) -> str:
    return " / ".join("–" if math.isnan(t) else f"{t:.3g}" if t < 100 else f"{t:.0f}" for t in entry.times)


def _megabytes(extra: float | None) -> str:
    return "–" if extra is None else f"{extra:.0f} MB"


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write("the pages hold the newest results\n")


if __name__ == "__main__":
    main()
