"""Expert matmuls on a CUDA device, by kernels in Triton (`kernels/triton/experts.py`) or torch's grouped matmuls.

A layer takes four launches, whose grids depend only on the numbers of tokens and experts, so that CUDA graphs can
record them. torch's bfloat16 matmuls can replace the middle two between the same sorting and adding. The fastest kernel
for a number of tokens is measured at start (`runner/expert_kernel_selection.py`). `TorchExpertMatmul` is the reference.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights, gate_of
from oarlock.workers.quantization.fixed_order import FixedOrderWeight
from oarlock.workers.quantization.method import DenseWeight, LinearWeight
from oarlock.workers.quantization.weight_only import UNITS, WeightOnly

# (token, expert) pairs in a block: the smallest for decodes, the larger for prompts.
BLOCKS = (16, 64, 128)
TILES = {f"tiles of {block}": block for block in BLOCKS}  # Triton kernels by name
GROUPED = "grouped_mm"
# Major compute capabilities with a grouped kernel in torch; on other devices it waits for the host.
_HOPPER, _BLACKWELL = 9, 10
_ALIGNED = 8  # 16-bit values: rows that torch's kernel reads begin at multiples of this number
_SORTED = 1024  # pairs sorted at a time
_ADDED = 1024  # outputs of a program that adds experts up
# Bytes of results before they are added up; with more tokens, parts are multiplied one after another.
_PARTIAL_BYTES = 128 << 20


def options(block: int, dtype: torch.dtype, amd: str | None, *, is_packed: bool) -> dict[str, Any]:
    """Return the weight rows and compile options of a matmul in blocks of `block` pairs.

    `is_packed`: the weight has 4 or 8 bits, whose scales take registers.
    """
    many = block > BLOCKS[0] and dtype != torch.float32
    compiled = availability.options(8 if block == BLOCKS[-1] and many else 4, 3 if many else 4, amd)
    return {
        "BLOCK_N": 128 if many and not is_packed else 64,
        "PRECISION": availability.float32_precision(amd),
        **compiled,
    }


class _StackedWeight:
    """Weights [N, K] of `count` experts in one format, each kind of tensor stacked over the experts, and their
    biases."""

    def __init__(self, count: int, first: LinearWeight, bias: Tensor | None) -> None:
        self.stored = first.stored if isinstance(first, WeightOnly) else None
        self.parts = [part if part is None else part.new_empty((count, *part.shape)) for part in _parts(first)]
        self.bias = None if bias is None else bias.new_empty((count, len(bias)))
        values = _parts(first)[0]
        assert values is not None
        self.columns, self.inputs = len(values), values.shape[1] if self.stored is None else self.stored.inputs

    def put(self, expert: int, weight: LinearWeight, bias: Tensor | None) -> None:
        if self.bias is not None and bias is not None:
            self.bias[expert] = bias
        for into, part in zip(self.parts, _parts(weight), strict=True):
            assert (into is None) == (part is None), "the experts have different formats"
            if into is not None and part is not None:
                into[expert] = part

    def constants(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the constants that kernels are compiled for, except the `options`."""
        if self.stored is None:
            units = 1 if dtype == torch.float32 else 2
            return {"BITS": 16, "FLOAT": False, "UNIT": UNITS[-1], "GROUP_UNITS": 0, "ZEROS": False, "UNITS": units}
        return {name: value for name, value in self.stored.constants().items() if name != "BLOCK_N"}

    def arguments(self) -> tuple[Tensor, ...]:
        values = self.parts[0]
        assert values is not None
        return tuple(values if part is None else part for part in self.parts)


def _parts(weight: LinearWeight) -> tuple[Tensor | None, ...]:
    """Return values, scales, zero points and factors."""
    if isinstance(weight, WeightOnly):
        stored = weight.stored
        return stored.values, stored.scales, stored.zeros, stored.factors
    assert isinstance(weight, (DenseWeight, FixedOrderWeight))
    return weight.tensor, None, None, None


