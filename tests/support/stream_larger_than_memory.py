"""Run by a test in a process of its own: a corpus four times larger than what the process may still allocate."""

import resource
import sys
from pathlib import Path

import numpy
import torch

import monoidreduce as mr
from monoidreduce import Col, Row

ROOM = 40 * 2**20  # bytes, beyond what importing torch took
FEATURES = 64


@mr.op
def search(x: Row["d"], y: Col["d"]):
    return mr.topk(x @ y, 10).indices


@mr.op
def total(x: Row["d"], y: Col["d"]):
    return mr.sum(torch.tanh(x @ y))


def used() -> int:
    """The address space of this process: what RLIMIT_AS counts."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(what: str, path: str) -> None:
    count = 4 * ROOM // (FEATURES * 4)
    block = numpy.random.default_rng(0).standard_normal((count // 64, FEATURES), dtype=numpy.float32)
    with open(path, "wb") as file:
        for k in range(64):
            file.write((block * (1 + k / 64)).tobytes())
    del block
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(0))
    search(x, torch.randn(300, FEATURES)), total(x, torch.randn(300, FEATURES))  # warm
    corpus = numpy.memmap(path, numpy.float32, "r", shape=(count, FEATURES))
    resource.setrlimit(resource.RLIMIT_AS, (used() + ROOM, resource.RLIM_INFINITY))
    try:
        torch.empty(count, FEATURES)
        raise SystemExit("the limit does not hold")
    except RuntimeError:
        pass
    got = (search if what == "topk" else total).stream(x).over(mr.chunks(corpus, size=8192))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if what == "topk":
        best = [(x @ torch.from_numpy(numpy.array(corpus[at : at + 65536])).T) for at in range(0, count, 65536)]
        same = torch.equal(got, torch.cat(best, 1).topk(10).indices)
    else:
        parts = [
            torch.tanh(x.double() @ torch.from_numpy(numpy.array(corpus[at : at + 65536])).double().T).sum(1)
            for at in range(0, count, 65536)
        ]
        same = torch.allclose(got.double(), torch.stack(parts).sum(0), rtol=1e-4, atol=0.5)
    print("same" if same else "different")


if __name__ == "__main__":
    main(*sys.argv[1:])
