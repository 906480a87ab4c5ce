"""Compiles the C++ kernels on first use and caches the library under a hash of everything it was made from.

A machine that cannot build them serves without them, and a log line has the reason.
"""

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from workers.platform.processor import features

_log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-w")
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512_bf16")
_COMPILE_TIMEOUT_S = 120


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be used on this machine; the message is the reason in one phrase."""


@cache
def why_not() -> str | None:
    """None when the kernels are built and loaded; else the reason. Tried once per process."""
    try:
        library()
    except KernelsUnavailable as reason:
        return str(reason)
    return None


@cache
def library() -> ctypes.CDLL:
    """The kernels, compiled now if this machine has not done so before. Raises `KernelsUnavailable`."""
    flags = _processor_flags()
    missing = [flag for flag in _NEEDED if flag not in flags]
    if missing:
        raise KernelsUnavailable(f"this processor lacks {', '.join(missing)}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelsUnavailable("there is no C++ compiler: install g++, or name one in CXX")
    openmp = _loaded_openmp()
    directory = _cache_directory()
    target = directory / f"kernels-{_fingerprint(compiler, openmp, flags)}.so"
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together; one compiles, the others wait and use the result
        if not target.exists():
            _compile(compiler, openmp, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded: {error}") from error


def _compile(compiler: str, openmp: Path, target: Path) -> None:
    started = time.monotonic()
    _log.info("compiling the CPU kernels, once for this machine compiler=%s", compiler)
    objects = {source: target.with_suffix(f".{source.stem}.{os.getpid()}.o") for source in _sources("*.cpp")}
    flags = [flag for flag in _FLAGS if flag != "-shared"]
    running = {
        source: subprocess.Popen(
            [compiler, *flags, "-c", str(source), "-o", str(into)], stderr=subprocess.PIPE, text=True
        )
        for source, into in objects.items()
    }
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        for source, process in running.items():
            _finish(process, f"compiling {source.name}")
        link = [compiler, *_FLAGS, *map(str, objects.values()), str(openmp), "-o", str(scratch)]
        _finish(subprocess.Popen(link, stderr=subprocess.PIPE, text=True), "linking")
        scratch.replace(target)
    finally:
        for path in (*objects.values(), scratch):
            path.unlink(missing_ok=True)
    _log.info("compiled the CPU kernels seconds=%.1f", time.monotonic() - started)


def _finish(process: subprocess.Popen[str], what: str) -> None:
    try:
        _, errors = process.communicate(timeout=_COMPILE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise KernelsUnavailable(f"{what} took more than {_COMPILE_TIMEOUT_S} s") from None
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or ["no message"]
        raise KernelsUnavailable(f"{what} failed: {lines[0].strip()[:200]}")


def _sources(pattern: str) -> list[Path]:
    return sorted(_SOURCES.glob(pattern))


def _fingerprint(compiler: str, openmp: Path, processor: frozenset[str]) -> str:
    """Changes with the sources, the flags, the compiler, torch's OpenMP and the processor (`-march=native`)."""
    digest = hashlib.blake2b(digest_size=12)
    for source in (*_sources("*.cpp"), *_sources("*.h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    facts = compiler_facts(compiler)
    for fact in (*_FLAGS, *facts, str(openmp), sys.version, " ".join(sorted(processor))):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()


def compiler_facts(compiler: str) -> tuple[str, ...]:
    """What identifies a compiler without running it: path, size in bytes and time of change in ns."""
    facts = os.stat(os.path.realpath(compiler))
    return (os.path.realpath(compiler), str(facts.st_size), str(facts.st_mtime_ns))


def _processor_flags() -> frozenset[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        raise KernelsUnavailable(f"they are written for x86-64 and this is {platform.machine()}")
    flags = features()
    if not flags:
        raise KernelsUnavailable("the system does not list the processor's features")
    return flags


def _loaded_openmp() -> Path:
    """The OpenMP library torch has loaded. A second one would start a second pool of threads on the same cores."""
    import torch  # noqa: F401  # so that its libraries are mapped in this process

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1] if "/" in line else ""
        if Path(path).name.startswith("libgomp"):
            return Path(path)
    raise KernelsUnavailable("torch runs without GNU OpenMP here, and the kernels share its threads")


def _cache_directory() -> Path:
    """The cache directory, owned by this user: its contents are loaded as code."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    directory = Path(root) / "oarlock" / "kernels"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise KernelsUnavailable(f"the cache {directory} cannot be written: {error.strerror}") from error
    if directory.stat().st_uid != os.getuid():
        raise KernelsUnavailable(f"the cache {directory} belongs to somebody else")
    return directory
