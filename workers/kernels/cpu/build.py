"""Compilation of the C++ kernels for one ISA level. The library is stored under a hash of its sources and flags.

A library has the kernels of every element type, or of one type: a server needs only the type of its model, and its
first start waits for the compilation. The library uses the OpenMP functions that torch has loaded, so it is linked
without an OpenMP library. The level is the best that this processor has; `OARLOCK_CPU_LEVEL` in the environment names a
lower one.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from oarlock.base.errors import StartupError
from oarlock.base.paths import cache_home
from oarlock.workers.platform.processor import features, may_use_tiles, vendor, widens_faster

ENVIRONMENT = "OARLOCK_CPU_LEVEL"


@dataclass(frozen=True, slots=True)
class ISALevel:
    """An ISA level: processors with all features in `needs` can run code that is compiled with `flags`."""

    name: str
    machine: str  # "x86_64" or "aarch64"
    needs: frozenset[str]  # Linux names
    flags: tuple[str, ...]
    vectors: str  # instructions of every kernel, as processor manuals name them
    bfloat16: str = ""  # instructions that multiply bfloat16; without them it is widened to float32 in registers
    tiles: str = ""  # instructions of matmuls with bfloat16 weights, if they differ


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = _AVX512 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_bf16"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16")

# Best first, for each machine type.
LEVELS = (
    ISALevel("amx", "x86_64", _AMX, _AMX_FLAGS, "AVX-512", "AVX512-BF16", "AMX-BF16"),
    ISALevel("avx512_bf16", "x86_64", _BF16, _BF16_FLAGS, "AVX-512", "AVX512-BF16"),
    ISALevel("avx512", "x86_64", _AVX512, ("-march=x86-64-v4", "-mprefer-vector-width=512"), "AVX-512"),
    ISALevel("avx2", "x86_64", _AVX2, ("-march=x86-64-v3",), "AVX2, FMA and F16C"),
    ISALevel(
        "neon_bf16", "aarch64", frozenset({"asimd", "bf16"}), ("-march=armv8.2-a+bf16",), "NEON", "BF16 extension"
    ),
    ISALevel("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",), "NEON"),
)

# AVX512-BF16 and AMX code with emulated instructions, for tests on processors without them. Optimised with -O1 only:
# the tests run seldom, and compiling takes longer than running them.
_DOT_FLAGS = ("-march=x86-64-v4", "-DOARLOCK_EMULATE_BF16_DOT", "-O1")
_TILE_FLAGS = (*_DOT_FLAGS, "-DOARLOCK_EMULATE_AMX")
EMULATED_BF16_DOT = ISALevel("avx512_bf16_emulated", "x86_64", _AVX512, _DOT_FLAGS, "AVX-512", "an emulation")
EMULATED_AMX = ISALevel("amx_emulated", "x86_64", _AVX512, _TILE_FLAGS, "AVX-512", "an emulation", "an emulation")

_CPP_TYPES = {"bfloat16": "BFloat16", "float16": "Float16", "float32": "float"}  # keys: names in torch


def of_one_type(level: ISALevel, element: str) -> ISALevel:
    """Return `level` with the kernels of only one element type, which compile faster."""
    return replace(level, name=f"{level.name}_{element}", flags=(*level.flags, f"-DOARLOCK_ONLY={_CPP_TYPES[element]}"))


def machine_name(machine: str | None = None) -> str:
    """Return the machine type as `ISALevel` names it; without `machine`, the type of this machine."""
    machine = platform.machine() if machine is None else machine
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def available(machine: str | None = None, flags: frozenset[str] | None = None, maker: str = "") -> list[ISALevel]:
    """Return the levels that a processor can run, best first.

    The processor is this one, or described by `machine`, `flags` (its features) and `maker`.
    """
    machine, is_here = machine_name(machine), flags is None
    if flags is None:
        flags, maker = features(), vendor()
    levels = [level for level in LEVELS if level.machine == machine and level.needs <= flags]
    if is_here and any("amx_tile" in level.needs for level in levels) and not may_use_tiles():
        levels = [level for level in levels if "amx_tile" not in level.needs]
    if widens_faster(flags, maker):  # then the level after AVX512-BF16 moves ahead of it
        levels.sort(key=lambda level: LEVELS.index(level) + 1.5 * (level.needs == _BF16))
    return levels


def why_not_better(better: ISALevel) -> str:
    """Return why this processor does not use `better`, a level that comes before its best `available` level."""
    lacking = sorted(better.needs - features())
    if lacking:
        return ", ".join(lacking)
    return "slower here" if better in available() else "not allowed by the system"


def chosen(environment: Mapping[str, str] = os.environ) -> ISALevel | None:
    """Return the best level that this processor runs, or the level named in the environment; None if there is no level.

    Raises `StartupError` if the name does not exist or this processor cannot run the level.
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
        reason = "this machine has no such ISA level"
    elif missing := sorted(named.needs - features()):
        reason = f"this processor lacks {', '.join(missing)}"
    else:
        reason = "the system does not let this process use the tile registers"
    known = f"use one of {', '.join(level.name for level in levels)}, or unset" if levels else "unset"
    raise StartupError(f"{ENVIRONMENT} is {name!r}, but {reason}.", f"{known.capitalize()} the variable.")


