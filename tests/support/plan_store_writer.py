"""Writes to the plan store in processes of their own, which do not import torch, under faults.

    python plan_store_writer.py killed FOLDER COUNT SEED   kill COUNT writers at random moments; the rest stays readable
    python plan_store_writer.py crowd FOLDER COUNT SEED    COUNT writers and readers at once, on the same few plans
    python plan_store_writer.py full FOLDER SIZE SEED      write where no file may grow beyond SIZE bytes
    python plan_store_writer.py refused FOLDER 0 SEED      write into a folder where this user may not create files

The last line printed is the outcome, as JSON.
"""

import json
import os
import random
import resource
import signal
import sys
import time
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANS = 4


def without_torch():
    """The store alone: the package's own door would import torch."""
    package = types.ModuleType("monoidreduce")
    package.__path__ = [str(ROOT / "monoidreduce")]
    sys.modules["monoidreduce"] = package
    from monoidreduce.plan import schedule as store

    return store


def record(store, number, value):
    key = store.Key(f"program {number}", "1024", "float32", "cpu", "", "versions")
    return store.Record(key, {"schedule": "flash", "tiles": [value] * (1 + value % 400)}, {"ms": value / 7})


def is_whole(found):
    """A record is one that was written: all its tiles are one number, of which it says how many."""
    tiles = found.plan["tiles"]
    return len(set(tiles)) == 1 and len(tiles) == 1 + tiles[0] % 400 and found.measured["ms"] == tiles[0] / 7


def write_forever(store, rng, done):
    """Write plans; say so on the pipe ``done`` when the first is written."""
    while True:
        store.remember(record(store, rng.randrange(PLANS), rng.randrange(10**6)))
        if done is not None:
            os.write(done, b"1")
            done = None


def check(store):
    """How many plans are there, and how many of them are damaged."""
    store.forget()
    found = [store.recall(record(store, n, 0).key) for n in range(PLANS)]
    present = [r for r in found if r is not None]
    return len(present), sum(not is_whole(r) for r in present)


def killed(store, count, rng):
    """Every other writer is killed during its first plans, or before them; the others have written one, however busy
    the machine is."""
    most, bad = 0, 0
    heard, said = os.pipe()
    for k in range(count):
        child = os.fork()
        if not child:
            write_forever(store, random.Random(rng.random()), said if k % 2 else None)
        if k % 2:
            os.read(heard, 1)
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        present, damaged = check(store)
        bad += damaged + (present < most)  # what was there once stays
        most = max(most, present)
    return {"kills": count, "plans": most, "failures": bad}


def crowd(store, count, rng):
    children = []
    for _ in range(count):
        child = os.fork()
        if not child:
            mine, end, bad = random.Random(rng.random()), time.monotonic() + 1.0, 0
            while time.monotonic() < end:
                store.remember(record(store, mine.randrange(PLANS), mine.randrange(10**6)))
                bad += check(store)[1]
            os._exit(min(bad, 100))
        children.append(child)
        rng.random()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return {"writers": count, "failures": sum(c != 0 for c in codes), "plans": check(store)[0]}


def full(store, size, rng):
    kept = record(store, 0, 7)
    store.remember(kept)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    written = store.remember(record(store, 0, 399))  # larger than any file may now be
    here = store.recall(kept.key).plan["tiles"][0]
    store.forget()
    found = store.recall(kept.key)
    files = sorted(p.name for p in (store.disk.cache_root() / store.FOLDER).iterdir())
    return {"written": written, "here": here, "kept": found == kept, "files": len(files)}


def refused(store, _, rng):
    if not os.geteuid():  # to root nothing is refused
        os.setuid(65534)
    kept = record(store, 0, 7)
    written = [store.remember(kept), store.remember(record(store, 1, 8))]
    here = store.recall(kept.key) == kept
    store.forget()
    return {"written": any(written), "here": here, "found": store.recall(kept.key) is not None}


CASES = {"killed": killed, "crowd": crowd, "full": full, "refused": refused}


def main():
    what, folder, count, seed = sys.argv[1:]
    os.environ["MONOIDREDUCE_CACHE"] = folder
    store = without_torch()
    assert "torch" not in sys.modules
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = CASES[what](store, int(count), random.Random(int(seed)))
    print(json.dumps(found | {"warnings": [str(w.message) for w in told]}))


if __name__ == "__main__":
    main()
