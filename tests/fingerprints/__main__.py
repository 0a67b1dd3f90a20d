"""Record what is compiled and launched, and compare it with an earlier record.

    python -m tests.fingerprints record FILE      # before a refactoring
    python -m tests.fingerprints compare FILE     # after it; exits with 1 where anything differs

``FILE`` is a JSON object: the name of each fingerprint and the hash of its text. The texts lie in the folder
``FILE`` without its suffix; those of the latest comparison in ``<that folder>.new``, so that two can be diffed.

    ptx/90/attention 64/0              PTX of the first kernel of a case of the compile tests, for cuda:90
    launches/causal attention/cold     interpreted launches of a call: grids, shapes, types, constants
    sources/causal attention/cold      the same launches: the text of each kernel, names removed
    replays/..., replay sources/...    the same where kernels are launched again by address, as on a GPU
    h200/causal attention/cold         launches on an H200 that is not there, with the PTX of kernels first met
    aten/causal attention/cold         torch operators of the eager engine and the shapes of what they return
    profiled/causal attention/warm     torch operators of the eager engine as torch's profiler sees them: unlike
                                       ``aten``, nothing watches the call, so that it is replayed

PTX is that of all compile tests for cuda:90 and of the quick ones for cuda:80. ``--quick`` takes the quick ones alone,
``--every`` all of them for cuda:80 and cuda:89, too; record with ``--every`` to compare with it. ``--only NAME`` (may
be repeated) takes the cases whose name, after that of their part, contains NAME or matches it as a pattern: ``--only
"ptx/90/*"``. Files of the library that a call of attention visits are counted for information.
"""

import argparse
import difflib
import hashlib
import importlib.metadata
import json
import shutil
import sys
import time
from pathlib import Path

from .jobs import PARTS, run

_SHOWN = 12  # lines of a difference that are printed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fingerprints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="fingerprints with NAME in theirs")
    parser.add_argument("--part", action="append", choices=PARTS, help="these parts alone")
    parser.add_argument("--quick", action="store_true", help="PTX of the quick compile tests only")
    parser.add_argument("--every", action="store_true", help="PTX for cuda:80 and cuda:89, too")
    parser.add_argument("--processes", type=int, default=2, help="run at once (default: 2)")
    given = parser.parse_args()
    if given.what == "compare" and not given.file.exists():
        parser.error(f"{given.file} does not exist: record it first, on the commit to compare with")

    folder = given.file.with_suffix("")
    if given.what == "compare":
        folder = folder.with_name(folder.name + ".new")
        shutil.rmtree(folder, ignore_errors=True)
    elif not (given.only or given.part or given.quick):
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    level = "quick" if given.quick else "every" if given.every else "usual"
    versions = (f"{name} {importlib.metadata.version(name)}\n" for name in ("torch", "triton"))
    (folder / "versions.txt").write_text("".join(versions))
    before, failed = _hashes(folder), []
    for part in given.part or PARTS:
        start = time.monotonic()
        failed += run(part, folder, given.only, level, given.processes)
        print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
    for name in failed:
        print(f"FAILED    {name}: see {folder / 'failed' / (name + '.txt')}")
    found = _hashes(folder)
    for path in sorted(folder.glob("visited/**/*.txt")) if "visited" in (given.part or PARTS) else ():
        print(f"visited   {path.relative_to(folder / 'visited').with_suffix('')}: {path.read_text().splitlines()[0]}")

    if given.what == "record":
        given.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{len(found)} fingerprints ({len(found.keys() - before.keys())} new) in {given.file}")
        return bool(failed)
    wanted = json.loads(given.file.read_text())
    cases = {case for path in folder.glob("cases/*.txt") for case in path.read_text().splitlines()}
    wanted = {name: found_then for name, found_then in wanted.items() if _expected(name, cases, given)}
    return _compare(wanted, found, given.file.with_suffix(""), folder) or bool(failed)


def _hashes(folder: Path) -> dict[str, str]:
    """The fingerprints of a folder: the hash of each text, by its path."""
    paths = (
        p
        for p in folder.glob("**/*.txt")
        if p.relative_to(folder).parts[0] not in ("visited", "failed", "kernels", "cases")
    )
    return {str(p.relative_to(folder))[:-4]: hashlib.sha256(p.read_bytes()).hexdigest()[:24] for p in paths}


def _expected(name: str, cases: set[str], given: argparse.Namespace) -> bool:
    """Whether a recorded fingerprint should have been made again: its case ran, or every case of its part should."""
    part, _, rest = name.partition("/")
    part = {"sources": "launches", "replay sources": "replays"}.get(part, part)
    if not rest or f"{part}/{rest}".rpartition("/")[0] in cases:
        return True
    return not (given.only or (given.quick and part == "ptx") or (given.part and part not in given.part))


def _compare(wanted: dict[str, str], found: dict[str, str], old: Path, new: Path) -> int:
    """Print what differs; 1 if anything does."""
    missing, added = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    changed = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name])
    for word, names in (("missing", missing), ("added", added)):
        for name in names:
            print(f"{word:9} {name}")
    for name in changed:
        paths = [folder / f"{name}.txt" for folder in (old, new)]
        print(f"differs   {name}\n          diff '{paths[0]}' '{paths[1]}'")
        texts = [p.read_text().splitlines() if p.exists() else [] for p in paths]
        lines = [line for line in difflib.unified_diff(*texts, n=0, lineterm="") if line[:3] not in ("---", "+++")]
        print("".join(f"          {line[:200]}\n" for line in lines[:_SHOWN]), end="")
    same = len(wanted.keys() & found.keys()) - len(changed)
    print(f"{same} equal, {len(changed)} different, {len(missing)} missing, {len(added)} added")
    return 1 if changed or missing or added else 0


if __name__ == "__main__":
    sys.exit(main())
