"""C++ functions that run the layers of a decoder, and the structures they take (`csrc/layer/layer.h`).

A class CNAME is the structure NAME of that header, field by field.
"""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import cache

_pointer, _number, _flag, _real = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class Rows(IntEnum):
    """Sources and destinations of an operation's rows."""

    RESIDUAL = 0
    KEPT = 1
    KEPT_TOO = 2
    PARTIAL = 3
    SCRATCH = 4
    SCRATCH_TOO = 5


class OperationKind(IntEnum):
    """Kinds of operations: `OperationKind` in layer.h, which describes them."""

    NORM_ROWS = 0
    MULTIPLY = 1
    TURN_HEADS = 2
    ATTEND = 3
    TOTAL = 4
    ADD_ROWS = 5
    MIX = 6
    MIX_TOTAL = 7


class CPackedWeight(ctypes.Structure):
    _fields_ = (
        ("weight", _pointer),
        ("bias", _pointer),
        ("columns", _number),
        ("inputs", _number),
        ("epilogue", _flag),
        ("kind", _flag),
        ("slices", _flag),
    )


class CNorm(ctypes.Structure):
    _fields_ = (
        ("scale", _pointer),
        ("shift", _pointer),
        ("width", _number),
        ("eps", _real),
        ("is_layer_norm", _flag),
    )


class CHeadsAndPages(ctypes.Structure):
    _fields_ = (
        ("attention", _pointer),
        ("head_norm", _pointer),
        ("k_pages", _pointer),
        ("v_pages", _pointer),
        ("rotary", _flag),
        ("interleaved", _flag),
        ("eps", _real),
        ("of_rows", _pointer),
        ("sinks", _pointer),
    )


class CAddition(ctypes.Structure):
    _fields_ = (("norm", _pointer), ("width", _number), ("scale", _real))


class CMixture(ctypes.Structure):
    _fields_ = (("router", _pointer), ("routed", _pointer), ("shared", _pointer), ("shared_gate", _pointer))


class COperation(ctypes.Structure):
    _fields_ = (("kind", _flag), ("source", _flag), ("target", _flag), ("of", _pointer))


class CBranch(ctypes.Structure):
    _fields_ = (
        ("operations", _pointer),
        ("count", _number),
        ("before_sum", _number),
        ("rows_at_once", _number),
        ("widths", _number * 2),
        ("sums", _number),
    )


class CRotaryRows(ctypes.Structure):
    _fields_ = (("rows", _pointer), ("width", _number))


MOST_ROTARIES = 4


class CLayerStep(ctypes.Structure):
    _fields_ = (
        ("hidden", _pointer),
        ("kept", _pointer * 2),
        ("partial", _pointer),
        ("rows", _number),
        ("width", _number),
        ("type", _flag),
        ("positions", _pointer),
        ("slots", _pointer),
        ("rotary", CRotaryRows * MOST_ROTARIES),
        ("attention", _pointer),
        ("group", _pointer),
    )


@cache
def bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions for layers. Return the library."""
    run, finish = kernels.oarlock_run_branches, kernels.oarlock_finish_branch
    run.restype, run.argtypes = ctypes.c_int, [_pointer, _number, _number, _pointer]
    finish.restype, finish.argtypes = None, [_pointer, _pointer]
    return kernels


ALL_CAME = -1


@cache
def all_reduce_of(kernels: ctypes.CDLL) -> Callable[[int, int, int], int]:
    """Return `all_reduce(group, x, count)`: addresses of a `RankGroup` and of float32 [count], which becomes the sum.

    It returns `ALL_CAME`, or the rank that did not reach the all-reduce in time.
    """
    function = kernels.oarlock_all_reduce
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function
