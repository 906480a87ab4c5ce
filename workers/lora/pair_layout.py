"""Order of A and B in the memory of a slot that kernels on the CPU read (`csrc/layer/low_rank.h`).

A kernel multiplies a few rows of A at a time, and a panel of B's outputs at a time. Stored in that order, a thread
reads memory from its first to its last byte, which the processor prefetches; rows of a plain matrix would be thousands
of bytes apart.

    A [max rank, inputs]   ->  [groups of 4 ranks][inputs / block][ranks of the group][block]
    B [max rank, outputs]  ->  [panels][max rank][outputs of the panel]

The last group and the last panel may be smaller, so both orders have the elements of the matrix and no others. The
order does not depend on the ISA level.
"""

from collections.abc import Iterator

from torch import Tensor

RANKS = 4  # rows of A in a group: `kRowsOfA`
PANEL = 64  # outputs of B in a panel: a multiple of the lanes of every register
_BLOCK = 32  # inputs of A in a block: a multiple of two registers of every kind


def block_of(length: int) -> int:
    """Return the number of inputs in a block of A, whose slices have `length` inputs: a block is within one slice."""
    return length if length % _BLOCK else _BLOCK


def _groups(stored: Tensor, block: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the groups of equal size in the memory of A: first rank, and memory [groups, blocks, ranks, block]."""
    ranks, inputs = stored.shape
    flat, whole = stored.view(-1), ranks // RANKS * RANKS
    if whole:
        yield 0, flat[: whole * inputs].view(-1, inputs // block, RANKS, block)
    if whole < ranks:
        yield whole, flat[whole * inputs :].view(1, inputs // block, ranks - whole, block)


def store_a(stored: Tensor, a: Tensor, block: int) -> None:
    """Store rows `a` [n, inputs] as the first n of the memory of A, `stored` [max rank, inputs]."""
    for first, groups in _groups(stored, block):
        blocks, ranks = groups.shape[1:3]
        held = a[first : first + len(groups) * ranks]
        count = len(held) // ranks
        groups[:count] = held[: count * ranks].reshape(count, ranks, blocks, block).transpose(1, 2)
        if len(rest := held[count * ranks :]):
            groups[count, :, : len(rest)] = rest.reshape(len(rest), blocks, block).transpose(0, 1)


def read_a(stored: Tensor, block: int) -> Tensor:
    """Return A [max rank, inputs] from its memory."""
    a = stored.new_empty(stored.shape)
    for first, groups in _groups(stored, block):
        count = len(groups) * groups.shape[2]
        a[first : first + count] = groups.transpose(1, 2).reshape(count, -1)
    return a


def _panels(stored: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the panels of equal width in the memory of B: first output, and memory [panels, ranks, width]."""
    ranks, outputs = stored.shape
    flat, whole = stored.view(-1), outputs // PANEL * PANEL
    if whole:
        yield 0, flat[: ranks * whole].view(-1, ranks, PANEL)
    if whole < outputs:
        yield whole, flat[ranks * whole :].view(1, ranks, outputs - whole)


def store_b(stored: Tensor, b: Tensor) -> None:
    """Store rows `b` [n, outputs] as the first n of the memory of B, `stored` [max rank, outputs]."""
    for first, panels in _panels(stored):
        count, _, width = panels.shape
        held = b[:, first : first + count * width]
        panels[:, : len(b)] = held.reshape(len(b), count, width).transpose(0, 1)


def read_b(stored: Tensor) -> Tensor:
    """Return B [max rank, outputs], transposed, from its memory."""
    b = stored.new_empty(stored.shape)
    for first, panels in _panels(stored):
        count, ranks, width = panels.shape
        b[:, first : first + count * width] = panels.transpose(0, 1).reshape(ranks, -1)
    return b
