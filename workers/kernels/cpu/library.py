"""The loaded kernels: one library for each ISA level, and the level that this process uses.

The first request decides how much is compiled: if it asks for the kernels of one element type, the process gets a
library with only that type. If it asks for another type later, it gets a library with all types, and keeps both. Every
library has the functions that do not depend on an element type, such as the functions for logits.

If a machine cannot have kernels, it serves without them, and a log line gives the reason.
"""

import ctypes
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import ISALevel, KernelsUnavailable
from oarlock.workers.kernels.cpu.structures import check_structures

if TYPE_CHECKING:
    import torch

_forced: ISALevel | None = None
_outcomes: dict[ISALevel, ctypes.CDLL | str] = {}  # the library, or the reason why there is none
_of_one_type: dict[
    ISALevel, tuple[str, ISALevel]
] = {}  # the element type requested first, and the level of its library
_given: dict["torch.dtype | None", ctypes.CDLL] = {}  # results of `library`, by its argument
_loading = threading.Lock()


def why_not(dtype: "torch.dtype | None" = None) -> str | None:
    """Return None if the kernels of this process's level can be loaded, else the reason.

    Raises `StartupError` like `library`.
    """
    try:
        library(dtype)
    except KernelsUnavailable as reason:
        return str(reason)
    return None


def library(dtype: "torch.dtype | None" = None) -> ctypes.CDLL:
    """Return the kernels of this process's level, at least for `dtype`.

    Without `dtype`, returns the functions that do not depend on an element type; if this is the first request, the
    library has all types.

    Raises `KernelsUnavailable`, or `StartupError` if the environment names a level that this processor does not have,
    or if the library's structures differ from those in structures.py.

    Callers ask each time they pack a weight or bind a function, and keep the result. So `using` affects all of them.
    """
    found = _given.get(dtype)
    if found is None:
        found = _given[dtype] = load(isa_level(), dtype)
    return found


def isa_level() -> ISALevel:
    """Return the level that this process uses. Raises like `library`."""
    found = _forced or _chosen()
    if found is None:
        raise KernelsUnavailable("they need AVX2, AVX-512 or 64-bit ARM with NEON, on Linux")
    return found


@contextmanager
def using(level: ISALevel) -> Generator[None]:
    """Use the kernels of `level` for everything that is loaded inside: for tests and comparisons."""
    global _forced
    before, _forced = _forced, level
    _given.clear()
    try:
        yield
    finally:
        _forced = before
        _given.clear()


@cache
def _chosen() -> ISALevel | None:
    return build.chosen()


def load(level: ISALevel, dtype: "torch.dtype | None" = None) -> ctypes.CDLL:
    """Load the kernels of `level`, compiled now if this machine has not compiled them before.

    `dtype` as in `library`. Raises `KernelsUnavailable`. Tried once per process: if it fails, it is not compiled again.
    """
    with _loading:
        level = _narrowed(level, dtype)
        if level not in _outcomes:
            _given.clear()  # the new library may have more types
            try:
                _outcomes[level] = _load(level)
            except KernelsUnavailable as reason:
                _outcomes[level] = str(reason)
        outcome = _outcomes[level]
    if isinstance(outcome, str):
        raise KernelsUnavailable(outcome)
    return outcome


def _narrowed(level: ISALevel, dtype: "torch.dtype | None") -> ISALevel:
    """Return the level of the library with `dtype`: the library of one type, if no other type was requested so far."""
    if level in _outcomes:
        return level
    if level not in _of_one_type:
        if dtype is None:
            return level
        element = str(dtype).removeprefix("torch.")
        _of_one_type[level] = element, build.for_type(level, element)
    element, narrow = _of_one_type[level]
    is_enough = dtype is None or str(dtype) == f"torch.{element}" or isinstance(_outcomes.get(narrow), str)
    return narrow if is_enough else level


def loaded() -> Path | None:
    """Return the file of this process's kernels, if they have been loaded already."""
    wanted = _forced or _chosen()
    outcome = None if wanted is None else _outcomes.get(_narrowed(wanted, None))
    return Path(outcome._name) if isinstance(outcome, ctypes.CDLL) else None


def _load(level: ISALevel) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"they are built on Linux only, and this is {sys.platform}")
    openmp = _loaded_openmp()
    path = build.compiled(level)
    try:
        # It is already loaded. Naming it again makes its functions visible to the library that is loaded next.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        kernels = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error
    check_structures(kernels)
    return kernels


def _loaded_openmp() -> Path:
    """Return the OpenMP library that torch has loaded. Another would start a second thread pool on the same cores."""
    import torch  # noqa: F401  # so that its libraries are mapped in this process

    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    paths = [Path(path) for path in mapped if Path(path).name.startswith("libgomp")]
    if not paths:
        raise KernelsUnavailable("torch runs without GNU OpenMP here, and the kernels share its threads")
    # Other packages may have their own copy. The copy of torch is in its own folder, or in the folder that auditwheel
    # uses.
    return next((path for path in paths if {"torch", "torch.libs"} & set(path.parts)), paths[0])


def provides(function: str, dtype: "torch.dtype | None" = None) -> bool:
    """Return whether the kernels are loaded and have `function`, for `dtype` if it depends on an element type."""
    return why_not(dtype) is None and hasattr(library(dtype), function)
