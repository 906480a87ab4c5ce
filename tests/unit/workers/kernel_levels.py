"""The levels of instruction set that this processor can run, for tests of the C++ kernels."""

from workers.kernels.cpu import library
from workers.kernels.cpu.levels import EMULATED_BF16_DOT, Level, available

NO_KERNELS = library.why_not()  # the reason, or None


def _testable() -> list[Level]:
    if NO_KERNELS:
        return []
    found = available()
    emulates = not any(level.name == "avx512_bf16" for level in found) and any(
        level.name == "avx512" for level in found
    )
    return [*found, *([EMULATED_BF16_DOT] if emulates else [])]


LEVELS = _testable()