class TritonExpertMatmul:
    """`ExpertMatmul` on a device."""

    def __init__(self, shape: ExpertsShape, experts: Iterable[ExpertWeights]) -> None:
        self.shape = shape
        # (maximum tokens, kernel) in ascending order; larger batches use the last kernel. Empty until measured.
        self.chosen: list[tuple[int, str]] = []
        self.gate_up: _StackedWeight | None = None
        self.down: _StackedWeight | None = None
        number = -1
        for number, one in enumerate(experts):
            if self.gate_up is None or self.down is None:
                self.gate_up = _StackedWeight(shape.count, one.gate_up, one.gate_up_bias)
                self.down = _StackedWeight(shape.count, one.down, one.down_bias)
                self.is_fixed = isinstance(one.gate_up, FixedOrderWeight)
            self.gate_up.put(number, one.gate_up, one.gate_up_bias)
            self.down.put(number, one.down, one.down_bias)
        assert number + 1 == shape.count

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        shape, top_k = self.shape, expert_ids.shape[1]
        if not shape.count or not len(x):
            return torch.zeros((len(x), shape.hidden), device=x.device)
        at_once = max(1, _PARTIAL_BYTES // (4 * shape.slices * top_k * shape.hidden))
        parts = [
            self._some(x[rows], expert_ids[rows].contiguous(), weights[rows].contiguous())
            for rows in (slice(first, first + at_once) for first in range(0, len(x), at_once))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _some(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        from oarlock.workers.kernels.triton import experts as kernels_of  # Triton is only installed on some machines

        kernels: Any = kernels_of  # calling a kernel compiles it, and no annotation describes its arguments
        shape, (tokens, top_k), device = self.shape, ids.shape, x.device
        pairs, chosen = tokens * top_k, self.kernel_for(tokens, tokens * top_k)
        block = TILES.get(chosen, BLOCKS[-1])
        # Maximum number of blocks: each expert in use has at most one block that is not full.
        blocks = min(pairs, shape.count + pairs // block)
        power = 1 << shape.count.bit_length()
        starts, pairs_of = (torch.empty(count, dtype=torch.int32, device=device) for count in (power, pairs))
        if chosen == GROUPED:
            pairs_of.fill_(pairs)  # rows of other ranks' pairs, which are not sorted
        table = torch.empty((3, blocks), dtype=torch.int32, device=device)
        kernels.sort_pairs[(1,)](
            ids, starts, pairs_of, table, pairs, blocks, shape.first, EXPERTS=shape.count, E_POW=power, BLOCK_M=block,
            SIZE=_SORTED, num_warps=8,
        )  # fmt: skip
        if chosen == GROUPED:
            partial = self._grouped(x, pairs_of, starts[: shape.count], top_k)
        else:
            inner = torch.empty((pairs, shape.width), dtype=shape.dtype, device=device)
            partial = torch.empty((shape.slices, pairs, shape.hidden), dtype=torch.float32, device=device)
            sorted_pairs, kernel = (pairs_of, table, block, top_k), kernels.multiply_experts
            factors = weights if shape.weighs_inputs else None
            self._multiply(kernel, x, self.gate_up, inner, *sorted_pairs, shape.activation, factors)
            self._multiply(kernel, inner, self.down, partial, *sorted_pairs, "")
        lanes = shape.slices * shape.groups
        out = torch.empty((lanes, tokens, shape.hidden), dtype=torch.float32, device=device)
        kernels.add_experts[(tokens, -(-shape.hidden // _ADDED), lanes)](
            partial, ids, weights, out, tokens, shape.hidden, shape.first, EXPERTS=shape.count, TOP_K=top_k,
            GROUP=shape.group if shape.groups > 1 else 0, WEIGHTED=not shape.weighs_inputs, BLOCK=_ADDED, num_warps=4,
        )  # fmt: skip
        return tree_sum(list(out))

    def _multiply(
        self,
        kernel: Any,
        x: Tensor,
        weight: _StackedWeight | None,
        out: Tensor,
        pairs_of: Tensor,
        table: Tensor,
        block: int,
        top_k: int,
        activation: str,
        pair_factors: Tensor | None = None,
    ) -> None:
        """Multiply sorted pairs by `weight`. `pair_factors`: float32 [T, k], factors of their inputs; None: 1."""
        assert weight is not None and x.stride(1) == 1 and x.shape[1] == weight.inputs
        shape, slices = self.shape, 1 if activation else self.shape.slices
        chosen = options(block, x.dtype, availability.amd_architecture(), is_packed=weight.stored is not None)
        outputs = weight.columns // 2 if activation else weight.columns
        rows = chosen["BLOCK_N"] // 2 if activation else chosen["BLOCK_N"]
        values, scales, zeros, factors = weight.arguments()
        groups = 0 if weight.stored is None or weight.stored.scales is None else scales.shape[1]
        kernel[(-(-outputs // rows), table.shape[1], slices)](
            x, values, scales, zeros, factors, values if weight.bias is None else weight.bias,
            values if pair_factors is None else pair_factors, out, pairs_of, table, table.shape[1], len(pairs_of),
            weight.columns, weight.inputs, weight.inputs // slices, groups, shape.alpha, shape.limit, x.stride(0),
            values.stride(1), TOP_K=top_k, ACTIVATION=activation, BIAS=weight.bias is not None,
            FACTORS=pair_factors is not None, BLOCK_M=block, **chosen, **weight.constants(x.dtype),
        )  # fmt: skip

    def _grouped(self, x: Tensor, pairs_of: Tensor, ends: Tensor, top_k: int) -> Tensor:
        """Return the results of pairs by torch's grouped matmuls: float32 [pairs + 1, hidden].

        The last row belongs to the pairs of other ranks. `pairs_of` is sorted and has the number of all pairs in place
        of other ranks' pairs. `ends` int32 [E] is the end of each expert's pairs; sorting leaves it in `starts`.
        """
        gate_up, down = self.weights()
        rows = (pairs_of // top_k).clamp_(max=len(x) - 1)
        both = F.grouped_mm(x.index_select(0, rows), gate_up.transpose(1, 2), offs=ends)  # [pairs, 2 * width]
        inner = gate_of(both, self.shape, torch.float32).to(x.dtype)
        results = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
        partial = torch.empty((len(pairs_of) + 1, self.shape.hidden), dtype=torch.float32, device=x.device)
        return partial.index_copy_(0, pairs_of.long(), results.float())

    @property
    def is_packed(self) -> bool:
        """True if weights have 4 or 8 bits."""
        return self.gate_up is not None and self.gate_up.stored is not None

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return the first tensor of gate and up, and of down, of all experts: [E, N, ...]."""
        assert self.gate_up is not None and self.down is not None
        return self.gate_up.arguments()[0], self.down.arguments()[0]

    def kernel_for(self, tokens: int, pairs: int) -> str:
        """Return the kernel's name. Before measurements, the tile fits the average number of pairs per expert."""
        if self.chosen:
            return next((kernel for most, kernel in self.chosen if tokens <= most), self.chosen[-1][1])
        kernels = self.kernels()
        return next((kernel for kernel in kernels if pairs <= TILES[kernel] * self.shape.count), kernels[-1])

    def kernels(self) -> list[str]:
        """Return the names of our kernels: only one if bits must not depend on the number of tokens."""
        return [*TILES][:1] if self.is_fixed or self.shape.dtype == torch.float32 else [*TILES]

    def why_not_grouped(self) -> str | None:
        """Return the reason why torch's grouped matmuls cannot be used, or None if they can."""
        shape, gate_up = self.shape, self.gate_up
        if shape.weighs_inputs:
            return "an expert's weight multiplies its input"
        if shape.dtype != torch.bfloat16 or gate_up is None or gate_up.stored is not None:
            return "weights are not bfloat16"
        if gate_up.bias is not None or shape.slices > 1:
            return "experts have biases" if gate_up.bias is not None else "the widths are split into slices"
        if shape.hidden % _ALIGNED or shape.width % _ALIGNED:
            return f"{shape.hidden} or {shape.width} inputs are not multiples of {_ALIGNED}"
        if availability.amd_architecture() is not None:
            return "torch has a kernel only for CUDA"
        major, minor = torch.cuda.get_device_capability(gate_up.arguments()[0].device)
        return None if major in (_HOPPER, _BLACKWELL) else f"torch has no kernel for devices of {major}.{minor}"


def why_not(first: ExpertWeights) -> str | None:
    """Return the reason why experts like `first` cannot use these kernels, or None if they can."""
    for weight in (first.gate_up, first.down):
        if not isinstance(weight, (WeightOnly, DenseWeight, FixedOrderWeight)):
            return f"no kernel reads a {type(weight).__name__}"
        if isinstance(weight, WeightOnly) and weight.order is not None:
            return "the order of inputs (act-order) differs from expert to expert"
        values = weight.stored.values if isinstance(weight, WeightOnly) else weight.tensor
        if not availability.can_serve(values.device):
            return f"it runs on CUDA devices, but the weights are on {values.device.type}"
    return None
