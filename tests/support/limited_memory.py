"""A process whose own limit makes torch's allocator fail in the middle of a call. Prints how it went, as JSON.

Some builds of torch bring an allocator that reserves a gigabyte of addresses beforehand; so the limit is set a
little above what there is, and all that is still to be had is then taken and given back piece by piece.
"""

import json
import os
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

os.environ["MONOIDREDUCE_CPP"] = "never"  # what generated C++ holds fits at the first attempt

import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from monoidreduce.engines.common import oom_retry

MB = 2**20
PIECES = (MB, MB // 2)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


def exhausted():
    """All that the allocator gives, never touched: by size."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 64 * MB
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    held = {size: [] for size in PIECES}
    for size, pieces in held.items():
        while True:
            try:
                pieces.append(torch.empty(size, dtype=torch.uint8))
            except RuntimeError:
                break
    return held


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = [torch.randn(2048, 16) for _ in range(3)]
    kept = [a.clone() for a in args]
    attention(*args)  # all that is loaded or allocated when first used, such as the workspace of a vendor's products
    with mr.budget("2MB"):
        expected = attention(*args)
    attempts = []
    oom_retry.release_memory, release = (
        (lambda device: attempts.append(device) or release(device)),
        oom_retry.release_memory,
    )
    held = exhausted()
    found = {}
    try:
        attention(*args)
    except Exception as error:
        found["without room"] = type(error).__name__
    while True:  # given back piece by piece: the first call that works has room for the smaller tiles alone
        attempts.clear()
        try:
            got = attention(*args)
        except mr.OutOfMemoryError:
            held[next(size for size in reversed(PIECES) if held[size])].pop()
            continue
        break
    found["attempts"] = 1 + len(attempts)
    held.clear()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found["smaller"] = bool(torch.allclose(got, expected, atol=1e-5))  # now that a comparison has room too
    found["inputs unchanged"] = all(map(torch.equal, args, kept))
    attempts.clear()
    found["afterwards"] = bool(torch.allclose(attention(*args), expected, atol=1e-5)) and not attempts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
