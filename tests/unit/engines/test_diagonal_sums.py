"""The assembly that adds up a warp's pairs along antidiagonals, instruction by instruction on 32 lanes; and that which
loads the entries of a band."""

import itertools
import operator
import re
from types import SimpleNamespace

import numpy as np
import pytest

from monoidreduce.engines.triton.codegen import lookups
from monoidreduce.engines.triton.schedules import diagonal_sums

LANE = np.arange(32)
INTEGERS = {
    "shr.u32": operator.rshift, "shl.b32": operator.lshift, "and.b32": operator.and_, "or.b32": operator.or_,
    "sub.u32": operator.sub, "setp.lt.u32": operator.lt, "setp.le.u32": operator.le, "setp.ne.u32": operator.ne,
}  # fmt: skip


def run(text, registers):
    """Run PTX on all lanes of a warp; only what this text uses is known."""

    def value(name):
        if name == "%laneid":
            return LANE
        return np.full(32, int(name)) if name.isdigit() else np.zeros(32) if name == "0f00000000" else registers[name]

    for line in filter(None, (part.strip() for part in text.strip(" {}").split(";"))):
        if line.startswith(".reg"):
            continue
        op, rest = line.split(None, 1)
        to, *given = (name.strip() for name in rest.split(","))
        if op.startswith("mov."):
            found = value(given[0])
        elif op in INTEGERS:
            found = INTEGERS[op](*(value(g).astype(np.int64) for g in given))
            found = found if found.dtype == bool else found & 0xFFFFFFFF
        elif op == "add.f32":
            found = value(given[0]) + value(given[1])
        elif op == "selp.f32":
            found = np.where(value(given[2]), value(given[0]), value(given[1]))
        else:
            assert op in ("shfl.sync.idx.b32", "shfl.sync.bfly.b32")
            found = value(given[0])[value(given[1]) if "idx" in op else LANE ^ int(given[1])]
        registers[to] = found


def test_sums_of_a_warp():
    x = np.random.default_rng(0).integers(-50, 50, (16, 64)).astype(float)
    r, c = LANE >> 2, LANE & 3
    registers = {
        f"${32 + 4 * m + 2 * h + e}": x[r + 8 * h, 2 * c + e + 8 * m]
        for m in range(8) for h in range(2) for e in range(2)
    }  # fmt: skip
    run(diagonal_sums._write_assembly(), registers)
    found, right = np.zeros(128), np.zeros(128)
    for p in range(4):
        found[32 * p + 8 * c + r] = registers[f"${p}"]
    np.add.at(right, np.add.outer(np.arange(16), np.arange(64)), x)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("over, reverse, folded", [("cols", False, 128), ("cols", True, 64), ("rows", False, 64)])
def test_entries_of_a_thread(over, reverse, folded):
    """The loads of a band, two entries each, reach every register of a thread from its first place."""
    text = lookups.write_look_up_band(SimpleNamespace(over=over, diagonals=True if reverse else None), folded)
    sign = 1 if over == "rows" else -1
    kept = lambda row: 63 - row if reverse else row  # the kept index of a row of the tile
    entry = lambda row, col: 500 - sign * kept(row) + sign * col
    loads = re.findall(r"\{(t\d+), (t\d+)\}, \[\$(\d+) \+ (-?\d+)\]", text)
    moves = re.findall(r"mov.f32 \$(\d+), (t\d+);", text)
    assert len(loads) == folded // 8 + 1 and len(moves) == folded // 2
    for r in range(8):
        for c in range(4):
            first = entry(r, 2 * c) - (sign < 0)
            found = {name: first + int(place) // 4 + k for *two, at, place in loads for k, name in enumerate(two)}
            got = {int(to): found[name] for to, name in moves}
            for m, h, e in itertools.product(range(folded // 8), range(2), range(2)):
                assert got[4 * m + 2 * h + e] == entry(r + 8 * h, 2 * c + e + 8 * m)
