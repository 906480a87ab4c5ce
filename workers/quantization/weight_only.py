"""Weights of 4 or 8 bits on a CUDA device, multiplied by kernels in Triton (`kernels/triton/weight_only.py`).

With the few rows of a decode step, a matmul takes as long as reading its weight, and rows of x are never rounded.
Programs that need the same part of the weight for other rows run at the same time, so memory is read once. With more
rows, torch multiplies by the weight written out in the dtype of x, some outputs at a time. It multiplies in float8
instead if the weight is float8, the checkpoint intends it and the device supports it (`scaled_float8.py`,
`block_float8.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization import block_float8, scaled_float8
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul, gated

MOST_ROWS = 256  # rows of x up to which the stored values are multiplied
BLOCKS = (16, 64, 128)  # rows of x per program
UNITS = (16, 32)  # inputs that are stored together
_STEP_BYTES = {4: 64, 8: 128}  # bits -> bytes of a weight row per step: 128 inputs
_BLOCK_N = 64
MERGED = 1024  # outputs of a program that adds spans up
_WAVES = 4  # programs per multiprocessor beyond which cutting the inputs gains nothing
_LEAST_STEPS = 4  # minimum steps of a span
_WRITTEN_OUT = 64 << 20  # bytes of a weight that are written out at a time


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight [N, K] in the layout that the kernels read (`kernels/triton/weight_only.py`)."""

    values: Tensor  # uint8 [N, units * unit * bits / 8]
    scales: Tensor | None  # float16, float32, or uint8 (exponents of powers of 2, plus 127) [groups, N]
    zeros: Tensor | None  # float16 [groups, N]
    factors: Tensor  # float32 [N]
    inputs: int
    group: int  # inputs per group; any value without scales
    bits: int
    is_float: bool = False  # e4m3, or e2m1 with 4 bits
    rounds_rows: bool = False  # may round x to float8 if it has many rows
    blocks: Tensor | None = None  # float32 [N / 128, K / 128]: `scales`, if blocks of 128 outputs share them

    @property
    def unit(self) -> int:
        return unit_of(self.group) if self.scales is not None else UNITS[-1]

    @property
    def columns(self) -> int:
        return len(self.values)

    @property
    def units(self) -> int:
        return -(-self.inputs // self.unit)

    @property
    def float8(self) -> Tensor:
        """Values of a float8 weight: [N, K]."""
        return self.values[:, : self.inputs].view(torch.float8_e4m3fn)

    def constants(self) -> dict[str, Any]:
        """Return the constants that kernels are compiled for."""
        return {
            "BITS": self.bits,
            "FLOAT": self.is_float,
            "UNIT": self.unit,
            "GROUP_UNITS": 0 if self.scales is None else self.group // self.unit,
            "ZEROS": self.zeros is not None,
            "BLOCK_N": _BLOCK_N,
            "UNITS": _STEP_BYTES[self.bits] * 8 // (self.unit * self.bits),
        }

    def _arguments(self) -> tuple[Tensor, ...]:
        nothing = self.factors
        scales, zeros = (nothing if part is None else part for part in (self.scales, self.zeros))
        return self.values, scales, zeros, self.factors

    def spans(self) -> tuple[int, int]:
        """Return (units of a span, spans), with enough programs to occupy the device. Independent of the number of
        rows."""
        constants = self.constants()
        steps = -(-self.units // constants["UNITS"])
        programs = -(-self.columns // _BLOCK_N)
        wanted = -(-_WAVES * processors(self.values.device) // programs)
        steps_each = -(-steps // max(1, min(wanted, steps // _LEAST_STEPS)))
        return steps_each * constants["UNITS"], -(-steps // steps_each)

    def multiply(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T` of x [T, K] by spans of inputs: float32 [spans, T, N]."""
        assert x.stride(1) == 1 and x.shape[1] == self.inputs
        rows = len(x)
        block = next((block for block in BLOCKS if rows <= block), BLOCKS[-1])
        span, spans = self.spans()
        partial = torch.empty((spans, rows, self.columns), dtype=torch.float32, device=x.device)
        _kernels().multiply[(-(-rows // block), -(-self.columns // _BLOCK_N), spans)](
            x, *self._arguments(), partial, rows, self.columns, self.inputs, self.units, x.stride(0),
            self.values.stride(0), span, BLOCK_M=block,
            **multiply_options(block, availability.amd_architecture()), **self.constants(),
        )  # fmt: skip
        return partial

    def written_out(self, dtype: torch.dtype, first: int = 0, stop: int | None = None) -> Tensor:
        """Return rows `first` to `stop` dequantised to `dtype`: [rows, K]."""
        return self._write_out(dtype, (self.columns if stop is None else stop) - first, first, None)

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows `ids`, int64 [T], dequantised to `dtype`: [T, K]."""
        return self._write_out(dtype, len(ids), 0, ids.contiguous())

    def _write_out(self, dtype: torch.dtype, rows: int, first: int, ids: Tensor | None) -> Tensor:
        out = torch.empty((rows, self.inputs), dtype=dtype, device=self.values.device)
        constants = self.constants()
        if rows:
            _kernels().write_out[(-(-rows // _BLOCK_N), -(-self.units // constants["UNITS"]))](
                *self._arguments(), self.factors if ids is None else ids, out, first, rows, self.columns, self.inputs,
                self.units, self.values.stride(0), IDS=ids is not None, num_warps=4, **constants,
            )  # fmt: skip
        return out


class WeightOnlyMatmul:
    """`x @ weight.T + bias (+ residual)`: [T, K] -> [T, N]."""

    def __init__(
        self,
        weight: StoredWeight,
        order: Tensor | None,
        dtype: torch.dtype,
        bias: Tensor | None,
        *,
        float32_output: bool = False,
    ) -> None:
        """Use `order` int64 [K] or None: input k of the weight is input order[k] of x. `dtype`: of x and bias."""
        self.weight = weight
        self.order = order
        self.dtype = dtype
        self.bias = bias
        self.output_dtype = torch.float32 if float32_output else dtype
        self.in_float8 = self._in_float8()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.dtype == self.dtype
        x = _ordered(x, self.order)
        if len(x) > MOST_ROWS:
            return self._many(x, residual)
        partial = self.weight.multiply(x)
        if len(partial) == 1 and self.bias is None and residual is None and self.output_dtype == torch.float32:
            return partial[0]
        return merged(partial, self.bias, residual, self.output_dtype)

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids`, int64 [T], of the weight: [T, K]."""
        rows = self.weight.rows(ids, self.dtype)
        return rows if self.order is None else torch.empty_like(rows).index_copy_(1, self.order, rows)

    def _many(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if self.in_float8 is not None:
            y = self.in_float8(x, dtype=self.output_dtype)
            y = y if self.bias is None else y.add_(self.bias)
        else:
            y = self._by_torch(x)
        return y if residual is None else y.add_(residual)

    def _by_torch(self, x: Tensor) -> Tensor:
        """Return `x` times the dequantised weight, plus the bias."""
        weight = self.weight
        at_once, parts = max(1, _WRITTEN_OUT // (weight.inputs * x.element_size())), []
        for first in range(0, weight.columns, at_once):
            stop = min(first + at_once, weight.columns)
            bias = None if self.bias is None else self.bias[first:stop]
            parts.append(_matmul(x, weight.written_out(x.dtype, first, stop), bias, self.output_dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _in_float8(self) -> Callable[..., Tensor] | None:
        """Return the float8 matmul for many rows, without bias, if the checkpoint intends it and the device supports
        it."""
        weight = self.weight
        if not weight.rounds_rows:
            return None
        if weight.scales is None:
            is_there = scaled_float8.why_not(weight.float8, self.output_dtype) is None
            return partial(scaled_float8.multiply, values=weight.float8, factors=weight.factors) if is_there else None
        if weight.blocks is None:
            return None
        dtypes = self.dtype, self.output_dtype
        found = block_float8.block_matmul(weight.float8, weight.blocks, *dtypes, self._by_torch)
        return None if isinstance(found, str) else found


class WeightOnlyGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)`: [T, K] -> [T, I]. `weight` [2 * I, K] has gate above up."""

    def __init__(
        self, weight: StoredWeight, order: Tensor | None, dtype: torch.dtype, bias: Tensor | None, activation: str
    ) -> None:
        self.both = WeightOnlyMatmul(weight, order, dtype, bias)
        self.activation = activation
        self.gated = gated(activation, weight.values.device)

    def __call__(self, x: Tensor) -> Tensor:
        both = self.both
        if len(x) <= MOST_ROWS:
            assert x.dtype == both.dtype
            return merged(both.weight.multiply(_ordered(x, both.order)), both.bias, None, both.dtype, self.activation)
        return self.gated(both(x))


class WeightOnly:
    """`LinearWeight` on a device. `slices` is ignored: these matmuls do not guarantee an order of additions."""

    def __init__(self, stored: StoredWeight, dtype: torch.dtype, order: Tensor | None = None) -> None:
        self.stored = stored
        self.dtype = dtype
        self.order = order

    def on(self, device: torch.device) -> "WeightOnly":
        assert self.stored.values.device.type == device.type
        return self

    def matmul(self, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
        return WeightOnlyMatmul(self.stored, self.order, self.dtype, bias, float32_output=float32_output)

    def gated_matmul(self, bias: Tensor | None, activation: str) -> GatedMatmul:
        return WeightOnlyGatedMatmul(self.stored, self.order, self.dtype, bias, activation)

    def embed(self, ids: Tensor) -> Tensor:
        return WeightOnlyMatmul(self.stored, self.order, self.dtype, None).rows(ids)


def merged(
    partial: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype, activation: str = ""
) -> Tensor:
    """Return the sum of spans [spans, T, N], plus bias [N] and residual [T, N], or gated: [T, N] or [T, N / 2]."""
    spans, rows, columns = partial.shape
    width = columns // 2 if activation else columns
    out = torch.empty((rows, width), dtype=dtype, device=partial.device)
    if residual is not None:
        assert residual.stride(1) == 1
    _kernels().merge[(rows, -(-width // MERGED))](
        partial, partial if bias is None else bias, partial if residual is None else residual, out, rows, columns,
        spans, 0 if residual is None else residual.stride(0), BIAS=bias is not None, RESIDUAL=residual is not None,
        GATE=activation, BLOCK=MERGED, num_warps=4,
    )  # fmt: skip
    return out


def multiply_options(block: int, amd: str | None) -> dict[str, Any]:
    """Return the compile options of a matmul in blocks of `block` rows. More stages prefetch more of the weight."""
    warps, stages = (4, 4) if block == BLOCKS[0] else (4, 3) if block < BLOCKS[-1] else (8, 3)
    options = availability.options(warps, stages, amd)
    return {"PRECISION": availability.float32_precision(amd), **options}


def unit_of(group: int) -> int:
    """Return the number of inputs that are stored together, all of one group."""
    return next(unit for unit in reversed(UNITS) if group % unit == 0)


def of_channels(values: Tensor, scales: Tensor) -> StoredWeight:
    """Store integers with a scale for each output: int8 [N, K], float32 [N]. The result is on the device of
    `values`."""
    inputs = values.shape[1]
    return StoredWeight(_integers(values, 8, UNITS[-1]), None, None, scales.to(values.device), inputs, inputs, 8)


def of_groups(
    values: Tensor, scales: Tensor, zeros: Tensor | None, factors: Tensor, group: int, bits: int
) -> StoredWeight:
    """Store values as in `StoredGroups`, on the device of `values`.

    `values` int8 [N, K], `scales` and `zeros` float16 [N, groups], `factors` float32 [N].
    """
    device = values.device
    return StoredWeight(
        _integers(values, bits, unit_of(group)),
        _by_group(scales, device),
        None if zeros is None else _by_group(zeros, device),
        factors.to(device),
        values.shape[1],
        group,
        bits,
    )


def of_float8(values: Tensor, scales: Tensor, group: int, *, rounds_rows: bool = False) -> StoredWeight:
    """Store finite `values` float8_e4m3fn [N, K] with `scales` float32 [N, groups], on the device of `values`."""
    inputs, device = values.shape[1], values.device
    if scales.shape[1] == 1:
        stored, factors, unit = None, scales[:, 0].contiguous().to(device), UNITS[-1]
    else:
        stored, factors, unit = _by_group(scales, device), torch.ones(len(values), device=device), unit_of(group)
    blocks = None
    if rounds_rows and stored is not None and group == block_float8.BLOCK and inputs % group == 0:
        blocks = block_float8.blocks_of(scales)
        blocks = None if blocks is None else blocks.to(device)
    padded = F.pad(values.view(torch.uint8), (0, -inputs % unit))
    return StoredWeight(
        padded, stored, None, factors, inputs, group, 8, is_float=True, rounds_rows=rounds_rows, blocks=blocks
    )


def of_mxfp4(values: Tensor, scales: Tensor) -> StoredWeight:
    """Store values in MXFP4, on the device of `values`.

    `values` uint8 [N, K / 2], two e2m1 values per byte, the first in the low half. `scales` uint8 [N, K / 32], the
    exponents of the scales, plus 127.
    """
    columns, inputs = len(values), 2 * values.shape[1]
    assert scales.shape == (columns, inputs // UNITS[-1])
    numbers = torch.stack([values & 15, values >> 4], 2).view(columns, -1, 2, UNITS[-1] // 2)
    low, high = numbers.unbind(2)
    factors = torch.ones(columns, device=values.device)
    packed = (low | high << 4).flatten(1)
    return StoredWeight(packed, _by_group(scales, values.device), None, factors, inputs, UNITS[-1], 4, is_float=True)


def _integers(values: Tensor, bits: int, unit: int) -> Tensor:
    """Return int8 [N, K] as the bytes that the kernels read: uint8 [N, bytes]."""
    padded = F.pad(values, (0, -values.shape[1] % unit))
    if bits == 8:
        return padded.view(torch.uint8) ^ 0x80
    low, high = ((part + 8).view(torch.uint8) for part in padded.view(len(values), -1, 2, unit // 2).unbind(2))
    return (low | high << 4).flatten(1)


def _by_group(scales: Tensor, device: torch.device) -> Tensor:
    """Transpose [N, groups] to [groups, N]."""
    return scales.T.contiguous().to(device)


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    if order is not None:
        return x.index_select(1, order)
    return x if x.stride(1) == 1 else x.contiguous()


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `x @ weight.T + bias`, with float32 sums left unrounded if `dtype` is float32."""
    if dtype == x.dtype:
        return F.linear(x, weight, bias)
    y = torch.mm(x, weight.T, out_dtype=dtype) if x.device.type == "cuda" else x.to(dtype) @ weight.to(dtype).T
    return y if bias is None else y.add_(bias)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device; 1 for any other device."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _kernels() -> Any:
    from oarlock.workers.kernels.triton import matmul as kernels  # Triton is only installed on some machines

    return kernels
