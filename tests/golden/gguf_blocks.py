"""Numbers as blocks of a GGUF type: what the `gguf` package has, and the types with two levels of scales, which only
llama.cpp's C++ writes. Scales are the simplest that reach the largest number of each group.
"""

import gguf
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def quantized(x: Floats, kind: str) -> np.ndarray:
    """[..., K] as the type `kind` stores it: [..., bytes of a row] for blocks, the numbers themselves otherwise."""
    if kind in _WITH_TWO_LEVELS:
        blocks = _WITH_TWO_LEVELS[kind](np.ascontiguousarray(x, np.float32).reshape(-1, 256))
        return blocks.reshape(*x.shape[:-1], -1)
    if kind in ("F32", "F16"):
        return x.astype(np.float32 if kind == "F32" else np.float16)
    return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), gguf.GGMLQuantizationType[kind])


def dequantized(stored: np.ndarray, kind: str) -> Floats:
    """Dequantise with the `gguf` package."""
    return gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])


def _half(x: Floats) -> tuple[Floats, Bytes]:
    """[B, 1] rounded to 16 bits, and its bytes."""
    rounded = x.astype(np.float16)
    return rounded.astype(np.float32), rounded.view(np.uint8)


def _divided(x: Floats, by: Floats) -> Floats:
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def _scales_and_minima(x: Floats, most: int) -> tuple[Bytes, Bytes, Bytes]:
    """Blocks [B, 256] -> whole numbers from 0 to `most` [B, 8, 32], the bytes of both scales, the 12 of their parts."""
    groups = x.reshape(-1, 8, 32)
    low = np.minimum(groups.min(2), 0.0)  # [B, 8]
    step = (groups.max(2) - low) / most
    d, d_bytes = _half(step.max(1, keepdims=True) / 63)
    least, least_bytes = _half(-low.min(1, keepdims=True) / 63)
    scales = np.clip(np.rint(_divided(step, d)), 0, 63).astype(np.uint8)
    minima = np.clip(np.rint(_divided(-low, least)), 0, 63).astype(np.uint8)
    shifted = groups + (least * minima)[:, :, None]
    values = np.clip(np.rint(_divided(shifted, (d * scales)[:, :, None])), 0, most).astype(np.uint8)
    first, second = (scales[:, :4], minima[:, :4]), (scales[:, 4:], minima[:, 4:])
    upper = [low_four | (high_four >> 4) << 6 for low_four, high_four in zip(first, second, strict=True)]
    both = (second[0] & 15) | (second[1] & 15) << 4
    return values, np.concatenate((d_bytes, least_bytes), 1), np.concatenate((*upper, both), 1)


def _nibbles(values: Bytes) -> Bytes:
    """Numbers of 4 bits [B, 8, 32]: groups in pairs, of which the second is in the upper halves. -> [B, 128]."""
    pairs = values.reshape(-1, 4, 2, 32) & 15
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)


def _q4_k(x: Floats) -> Bytes:
    values, halves, scales = _scales_and_minima(x, 15)
    return np.concatenate((halves, scales, _nibbles(values)), 1)


def _q5_k(x: Floats) -> Bytes:
    values, halves, scales = _scales_and_minima(x, 31)
    fifth = ((values >> 4) << np.arange(8, dtype=np.uint8).reshape(1, 8, 1)).sum(1, dtype=np.uint8)  # [B, 32]
    return np.concatenate((halves, scales, fifth, _nibbles(values)), 1)


def _q6_k(x: Floats) -> Bytes:
    groups = x.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(2, keepdims=True), 2).squeeze(2)
    step = largest / -32
    d, d_bytes = _half(np.abs(step).max(1, keepdims=True) / 127)
    scales = np.clip(np.rint(_divided(step, d)), -127, 127).astype(np.int8)
    values = np.clip(np.rint(_divided(groups, (d * scales)[:, :, None])), -32, 31) + 32
    quarters = values.astype(np.uint8).reshape(-1, 2, 4, 32)  # of each half of a block
    lower = (quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4
    upper = ((quarters >> 4) << np.array((0, 2, 4, 6), np.uint8).reshape(1, 1, 4, 1)).sum(2, dtype=np.uint8)
    sides = [part.reshape(len(x), -1) for part in (lower, upper)]
    return np.concatenate((*sides, scales.view(np.uint8), d_bytes), 1)


_WITH_TWO_LEVELS = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
