"""Run by tests in a process of its own: neighbours of points in files, in little memory, or slowly, to be killed."""

import resource
import sys
import time
from pathlib import Path

import numpy
import torch

import monoidreduce as mr
from monoidreduce import ops, sources


def neighbours(rows: str, cols: str, out: str, state: str | None, every: float = 0.0) -> None:
    ops.knn.stream(rows, k=5).over(cols, out=out, state=state, every=every)


def bounded(rows: str, cols: str, out: str, budget: str, slack: str) -> None:
    """With no more memory than the budget beyond what was there before, and a little for Python's objects."""
    torch.set_num_threads(1)
    few = torch.ones(64, 2048)
    ops.knn.stream(few, k=5).over(few, out=out)  # so that code, caches and threads are there
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()  # what RLIMIT_AS counts
    room = int(budget) + int(slack)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        numpy.ones(2 * room // 8, numpy.float64)
        raise SystemExit("the limit does not hold")
    except MemoryError:
        pass
    with mr.budget(int(budget)):
        neighbours(rows, cols, out, None)
    print("done")


def slowly(rows: str, cols: str, out: str, state: str) -> None:
    """A second for each chunk after the third, so that there is time to be killed."""
    read = sources.Chunks._cut

    def cut(self, chunk):
        for n, values in enumerate(read(self, chunk)):
            if n >= 3:
                print("reading", flush=True)
                time.sleep(1)
            yield values

    sources.Chunks._cut = cut
    with mr.budget("200KB"):
        neighbours(rows, cols, out, state)


if __name__ == "__main__":
    {"bounded": bounded, "slowly": slowly}[sys.argv[1]](*sys.argv[2:])
