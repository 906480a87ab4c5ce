"""Log-probabilities of the raw logits, as in `workers/sampling/sampler.py`, for the rows that want them."""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.choose import BLOCK, FINITE, first_of


@triton.jit
def _reports(num_logprobs, target_ids, row):
    return (tl.load(num_logprobs + row) >= 0) | (tl.load(target_ids + row) >= 0)


@triton.jit
def survey_raw(
    logits,  # float32 [L, V], rows `stride` elements apart
    maxima,  # float32 [L, B]   largest logit
    masses,  # float32 [L, B]   sum of exp(logit - maximum)
    above,  # int32 [L, tiles]   number of logits that are larger than the token's
    tokens,
    num_logprobs,
    target_ids,
    first,
    stride,
    vocab,
    blocks,
    tiles,
    TILE: tl.constexpr,  # blocks of one program
):
    place, tile = tl.program_id(0), tl.program_id(1)
    row = first + place
    if not _reports(num_logprobs, target_ids, row):
        return
    x = logits + place.to(tl.int64) * stride
    value = tl.load(x + tl.load(tokens + row))
    block = tile * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + ids, ids < vocab, float("-inf"))
    top = tl.max(values, 1)
    finite = tl.where(tl.abs(top) < float("inf"), top, 0.0)
    into = place * blocks + block
    tl.store(maxima + into, top, block < blocks)
    tl.store(masses + into, tl.sum(tl.exp(values - finite[:, None]), 1), block < blocks)
    tl.store(above + place * tiles + tile, tl.sum((values > value).to(tl.int32)))


@triton.jit
def report_logprobs(
    logits,
    maxima,
    masses,
    above,
    tokens,
    logprobs,  # float32 [R]
    ranks,  # int32 [R]
    top_ids,  # int32 [R, MOST]   -1 after the wanted ids
    top_logprobs,  # float32 [R, MOST]
    states,
    num_logprobs,
    target_ids,
    first,
    stride,
    vocab,
    blocks,
    tiles,
    MOST: tl.constexpr,
    MOST_WIDTH: tl.constexpr,  # MOST rounded up to a power of 2
    WIDTH: tl.constexpr,  # B rounded up to a power of 2
    TILES: tl.constexpr,  # `tiles` rounded up to a power of 2
):
    """Write logprobs, ranks and the best ids of the rows that want them. Rows that are not finite get none.

    Other arguments are the same as in `survey_raw`.
    """
    place = tl.program_id(0)
    row = first + place
    column = tl.arange(0, MOST_WIDTH)
    ids, values = tl.full([MOST_WIDTH], -1, tl.int32), tl.full([MOST_WIDTH], float("-inf"), tl.float32)
    logprob, rank = 0.0, 0
    if _reports(num_logprobs, target_ids, row) & (tl.load(states + row) == FINITE):
        x = logits + place.to(tl.int64) * stride
        block, lane, tile = tl.arange(0, WIDTH), tl.arange(0, BLOCK), tl.arange(0, TILES)
        top = tl.load(maxima + place * blocks + block, block < blocks, float("-inf"))
        peak = tl.max(top)
        mass = tl.load(masses + place * blocks + block, block < blocks, 0.0) * tl.exp(top - peak)
        total = peak.to(tl.float64) + tl.log(tl.sum(mass.to(tl.float64)))
        logprob = (tl.load(x + tl.load(tokens + row)).to(tl.float64) - total).to(tl.float32)
        rank = 1 + tl.sum(tl.load(above + place * tiles + tile, tile < tiles, 0))
        last, last_id = tl.full([], float("inf"), tl.float32), 0
        for nth in range(tl.load(num_logprobs + row)):
            best = tl.max(top)
            this = first_of(top == best, block)
            here = this * BLOCK + lane
            few = tl.load(x + here, here < vocab, float("-inf"))
            # the next id in the order of logits, then of ids
            found = first_of((few == best) & ((few < last) | (here > last_id)), here)
            ids = tl.where(column == nth, found, ids)
            values = tl.where(column == nth, (best.to(tl.float64) - total).to(tl.float32), values)
            rest = tl.max(tl.where((few < best) | ((few == best) & (here > found)), few, float("-inf")))
            top = tl.where(block == this, rest, top)
            last, last_id = best, found
    tl.store(logprobs + row, logprob)
    tl.store(ranks + row, rank)
    tl.store(top_ids + row * MOST + column, ids, column < MOST)
    tl.store(top_logprobs + row * MOST + column, values, column < MOST)
