"""The machine that figures are from: its kind of processor, and what it allows at this moment.

The kind decides which section of the page figures stand in. Streaming reads and dense products are measured beside
every round, because a machine that is shared gives another amount from minute to minute. Their programs in C++ are
compiled for the processor at hand; without g++ torch alone is asked.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

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


def beyond_caches(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes of which caches hold little: three times the largest cache of the first core, and at least 192 MiB."""
    sizes = [path.read_text().strip() for path in folder.glob("index*/size")]  # such as 266240K
    return max([192 << 20, *(3 * int(size[:-1]) << 10 for size in sizes if size.endswith("K"))])


PROGRAMS = Path(__file__).resolve().parent / "ceilings"
# (rows, outputs, inputs): a prompt of 516 tokens through the widest product of the 0.5B shape.
SHAPE = (516, 4864, 896)
PASSES = 5


class Ceilings:
    """Compiles the two programs once; `measure` takes a few seconds."""

    def __init__(self, threads: int, gibibytes: float = 1.0, shape: tuple[int, int, int] = SHAPE) -> None:
        self.threads, self.gibibytes, self.shape = threads, gibibytes, shape
        self._folder = tempfile.TemporaryDirectory(prefix="oarlock-ceilings-")
        compiler = shutil.which("g++")
        self._programs = {
            name: self._compiled(compiler, name) for name in ("stream_read", "gemm") if compiler is not None
        }

    def _compiled(self, compiler: str, name: str) -> Path:
        out = Path(self._folder.name) / name
        flags = ["-O3", "-march=native", "-fopenmp", "-std=c++17"]
        subprocess.run([compiler, *flags, str(PROGRAMS / f"{name}.cpp"), "-o", str(out)], check=True)
        return out

    def _run(self, name: str, *arguments: object) -> dict[str, float]:
        env = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        command = [str(self._programs[name]), *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(done.stdout)

    def measure(self) -> dict[str, Any]:
        """Measure `read_gb_s`, for each type `gemm_gflops` by torch and by the plain loop, and `other_cores`.

        The last: how many cores other programs kept busy in a second without any of ours, near zero on a quiet machine.
        """
        others = {"other_cores": psutil.cpu_percent(interval=1.0) / 100 * (psutil.cpu_count() or 1)}
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            products = {f"torch {dtype}": self._torch_product(dtype) for dtype in ("float32", "bfloat16")}
            if not self._programs:
                return others | {"read_gb_s": self.read_rate(), "gemm_gflops": products}
        finally:
            torch.set_num_threads(before)
        products |= {f"loop {dtype}": rate for dtype, rate in self._run("gemm", *self.shape).items()}
        return others | {"read_gb_s": self.read_rate(), "gemm_gflops": products}

    def read_rate(self) -> float:
        """The rate of streaming reads in GB/s, by the program where there is one."""
        return self._run("stream_read", self.gibibytes)["best"] if self._programs else self._torch_read()

    def _torch_product(self, dtype: str) -> float:
        rows, outputs, inputs = self.shape
        x = torch.randn(rows, inputs).to(getattr(torch, dtype))
        w = torch.randn(outputs, inputs).to(x.dtype)
        return 2.0 * rows * outputs * inputs / _best_seconds(lambda: F.linear(x, w)) / 1e9

    def _torch_read(self) -> float:
        data = torch.ones(int(self.gibibytes * 2**27), dtype=torch.int64)
        return data.nbytes / _best_seconds(data.sum) / 1e9


def _best_seconds(call: Callable[[], Any]) -> float:
    """The best of a few calls, fewer where one takes long: products in a type that is emulated do."""
    call()
    times: list[float] = []
    while len(times) < PASSES and sum(times) < 1.0:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