_log = logging.getLogger("oarlock.kernels")

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fno-gnu-unique", "-w")
# Sources that are compiled together, because reading their includes takes as long as compiling most of them. There are
# two units of about equal length, because a machine that compiles while a server starts has at least two cores.
UNITS = (
    ("gemm/fp8.cpp", "gemm/grouped*.cpp", "gemm/int8.cpp"),
    (
        "attention/*.cpp",
        "elementwise/*.cpp",
        "gemm/experts.cpp",
        "gemm/gemm.cpp",
        "gemm/heads.cpp",
        "gemm/pack.cpp",
        "layer/*.cpp",
        "recurrent/*.cpp",
        "runtime/*.cpp",
        "sampling/*.cpp",
        "structures.cpp",
    ),
)
_COMPILE_TIMEOUT_S = 600
_POLL_S = 0.05
USUAL_TIME = "10 to 60 s"  # two cores; the lower figure if nothing else uses them
_NO_COMPILER = "there is no C++ compiler: install g++, name one in CXX, or install a wheel of `make wheel`"


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be used on this machine; the message is the reason in one phrase."""


def why_not_obtainable(level: ISALevel) -> str | None:
    """Return None if the library for `level` exists or can be compiled here, else the reason as one phrase.

    It compiles nothing and does not import torch.
    """
    if prebuilt(level).exists():
        return None
    try:
        compiler()
        cache_directory()
    except KernelsUnavailable as reason:
        return str(reason)
    return None


def for_type(level: ISALevel, element: str) -> ISALevel:
    """Return `level` with only one element type (its torch name); `level` itself if the library of all types exists."""
    with suppress(KernelsUnavailable):  # compiling reports the reason later
        if existing(level) is not None:
            return level
    return of_one_type(level, element)


def compiled(level: ISALevel) -> Path:
    """Return the library for `level`: shipped with the sources, from this user's cache, or compiled now.

    Raises `KernelsUnavailable`.
    """
    target = _library_path(level)
    if target.exists():
        return target
    found = compiler()
    with open(lock_file(level), "a+") as lock:
        started = time.monotonic()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # ranks start together: one process compiles, the others wait and use the result
            _log.info("event=awaiting_kernels level=%s reason='another process compiles them'", level.name)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            event = "awaited_kernels"
        else:
            event = "compiled_kernels"
            _log.info("event=compiling_kernels level=%s compiler=%s usual_time=%r", level.name, found, USUAL_TIME)
            with _state_in(lock) as on_part:
                compile_to(target, level, found, on_part=on_part)
        seconds = time.monotonic() - started
        _log.info("event=%s level=%s compiler=%s seconds=%.1f", event, level.name, found, seconds)
    return target


@dataclass(frozen=True, slots=True)
class Compilation:
    """State of a compilation, which any process can read while another one compiles."""

    done: int  # finished parts, out of `total`
    total: int
    started_at: float  # timestamp of `time.time`

    @property
    def fraction(self) -> float:
        return self.done / self.total


def lock_file(level: ISALevel) -> Path:
    """Return the file that a process locks while it compiles for `level`. Raises `KernelsUnavailable`."""
    return cache_directory() / f"{level.name}.lock"


def read_compilation(file: Path) -> Compilation | None:
    """Return the state of the compilation that holds this lock file, or None if there is none."""
    try:
        with open(file) as lock:
            words = lock.read().split()
            if len(words) != 3:
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # succeeds if the process that wrote the state was killed
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return Compilation(int(words[0]), int(words[1]), float(words[2]))
    return None


@contextmanager
def _state_in(lock: TextIO) -> Generator[Callable[[int, int], None]]:
    """Yield a function that writes (parts done, all parts) into the lock file. The file is empty again afterwards."""
    started_at = time.time()

    def write(done: int, total: int) -> None:
        lock.truncate(0)
        lock.write(f"{done} {total} {started_at:.1f}\n")  # the file is open for appending
        lock.flush()

    try:
        yield write
    finally:
        lock.truncate(0)


def existing(level: ISALevel) -> Path | None:
    """Return the library for `level`, or None if it must be compiled. Raises `KernelsUnavailable` if it cannot be."""
    target = _library_path(level)
    return target if target.exists() else None


def _library_path(level: ISALevel) -> Path:
    """Return the path of the library for `level`: next to the sources if shipped with them, else in the cache."""
    if _carried(level):
        return prebuilt(level)
    facts = compiler_facts(compiler())
    return cache_directory() / f"{level.name}-{fingerprint(level, facts)}.so"


def _carried(level: ISALevel) -> bool:
    return PREBUILT.is_dir() and prebuilt(level).exists()


def prebuilt(level: ISALevel) -> Path:
    """Return the path of the library that is compiled for a wheel or an image; it need not exist.

    Its name contains the hash of the sources and flags, so a library made of other sources is not found.
    """
    return PREBUILT / f"{level.name}-{fingerprint(level)}.so"


def compile_to(
    target: Path,
    level: ISALevel,
    compiler: str,
    sources: Sequence[Path] = (),
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compile `sources` (by default all of the kernels) for `level` and link them into `target`.

    `on_part` gets the number of finished parts, and of all parts. Raises `KernelsUnavailable`. On every exit, no
    compiler is left running.
    """
    units = [[source] for source in sources] or [_sources(*patterns) for patterns in UNITS]
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    objects = [scratch.with_suffix(f".{number}.o") for number in range(len(units))]
    command = [compiler, *FLAGS, *level.flags, f"-I{SOURCES}", "-c", "-x", "c++", "-"]
    running: list[subprocess.Popen[str]] = []
    try:
        on_part(0, len(units))
        for unit, into in zip(units, objects, strict=True):
            _begin([*command, "-o", str(into)], running, "".join(f'#include "{source}"\n' for source in unit))
        for done, _ in enumerate(_finished(running, [f"compiling {unit[0].parent.name}" for unit in units]), 1):
            on_part(done, len(units))
        _begin([compiler, "-shared", "-Wl,--as-needed", *map(str, objects), "-o", str(scratch)], running)
        list(_finished(running[-1:], ["linking"]))
        scratch.replace(target)
    finally:
        for process in running:
            _end(process)
        for path in (*objects, scratch):
            path.unlink(missing_ok=True)


