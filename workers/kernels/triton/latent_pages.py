"""Pages of latent attention: one row per token for all heads, whose first elements, the latent, are also the value.

A page holds the data of one block: `BLOCK_SIZE` rows of `RANK + ROPE` elements in the model dtype or in 8 bits
(`FORMAT`: "int8" or "fp8"). In int8 pages the scales follow the rows as bfloat16, first those of the latents
[BLOCK_SIZE], then those of the other elements [BLOCK_SIZE]. Kernels get them as a second pointer (int16) to the same
memory. `attention/kv_format.py` defines the values bit by bit.
"""

import triton
import triton.language as tl

from oarlock.workers.kernels.triton.elementwise import norm_values
from oarlock.workers.kernels.triton.kv_pages import rotated_head, store_values

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


@triton.jit
def norm_rotate_and_write(
    q,  # [T, HEADS, NOPE + ROPE], tokens `q_stride` elements apart; the last ROPE elements of a head are read
    rows,  # [T, RANK + ROPE], tokens `stride` elements apart
    queries,  # [T, HEADS, RANK + ROPE]; the last ROPE elements of a head are written
    pages,  # [blocks] pages, see the module docstring
    scales,
    slot_mapping,  # int64 [T]
    cos,  # float32 [T, ROTARY]; unused, as `sin`, if ROTARY is 0
    sin,  # float32 [T, ROTARY]   the first half negated
    weight,  # [RANK]   scale of the latent's norm
    eps,
    q_stride,
    stride,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    ROTARY: tl.constexpr,  # number of rotated elements, the first of the last ROPE
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,  # RANK and ROPE rounded up to powers of 2
    BLOCK_R: tl.constexpr,
    NEIGHBOURS: tl.constexpr,  # elements 2 i and 2 i + 1 are rotated, not those that are ROTARY / 2 apart
    FORMAT: tl.constexpr,
):
    """Rotate the query of one head of one token, or norm, rotate and store the row of the token (head HEADS).

    This is the work between the projections and attention, except for the first RANK elements of `queries`, which are
    the results of a matmul. Each value is computed in float32 and rounded once.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    other = tl.arange(0, BLOCK_R)
    is_other = other < ROPE
    source = rows + token * stride + RANK
    if head < HEADS:
        source = q + token * q_stride + head * (NOPE + ROPE) + NOPE
    if ROTARY == 0:
        x = tl.load(source + other, mask=is_other, other=0.0)
    else:
        x = rotated_head(
            source, other, is_other, cos + token * ROTARY, sin + token * ROTARY, weight, eps, ROPE, ROTARY, False,
            False, NEIGHBOURS,
        )  # fmt: skip
    x = tl.where(is_other, x, 0.0).to(q.dtype.element_ty)
    if head < HEADS:
        tl.store(queries + (token * HEADS + head) * (RANK + ROPE) + RANK + other, x, mask=is_other)
        return
    slot = tl.load(slot_mapping + token)
    page, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    into = pages + latent_row_at(page, slot, RANK + ROPE, BLOCK_SIZE, FORMAT)
    one, is_row = tl.zeros([1], tl.int64), tl.full([1], 1, tl.int1)
    of_scales = scales + latent_scale_at(page, slot, OTHERS, RANK + ROPE, BLOCK_SIZE)
    store_values((into + RANK + other)[None, :], of_scales + one, x[None, :], is_other[None, :], is_row, FORMAT)
    column = tl.arange(0, BLOCK_D)
    inside = column < RANK
    latent = tl.load(rows + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    latent = norm_values(latent, weight, eps, column, inside, RANK).to(q.dtype.element_ty)
    of_scales = scales + latent_scale_at(page, slot, LATENT, RANK + ROPE, BLOCK_SIZE)
    store_values((into + column)[None, :], of_scales + one, latent[None, :], inside[None, :], is_row, FORMAT)
