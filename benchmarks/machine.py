"""The machine that figures are from, and the kind of processor that decides which section of the page they stand in."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

# Kind -> the features that make it, in the order in which they are tried. The names are those of result files.
KINDS = (
    ("amx", {"amx_bf16", "amx_tile"}),
    ("avx512-bf16", {"avx512_bf16"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2", "fma", "f16c"}),
    ("neon-bf16", {"asimd", "bf16"}),
    ("neon", {"asimd"}),
)
TITLES = {
    "amx": "x86-64 with AMX",
    "avx512-bf16": "x86-64 with AVX512-BF16",
    "avx512": "x86-64 with AVX512 and without AVX512-BF16",
    "avx2": "x86-64 with AVX2 and without AVX512",
    "neon-bf16": "ARM with BF16",
    "neon": "ARM without BF16",
    "other": "Others",
}


def kind(features: frozenset[str]) -> str:
    """The first kind whose features are all there, or `other`."""
    return next((name for name, needed in KINDS if needed <= features), "other")


def about(features: frozenset[str]) -> dict[str, Any]:
    """Description of this machine for readers of a result."""
    return {
        "kind": kind(features),
        "processor": _processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "torch": importlib.metadata.version("torch"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
