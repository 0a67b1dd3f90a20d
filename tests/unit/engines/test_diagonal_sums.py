"""The assembly that adds up a warp's pairs along antidiagonals, instruction by instruction on 32 lanes."""

import operator

import numpy as np

from monoidreduce.engines.triton.schedules.resident import diagonal_sums

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
