"""Measures how near the device's bandwidth products with weights of 4 and 8 bits come, beside those in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.gpu_check.device import measure_ceilings, seconds_of
from benchmarks.gpu_check.part import NotHere, Row, Where
from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.int4 import rounded
from oarlock.workers.quantization.int8 import Int8Weight, round_rows
from oarlock.workers.quantization.method import LinearWeight
from oarlock.workers.quantization.unquantized import DenseWeight

BATCHES = (1, 8, 16, 32, 64, 128, 512, 2048)
_IN_ALL = 1 << 30  # bytes of weights in bfloat16 that follow one another: several times what a cache holds


def _float8(weight: Tensor) -> LinearWeight:
    scales = weight.float().abs().amax(1, keepdim=True) / 448.0
    values = (weight.float() / scales).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales, weight.shape[1], weight.dtype, rounds_rows=True)


# name -> (what makes it of a weight in 16 bits, bits of a weight with what lies beside it)
FORMS: dict[str, tuple[Callable[[Tensor], LinearWeight], float]] = {
    "bfloat16": (DenseWeight, 16.0),
    "int8": (lambda weight: Int8Weight(*round_rows(weight), weight.dtype), 8.0),
    "float8": (_float8, 8.0),
    "int4": (rounded, 4.5),
}


def products(where: Where) -> Iterator[Row]:
    """Products with weights that no cache holds, at the rows of decode steps and of prompts."""
    device = torch.device(where.device, 0) if where.device == "cuda" else torch.device("cpu")
    missing = availability.why_not(device)
    if missing is not None:
        raise NotHere(f"no kernels in Triton: {missing}")
    limits = measure_ceilings(where)
    outputs, inputs = (64, 128) if where.is_tiny else (14336, 4096)
    copies = 2 if where.is_tiny else _IN_ALL // (outputs * inputs * 2)
    # The interpreter, which runs tiny shapes, has no products of bfloat16.
    dtype = torch.float16 if where.is_tiny else torch.bfloat16
    took: dict[int, float] = {}
    for name, (form, bits) in FORMS.items():
        weights = [form(torch.randn(outputs, inputs, device=device, dtype=dtype)).on(device) for _ in range(copies)]
        each = [weight.matmul() for weight in weights]
        for rows in (1, 70) if where.is_tiny else BATCHES:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            seconds = seconds_of(where, lambda x=x, each=each: [product(x) for product in each]) / copies
            took.setdefault(rows, seconds)
            figures = {
                "us": seconds * 1e6,
                "share of bandwidth": outputs * inputs * bits / 8 / seconds / limits.bytes_s,
            }
            figures |= {"TFLOP/s": 2e-12 * rows * outputs * inputs / seconds, "times bfloat16": took[rows] / seconds}
            yield Row(f"{name}: {rows} rows, {outputs} x {inputs}", figures)
        del weights, each
