"""Detects the 16-bit number types that this machine's processor multiplies in hardware. Torch-free."""

import ctypes
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_X86 = ("x86_64", "AMD64")
_ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Processor:
    """16-bit types for which the processor has instructions. Libraries emulate the others in float32."""

    bfloat16: bool
    float16: bool
    name: str  # what is missing, as a phrase for messages

    def multiplies(self, dtype: str) -> bool:
        """Whether products of `dtype` (a name as in settings) are not emulated."""
        return {"bfloat16": self.bfloat16, "float16": self.float16}.get(dtype, True)


@cache
def here() -> Processor:
    """The processor of this machine."""
    return of(platform.machine(), features())


def of(machine: str, flags: frozenset[str]) -> Processor:
    """The processor of `machine` (as `platform.machine()` names it) with `flags`, its features as Linux names them."""
    if machine in _X86:
        bfloat16 = bool(flags & {"avx512_bf16", "amx_bf16"})
        return Processor(bfloat16, bool(flags & {"avx512_fp16", "amx_fp16"}), "no AVX512-BF16 or AMX")
    if machine in _ARM:
        return Processor("bf16" in flags, bool(flags & {"asimdhp", "fphp"}), "no BF16 extension")
    return Processor(False, False, f"it is {machine}")


def features() -> frozenset[str]:
    """Features of the first processor; empty where the system does not list them."""
    if sys.platform == "darwin":
        asked = subprocess.run(
            ["sysctl", "-n", "hw.optional.arm.FEAT_BF16"], capture_output=True, text=True, check=False
        )
        return frozenset({"asimdhp", "fphp", *(["bf16"] if asked.stdout.strip() == "1" else [])})
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(values.split())
    return frozenset()


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


@cache
def may_use_tiles() -> bool:
    """Ask the kernel to let this process, and all its threads, use the tile registers of AMX: Linux 5.16 and newer."""
    if sys.platform != "linux" or platform.machine() not in _X86:
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0
