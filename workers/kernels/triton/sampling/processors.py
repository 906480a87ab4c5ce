"""Bias, penalties and masks, as in `workers/sampling/logits_processors.py`, stored separately from raw logits."""

import triton
import triton.language as tl


@triton.jit
def _penalised(x, ids, inside, seen, guesses, row, history, drafts, repetition, frequency, presence):
    """Return the logits with penalties for ids that occurred before. Drafts before the row count as generated."""
    if history >= 0:
        number = tl.load(seen + ids, inside, 0)  # twice the count, plus 1 if listed
        for back in range(drafts):
            number += tl.where(ids == tl.load(guesses + row - 1 - back), 2, 0)
        if tl.max(number) > 0:
            y = x.to(tl.float64)
            factor = tl.load(repetition + row).to(tl.float64)
            y = tl.where(x > 0, y / factor, y * factor)
            times = number >> 1
            y -= tl.load(frequency + row).to(tl.float64) * times
            y -= tl.where(times > 0, tl.load(presence + row).to(tl.float64), 0.0)
            x = tl.where(number > 0, y.to(tl.float32), x)
    return x


@triton.jit
def _masked(x, ids, inside, mask_bits, mask, words):
    """Return the logits after the mask, and which ids it allows. NaN stays NaN, and +inf becomes NaN."""
    allowed = inside
    if mask >= 0:
        word = tl.load(mask_bits + mask * words + ids // 32, inside & (ids // 32 < words), 0)
        allowed = inside & (((word >> (ids % 32)) & 1) > 0)
        x = tl.where(allowed, x, x + float("-inf"))
    return x, allowed


@triton.jit
def penalise_and_mask(
    logits,
    adjusted,
    allowed,
    seen,  # int32 [engine's rows, V]   counts of `DenseHistories`
    changed,
    history_rows,
    repetition,
    frequency,
    presence,
    guesses,
    drafts_before,
    mask_index,
    mask_bits,
    first,
    first_id,  # the id of the first logit if the vocabulary is split over ranks; else 0
    stride,
    vocab,
    width,  # ids in a row of `seen`
    tiles,
    words,
    TILE: tl.constexpr,  # ids of one program
):
    """Apply penalties and masks to all ids of changed rows. `add_bias` then changes the ids with a bias."""
    index, tile = tl.program_id(0), tl.program_id(1)
    row = first + index
    if tl.load(changed + row) == 0:
        return
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = tl.load(logits + index.to(tl.int64) * stride + ids, inside, float("-inf"))
    history, drafts = tl.load(history_rows + row), tl.load(drafts_before + row)
    counts, token = seen + history.to(tl.int64) * width, first_id + ids
    x = _penalised(x, token, inside, counts, guesses, row, history, drafts, repetition, frequency, presence)
    x, free = _masked(x, token, inside, mask_bits, tl.load(mask_index + row).to(tl.int64), words)
    tl.store(adjusted + index.to(tl.int64) * vocab + ids, x, inside)
    tl.store(allowed + index * tiles + tile, tl.sum(free.to(tl.int32)))


@triton.jit
def add_bias(
    logits,
    adjusted,
    banned,
    seen,
    changed,
    history_rows,
    repetition,
    frequency,
    presence,
    guesses,
    drafts_before,
    mask_index,
    mask_bits,
    bias_starts,
    bias,
    first,
    first_id,
    stride,
    vocab,
    width,
    words,
    TILE: tl.constexpr,  # entries at a time
):
    """Recompute ids with a bias from the raw logits. Other arguments are the same as in `penalise_and_mask`."""
    index = tl.program_id(0)
    row = first + index
    if tl.load(changed + row) == 0:
        return
    history, drafts = tl.load(history_rows + row), tl.load(drafts_before + row)
    mask = tl.load(mask_index + row).to(tl.int64)
    counts = seen + history.to(tl.int64) * width
    end, bans = tl.load(bias_starts + row + 1), 0
    for start in range(tl.load(bias_starts + row), end, TILE):
        entry = start + tl.arange(0, TILE)
        token = tl.load(bias + 2 * entry, entry < end, -1)
        ids = token - first_id
        inside = (token >= 0) & (ids >= 0) & (ids < vocab)
        value = tl.load(bias + 2 * entry + 1, inside, 0).to(tl.float32, bitcast=True)
        x = tl.load(logits + index.to(tl.int64) * stride + ids, inside, 0.0) + value
        x = _penalised(x, token, inside, counts, guesses, row, history, drafts, repetition, frequency, presence)
        x, free = _masked(x, token, inside, mask_bits, mask, words)
        bans += tl.sum((free & (value == float("-inf"))).to(tl.int32))
        tl.store(adjusted + index.to(tl.int64) * vocab + ids, x, inside)
    tl.store(banned + index, bans)


@triton.jit
def count_sampled(seen, tokens, history_rows, guesses, drafts_before, vocab):
    """Add the sampled tokens of rows with penalties to the histories, unless a draft before them was wrong."""
    row = tl.program_id(0)
    history = tl.load(history_rows + row)
    if history < 0:
        return
    right = True
    for back in range(tl.load(drafts_before + row)):
        right = right & (tl.load(tokens + row - 1 - back) == tl.load(guesses + row - 1 - back))
    if right:
        tl.atomic_add(seen + history.to(tl.int64) * vocab + tl.load(tokens + row), 2, sem="relaxed")
