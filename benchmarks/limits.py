"""The longest context, the largest vocabulary and the largest batch in a given memory, ours beside torch.

    python -m benchmarks.limits --out DIR                    # on a GPU where there is one, else on a CPU
    python -m benchmarks.limits --memory 4GiB --seconds 60
    python -m benchmarks.limits --read FILE --out DIR        # from the printed output of a run on another machine

Every size is really run, forward and backward, growing until a run needs more than allowed or the next one would take
too long: what ``monoidreduce demo`` does first, with more time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from monoidreduce.cli.limits import QUESTIONS, answer
from monoidreduce.plan.settings import parse_bytes

from .cpu import commit, environment

_RESULT = "RESULT "


def measure(
    memory: int, seconds: float, device: torch.device, about: dict[str, Any], wanted: list[str]
) -> dict[str, Any]:
    """The answers to the questions wanted, as data; a line is printed for each side."""
    found = []
    for question in (q for q in QUESTIONS if q.key in wanted):
        limit = answer(question, memory, seconds, device)
        words = {"title": question.title, "what": question.what, "torch_code": question.torch_code}
        found.append({**words, **limit.to_data()})
        for who in ("ours", "torch"):
            print(f"{question.key}: {who} {found[-1][who]}", flush=True)
    return {"environment": about, "device": device.type, "memory_bytes": memory, "limits": found}


def markdown(results: dict[str, Any]) -> str:
    """The results as a page: where they were measured, and one row a question."""
    memory = f"{results['memory_bytes'] / 2**20:.0f} MiB"
    lines = [f"- {k}: {v}" for k, v in results["environment"].items()]
    lines += [
        "",
        f"The largest size that runs, forward and backward, within {memory}, inputs and gradients included. ≥: the "
        "next size would have taken too long; memory was left.",
        "",
        "| | | ours | torch | ours ÷ torch | torch's form |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["limits"]:
        ours, torch_ = (format_side(row, who) for who in ("ours", "torch"))
        cells = [row["title"], row["what"], ours, torch_, format_gain(row), f"`{row['torch_code']}`"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_side(row: dict[str, Any], who: str) -> str:
    """The largest size of one side; the least that was tried, where that did not fit.

    >>> format_side({"ours": {"largest": 4096, "stopped_by": "time", "runs": []}, "unit": "tokens"}, "ours")
    '≥ 4,096 tokens'
    """
    side = row[who]
    if side["largest"] is None:
        return f"< {side['runs'][0]['size']:,} {row['unit']}"
    return f"{'≥ ' if side['stopped_by'] == 'time' else ''}{side['largest']:,} {row['unit']}"


def format_gain(row: dict[str, Any]) -> str:
    ours, theirs = row["ours"]["largest"], row["torch"]["largest"]
    return f"{ours / theirs:.1f}" if ours and theirs else "–"


def write(results: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kind = "limits" if results["device"] == "cuda" else "limits-cpu"
    stem = folder / f"{kind}-{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M}"
    stem.with_suffix(".json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(results), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a folder for limits-DATE.json and .md")
    parser.add_argument("--memory", type=parse_bytes, help="what may be used; 1GiB on a GPU, 256MiB on a CPU")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each side of each question, about")
    parser.add_argument("--commit", type=commit, help="what was measured, where the machine has no git")
    parser.add_argument(
        "--only", choices=[q.key for q in QUESTIONS], action="append", help="this question; again for more"
    )
    parser.add_argument("--read", type=Path, help="a printed output, whose results are written and not measured")
    options = parser.parse_args()
    wanted = options.only or [q.key for q in QUESTIONS]
    if options.read is not None:
        lines = options.read.read_text(encoding="utf-8").splitlines()
        results = json.loads(next(line.removeprefix(_RESULT) for line in lines if line.startswith(_RESULT)))
        results["limits"] = [row for row in results["limits"] if row["name"] in wanted]
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        about = environment()
        if device.type == "cuda":
            about["machine"] = torch.cuda.get_device_name()
            about["versions"] += f", triton {importlib.metadata.version('triton')}"
        about["commit"] = options.commit or about["commit"]
        memory = options.memory or (2**30 if device.type == "cuda" else 2**28)
        about["command"] = f"python -m benchmarks.limits --memory {memory} --seconds {options.seconds:g}"
        results = measure(memory, options.seconds, device, about, wanted)
        print(_RESULT + json.dumps(results, ensure_ascii=False), flush=True)
    if options.out is not None:
        write(results, options.out)
    print(markdown(results))


if __name__ == "__main__":
    main()
