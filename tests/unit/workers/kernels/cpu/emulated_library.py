"""The kernels of another kind of machine, callable like a loaded library: they run in an emulator of its processor.

The process in `csrc/remote_calls.cpp` calls the functions. Its memory accesses are served from this process's memory,
at the same addresses, so whatever pointers the arguments hold mean the same there.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from oarlock.workers.kernels.cpu import build
from oarlock.workers.kernels.cpu.build import ISALevel

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_SERVER = Path(__file__).parent / "csrc" / "remote_calls.cpp"
_FLAGS = ("-O1", "-std=c++17", "-fopenmp", "-rdynamic", "-Wl,--no-as-needed", "-lgomp", "-ldl")
_PAGE = 4096
_MOST_PAGES = 16  # fetched at once
_NEAR = 1 << 28  # bytes that mappings of the emulator may grow by


def why_not() -> str | None:
    """Why kernels for 64-bit ARM cannot be compiled and run here; None if they can."""
    missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not installed (g++-aarch64-linux-gnu, qemu-user)" if missing else None


class EmulatedLibrary:
    """Attributes are functions, as those of `ctypes.CDLL`."""

    def __init__(self, level: ISALevel, sources: Sequence[Path] = ()) -> None:
        """Compile all kernels, or `sources`."""
        self._name = str(_compiled(level, tuple(sources)))
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self._threads = 0
        self._functions: dict[str, _Function] = {}
        for _ in range(20):
            self._process = self._start()
            if not self._overlaps():
                return
            self.close()  # the next one lies elsewhere
        raise RuntimeError("the emulator's memory lies where this process has its own")

    def __getattr__(self, name: str) -> "_Function":
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self._functions:
            self._functions[name] = _Function(self, name)
        return self._functions[name]

    def close(self) -> None:
        """End the emulator."""
        self._process.kill()
        self._process.wait(60)

    def set_threads(self, count: int) -> None:
        """Let functions use as many threads as torch does here."""
        if count != self._threads:
            self.call("omp_set_num_threads", [count], [], False)
            self._threads = count

    def _start(self) -> subprocess.Popen[bytes]:
        command = [EMULATOR, "-cpu", "max", "-L", SYSTEM, str(_server()), self._name]
        threads = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=threads)
        self._process = process
        self.call("no_such_function", [], [], False)  # answers when everything is mapped
        return process

    def _overlaps(self) -> bool:
        theirs = _mappings(self._process.pid)
        return any(
            start < end_there + _NEAR and start_there - _NEAR < end
            for start, end in _mappings(os.getpid())
            for start_there, end_there in theirs
        )

    def call(self, name: str, integers: list[int], numbers: list[bytes], is_float: bool) -> bytes | None:
        """The 8 bytes that function `name` returns, or None if there is none. `numbers`: 8 bytes each."""
        assert self._process.stdin is not None
        head = struct.pack("<4i", len(name), len(integers), len(numbers), is_float) + name.encode()
        arguments = b"".join(struct.pack("<Q", value & (2**64 - 1)) for value in integers)
        self._process.stdin.write(head + arguments + b"".join(numbers))
        self._process.stdin.flush()
        sent: set[int] = set()
        while True:
            tag, value = self._receive(1), self._receive(8)
            address = int.from_bytes(value, "little")
            if tag == b"F":
                self._send_pages(address, sent)
            elif tag == b"D":
                changed = self._receive(int.from_bytes(self._receive(4), "little"))
                ctypes.memmove(address, changed, len(changed))
            elif tag == b"C":
                raise RuntimeError(f"the emulator has memory of its own at {address:#x}")
            else:
                return value if tag == b"R" else None

    def _receive(self, count: int) -> bytes:
        assert self._process.stdout is not None
        received = self._process.stdout.read(count)
        if len(received) < count:
            raise RuntimeError(f"the emulator ended with status {self._process.wait(60)}")
        return received

    def _send_pages(self, address: int, sent: set[int]) -> None:
        assert self._process.stdin is not None
        most = next((i for i in range(_MOST_PAGES) if address + i * _PAGE in sent), _MOST_PAGES)
        try:
            content = os.pread(self._memory, most * _PAGE, address)
        except OSError:  # nothing is mapped at the address
            content = b""
        count = len(content) // _PAGE
        sent.update(address + i * _PAGE for i in range(count))
        self._process.stdin.write(struct.pack("<i", count) + content[: count * _PAGE])
        self._process.stdin.flush()


class _Function:
    """One function: `argtypes` and `restype` mean what they mean in ctypes."""

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name
        self.argtypes: Sequence[Any] = ()
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        integers: list[int] = []
        numbers: list[bytes] = []
        for place, argument in enumerate(arguments):
            kind = self.argtypes[place] if place < len(self.argtypes) else type(argument)
            value = argument.value if isinstance(argument, ctypes._SimpleCData) else argument
            if kind in (ctypes.c_float, ctypes.c_double):
                numbers.append(struct.pack("<f4x" if kind is ctypes.c_float else "<d", value))
            else:
                integers.append(_address_or_integer(value))
        self._library.set_threads(torch.get_num_threads())
        result = self._library.call(self._name, integers, numbers, self.restype is ctypes.c_float)
        if result is None:
            raise AttributeError(f"{self._library._name} has no function {self._name}")
        return None if self.restype is None else self.restype.from_buffer_copy(result).value


def _address_or_integer(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    if isinstance(value, ctypes._Pointer):
        return ctypes.cast(value, ctypes.c_void_p).value or 0
    return ctypes.addressof(getattr(value, "_obj", value))  # what byref made, an array or a structure


def _mappings(pid: int) -> list[tuple[int, int]]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    words = [line.split()[0].split("-") for line in lines if "[vsyscall]" not in line]
    return [(int(start, 16), int(end, 16)) for start, end in words]


def _compiled(level: ISALevel, sources: tuple[Path, ...]) -> Path:
    """Kept between runs, as the kernels of this machine are."""
    compiler = shutil.which(COMPILER)
    assert compiler is not None
    facts = (*build.compiler_facts(compiler), *(path.read_text() for path in sources))
    target = build.cache_directory() / f"{level.name}-{build.fingerprint(level, facts)}.so"
    if not target.exists():
        build.compile_to(target, level, compiler, sources)
    return target


@cache
def _server() -> Path:
    text = _SERVER.read_text()
    target = build.cache_directory() / f"remote-calls-{build.digest([text, *_FLAGS])}"
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, str(_SERVER), "-o", str(scratch), *_FLAGS], check=True, timeout=120)
        scratch.replace(target)
    return target
