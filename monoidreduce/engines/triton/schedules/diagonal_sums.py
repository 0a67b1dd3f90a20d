"""Sums along the diagonals of a tile of pairs, inside a warp-specialised kernel: the gradient of a band.

A warp group has a tile of 64 kept and 64 folded indices in registers, its rows in reverse: a diagonal of the pairs is
an antidiagonal of the tile, and row ``i`` and column ``j`` of it belong to sum ``i + j``. A warp has 16 of the rows. A
thread has rows ``r`` and ``r + 8`` and columns ``2c + e + 8m``, where ``4r + c`` is its lane:

1. in each thread, row ``r + 8`` of eight ``m`` is added to row ``r`` of eight ``m + 1``: sum ``r + 2c + e + 8m``;
2. in each warp, threads of one ``c`` rotate by ``2c + e``, so that sums that are equal modulo 8 meet in one ``r``,
   those that passed 8 in the next eight; then the four ``c`` are added, each thread keeping a quarter of the eights;
3. the sums of the four warps, each 16 further than the one before, are added through shared memory, in this order.

One tile leaves 128 sums (the last is zero) in memory: those of the 64 diagonals from its corner on, and those of the
next 64. ``sum_tiles`` (``kernels/histogram.py``) adds those of all tiles, in a fixed order, without atomics.
"""

from __future__ import annotations

from .gluon_parts import GROUP_ROWS

SUMS = 2 * GROUP_ROWS  # that a tile leaves
SHARED_BYTES = 4 * 4 * (SUMS + 16)  # of a warp group

# Where a thread's sums go: [warp, quarter of 32 sums, eight, place in it], warps 16 sums apart from one another.
_LAYOUT = (
    "tl.PaddedSharedLayout([[128, 16]], [[1, 0], [2, 0], [4, 0], [0, 2], [0, 4], [0, 1], [8, 0], [16, 0], [32, 0]], "
    "[], [64, 8])"
)
_PLAIN = "tl.SwizzledSharedLayout(1, 1, 1, [1, 0])"


def allocate(name: str) -> str:
    """Shared memory of one warp group."""
    return f"{name} = tl.allocate_shared_memory(tl.float32, [64, 8], {_LAYOUT})"


def clear(name: str) -> str:
    """The line that makes the gaps between warps zero, once."""
    return f"{name}._reinterpret(tl.float32, [4, {SUMS}], {_PLAIN}).store(tl.zeros([4, {SUMS}], tl.float32, SUM_ROWS))"


LAYOUTS = ["SUM_ROWS: tl.constexpr = tl.BlockedLayout([4, 1], [1, 32], [1, 4], [1, 0])"]


def add_tile(value: str, memory: str, place: str) -> list[str]:
    """The lines that leave a tile's sums at a pointer; ``value``: the tile, in the layout of scores."""
    return [
        f"{memory}.store(sum_antidiagonals({value}))",
        f"band_rows = {memory}._reinterpret(tl.float32, [4, {SUMS}], {_PLAIN}).load(SUM_ROWS)",
        f"tl.store({place} + tl.arange(0, {SUMS}, tl.SliceLayout(0, SUM_ROWS)), tl.sum(band_rows, 0))",
    ]


def _write_assembly() -> str:
    """Steps 1 and 2 in PTX. Register ``4m + 2h + e`` of a thread is its row ``r + 8h``; the sums of eight
    ``m = 4p + c`` go into register ``p``."""
    lines = [".reg .pred p0, p1, q0, q1;", ".reg .b32 l, r, k, s0, s1;", ".reg .f32 z, u, t;"]
    lines += [f".reg .f32 {x}<{n}>;" for x, n in (("a", 18), ("b", 18), ("w", 10), ("y", 6), ("v", 3))]
    lines += [
        "mov.u32 l, %laneid;",
        "shr.u32 r, l, 2;",
        "and.b32 k, l, 3;",
        "shl.b32 k, k, 1;",  # 2c
        "setp.lt.u32 p0, r, k;",  # those that pass 8
        "setp.le.u32 p1, r, k;",
        "sub.u32 s0, r, k;",
        "sub.u32 s1, s0, 1;",
        *(f"and.b32 s{e}, s{e}, 7;" for e in range(2)),
        *(f"shl.b32 s{e}, s{e}, 2;" for e in range(2)),
        "and.b32 k, l, 3;",
        *(f"or.b32 s{e}, s{e}, k;" for e in range(2)),
        "and.b32 r, l, 1;",
        "setp.ne.u32 q0, r, 0;",
        "and.b32 r, l, 2;",
        "setp.ne.u32 q1, r, 0;",
        "mov.f32 z, 0f00000000;",
    ]
    for m in range(9):
        for e in range(2):
            rows = [f"${32 + 4 * m + e}"] if m < 8 else []
            rows += [f"${32 + 4 * (m - 1) + 2 + e}"] if m else []
            a = f"a{2 * m + e}"
            lines.append(f"add.f32 {a}, {rows[0]}, {rows[1]};" if len(rows) == 2 else f"mov.f32 {a}, {rows[0]};")
            lines.append(f"shfl.sync.idx.b32 b{2 * m + e}, {a}, s{e}, 31, 0xffffffff;")
    rotated = [[f"b{2 * m + e}" for e in range(2)] for m in range(9)]
    rotated = [["z", "z"], *rotated, ["z", "z"]]  # before the first eight, and after the last
    for m in range(10):
        pairs = zip("ut", rotated[m], rotated[m + 1], range(2), strict=True)
        lines += [f"selp.f32 {x}, {before}, {here}, p{e};" for x, before, here, e in pairs]
        lines.append(f"add.f32 w{m}, u, t;")
    for k in range(5):
        lines += _halve(f"w{2 * k}", f"w{2 * k + 1}", "q0", f"y{k}", 1)
    lines.append("mov.f32 y5, z;")
    for p in range(3):
        lines += _halve(f"y{2 * p}", f"y{2 * p + 1}", "q1", f"v{p}", 2)
    lines += [f"mov.f32 ${k}, {f'v{k}' if k < 3 else 'z'};" for k in range(32)]
    return "{ " + " ".join(lines) + " }"


def _halve(low: str, high: str, lane: str, to: str, by: int) -> list[str]:
    """Add two registers of two threads: one thread keeps the sums of the low ones, the other those of the high ones."""
    return [
        f"selp.f32 u, {low}, {high}, {lane};",
        f"selp.f32 t, {high}, {low}, {lane};",
        f"shfl.sync.bfly.b32 u, u, {by}, 31, 0xffffffff;",
        f"add.f32 {to}, t, u;",
    ]


# The first eight columns of the result hold what a thread has in its first four registers.
FUNCTION = f'''
@gluon.jit
def sum_antidiagonals(tile):
    sums = tl.inline_asm_elementwise(
        "{_write_assembly()}",
        "{",".join(["=f"] * 32 + ["f"] * 32)}",
        [tile],
        dtype=tl.float32,
        is_pure=True,
        pack=32,
    )
    sums = tl.permute(tl.reshape(sums, [64, 2, 2, 2, 8]), [0, 4, 1, 2, 3])
    sums, _ = tl.split(sums)
    sums, _ = tl.split(sums)
    sums, _ = tl.split(sums)
    return sums
'''
