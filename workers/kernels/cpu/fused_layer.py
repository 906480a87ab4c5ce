"""C++ functions that run the layers of a decoder, and the enumerations of their structures (`csrc/layer/layer.h`)."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import cache

_pointer, _number = ctypes.c_void_p, ctypes.c_long


class Rows(IntEnum):
    """Sources and destinations of an operation's rows."""

    RESIDUAL = 0
    NORMED_0 = 1
    NORMED_1 = 2
    PARTIAL = 3
    SCRATCH_0 = 4
    SCRATCH_1 = 5
    SCRATCH_2 = 6
    SCRATCH_3 = 7
    LAYER_INPUTS = 8  # only as columns that are read


NUM_SCRATCH = 4  # scratch buffers of a branch: `kScratchBuffers` in layer.h


class OperationKind(IntEnum):
    """Kinds of operations: `OperationKind` in layer.h, which describes them."""

    NORM_ROWS = 0
    MULTIPLY = 1
    APPLY_ROPE = 2
    ATTEND = 3
    FINISH_MATMUL = 4
    ADD_ROWS = 5
    RUN_EXPERTS = 6
    FINISH_EXPERTS = 7
    CLAMP_ROWS = 8
    GATE_ROWS = 9
    CONVOLVE = 10
    GATED_DELTA = 11
    MAMBA2 = 12
    GATED_NORM = 13
    MULTIPLY_COLUMNS = 14
    SCALE_COLUMNS = 15
    NORM_HEADS = 16
    GATE_HEADS = 17
    ADD_COLUMNS = 18
    MULTIPLY_ADAPTED = 19
    FINISH_ADAPTED = 20
    PREPARE_LATENT = 21
    MULTIPLY_HEADS = 22
    ATTEND_LATENT = 23
    KIMI_DELTA = 24


@cache
def bound(kernels: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions for layers. Return the library."""
    run, finish = kernels.oarlock_run_branches, kernels.oarlock_finish_branch
    run.restype, run.argtypes = ctypes.c_int, [_pointer, _number, _number, _pointer]
    finish.restype, finish.argtypes = None, [_pointer, _pointer]
    return kernels


ALL_ARRIVED = -1


@cache
def all_reduce_of(kernels: ctypes.CDLL) -> Callable[[int, int, int], int]:
    """Return `all_reduce(group, x, count)`: addresses of a `CRankGroup` and of float32 [count], which becomes the sum.

    It returns `ALL_ARRIVED`, or the rank that did not reach the all-reduce in time.
    """
    function = kernels.oarlock_all_reduce
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function
