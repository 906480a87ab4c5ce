"""The description of a checkpoint's class, from a child process that imports transformers and torch. Torch-free.

The look takes a few seconds, so a process keeps each description. The child gets no keys, no network and no devices.
"""

import os
import subprocess
from functools import lru_cache
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.paths import library_caches
from oarlock.base.python_child import child_environment, import_path, python_command
from oarlock.workers.transformers_backend.class_description import ClassDescription

TIMEOUT_S = 180.0  # limit for one look; importing torch from a slow disk takes most of it
_PROGRAM = "oarlock.workers.transformers_backend.inspection"
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
_LONGEST_LINE = 300  # characters of an error of the child
_UNKNOWN = "Use a described architecture (`oarlock models --supported` lists them)."


def class_description(directory: Path, ranks: int, *, trusts_code: bool = False) -> ClassDescription:
    """Return the description of the class that `directory` names, as `ranks` tensor-parallel ranks hold it.

    Raise `StartupError` if the look fails, or if the checkpoint lacks tensors of the class. A description may have a
    refusal.
    """
    directory = directory.resolve()
    stamps = tuple(sorted(_stamp(path) for pattern in _READ for path in directory.glob(pattern)))
    return _looked_up(directory, ranks, trusts_code, stamps)


_READ = ("*.json", "*.py", "*.safetensors")  # files of a checkpoint that a look reads, or whose headers it reads


def _stamp(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return path.name, facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=64)
def _looked_up(directory: Path, ranks: int, trusts_code: bool, stamps: tuple) -> ClassDescription:
    words = ["-m", _PROGRAM, str(directory), "--tensor-parallel-size", str(ranks)]
    words += ["--trust-remote-code"] if trusts_code else []
    try:
        child = subprocess.run(
            python_command(words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=_environment(),
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"{directory}: a look at its model class was not finished within {TIMEOUT_S:g} s.",
            "Check that the disk with Python's packages responds, then start again.",
        ) from None
    lines = child.stdout.decode(errors="replace").splitlines()
    if child.returncode or len(lines) < 2:
        raise StartupError(f"{directory}: transformers cannot build its model class ({_last_line(child)}).", _UNKNOWN)
    if lines[1]:
        raise StartupError(
            f"{directory}: {lines[1]}.", "Use a complete checkpoint whose config.json names the right architecture."
        )
    return ClassDescription.decoded(lines[0])


def _environment() -> dict[str, str]:
    """Return the variables of the child: without keys, and without devices."""
    path = import_path(os.environ.get("PYTHONPATH", ""))
    return {**child_environment(), **library_caches(os.environ), "PYTHONPATH": path, **_ENVIRONMENT}


def _last_line(child: "subprocess.CompletedProcess[bytes]") -> str:
    """Return the last line that a failed child wrote, which names the exception."""
    lines = [line.strip() for line in child.stderr.decode(errors="replace").splitlines() if line.strip()]
    if not lines:
        return f"exit status {child.returncode}"
    return lines[-1][:_LONGEST_LINE].rstrip(".")
