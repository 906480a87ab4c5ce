"""The loaded kernels: one library for each level of instruction set, and the level that this process uses.

What is asked for first decides how much is compiled: a process that asks for the kernels of one element type gets a
library of that type alone. If it asks for another type later, it gets one of all types, and keeps both. Functions that
know no element type, such as those for logits, are in every library.

A machine that cannot have kernels serves without them, and a log line has the reason.
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
from oarlock.workers.kernels.cpu.build import KernelsUnavailable, Level

if TYPE_CHECKING:
    import torch

_forced: Level | None = None
_outcomes: dict[Level, ctypes.CDLL | str] = {}  # the library, or the reason why there is none
_of_one_type: dict[Level, tuple[str, Level]] = {}  # the element type that was asked for first, and its library's level
_given: dict["torch.dtype | None", ctypes.CDLL] = {}  # what `library` returned, by its argument
_loading = threading.Lock()


def why_not(dtype: "torch.dtype | None" = None) -> str | None:
    """None when the kernels of this process's level are loaded; else the reason. Raises `StartupError` as `library`."""
    try:
        library(dtype)
    except KernelsUnavailable as reason:
        return str(reason)
    return None


def library(dtype: "torch.dtype | None" = None) -> ctypes.CDLL:
    """The kernels of this process's level: those of `dtype` at least.

    Without `dtype`, the functions that know no element type; all types if nothing was asked for before.

    Raises `KernelsUnavailable`, and `StartupError` where the environment names a level that this processor has not.

    Callers ask each time they pack a weight or bind a function, and keep what they got: `using` then reaches them all.
    """
    found = _given.get(dtype)
    if found is None:
        found = _given[dtype] = load(level(), dtype)
    return found


def level() -> Level:
    """The level that this process uses. Raises as `library`."""
    found = _forced or _chosen()
    if found is None:
        raise KernelsUnavailable("they need AVX2, AVX-512 or 64-bit ARM with NEON, on Linux")
    return found


@contextmanager
def using(level: Level) -> Generator[None]:
    """Everything that is loaded inside uses the kernels of `level`: for tests and comparisons."""
    global _forced
    before, _forced = _forced, level
    _given.clear()
    try:
        yield
    finally:
        _forced = before
        _given.clear()


@cache
def _chosen() -> Level | None:
    return build.chosen()


def load(level: Level, dtype: "torch.dtype | None" = None) -> ctypes.CDLL:
    """The kernels of `level`, compiled now if this machine has not done so before. Raises `KernelsUnavailable`.

    `dtype` as for `library`. Tried once in a process: what failed is not compiled again.
    """
    with _loading:
        level = _narrowed(level, dtype)
        if level not in _outcomes:
            _given.clear()  # this one may have more types
            try:
                _outcomes[level] = _load(level)
            except KernelsUnavailable as reason:
                _outcomes[level] = str(reason)
        outcome = _outcomes[level]
    if isinstance(outcome, str):
        raise KernelsUnavailable(outcome)
    return outcome


def _narrowed(level: Level, dtype: "torch.dtype | None") -> Level:
    """The level of the library that has `dtype`: that of one type, if it is the only one asked for so far."""
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
    """The file of this process's kernels, if something has loaded them already."""
    wanted = _forced or _chosen()
    outcome = None if wanted is None else _outcomes.get(_narrowed(wanted, None))
    return Path(outcome._name) if isinstance(outcome, ctypes.CDLL) else None


def _load(level: Level) -> ctypes.CDLL:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"they are built on Linux only, and this is {sys.platform}")
    openmp = _loaded_openmp()
    path = build.compiled(level)
    try:
        # Loaded already; named again, so that its functions are found by the library that comes next.
        ctypes.CDLL(str(openmp), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _loaded_openmp() -> Path:
    """The OpenMP library torch has loaded. A second one would start a second pool of threads on the same cores."""
    import torch  # noqa: F401  # so that its libraries are mapped in this process

    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
    paths = [Path(path) for path in mapped if Path(path).name.startswith("libgomp")]
    if not paths:
        raise KernelsUnavailable("torch runs without GNU OpenMP here, and the kernels share its threads")
    # Other packages may bring their own: torch's lies in its own folder, or where auditwheel puts it.
    return next((path for path in paths if {"torch", "torch.libs"} & set(path.parts)), paths[0])


def provides(function: str, dtype: "torch.dtype | None" = None) -> bool:
    """Whether the kernels are loaded and have `function`, for `dtype` if it has an element type."""
    return why_not(dtype) is None and hasattr(library(dtype), function)
