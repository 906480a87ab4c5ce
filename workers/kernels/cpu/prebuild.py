"""Compile the kernels of every ISA level of this machine type into the package, for wheels and images.

    python -m oarlock.workers.kernels.cpu.prebuild

Prints the platform tag of a wheel with these kernels: the oldest C library that has the functions they use.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from oarlock.workers.kernels.cpu import build

_OLDEST = 17  # manylinux_2_17 is the oldest tag that pip knows with this naming scheme


def prebuild() -> list[Path]:
    """Compile the libraries and return their paths; other libraries are removed. Raises `KernelsUnavailable`."""
    shutil.rmtree(build.PREBUILT, ignore_errors=True)
    build.PREBUILT.mkdir()
    made = []
    for level in build.LEVELS:
        if level.machine == build.machine_name():
            made.append(build.prebuilt(level))
            build.compile_to(made[-1], level, build.compiler())
    return made


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return `manylinux_2_…` with the newest version of the GNU C library that `libraries` need."""
    named = (match for library in libraries for match in re.findall(rb"\0GLIBC_2\.(\d+)", library.read_bytes()))
    return f"manylinux_2_{max([_OLDEST, *map(int, named)])}_{build.machine_name()}"


if __name__ == "__main__":
    print(platform_tag(prebuild()))
