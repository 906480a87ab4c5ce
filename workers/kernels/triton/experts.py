"""Matmuls with the experts of an MoE layer: tokens are sorted by expert, multiplied in blocks, and summed over experts.

Only data on the device decide for which expert a program works. Grids follow from T tokens, k experts per token, and E
experts, so launches can be captured in a CUDA graph. A block has up to BLOCK_M pairs of a token and one expert; an
expert's last block may be partly empty. Weights of 4 and 8 bits are stored as described in `matmul.py`, with all
experts in one tensor. Only the weights of experts in use are read.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.matmul import scaled, values_of


@triton.jit(do_not_specialize=["pairs", "blocks", "first"])
def sort_pairs(
    ids,  # int32 [T, k]
    starts,  # int32 [E_POW]   scratch: the index of each expert's next pair
    pairs_of,  # int32 [T * k]   indices of pairs, sorted by expert
    table,  # int32 [3, blocks]   a block's expert, its first index in `pairs_of`, and its number of pairs: 0 if unused
    pairs,  # T * k
    blocks,
    first,  # id of this rank's first expert
    EXPERTS: tl.constexpr,
    E_POW: tl.constexpr,  # a power of 2 above EXPERTS
    BLOCK_M: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Sort pairs by expert, in one program. The order of an expert's pairs varies, but no result depends on it."""
    expert = tl.arange(0, E_POW)
    counts = tl.zeros([E_POW], tl.int32)
    for at in range(0, pairs, SIZE):
        pair = at + tl.arange(0, SIZE)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
        own = tl.where((own >= 0) & (own < EXPERTS) & (pair < pairs), own, E_POW - 1)  # pairs of other ranks
        counts += tl.histogram(own, E_POW)
    counts = tl.where(expert < EXPERTS, counts, 0)
    begin = tl.cumsum(counts, 0) - counts
    tl.store(starts + expert, begin)
    of_expert = (counts + BLOCK_M - 1) // BLOCK_M
    block = tl.cumsum(of_expert, 0) - of_expert
    for number in range(tl.max(of_expert, 0)):
        here = number < of_expert
        tl.store(table + block + number, expert, mask=here)
        tl.store(table + blocks + block + number, begin + number * BLOCK_M, mask=here)
        tl.store(table + 2 * blocks + block + number, tl.minimum(counts - number * BLOCK_M, BLOCK_M), mask=here)
    nothing = tl.zeros([SIZE], tl.int32)
    for at in range(tl.sum(of_expert, 0), blocks, SIZE):
        left = at + tl.arange(0, SIZE)
        tl.store(table + 2 * blocks + left, nothing, mask=left < blocks)
    tl.debug_barrier()  # wait until `starts` is written
    for at in range(0, pairs, SIZE):
        pair = at + tl.arange(0, SIZE)
        own = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
        is_own = (own >= 0) & (own < EXPERTS) & (pair < pairs)
        slot = tl.atomic_add(starts + tl.where(is_own, own, 0), 1, mask=is_own)
        tl.store(pairs_of + slot, pair, mask=is_own)


