"""The levels of instruction set, for tests of the C++ kernels.

Those of this kind of machine run on its processor; those of 64-bit ARM in an emulator of one, in `make test-long`.
"""

import atexit
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.build import EMULATED_AMX, EMULATED_BF16_DOT, ISALevel, available, machine_name
from oarlock.workers.kernels.cpu.build import LEVELS as ALL
from oarlock.workers.platform.processor import features
from tests.unit.workers.kernels.cpu import emulated_library
from tests.unit.workers.kernels.cpu.emulated_library import EmulatedLibrary

NO_KERNELS = library.why_not()  # the reason, or None


def is_here(level: ISALevel) -> bool:
    """Whether the level is of this kind of machine."""
    return level.machine == machine_name()


def why_not(level: ISALevel) -> str | None:
    """Why the kernels of `level` cannot run here; None if they can."""
    if not is_here(level):
        return emulated_library.why_not()
    if missing := sorted(level.needs - features()):
        return f"this processor lacks {', '.join(missing)}"
    return NO_KERNELS


@contextmanager
def using(level: ISALevel) -> Generator[None]:
    """Everything that is loaded inside uses the kernels of `level`."""
    if not is_here(level):
        library._outcomes[level] = _emulated(level)  # ty: ignore[invalid-assignment]
    library.load(level)  # all element types, whichever comes first
    with library.using(level):
        yield


@contextmanager
def threads(count: int) -> Generator[None]:
    """Let torch and the kernels use `count` threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _emulated(level: ISALevel) -> EmulatedLibrary:
    """One for each level and process, since starting it takes a second."""
    started = EmulatedLibrary(level)
    atexit.register(started.close)
    return started


def _parameter(level: ISALevel, others: Sequence[ISALevel] = ()) -> Any:
    reason = why_not(level)
    marks = [pytest.mark.skipif(bool(reason), reason=str(reason)), *([] if is_here(level) else [pytest.mark.soak])]
    marks += [pytest.mark.product] if level in others else []
    return pytest.param(level, id=level.name, marks=marks)


# AVX512-BF16 and AMX with their instructions emulated, where the processor has none.
_EMULATED = {"avx512_bf16": EMULATED_BF16_DOT, "amx": EMULATED_AMX}
_HERE = {level.name for level in available()}
_KNOWN = [
    level
    for level in (*ALL, *(emulated for name, emulated in _EMULATED.items() if name not in _HERE))
    if is_here(level) or level.machine == "aarch64"
]
LEVELS = [level for level in _KNOWN if is_here(level) and why_not(level) is None]  # those that run on this processor
_BY_VECTORS = {level.vectors: level for level in reversed(LEVELS)}  # of each kind of vectors the best level

# Each with the reason to skip it. `VECTORS` is for kernels that multiply no bfloat16: levels that have the vectors of a
# better one run in `make test-long` alone.
PARAMETERS = [_parameter(level) for level in _KNOWN]
VECTORS = [_parameter(level, [each for each in LEVELS if each not in _BY_VECTORS.values()]) for level in _KNOWN]
