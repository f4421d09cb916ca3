"""One kernel for every matrix of a decode step: few rows, so its time is that of streaming the weights.

The work is U units, each one [BLOCK_N, BLOCK_K] of weights, in the order (tile of columns, tile of rows, depth).
Program p of P takes those from p*U/P up to (p+1)*U/P, whatever tiles they belong to, so that every multiprocessor
streams as much as the others:

    weights --copy engine, STAGES deep--> shared memory --wgmma--> sums of a piece of a tile
    a whole tile  -> epilogue -> result
    a piece of it -> workspace; the program that brings a tile's last piece adds up all of them, in the order of the
                     depth, and runs the epilogue

Sums do not depend on which program comes last, nor a row on the other rows. Weights are asked for before the kernel
ahead has ended; all it wrote is read after `gdc_wait`.
"""
# ruff: noqa: N806, RUF005

from __future__ import annotations

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

STORE: Final = gl.constexpr(0)
ADD: Final = gl.constexpr(1)
SILU: Final = gl.constexpr(2)


@gluon.jit
def _copy_weights(weights, buffers, bars, begin, unit, end, k_units, M_TILES: gl.constexpr, BYTES: gl.constexpr):
    """Asks for the weights of `unit`, and has its barrier expect BYTES: those and the rows."""
    stage = (unit - begin) % bars.shape[0]
    place = unit
    if M_TILES > 1:
        place = unit // (k_units * M_TILES) * k_units + unit % k_units
    place *= buffers.shape[1]
    mbarrier.expect(bars.index(stage), BYTES, pred=unit < end)
    tma.async_copy_global_to_shared(weights, [place, 0], bars.index(stage), buffers.index(stage), pred=unit < end)


@gluon.jit
def _copy_rows(rows, buffers, bars, begin, unit, end, k_units, M_TILES: gl.constexpr):
    """Asks for the rows of `unit`."""
    stage = (unit - begin) % bars.shape[0]
    m = 0
    if M_TILES > 1:
        m = unit // k_units % M_TILES * buffers.shape[1]
    k = unit % k_units * buffers.shape[2]
    tma.async_copy_global_to_shared(rows, [m, k], bars.index(stage), buffers.index(stage), pred=unit < end)


@gluon.jit
def _silu(gate, up):
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def _scaled(values, squares, K, eps):
    """`values` of rows whose squares sum up to `squares` over K, as if of rows of a mean square of 1."""
    scale = gl.convert_layout(gl.rsqrt(squares / K + eps), gl.SliceLayout(1, values.type.layout))
    return values * gl.expand_dims(scale, 1)


@gluon.jit
def _write(out, values, m0, n0, M, N, EPILOGUE: gl.constexpr):
    """To the rows from `m0` and columns from `n0` of the result."""
    layout: gl.constexpr = values.type.layout
    m = m0 + gl.arange(0, values.shape[0], layout=gl.SliceLayout(1, layout))
    n = n0 + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, layout))
    place = out + gl.expand_dims(m.to(gl.int64) * N, 1) + gl.expand_dims(n, 0)
    there = gl.expand_dims(m < M, 1) & gl.expand_dims(n < N, 0)
    if EPILOGUE == ADD:
        values += gl.load(place, mask=there, other=0.0, cache_modifier=".cg").to(gl.float32)
    gl.store(place, values.to(out.dtype.element_ty), mask=there)


