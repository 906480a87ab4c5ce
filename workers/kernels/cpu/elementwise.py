"""Norms, rotary embedding, gelu and gates of rows with the C++ kernels, one call each instead of several operations.

The kernels are in `elementwise.cpp`, for bfloat16, float16 and float32; tests compare them with float64 and with the
torch versions in `layers/`.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.structures import CHeadsOfRank

_WIDEST_HEAD = 576  # `kWidestHead` in elementwise/heads.h
_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # same numbers as in `element_types.h`


def can_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the kernels support rows of `dtype` on `device`, and could be built here."""
    return dtype in _TYPES and device.type == "cpu" and library.provides("oarlock_rms_norm", dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, float32_output: bool = False) -> Tensor:
    """Apply RMSNorm to `x` [T, H, D] or [T, D]; `weight` float32 [H, D] or [D].

    The result has the shape of `x`, and its dtype or float32.
    """
    heads = x.shape[1] if x.dim() == 3 else 1
    width = x.shape[-1]
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == width)
    assert weight.dtype == torch.float32 and weight.is_contiguous()
    y = torch.empty(x.shape, dtype=torch.float32 if float32_output else x.dtype)
    _function(library.library(x.dtype), "oarlock_rms_norm")(
        x.data_ptr(), weight.data_ptr(), y.data_ptr(),
        x.shape[0], heads, width, x.stride(0), eps, _TYPES[x.dtype], float32_output,
    )  # fmt: skip
    return y


def squares_of_heads(of: CHeadsOfRank, qk: Tensor) -> Tensor:
    """Sum squares: `qk` [T, heads + kv_heads, D] -> float32 [T, all heads and KV heads], 0 for heads of other ranks."""
    rows, _, width = qk.shape
    squares = torch.empty((rows, of.all_heads + of.all_kv_heads), dtype=torch.float32)
    _function(library.library(qk.dtype), "oarlock_squares_of_heads")(
        ctypes.addressof(of), qk.data_ptr(), squares.data_ptr(), rows, width, qk.stride(0), _TYPES[qk.dtype]
    )
    return squares


