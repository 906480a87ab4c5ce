"""What a recording was made with: checksums that tell one checkpoint from another, and the versions of the libraries.

Reads config.json and the headers of the weight files, which name every tensor and its place; never the tensors
themselves, which would take as long as loading them. Torch-free.
"""

import hashlib
import platform
from dataclasses import fields
from importlib import metadata
from pathlib import Path

from workers.protocol import StepMetadata, StepOutput

_MAX_HEADER_BYTES = 100_000_000  # as the loader has it; beyond, the whole length field is in doubt
_PACKAGES = ("oarlock", "torch", "numpy", "safetensors", "transformers")


def model_sums(directory: Path) -> dict[str, str]:
    """File name -> SHA-256 of config.json, and of each safetensors file's size and header."""
    sums = {}
    config = directory / "config.json"
    if config.is_file():
        sums[config.name] = hashlib.sha256(config.read_bytes()).hexdigest()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES))
        sums[path.name] = hashlib.sha256(b"%d:" % path.stat().st_size + length + header).hexdigest()
    return sums


def layout() -> str:
    """Names what a packed step and its answer consist of: it changes when the ranks' protocol does."""
    names = [field.name for kind in (StepMetadata, StepOutput) for field in fields(kind)]
    return hashlib.sha256(",".join(names).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    """Of everything that decides a number."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # a checkout that was not installed
            found[name] = "unknown"
    return found