def compiler() -> str:
    """Return the path of the C++ compiler. Raises `KernelsUnavailable`."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise KernelsUnavailable(_NO_COMPILER)
    return found


def _begin(command: Sequence[str], running: list[subprocess.Popen[str]], text: str = "") -> None:
    """Start a compiler, add it to `running`, and pass it `text` on its standard input."""
    pipe, silent = subprocess.PIPE, subprocess.DEVNULL
    with _handlers_wait():  # an exception from a handler before `append` would leave the process running
        # A process group of its own, so that the processes it starts can be ended with it.
        process = subprocess.Popen(command, stdin=pipe, stdout=silent, stderr=pipe, text=True, process_group=0)
        running.append(process)
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # if the compiler reads nothing, it reports why or succeeds
        process.stdin.write(text)
    process.stdin = None


@contextmanager
def _handlers_wait() -> Generator[None]:
    """Delay handlers of Ctrl-C and SIGTERM until the end. New processes would inherit blocked signals instead."""
    came: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # Python runs handlers only in the main thread
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if in_main}
    held = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in held:
        signal.signal(number, lambda got, frame: came.append(got))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _finished(processes: Sequence[subprocess.Popen[str]], names: Sequence[str]) -> Generator[str]:
    """Yield the name of each process when it has succeeded, in the order in which they end.

    Raises `KernelsUnavailable` for the first process that fails or takes too long.
    """
    deadline = time.monotonic() + _COMPILE_TIMEOUT_S
    running = dict(zip(processes, names, strict=True))
    while running:
        for process, name in list(running.items()):
            try:
                _, messages = process.communicate(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise KernelsUnavailable(f"{name} took more than {_COMPILE_TIMEOUT_S} s") from None
                continue
            if process.returncode:
                errors = messages.splitlines()
                lines = [line for line in errors if "error" in line] or errors or ["no message"]
                raise KernelsUnavailable(f"{name} failed: {lines[0].strip()[:200]}")
            del running[process]
            yield name


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _sources(*patterns: str) -> list[Path]:
    return [path for pattern in patterns for path in sorted(SOURCES.glob(pattern))]


def fingerprint(level: ISALevel, compiler: Sequence[str] = ()) -> str:
    """Return a hash of the sources, the flags and the facts that identify the compiler."""
    sources = (*_sources("**/*.cpp"), *_sources("**/*.h"))
    texts = [text for source in sources for text in (str(source.relative_to(SOURCES)), source.read_text("utf-8"))]
    return digest([*texts, *FLAGS, *level.flags, *compiler])


def digest(texts: Iterable[str]) -> str:
    """Return a hash of texts, in order."""
    found = hashlib.blake2b(digest_size=12)
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()


def compiler_facts(compiler: str) -> tuple[str, ...]:
    """Return facts that identify a compiler without running it: path, size in bytes and modification time in ns."""
    facts = os.stat(os.path.realpath(compiler))
    return (os.path.realpath(compiler), str(facts.st_size), str(facts.st_mtime_ns))


def cache_directory() -> Path:
    """Return the cache directory, which must belong to this user because its contents are loaded as code."""
    try:
        directory = cache_home() / "oarlock" / "kernels"
    except StartupError as error:
        raise KernelsUnavailable(f"{error.cause} {error.fix}") from None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise KernelsUnavailable(f"the cache {directory} cannot be written: {error.strerror}") from error
    if directory.stat().st_uid != os.getuid():
        raise KernelsUnavailable(f"the cache {directory} belongs to another user")
    return directory
