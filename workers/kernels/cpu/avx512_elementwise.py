"""RMSNorm and rotary embedding of bfloat16 rows by the C++ kernels, one call each instead of several operations.

The kernels are in `elementwise.cpp`; tests compare them with the forms of torch in `layers/norm.py` and
`layers/rotary.py`.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor

from workers.kernels.cpu import library


def can_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels support rows of `dtype` on `device`, and could be built here."""
    return dtype == torch.bfloat16 and device.type == "cpu" and library.provides("oarlock_rms_norm")


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, float32_output: bool = False) -> Tensor:
    """`x` bfloat16 [T, H, D] or [T, D], `weight` float32 [H, D] or [D] -> the same shape."""
    heads = x.shape[1] if x.dim() == 3 else 1
    width = x.shape[-1]
    assert x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == width) and weight.is_contiguous()
    y = torch.empty_like(
        x, dtype=torch.float32 if float32_output else torch.bfloat16, memory_format=torch.contiguous_format
    )
    _kernels()[0](
        x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape[0], heads, width, x.stride(0), eps, float32_output
    )  # fmt: skip
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [T, H, D] bfloat16 or float32; `cos`, `sin` float32 [T, 1, rotary_dim] -> bfloat16 [T, H, D], contiguous."""
    rows, heads, width = x.shape
    assert x.stride(2) == 1 and x.stride(1) == width and cos.is_contiguous() and sin.is_contiguous()
    y = torch.empty((rows, heads, width), dtype=torch.bfloat16)
    _kernels()[1](
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr(),
        rows, heads, width, cos.shape[-1], x.stride(0), x.dtype == torch.float32,
    )  # fmt: skip
    return y


@cache
def _kernels():
    kernels = library.library()
    pointer, number = ctypes.c_void_p, ctypes.c_long
    kernels.oarlock_rms_norm.argtypes = [*[pointer] * 3, *[number] * 4, ctypes.c_float, ctypes.c_int]
    kernels.oarlock_rotate.argtypes = [*[pointer] * 4, *[number] * 5, ctypes.c_int]
    kernels.oarlock_rms_norm.restype = kernels.oarlock_rotate.restype = None
    return kernels.oarlock_rms_norm, kernels.oarlock_rotate
