"""The levels of instruction set that the C++ kernels are compiled for, and the best one that this processor has.

`OARLOCK_CPU_LEVEL` in the environment names a lower one, to compare or to test it.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oarlock.workers.errors import StartupError
from oarlock.workers.platform.processor import features, may_use_tiles

ENVIRONMENT = "OARLOCK_CPU_LEVEL"


@dataclass(frozen=True, slots=True)
class Level:
    """Processors with all features in `needs` run what a compiler makes with `flags`."""

    name: str
    machine: str  # "x86_64" or "aarch64"
    needs: frozenset[str]  # as Linux names them
    flags: tuple[str, ...]
    vectors: str  # the instructions of every kernel, as processor manuals name them
    bfloat16: str = ""  # those that multiply bfloat16; without them it is widened to float32 in registers
    tiles: str = ""  # those of products with weights in bfloat16, where they are others


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16")

# Best first, for each kind of machine.
LEVELS = (
    Level("amx", "x86_64", _AMX, _AMX_FLAGS, "AVX-512", "AVX512-BF16", "AMX-BF16"),
    Level("avx512_bf16", "x86_64", _BF16, _BF16_FLAGS, "AVX-512", "AVX512-BF16"),
    Level("avx512", "x86_64", _AVX512, ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX-512"),
    Level("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",), "AVX2, FMA and F16C"),
    Level("neon_bf16", "aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",), "NEON", "BF16 extension"),
    Level("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), "NEON"),
)

# The paths of AVX512-BF16 and AMX with their instructions computed from others: for tests on processors without them,
# which are run seldom, so compiling them takes longer than they do.
_DOT_FLAGS = ("-march=x86-64-v4", "-DOARLOCK_EMULATE_BF16_DOT", "-O1")
_TILE_FLAGS = (*_DOT_FLAGS, "-DOARLOCK_EMULATE_AMX")
EMULATED_BF16_DOT = Level("avx512_bf16_emulated", "x86_64", _AVX512, _DOT_FLAGS, "AVX-512", "an emulation")
EMULATED_AMX = Level("amx_emulated", "x86_64", _AVX512, _TILE_FLAGS, "AVX-512", "an emulation", "an emulation")

_CPP_TYPES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "float"}  # by their names in torch


def of_one_type(level: Level, element: str) -> Level:
    """`level` with the kernels of one element type alone, which are compiled in half the time."""
    return replace(level, name=f"{level.name}_{element}", flags=(*level.flags, f"-DOARLOCK_ONLY={_CPP_TYPES[element]}"))


def machine_name(machine: str | None = None) -> str:
    """The kind of `machine` as `Level` names it; without one, of this machine."""
    machine = platform.machine() if machine is None else machine
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def available(machine: str | None = None, flags: frozenset[str] | None = None) -> list[Level]:
    """The levels that a processor can run, best first: this one, or one described by machine and features."""
    machine = machine_name(machine)
    found = features() if flags is None else flags
    levels = [level for level in LEVELS if level.machine == machine and level.needs <= found]
    if flags is None and any("amx_tile" in level.needs for level in levels) and not may_use_tiles():
        levels = [level for level in levels if "amx_tile" not in level.needs]
    return levels


def chosen(environment: Mapping[str, str] = os.environ) -> Level | None:
    """The best level that this processor runs, or the one that the environment names; None where there is no level.

    Raises `StartupError` for a name that does not exist or that this processor cannot run.
    """
    levels = available()
    name = environment.get(ENVIRONMENT, "").strip()
    if not name:
        return levels[0] if levels else None
    for level in levels:
        if level.name == name:
            return level
    named = next((level for level in LEVELS if level.name == name and level.machine == machine_name()), None)
    if named is None:
        reason = "there is no such level for this machine"
    elif missing := sorted(named.needs - features()):
        reason = f"this processor lacks {', '.join(missing)}"
    else:
        reason = "the system does not let this process use the tile registers"
    known = f"use one of {', '.join(level.name for level in levels)}, or unset" if levels else "unset"
    raise StartupError(f"{ENVIRONMENT} is {name!r}, but {reason}.", f"{known.capitalize()} the variable.")