@gluon.jit
def _sum(places, mask, first, last, SIZE: gl.constexpr, PIECES: gl.constexpr):
    """Of the pieces that programs `first` to `last` brought, in their order; SIZE: elements of one. All are asked for
    before the first is needed."""
    total = gl.load(places + (2 * first + 1) * SIZE, mask=mask, other=0.0, cache_modifier=".cg")
    for index in gl.static_range(1, PIECES):
        piece = 2 * (first + index)
        read = mask & (first + index <= last)
        total += gl.load(places + piece * SIZE, mask=read, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit(do_not_specialize=["M"])
def matmul(
    rows,
    weights,
    out,
    partials,
    partial_squares,
    arrived,
    M,
    N,
    K,
    eps,
    EPILOGUE: gl.constexpr,
    NORM: gl.constexpr,
    STAGES: gl.constexpr,
    M_TILES: gl.constexpr,
    PIECES: gl.constexpr,
    PART: gl.constexpr,
    num_warps: gl.constexpr,
):
    """rows: descriptor [M, K]; weights: descriptor of the units of a packed weight; out: [M, N].

    partials: float32 [2 * P, BLOCK_M, WIDTH] and partial_squares: float32 [2 * P, BLOCK_M], of a program's piece that
    ends a tile begun by another and of its piece that begins one; arrived: int32 [tiles], zeros before and after.
    PIECES: of one tile, at most; PART: columns of them that are added up at once.
    """
    BLOCK_M: gl.constexpr = rows.block_shape[0]
    BLOCK_K: gl.constexpr = rows.block_shape[1]
    WIDTH: gl.constexpr = weights.block_shape[0]
    BLOCK_N: gl.constexpr = WIDTH // 2 if EPILOGUE == SILU else WIDTH
    BYTES: gl.constexpr = (BLOCK_M + WIDTH) * BLOCK_K * rows.dtype.primitive_bitwidth // 8
    WARPS_M: gl.constexpr = min(num_warps, BLOCK_M // 16)
    WARPS_N: gl.constexpr = num_warps // WARPS_M
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS_M, WARPS_N], instr_shape=[16, WIDTH // WARPS_N, 16]
    )
    read_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    row_layout: gl.constexpr = gl.SliceLayout(1, read_layout)
    part_layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // PART, PART // 4], [num_warps, 1], [1, 0])

    k_units = gl.cdiv(K, BLOCK_K)
    units = gl.cdiv(N, BLOCK_N) * M_TILES * k_units
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    begin = program * units // programs
    end = (program + 1) * units // programs

    w_buffers = gl.allocate_shared_memory(weights.dtype, [STAGES] + weights.block_shape, weights.layout)
    x_buffers = gl.allocate_shared_memory(rows.dtype, [STAGES] + rows.block_shape, rows.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for ahead in gl.static_range(STAGES):
        mbarrier.init(bars.index(ahead), count=1)
    for ahead in gl.static_range(STAGES):
        _copy_weights(weights, w_buffers, bars, begin, begin + ahead, end, k_units, M_TILES, BYTES)
    gdc_launch_dependents()
    gdc_wait()
    for ahead in gl.static_range(STAGES):
        _copy_rows(rows, x_buffers, bars, begin, begin + ahead, end, k_units, M_TILES)

    unit = begin
    while unit < end:
        tile = unit // k_units
        stop = min((tile + 1) * k_units, end)
        whole = stop - unit == k_units
        starts = unit == tile * k_units
        acc = gl.zeros([BLOCK_M, WIDTH], gl.float32, layout=acc_layout)
        squares = gl.zeros([BLOCK_M], gl.float32, layout=row_layout)
        while unit < stop:
            stage = (unit - begin) % STAGES
            mbarrier.wait(bars.index(stage), (unit - begin) // STAGES & 1)
            x = x_buffers.index(stage)
            acc = warpgroup_mma(x, w_buffers.index(stage).permute((1, 0)), acc)
            if NORM:
                values = x.load(read_layout).to(gl.float32)
                squares += gl.sum(values * values, axis=1)
            # Every warp has read the stage before the copy engine writes to it.
            gl.thread_barrier()
            _copy_weights(weights, w_buffers, bars, begin, unit + STAGES, end, k_units, M_TILES, BYTES)
            _copy_rows(rows, x_buffers, bars, begin, unit + STAGES, end, k_units, M_TILES)
            unit += 1
        m0 = tile % M_TILES * BLOCK_M
        n0 = tile // M_TILES * BLOCK_N
        if whole:
            if NORM:
                acc = _scaled(acc, squares, K, eps)
            if EPILOGUE == SILU:
                gate, up = gl.split(gl.permute(gl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
                _write(out, _silu(gate, up), m0, n0, M, N, EPILOGUE)
            else:
                _write(out, acc, m0, n0, M, N, EPILOGUE)
        else:
            row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, acc_layout))
            column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, acc_layout))
            piece = 2 * program + starts.to(gl.int32)
            place = partials + piece * (BLOCK_M * WIDTH) + gl.expand_dims(row * WIDTH, 1) + gl.expand_dims(column, 0)
            gl.store(place, acc, mask=gl.expand_dims(m0 + row < M, 1))
            if NORM:
                gl.store(partial_squares + piece * BLOCK_M + gl.arange(0, BLOCK_M, layout=row_layout), squares)
            # As `packing.program_of`.
            first = ((tile * k_units + 1) * programs - 1) // units
            last = ((tile + 1) * k_units * programs - 1) // units
            gl.thread_barrier()
            before = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
            if before == last - first:
                gl.store(arrived + tile, 0)
                part_row = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, part_layout))
                part_column = gl.arange(0, PART, layout=gl.SliceLayout(0, part_layout))
                there = gl.expand_dims(m0 + part_row < M, 1) & gl.expand_dims(part_column >= 0, 0)
                places = partials + gl.expand_dims(part_row * WIDTH, 1) + gl.expand_dims(part_column, 0)
                if NORM:
                    sums = _sum(partial_squares + part_row, m0 + part_row < M, first, last, BLOCK_M, PIECES)
                for begun in range(0, BLOCK_N, PART):
                    values = _sum(places + begun, there, first, last, BLOCK_M * WIDTH, PIECES)
                    if NORM:
                        values = _scaled(values, sums, K, eps)
                    if EPILOGUE == SILU:
                        up = _sum(places + begun + BLOCK_N, there, first, last, BLOCK_M * WIDTH, PIECES)
                        values = _silu(values, _scaled(up, sums, K, eps))
                    _write(out, values, m0, n0 + begun, M, N, EPILOGUE)
