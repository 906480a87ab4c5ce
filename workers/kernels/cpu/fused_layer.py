"""C++ functions that compute half a decoder layer in one call, and the structures they take (`csrc/layer/layer.h`)."""

import ctypes
from collections.abc import Callable
from functools import cache

_pointer, _number, _flag, _real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class CPackedWeight(ctypes.Structure):
    """`PackedWeight`."""

    _fields_ = (
        ("weight", _pointer),
        ("bias", _pointer),
        ("columns", _number),
        ("inputs", _number),
        ("epilogue", _flag),
        ("kind", _flag),
        ("slices", _flag),
    )


class CLayerHalf(ctypes.Structure):
    """`LayerHalf`; the whole of an MLP."""

    _fields_ = (
        ("norm", _pointer),
        ("post_norm", _pointer),
        ("into", CPackedWeight),
        ("out", CPackedWeight),
        ("eps", _real),
        ("type", _flag),
    )


class CAttentionHalf(ctypes.Structure):
    """`AttentionHalf`."""

    _fields_ = (
        ("half", CLayerHalf),
        ("attention", _pointer),
        ("head_norm", _pointer),
        ("k_pages", _pointer),
        ("v_pages", _pointer),
        ("rotary", _flag),
    )


class CRotaryRows(ctypes.Structure):
    """`RotaryRows`."""

    _fields_ = (("rows", _pointer), ("width", _number))


class CLayerStep(ctypes.Structure):
    """`LayerStep`."""

    _fields_ = (
        ("hidden", _pointer),
        ("partial", _pointer),
        ("rows", _number),
        ("positions", _pointer),
        ("slots", _pointer),
        ("rotary", CRotaryRows * 2),
        ("attention", _pointer),
        ("group", _pointer),
    )


@cache
def bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """The library, with the types of its functions for layers declared."""
    for name in ("oarlock_attention_half", "oarlock_mlp_half"):
        function = getattr(kernels, name)
        function.restype, function.argtypes = ctypes.c_int, [_pointer] * 2
    kernels.oarlock_add_total.restype, kernels.oarlock_add_total.argtypes = None, [_pointer] * 3
    return kernels


ALL_CAME = -1


@cache
def all_reduce_of(kernels: ctypes.CDLL) -> Callable[[int, int, int], int]:
    """`all_reduce(group, x, count)`: addresses of a `RankGroup` and of float32 [count], which becomes the sum.

    Returns `ALL_CAME`, or the rank that did not come in time.
    """
    function = kernels.oarlock_all_reduce
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function
