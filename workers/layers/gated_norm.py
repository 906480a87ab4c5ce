"""Gated norm of a recurrence's result, over groups of heads of which a rank may hold a part."""

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu.structures import CGatedNorm
from oarlock.workers.layers.fused_layer import CannotPrepare, Program
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


class GatedNorm:
    """Gated RMS norm over each group of heads: [T, heads of the rank, head width] -> the same shape and dtype.

    If every rank, at each number of ranks with equal bits, holds whole groups, a rank norms them by itself. Otherwise
    one rank computes the sum of squares of each head, and every rank adds the sums of all heads of a group in the same
    order, so that the bits do not depend on the number of ranks (`RowNorm` is the same for queries and keys).
    """

    def __init__(self, name: str, spec: Mamba2Spec, placement: Placement) -> None:
        """Prepare the norm. `name` is the name of the sublayer's module."""
        assert spec.eps is not None
        size = placement.tp.size
        self.name = f"{name}.norm.weight"
        self.eps: float = spec.eps
        self.gates_first = spec.gates_first
        self.placement = placement
        self.head_dim = spec.head_dim
        self.all_heads, self.heads = spec.num_heads, spec.num_heads // size
        self.first = placement.tp.rank * self.heads
        self.all_groups = spec.groups
        self.groups = max(1, spec.groups // size)
        self.has_whole_groups = spec.groups % size == 0 and spec.groups % placement.slices == 0

    @property
    def weight_bytes(self) -> int:
        return 4 * self.heads * self.head_dim

    def load(self, weights: WeightSource) -> None:
        into = self.placement.empty(self.heads * self.head_dim)
        rows = self.all_heads * self.head_dim
        weights.take(self.name, into, shape=(rows,), start=self.first * self.head_dim)
        self.weight = into.float().view(self.heads, self.head_dim)

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of `x`, gated by `gate` of the same shape: [T, heads, head width]."""
        if self.has_whole_groups:
            groups = (len(x), self.groups, -1)
            weight = self.weight.view(self.groups, -1)
            normed = operations.gated_norm(
                x.reshape(groups), gate.reshape(groups), weight, self.eps, gates_first=self.gates_first
            )
            return normed.view(x.shape)
        squares = self._squares_of_groups(operations.gated_squares(x, gate, gates_first=self.gates_first))
        return operations.gated_norm_of_heads(x, gate, squares, self.weight, self.eps, gates_first=self.gates_first)

    def fuse(self, program: Program) -> CGatedNorm:
        """Return the norm as the kernels read it. Raises `CannotPrepare` if they cannot compute it."""
        weight = program.take(self, "weight", Tensor).data_ptr()
        if self.has_whole_groups:
            width = self.heads * self.head_dim // self.groups
            return CGatedNorm(weight, self.groups, width, self.eps, self.gates_first, 1, self.groups, 0)
        each = self.all_heads // self.all_groups
        all_heads, first = (self.heads, 0) if self.heads % each == 0 else (self.all_heads, self.first)
        if all_heads != self.heads and self.placement.tp.group_for_kernels is None:
            raise CannotPrepare("no kernel all-reduces the squares of the gated norm")
        return CGatedNorm(weight, self.heads, self.head_dim, self.eps, self.gates_first, each, all_heads, first)

    def _squares_of_groups(self, squares: Tensor) -> Tensor:
        """Return the sums of squares of all heads of the rank's groups: [T, groups, heads of a group]. `squares`: of
        the rank's heads, [T, heads]."""
        each = self.all_heads // self.all_groups
        if self.heads % each == 0:  # the rank has all heads of its groups
            return squares.unflatten(1, (-1, each))
        own = squares.new_zeros((len(squares), self.all_heads), dtype=torch.float32)
        own[:, self.first : self.first + self.heads] = squares
        # only one rank has each sum, the others have zeros: the all-reduce is exact
        total = self.placement.tp.all_reduce(own)
        first = self.first // each
        return total.unflatten(1, (-1, each))[:, first : first + self.groups]
