"""The one pass over all logits: what of each block of 128 ids decides whether it matters."""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.sampling.noise import gumbel_screen, inverse, noise_words

BLOCK = tl.constexpr(128)


@triton.jit
def changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED: tl.constexpr):
    """The row's logits as they are sampled: `adjusted` where bias, penalties or a mask changed them."""
    x = logits + place.to(tl.int64) * stride
    if PROCESSED:
        is_changed = tl.load(changed + row) > 0
        if is_changed:
            x = adjusted + place.to(tl.int64) * vocab
    return x


@triton.jit
def survey(
    logits,  # float32 [L, V], rows `stride` elements apart
    adjusted,  # float32 [L, V]; of rows that are changed
    maxima,  # float32 [L, B]   largest logit; +inf where one is NaN
    screens,  # float32 [L, B]   largest (logit - maximum) / temperature + noise; of rows that are drawn
    masses,  # float32 [L, B]   sum of exp((logit - maximum) / temperature); of those too
    changed,
    temperature,
    keys,
    first,
    stride,
    vocab,
    blocks,
    TILE: tl.constexpr,  # blocks for one program
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    PROCESSED: tl.constexpr,
):
    place, tile = tl.program_id(0), tl.program_id(1)
    row = first + place
    block = tile * TILE + tl.arange(0, TILE)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = changed_row(logits, adjusted, changed, row, place, stride, vocab, PROCESSED)
    x = tl.load(x + ids, ids < vocab, float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    top = tl.max(x, 1)
    into = place * blocks + block
    inside = block < blocks
    tl.store(maxima + into, top, inside)
    if RANDOM:
        hot = tl.load(temperature + row)
        if hot > 0:
            finite = tl.where(tl.abs(top) < float("inf"), top, 0.0)
            scaled = (x - finite[:, None]) * inverse(hot)
            words = noise_words(ids, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
            tl.store(screens + into, tl.max(scaled + gumbel_screen(words), 1), inside)
            if FILTERED:
                tl.store(masses + into, tl.sum(tl.exp(scaled), 1), inside)
