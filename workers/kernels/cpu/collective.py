"""The sum over ranks by the C++ kernels (`csrc/runtime/collective.h`), on the memory of `workers/distributed/`."""

import ctypes
from collections.abc import Callable
from functools import cache

ALL_CAME = -1


@cache
def all_reduce_of(kernels: ctypes.CDLL) -> Callable[[int, int, int], int]:
    """`all_reduce(group, x, count)`: addresses of a `RankGroup` and of float32 [count], which becomes the sum.

    Returns `ALL_CAME`, or the rank that did not come in time.
    """
    function = kernels.oarlock_all_reduce
    function.restype, function.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
    return function
