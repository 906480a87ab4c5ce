"""Pages of latent attention: one row per token for all heads, whose first elements, the latent, are also the value.

A page holds the data of one block: `BLOCK_SIZE` rows of `RANK + ROPE` elements in the model dtype or in 8 bits
(`FORMAT`: "int8" or "fp8"). In int8 pages the scales follow the rows as bfloat16, first those of the latents
[BLOCK_SIZE], then those of the other elements [BLOCK_SIZE]. Kernels get them as a second pointer (int16) to the same
memory. `attention/kv_format.py` defines the values bit by bit.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.kv_pages import store_values

LATENT: tl.constexpr = tl.constexpr(0)  # parts of a row, each with its own scale
OTHERS: tl.constexpr = tl.constexpr(1)


@triton.jit
def latent_row_at(page, slot, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr):
    """Return the offset of row `slot` of `page`, in elements. `page`: int64. `WIDTH`: elements of a row."""
    size: tl.constexpr = BLOCK_SIZE * (WIDTH + 4 if FORMAT == "int8" else WIDTH)
    return page * size + slot * WIDTH


@triton.jit
def latent_scale_at(page, slot, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Return the offset of the scale of a part of row `slot`, in 16-bit elements."""
    of_page: tl.constexpr = BLOCK_SIZE * WIDTH // 2 + PART * BLOCK_SIZE
    return page * (BLOCK_SIZE * (WIDTH + 4) // 2) + of_page + slot


@triton.jit(do_not_specialize=["count"])
def write_rows(
    rows,  # [T, RANK + ROPE], `stride` elements apart
    pages,  # [blocks] pages, see the module docstring
    scales,
    slot_mapping,  # int64 [T]
    count,  # T
    stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_D: tl.constexpr,  # RANK and ROPE rounded up to powers of 2
    BLOCK_R: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Store the rows of some tokens."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_row = token < count
    slot = tl.load(slot_mapping + token, mask=is_row, other=0)
    page, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    x_rows = (rows + token * stride)[:, None]
    into = (pages + latent_row_at(page, slot, RANK + ROPE, BLOCK_SIZE, FORMAT))[:, None]
    column, other = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    inside = is_row[:, None] & (column < RANK)
    x = tl.load(x_rows + column, mask=inside, other=0.0)
    of_scales = scales + latent_scale_at(page, slot, LATENT, RANK + ROPE, BLOCK_SIZE)
    store_values(into + column, of_scales, x, inside, is_row, FORMAT)
    inside = is_row[:, None] & (other < ROPE)
    x = tl.load(x_rows + RANK + other, mask=inside, other=0.0)
    of_scales = scales + latent_scale_at(page, slot, OTHERS, RANK + ROPE, BLOCK_SIZE)
    store_values(into + RANK + other, of_scales, x, inside, is_row, FORMAT)
