"""Softmax attention forward on Hopper, scheduled by hand: an experiment."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

load = getattr(tma, "async_copy_global_to_shared", None) or tma.async_load
save = getattr(tma, "async_copy_shared_to_global", None) or tma.async_store


@gluon.jit
def row_sum(p, LANES: gl.constexpr):
    # sums of the columns a thread holds: the lanes of a row are added once, at the end
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    if LANES:
        return gl.sum(gl.sum(gl.reshape(p, [M, N // 8, 4, 2]), 1), 2)
    else:
        return gl.sum(p, 1)


@gluon.jit
def consume(q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
            row, col, n, scale,
            WHICH: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING: gl.constexpr, GUESS: gl.constexpr,
            QREG: gl.constexpr, LANES: gl.constexpr, OVERLAP: gl.constexpr):
    BN: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    W: gl.constexpr = 4
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    flat: gl.constexpr = gl.SliceLayout(1, s_layout)
    q_mine = q_smem.index(WHICH)
    mbarrier.wait(q_full.index(WHICH), 0)
    if QREG:
        q = q_mine.load(q_layout)
    else:
        q = q_mine
    zero_s = gl.zeros([64, BN], gl.float32, s_layout)
    o = gl.zeros([64, D], gl.float32, o_layout)

    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    top = gl.max(s, 1) * scale
    if GUESS:
        top += 60
    p = gl.exp2(s * scale - top[:, None])
    total = row_sum(p, LANES)
    p16 = gl.convert_layout(p.to(k_desc.dtype), p_layout)
    for j in range(1, n):
        slot = j % STAGES
        phase = (j // STAGES) & 1
        before = (j - 1) % STAGES
        behind = ((j - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        if PING:
            mbarrier.wait(turns.index(WHICH), (j & 1) ^ 1 ^ (WHICH == 0))
        s = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        if OVERLAP:
            mbarrier.wait(v_full.index(before), behind)
            o = warpgroup_mma(p16, v_smem.index(before), o, is_async=True)
            if PING:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
            s = warpgroup_mma_wait(1, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
        else:
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(before), behind)
            o = warpgroup_mma(p16, v_smem.index(before), o, is_async=True)
            if PING:
                mbarrier.arrive(turns.index(1 - WHICH), count=1)
        if GUESS:
            p = gl.exp2(s * scale - top[:, None])
            total += row_sum(p, LANES)
            o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
        else:
            new = gl.maximum(top, gl.max(s, 1) * scale)
            p = gl.exp2(s * scale - new[:, None])
            shrink = gl.exp2(top - new)
            if LANES:
                total = total * gl.convert_layout(shrink, gl.SliceLayout(1, total.type.layout))[:, None] + row_sum(p, LANES)
            else:
                total = total * shrink + row_sum(p, LANES)
            top = new
            o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.arrive(v_empty.index(before), count=1)
        p16 = gl.convert_layout(p.to(k_desc.dtype), p_layout)
    last = (n - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((n - 1) // STAGES) & 1)
    o = warpgroup_mma(p16, v_smem.index(last), o, is_async=True)
    if LANES:
        total = gl.convert_layout(gl.sum(total, 1), flat)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(last), count=1)
    o = o / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    at = row + WHICH * 64
    gl.store(lse_ptr + at + gl.arange(0, 64, layout=flat), (gl.log2(total) + top) * 0.6931471805599453)
    q_mine.store(o.to(k_desc.dtype))
    fence_async_shared()
    save(o_desc, [at, 0], q_mine)
    tma.store_wait(0)


@gluon.jit
def produce(q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
            row, col, n, scale,
            WHICH: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING: gl.constexpr, GUESS: gl.constexpr,
            QREG: gl.constexpr, LANES: gl.constexpr, OVERLAP: gl.constexpr):
    BN: gl.constexpr = k_desc.block_type.shape[0]
    for w in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes)
        load(q_desc, [row + w * 64, 0], q_full.index(w), q_smem.index(w))
    for j in range(n):
        slot = j % STAGES
        phase = ((j // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(slot), phase)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        load(k_desc, [col + j * BN, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), phase)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        load(v_desc, [col + j * BN, 0], v_full.index(slot), v_smem.index(slot))


@gluon.jit
def specialised(q_desc, k_desc, v_desc, o_desc, lse_ptr, M, N, scale, tiles,
                CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PING: gl.constexpr, GUESS: gl.constexpr,
                QREG: gl.constexpr, LANES: gl.constexpr, OVERLAP: gl.constexpr, REGS: gl.constexpr, num_warps: gl.constexpr):
    BN: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    pid = gl.program_id(0)
    batch = pid // tiles
    row = batch * M + (pid % tiles) * 64 * CONSUMERS
    col = batch * N
    n = N // BN
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bar)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 0, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
            (consume, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 1, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
            (produce, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 0, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
        ], [4, 1], [REGS, 24])
    if CONSUMERS == 3:
        gl.warp_specialize([
            (consume, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 0, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
            (consume, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 1, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
            (consume, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 2, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
            (produce, (q_desc, k_desc, v_desc, o_desc, lse_ptr, q_smem, k_smem, v_smem, q_full, k_full, k_empty, v_full, v_empty, turns,
                       row, col, n, scale, 0, CONSUMERS, STAGES, PING, GUESS, QREG, LANES, OVERLAP)),
        ], [4, 4, 1], [REGS, REGS, 24])


@gluon.jit
def together(q_desc, k_desc, v_desc, o_desc, lse_ptr, M, N, scale, tiles,
             STAGES: gl.constexpr, GUESS: gl.constexpr, QREG: gl.constexpr, LANES: gl.constexpr, OVERLAP: gl.constexpr,
             num_warps: gl.constexpr):
    BM: gl.constexpr = q_desc.block_type.shape[0]
    BN: gl.constexpr = k_desc.block_type.shape[0]
    D: gl.constexpr = k_desc.block_type.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BN, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    q_layout: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    flat: gl.constexpr = gl.SliceLayout(1, s_layout)
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    pid = gl.program_id(0)
    batch = pid // tiles
    row = batch * M + (pid % tiles) * BM
    col = batch * N
    n = N // BN
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [BM, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bar)
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    mbarrier.expect(q_full, q_desc.block_type.nbytes)
    load(q_desc, [row, 0], q_full, q_smem)
    for i in gl.static_range(STAGES):
        mbarrier.expect(k_full.index(i), k_desc.block_type.nbytes, pred=i < n)
        load(k_desc, [col + i * BN, 0], k_full.index(i), k_smem.index(i), pred=i < n)
        mbarrier.expect(v_full.index(i), v_desc.block_type.nbytes, pred=i < n)
        load(v_desc, [col + i * BN, 0], v_full.index(i), v_smem.index(i), pred=i < n)
    mbarrier.wait(q_full, 0)
    if QREG:
        q = q_smem.load(q_layout)
    else:
        q = q_smem
    zero_s = gl.zeros([BM, BN], gl.float32, s_layout)
    o = gl.zeros([BM, D], gl.float32, o_layout)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    top = gl.max(s, 1) * scale
    if GUESS:
        top += 60
    p = gl.exp2(s * scale - top[:, None])
    total = row_sum(p, LANES)
    p16 = gl.convert_layout(p.to(k_desc.dtype), p_layout)
    for j in range(1, n):
        slot = j % STAGES
        phase = (j // STAGES) & 1
        before = (j - 1) % STAGES
        behind = ((j - 1) // STAGES) & 1
        # both products of the tile before are done in all warps once this barrier is passed
        more = j + STAGES - 1 < n
        gl.thread_barrier()
        mbarrier.expect(k_full.index(before), k_desc.block_type.nbytes, pred=more)
        load(k_desc, [col + (j + STAGES - 1) * BN, 0], k_full.index(before), k_smem.index(before), pred=more)
        older = (j - 2) % STAGES
        refill = (j > 1) & (j + STAGES - 2 < n)
        mbarrier.expect(v_full.index(older), v_desc.block_type.nbytes, pred=refill)
        load(v_desc, [col + (j + STAGES - 2) * BN, 0], v_full.index(older), v_smem.index(older), pred=refill)
        mbarrier.wait(k_full.index(slot), phase)
        s = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zero_s, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), behind)
        o = warpgroup_mma(p16, v_smem.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        if GUESS:
            p = gl.exp2(s * scale - top[:, None])
            total += row_sum(p, LANES)
            o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
        else:
            new = gl.maximum(top, gl.max(s, 1) * scale)
            p = gl.exp2(s * scale - new[:, None])
            shrink = gl.exp2(top - new)
            total = total * shrink + row_sum(p, LANES)
            top = new
            o, p16 = warpgroup_mma_wait(0, deps=[o, p16])
            o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        p16 = gl.convert_layout(p.to(k_desc.dtype), p_layout)
    last = (n - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((n - 1) // STAGES) & 1)
    o = warpgroup_mma(p16, v_smem.index(last), o, is_async=True)
    if LANES:
        total = gl.convert_layout(gl.sum(total, 1), flat)
    o = warpgroup_mma_wait(0, deps=[o])
    o = o / gl.convert_layout(total, gl.SliceLayout(1, o_layout))[:, None]
    gl.store(lse_ptr + row + gl.arange(0, BM, layout=flat), (gl.log2(total) + top) * 0.6931471805599453)
    q_smem.store(o.to(k_desc.dtype))
    fence_async_shared()
    save(o_desc, [row, 0], q_smem)
    tma.store_wait(0)
