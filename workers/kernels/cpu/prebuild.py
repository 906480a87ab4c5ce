"""Compiles the kernels of every level of this kind of machine into the package, for wheels and images.

    python -m oarlock.workers.kernels.cpu.prebuild

Prints the platform tag of a wheel that carries them: the oldest C library that has the functions they use.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from oarlock.workers.kernels.cpu import build

_OLDEST = 17  # manylinux_2_17 is the oldest that pip knows by this scheme


def prebuild() -> list[Path]:
    """The libraries, compiled now; others are removed. Raises `KernelsUnavailable`."""
    shutil.rmtree(build.PREBUILT, ignore_errors=True)
    build.PREBUILT.mkdir()
    made = []
    for level in build.LEVELS:
        if level.machine == build.machine_name():
            made.append(build.prebuilt(level))
            build.compile_to(made[-1], level, build.compiler())
    return made


def platform_tag(libraries: Iterable[Path]) -> str:
    """`manylinux_2_…` with the newest version of the GNU C library that `libraries` name."""
    named = (match for library in libraries for match in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()))
    return f"manylinux_2_{max([_OLDEST, *map(int, named)])}_{build.machine_name()}"


if __name__ == "__main__":
    print(platform_tag(prebuild()))