@triton.jit
def _activated(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    if ACTIVATION == "clamped_swiglu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL) + 1.0
        inner = alpha * gate
    else:
        inner = gate
        if ACTIVATION == "gelu_tanh":  # (1 + tanh(y)) / 2 = sigmoid(2 * y)
            inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * tl.sigmoid(inner) * up


@triton.jit
def _step(
    at, begin, stop, stored, scales, zeros, factor, x_rows, sums, column, columns, is_column, is_row,
    BITS: tl.constexpr, FLOAT: tl.constexpr, UNIT: tl.constexpr, GROUP_UNITS: tl.constexpr, ZEROS: tl.constexpr,
    UNITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of the inputs from unit `at` on that are in the range `begin` to `stop`."""
    BYTES: tl.constexpr = UNIT * (8 if BITS == 16 else BITS) // 8
    lane = tl.arange(0, UNITS * BYTES)
    if BITS == 16:
        k = at * UNIT + lane
        is_input = (k >= begin) & (k < stop)
        weight = tl.load(stored[:, None] + k[None, :], mask=is_column[:, None] & is_input[None, :], other=0.0)
        right = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        sums = tl.dot(weight, right, sums, input_precision=PRECISION)
    else:
        unit = at + tl.arange(0, UNITS)
        inside = is_column[:, None, None] & (unit * UNIT < stop)[None, :, None]
        at_byte = (unit * BYTES)[None, :, None] + tl.arange(0, BYTES)[None, None, :]
        words = tl.load(stored[:, None, None] + at_byte, mask=inside, other=0)
        for half in tl.static_range(8 // BITS):
            numbers = values_of(words, half, BITS, FLOAT)
            if GROUP_UNITS:
                spot = (unit // GROUP_UNITS)[None, :, None] * columns + column[:, None, None]
                numbers = scaled(numbers, scales, zeros, factor[:, None, None], spot, inside, ZEROS)
            weight = tl.reshape(numbers.to(x_rows.dtype.element_ty), [sums.shape[0], UNITS * BYTES])
            k = (at + lane // BYTES) * UNIT + lane % BYTES + half * BYTES
            is_input = (k >= begin) & (k < stop)
            right = tl.load(x_rows + k[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
            sums = tl.dot(weight, right, sums, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=["blocks", "pairs"])
def multiply_experts(
    x,  # [T, K]; without ACTIVATION [T * k, K]
    values,  # [E, N, K], or uint8 [E, N, row_bytes]
    scales, zeros,  # [E, groups, N]; unused without groups; the second also without ZEROS
    factors,  # float32 [E, N]; unused with dense weights
    bias,  # [E, N]; unused without BIAS
    pair_factors,  # float32 [T * k]   factors of the inputs of pairs; unused without FACTORS
    out,  # [T * k, width]; without ACTIVATION float32 [slices, T * k, N]
    pairs_of, table,  # results of `sort_pairs`
    blocks, pairs,
    columns,  # N: with ACTIVATION 2 * width, gate above up
    inputs, slice_inputs,  # K, and the number of inputs that one program adds up
    groups, alpha, limit, x_stride, row_bytes,  # the last: bytes of a row; elements of a dense row
    TOP_K: tl.constexpr, BIAS: tl.constexpr, FACTORS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # "": none
    BITS: tl.constexpr,  # 16: dense
    FLOAT: tl.constexpr, UNIT: tl.constexpr, GROUP_UNITS: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # pairs
    BLOCK_N: tl.constexpr,  # rows of the weight; with ACTIVATION half are gate and half are up
    UNITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply one block of pairs by some rows of their expert's weight, over one slice of inputs."""
    block = tl.program_id(1)
    count = tl.load(table + 2 * blocks + block)
    if count == 0:
        return
    expert = tl.load(table + block).to(tl.int64)
    lane, local, is_row = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M) < count
    pair = tl.load(pairs_of + tl.load(table + blocks + block) + lane, mask=is_row, other=0)
    if ACTIVATION != "":
        HALF: tl.constexpr = BLOCK_N // 2
        width = columns // 2
        is_column = tl.program_id(0) * HALF + local % HALF < width
        column = tl.program_id(0) * HALF + local % HALF + local // HALF * width
        x_rows = x + (pair // TOP_K).to(tl.int64)[None, :] * x_stride
    else:
        column = tl.program_id(0) * BLOCK_N + local
        is_column = column < columns
        x_rows = x + pair.to(tl.int64)[None, :] * x_stride
    part = tl.program_id(2)
    begin, stop = part * slice_inputs, tl.minimum((part + 1) * slice_inputs, inputs)
    stored = values + (expert * columns + column) * row_bytes
    factor = tl.full([BLOCK_N], 1.0, tl.float32)
    if BITS != 16:
        factor = tl.load(factors + expert * columns + column, mask=is_column, other=0.0)
        scales += expert * groups * columns
        zeros += expert * groups * columns
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for at in range(begin // UNIT, tl.cdiv(stop, UNIT), UNITS):
        sums = _step(
            at, begin, stop, stored, scales, zeros, factor, x_rows, sums, column, columns, is_column, is_row,
            BITS, FLOAT, UNIT, GROUP_UNITS, ZEROS, UNITS, PRECISION,
        )  # fmt: skip
    if BITS != 16 and GROUP_UNITS == 0:
        sums *= factor[:, None]
    if FACTORS:  # scaling sums rounds less than scaling inputs
        sums *= tl.load(pair_factors + pair, mask=is_row, other=0.0)[None, :]
    if BIAS:
        added = tl.load(bias + expert * columns + column, mask=is_column, other=0.0).to(tl.float32)
        sums += tl.where(part == 0, added, 0.0)[:, None]
    if ACTIVATION != "":
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, HALF, BLOCK_M]), [1, 2, 0]))
        result_column = tl.program_id(0) * HALF + tl.arange(0, HALF)
        result = _activated(gate, up, alpha, limit, ACTIVATION).to(out.dtype.element_ty)
        into = out + pair.to(tl.int64)[None, :] * width + result_column[:, None]
        tl.store(into, result, mask=(result_column < width)[:, None] & is_row[None, :])
    else:
        into = out + (part * pairs + pair).to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(into, sums, mask=is_column[:, None] & is_row[None, :])


@triton.jit(do_not_specialize=["tokens", "first"])
def add_experts(
    partial,  # float32 [slices, T * k, N]
    ids,  # int32 [T, k]
    weights,  # float32 [T, k]
    out,  # float32 [lanes, T, N]
    tokens,  # T
    columns,  # N
    first,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUP: tl.constexpr,  # experts per lane; 0: lanes are slices
    WEIGHTED: tl.constexpr,  # results are multiplied by `weights`
    BLOCK: tl.constexpr,
):
    """Add up one token's results, each times its weight, in the order of its ids."""
    token, lane = tl.program_id(0), tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(ids + pair) - first
        is_here = (expert >= 0) & (expert < EXPERTS)
        row = pair
        if GROUP:
            is_here &= expert // GROUP == lane
        else:
            row += lane * tokens * TOP_K
        found = tl.load(partial + row.to(tl.int64) * columns + column, mask=inside & is_here, other=0.0)
        if WEIGHTED:
            found = tl.load(weights + pair) * found
        total += tl.where(is_here, found, 0.0)
    tl.store(out + (lane * tokens + token).to(tl.int64) * columns + column, total, mask=inside)
