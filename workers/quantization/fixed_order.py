"""Unquantised weights whose matmuls are batch-invariant on a CUDA device, by kernels in Triton.

The division of a matmul into tiles and spans depends on the shape of the weight, its dtype and the device, never on the
rows (`kernels/triton/matmul.py`). torch's matmuls in `matmul.py` are the reference.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization import weight_only
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul
from oarlock.workers.quantization.method import Empty, LinearWeight, UnquantizedLinearMethod, WeightShard
from oarlock.workers.quantization.registry import Quantization
from oarlock.workers.weights.source import WeightSource

_WAVES = 4  # programs per multiprocessor beyond which cutting the inputs gains nothing
_LEAST_STEPS = 8  # minimum steps of a span
_PARTIAL_BYTES = 64 << 20  # bytes of the sums of spans; with more rows, parts are multiplied one after another


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Sizes of the tile that one program multiplies in a step, and its compile options."""

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int

    def constants(self) -> dict[str, int]:
        return {"BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inputs}

    def options(self, amd: str | None) -> dict[str, Any]:
        precision = availability.float32_precision(amd)
        return {"PRECISION": precision, **availability.options(self.warps, self.stages, amd)}


def matmul_tile(dtype: torch.dtype) -> MatmulTile:
    """Return the tile, which does not depend on the number of rows. float32 takes more registers."""
    return MatmulTile(32, 64, 32, 4, 3) if dtype == torch.float32 else MatmulTile(32, 64, 64, 4, 4)


class FixedOrderMatmul:
    """`x @ weight.T + bias (+ residual)`, or gated: [T, K] -> [T, N] or [T, N / 2]. Rounded once."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, float32_output: bool = False, activation: str = ""
    ) -> None:
        """Plan spans for `weight` [N, K], `bias` [N]. `activation`: see `GatedMatmul`; the weight then has gate above
        up."""
        assert weight.is_contiguous()
        self.weight = weight
        self.bias = bias
        self.activation = activation
        self.output_dtype = torch.float32 if float32_output else weight.dtype
        self.tile = matmul_tile(weight.dtype)
        columns, inputs = weight.shape
        steps = -(-inputs // self.tile.inputs)
        wanted = -(-_WAVES * weight_only.processors(weight.device) // -(-columns // self.tile.columns))
        steps_each = -(-steps // max(1, min(wanted, steps // _LEAST_STEPS)))
        self.span, self.spans = steps_each * self.tile.inputs, -(-steps // steps_each)
        fitting = _PARTIAL_BYTES // (4 * self.spans * columns)
        self.rows_at_once = max(1, fitting // self.tile.rows) * self.tile.rows

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype == self.weight.dtype
        x = x if x.stride(1) == 1 else x.contiguous()
        parts = [
            weight_only.merged(
                self._multiply(x[first : first + self.rows_at_once]),
                self.bias,
                None if residual is None else residual[first : first + self.rows_at_once],
                self.output_dtype,
                self.activation,
            )
            for first in range(0, max(1, len(x)), self.rows_at_once)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids`, int64 [T], of the weight: [T, K]."""
        return F.embedding(ids, self.weight)

    def _multiply(self, x: Tensor) -> Tensor:
        """Return the sums of the spans: float32 [spans, T, N]."""
        from oarlock.workers.kernels.triton import matmul as kernels  # Triton is only installed on some machines

        kernel: Any = kernels.multiply_in_order  # calling a kernel compiles it; no annotation of its arguments
        tile, rows, (columns, inputs) = self.tile, len(x), self.weight.shape
        partial = torch.empty((self.spans, rows, columns), dtype=torch.float32, device=x.device)
        kernel[(-(-columns // tile.columns), self.spans, -(-rows // tile.rows))](
            x, self.weight, partial, rows, columns, inputs, x.stride(0), self.span,
            **tile.constants(), **tile.options(availability.amd_architecture()),
        )  # fmt: skip
        return partial


class FixedOrderHeadMatmul:
    """`x[:, h] @ weight[h].T` for every head h: [T, heads, K] -> [T, heads, N]. Rounded once."""

    def __init__(self, weight: Tensor) -> None:
        """Prepare `weight` [heads, N, K]."""
        self.weight = weight.contiguous()
        self.tile = matmul_tile(weight.dtype)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the results, in `out` if there is one. Heads of both may be parts of wider rows."""
        from oarlock.workers.kernels.triton import matmul as kernels  # Triton is only installed on some machines

        heads, columns, inputs = self.weight.shape
        rows = len(x)
        if out is None:
            out = torch.empty((rows, heads, columns), dtype=x.dtype, device=x.device)
        assert x.shape[1:] == (heads, inputs) and out.shape == (rows, heads, columns)
        assert x.dtype == self.weight.dtype == out.dtype and x.stride(2) == out.stride(2) == 1
        kernel: Any = kernels.multiply_heads  # calling a kernel compiles it; no annotation of its arguments
        tile = self.tile
        kernel[(-(-columns // tile.columns), heads, -(-rows // tile.rows))](
            x, self.weight, out, rows, columns, inputs, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            **tile.constants(), **tile.options(availability.amd_architecture()),
        )  # fmt: skip
        return out


class FixedOrderWeight:
    """`LinearWeight` of one tensor. `slices` is ignored: an order of additions over ranks is not guaranteed here."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # [N, K]

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        return FixedOrderMatmul(self.tensor, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        return FixedOrderMatmul(self.tensor, bias, activation=activation)

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.tensor)

    def on(self, device: torch.device) -> "FixedOrderWeight":
        return FixedOrderWeight(self.tensor.to(device))


class FixedOrderLinearMethod:
    """`LinearMethod` of unquantised checkpoints."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        return FixedOrderWeight(UnquantizedLinearMethod().load(shard, weights, empty).tensor)


FIXED_ORDER = Quantization(FixedOrderLinearMethod)  # format of every weight of an unquantised model
