"""Compiles the C++ kernels for one level of instruction set and keeps the library under a hash of what it was made of.

The library uses the OpenMP functions that torch has loaded, so it is linked without a library for them.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.kernels.cpu.levels import Level

_log = logging.getLogger("oarlock.kernels")

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-gnu-unique", "-w")
_COMPILE_TIMEOUT_S = 120
_NO_COMPILER = "there is no C++ compiler: install g++, name one in CXX, or install a wheel of `make wheel`"


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be used on this machine; the message is the reason in one phrase."""


def why_not_obtainable(level: Level) -> str | None:
    """Without compiling: None if the library for `level` can be had here, else the reason as one phrase. Torch-free."""
    if prebuilt(level).exists():
        return None
    try:
        compiler()
        cache_directory()
    except KernelsUnavailable as reason:
        return str(reason)
    return None


def compiled(level: Level) -> Path:
    """The library for `level`: what came with the sources, or lies in this user's cache, or is compiled now.

    Raises `KernelsUnavailable`.
    """
    if (there := existing(level)) is not None:
        return there
    found = compiler()
    target = _cached(level, found)
    with open(target.with_name(f"{level.name}.lock"), "w") as lock:
        started = time.monotonic()
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together; one compiles, the others wait and use the result
        if not target.exists():
            compile_to(target, level, found)
        seconds = time.monotonic() - started
        _log.info("event=compiled_kernels level=%s compiler=%s waited_s=%.1f", level.name, found, seconds)
    return target


def existing(level: Level) -> Path | None:
    """The library for `level`, if it need not be compiled. Raises `KernelsUnavailable` where it could not be either."""
    if (carried := prebuilt(level)).exists():
        return carried
    target = _cached(level, compiler())
    return target if target.exists() else None


def _cached(level: Level, compiler: str) -> Path:
    return cache_directory() / f"{level.name}-{fingerprint(level, compiler_facts(compiler))}.so"


def prebuilt(level: Level) -> Path:
    """Where the library lies that was compiled when the wheel or image was made, if there is one.

    Its name has the hash of the sources and flags, so one that was made of others is not found.
    """
    return PREBUILT / f"{level.name}-{fingerprint(level)}.so"


def compile_to(target: Path, level: Level, compiler: str, sources: Sequence[Path] = ()) -> None:
    """Compile `sources` (all of the kernels') for `level` and link them into `target`. Raises `KernelsUnavailable`."""
    # The longest takes longest, by and large. It begins first: last, it would keep one core busy and leave the others.
    ordered = sorted(sources or _sources("*.cpp"), key=lambda source: -source.stat().st_size)
    objects = {source: target.with_suffix(f".{source.stem}.{os.getpid()}.o") for source in ordered}
    command = [compiler, *FLAGS, *level.flags, f"-I{SOURCES}"]

    def compile_one(source: Path) -> None:
        _run([*command, "-c", str(source), "-o", str(objects[source])], f"compiling {source.name}")

    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(compile_one, ordered):
                pass  # the first failure ends this, and what has not begun is not
        _run([compiler, "-shared", "-Wl,--as-needed", *map(str, objects.values()), "-o", str(scratch)], "linking")
        scratch.replace(target)
    finally:
        for path in (*objects.values(), scratch):
            path.unlink(missing_ok=True)


def compiler() -> str:
    """The path of the C++ compiler. Raises `KernelsUnavailable`."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise KernelsUnavailable(_NO_COMPILER)
    return found


def _run(command: Sequence[str], what: str) -> None:
    try:
        process = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"{what} took more than {_COMPILE_TIMEOUT_S} s") from None
    if process.returncode:
        errors = process.stderr.splitlines()
        lines = [line for line in errors if "error" in line] or errors or ["no message"]
        raise KernelsUnavailable(f"{what} failed: {lines[0].strip()[:200]}")


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.rglob(pattern))


def fingerprint(level: Level, compiler: Sequence[str] = ()) -> str:
    """Changes with the sources, the flags and what identifies the compiler."""
    sources = (*_sources("*.cpp"), *_sources("*.h"))
    texts = [text for source in sources for text in (str(source.relative_to(SOURCES)), source.read_text("utf-8"))]
    return digest([*texts, *FLAGS, *level.flags, *compiler])


def digest(texts: Iterable[str]) -> str:
    """A hash of texts, in order."""
    found = hashlib.blake2b(digest_size=12)
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def compiler_facts(compiler: str) -> tuple[str, ...]:
    """What identifies a compiler without running it: path, size in bytes and time of change in ns."""
    facts = os.stat(os.path.realpath(compiler))
    return (os.path.realpath(compiler), str(facts.st_size), str(facts.st_mtime_ns))


def cache_directory() -> Path:
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