def norm_of_rows(of: CHeadsOfRank, qk: Tensor, squares: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to `qk` [T, heads + kv_heads, D] over all heads: float32 of the same shape.

    `squares`: of all ranks' heads, as from `squares_of_heads`. `weight`: float32 [heads + kv_heads, D].
    """
    rows, _, width = qk.shape
    assert qk.stride(1) == width and qk.stride(2) == 1 and squares.is_contiguous() and weight.is_contiguous()
    y = torch.empty(qk.shape, dtype=torch.float32)
    _function(library.library(qk.dtype), "oarlock_norm_of_rows")(
        ctypes.addressof(of), qk.data_ptr(), squares.data_ptr(), weight.data_ptr(), y.data_ptr(),
        rows, width, qk.stride(0), eps, _TYPES[qk.dtype],
    )  # fmt: skip
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotate `x` [T, H, D] of `dtype` or float32 -> `dtype` [T, H, D], contiguous.

    `cos`, `sin`: float32 [T, 1, rotary_dim].
    """
    rows, heads, width = x.shape
    assert x.dtype in (dtype, torch.float32) and x.stride(2) == 1 and x.stride(1) == width
    assert cos.is_contiguous() and sin.is_contiguous()
    y = torch.empty((rows, heads, width), dtype=dtype)
    _function(library.library(dtype), "oarlock_rotate")(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        rows, heads, width, cos.shape[-1] // 2, x.stride(0), x.dtype == torch.float32, _TYPES[dtype],
    )  # fmt: skip
    return y


def finish_heads(
    x: Tensor,
    angles: tuple[Tensor, Tensor] | None,
    norm: tuple[Tensor, float] | None,
    scale: Tensor | None,
    num_scaled: int,
    dtype: torch.dtype,
    *,
    pairs_neighbours: bool,
) -> Tensor:
    """Rotate, norm and scale the heads of `x`, as `finish_heads` in layers/rotary.py describes."""
    rows, heads, width = x.shape
    assert x.dtype in (dtype, torch.float32) and x.stride(2) == 1 and x.stride(1) == width <= _WIDEST_HEAD
    cos, sin = angles or (None, None)
    weight, eps = norm or (None, 0.0)
    assert all(one is None or (one.is_contiguous() and one.dtype == torch.float32) for one in (cos, sin, weight, scale))
    y = torch.empty((rows, heads, width), dtype=dtype)
    _function(library.library(dtype), "oarlock_finish_heads")(
        x.data_ptr(), *[None if one is None else one.data_ptr() for one in (cos, sin, weight, scale)], y.data_ptr(),
        rows, heads, width, 0 if cos is None else cos.shape[-1] // 2, x.stride(0), num_scaled, eps, pairs_neighbours,
        x.dtype == torch.float32, _TYPES[dtype],
    )  # fmt: skip
    return y


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply `x` [T, D] by the sigmoid of `gate` [T, D], both contiguous and of one dtype, in place. Return `x`."""
    assert x.is_contiguous() and gate.is_contiguous() and x.dtype == gate.dtype and x.shape == gate.shape
    _function(library.library(x.dtype), "oarlock_gate_rows")(x.data_ptr(), gate.data_ptr(), *x.shape, _TYPES[x.dtype])
    return x


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Apply LayerNorm to `x` [T, D] of `dtype` or float32, contiguous -> `dtype` [T, D].

    `weight`, `bias`: float32 [D], or None.
    """
    assert x.is_contiguous() and x.dtype in (dtype, torch.float32)
    assert all(one is None or (one.dtype == torch.float32 and one.is_contiguous()) for one in (weight, bias))
    y = torch.empty(x.shape, dtype=dtype)
    _function(library.library(dtype), "oarlock_layer_norm")(
        x.data_ptr(), None if weight is None else weight.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), *x.shape, eps, x.dtype == torch.float32, _TYPES[dtype],
    )  # fmt: skip
    return y


def gelu(x: Tensor, dtype: torch.dtype, *, gated: bool = False, is_tanh: bool = False) -> Tensor:
    """Apply gelu to `x` [T, I] of `dtype` or float32, contiguous -> `dtype` [T, I].

    With `gated`, `x` is [T, 2 * I], and the first half of a row is the gate of the second half.
    """
    assert x.is_contiguous() and x.dtype in (dtype, torch.float32)
    rows, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    y = torch.empty((rows, width), dtype=dtype)
    _function(library.library(dtype), "oarlock_gelu")(
        x.data_ptr(), y.data_ptr(), rows, width, gated, is_tanh, x.dtype == torch.float32, _TYPES[dtype]
    )
    return y


@cache
def _function(kernels: ctypes.CDLL, name: str) -> Callable[..., None]:
    pointer, number, switch = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    arguments = {
        "oarlock_rms_norm": [*[pointer] * 3, *[number] * 4, ctypes.c_float, switch, switch],
        "oarlock_squares_of_heads": [*[pointer] * 3, *[number] * 3, switch],
        "oarlock_norm_of_rows": [*[pointer] * 5, *[number] * 3, ctypes.c_float, switch],
        "oarlock_rotate": [*[pointer] * 4, *[number] * 5, switch, switch],
        "oarlock_finish_heads": [*[pointer] * 6, *[number] * 6, ctypes.c_float, *[switch] * 3],
        "oarlock_gate_rows": [*[pointer] * 2, *[number] * 2, switch],
        "oarlock_layer_norm": [*[pointer] * 4, *[number] * 2, ctypes.c_float, switch, switch],
        "oarlock_gelu": [*[pointer] * 2, *[number] * 2, *[switch] * 4],
    }
    function = getattr(kernels, name)
    function.argtypes, function.restype = arguments[name], None
    return function
