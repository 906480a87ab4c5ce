"""The order in which partial sums are added, over slices of a product's inputs and over ranks: a balanced binary tree.

Each half of the tree is a sum by itself. So a rank that holds some neighbouring slices adds them up to what another
number of ranks has at the same place, and the total has the same bits at every number of ranks.
"""

from collections.abc import Sequence

from torch import Tensor


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """((0 + 1) + (2 + 3)) + ...: tensors of one shape, in their own dtype. The left half is a power of two of them."""
    if len(parts) == 1:
        return parts[0]
    half = 1 << (len(parts) - 1).bit_length() - 1
    return tree_sum(parts[:half]) + tree_sum(parts[half:])
