"""The levels of instruction set, for tests of the C++ kernels."""

import pytest

from workers.kernels.cpu import library
from workers.kernels.cpu.levels import EMULATED_BF16_DOT, Level, machine_name
from workers.kernels.cpu.levels import LEVELS as ALL
from workers.platform.processor import features

NO_KERNELS = library.why_not()  # the reason, or None


def why_not(level: Level) -> str | None:
    """Why this machine cannot run the kernels of `level`; None if it can."""
    if missing := sorted(level.needs - features()):
        return f"this processor lacks {', '.join(missing)}"
    return NO_KERNELS


# Every level of this kind of machine, each with the reason to skip it; AVX512-BF16 also with its instruction emulated.
_KNOWN = [level for level in (*ALL, EMULATED_BF16_DOT) if level.machine == machine_name()]
PARAMETERS = [
    pytest.param(level, id=level.name, marks=pytest.mark.skipif(bool(why_not(level)), reason=str(why_not(level))))
    for level in _KNOWN
]
LEVELS = [level for level in _KNOWN if why_not(level) is None]  # those that can run
