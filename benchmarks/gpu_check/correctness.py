"""Whether the numbers are right on the device: kernels by their own tests, models beside transformers, text by text."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.gpu_check.part import NotHere, Row, Where, missing_package

ROOT = Path(__file__).resolve().parents[2]
QUICK = "test_triton_rotation"  # the file whose tests take least
ONLY_INTERPRETED = "pytestmark = pytest.mark.skipif(torch.cuda.is_available()"  # in a file whose tests a device skips


def tests_of_kernels() -> list[Path]:
    """The files whose tests run on a device where there is one: each kernel beside the slow way to compute the same."""
    found = []
    for file in sorted((ROOT / "tests" / "unit" / "workers").rglob("test_*.py")):
        text = file.read_text("utf-8")
        has_kernels = file.stem.startswith("test_triton_") or "torch.cuda.is_available()" in text
        if has_kernels and ONLY_INTERPRETED not in text:
            found.append(file)
    return found


def kernels(where: Where) -> Iterator[Row]:
    """Ten cases of each test of every kernel, several files at a time. Kernels are compiled once for all processes."""
    files = [file for file in tests_of_kernels() if not where.is_tiny or file.stem == QUICK]
    with ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 1) // 2))) as pool:
        of_file = partial(_tested, where=where, options=("-p", "benchmarks.gpu_check.ten_cases"))
        for done in as_completed([pool.submit(of_file, file) for file in files]):
            yield from done.result()


def all_kernels(file: Path, where: Where) -> Iterator[Row]:
    """All tests of one file. In bfloat16, too, which Triton's interpreter does not compute as devices do."""
    if where.is_tiny and file.stem != QUICK:
        raise NotHere("it needs a CUDA device: make test runs them on the CPU")
    yield from _tested(file, where)


def _tested(file: Path, where: Where, options: tuple[str, ...] = ()) -> list[Row]:
    """Runs tests with pytest alone: without its plugins, and without what the repository's settings need of them."""
    if importlib.util.find_spec("pytest") is None:
        raise NotHere("pytest is not installed: make check installs it")
    chosen = ["-k", "cuda"] if file.stem == "test_attention" else []
    alone = ["-c", os.devnull, "--rootdir", str(ROOT), f"--confcutdir={ROOT / 'tests' / 'unit' / 'workers'}"]
    alone += ["--import-mode=importlib", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not soak and not product"]
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({"TRITON_INTERPRET": "1"} if where.is_tiny else {})
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *alone, str(file), *chosen, *options]
        done = _run([*command, f"--junitxml={report}"], **environment)
        if not report.exists():
            return [Row(file.stem, ok=False, note=f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")]
        return list(rows_of_tests(report.read_text("utf-8"), file.stem))


def rows_of_tests(report: str, name: str) -> Iterator[Row]:
    """One row of all tests, and one of each that failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    counts = {"passed": float(passed), "failed": float(len(failed)), "skipped": float(len(skipped))}
    yield Row(name, counts, ok=not failed and passed > 0, note="" if cases else "no test ran")
    for case in failed:
        fault = next(found for kind in ("failure", "error") if (found := case.find(kind)) is not None)
        yield Row(case.get("name", "a test"), ok=False, note=(fault.get("message") or "")[:300])


def families(dtype: str, where: Where, kinds: tuple[str, ...]) -> Iterator[Row]:
    """`oarlock verify` on a tiny model of every family: each tensor of each layer within the bounds of accuracy.md.
    `kinds`: names of the lists of families."""
    from tests.golden import tiny_models

    chosen = [family for kind in kinds for family in getattr(tiny_models, kind)]
    for family in chosen[:1] if where.is_tiny else chosen:
        with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
            # transformers' grouped matmuls of 16 bits need widths of experts that 8 divides.
            width = getattr(tiny_models.tiny_config(family), "moe_intermediate_size", None)
            overrides: dict[str, Any] = {"moe_intermediate_size": 40} if width == 36 else {}
            model = tiny_models.make_tiny(Path(folder), family, seed=7, dtype=getattr(torch, dtype), **overrides)
            yield verified(family, model, where, dtype)


def demo(where: Where, ranks: int = 1) -> Iterator[Row]:
    """The model that ships with the repository, in the types that it is served in."""
    for dtype in ("float32",) if where.is_tiny else ("float32", "bfloat16"):
        yield verified(f"demo model, {dtype}", ROOT / "models" / "oarlock-demo", where, dtype, ranks)


def quantised(where: Where) -> Iterator[Row]:
    """The demo model with weights rounded at load, beside the float64 model with those weights."""
    for form in ("int8",) if where.is_tiny else ("int8", "int4"):
        model = ROOT / "models" / "oarlock-demo"
        yield verified(f"demo model, {form}", model, where, "bfloat16", options=("--quantization", form))


def verified(name: str, model: Path, where: Where, dtype: str, ranks: int = 1, options: tuple[str, ...] = ()) -> Row:
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-P", "-m", "oarlock.workers.verify", str(model), "--device", where.device]
        command += ["--dtype", dtype, "--tensor-parallel-size", str(ranks), "--output", str(report), *options]
        done = _run(command)
        if not report.exists():
            if why := missing_package(done.stderr):
                raise NotHere(why)
            return Row(name, ok=False, note=f"status {done.returncode}: {done.stderr[-600:]}")
        return row_of_report(name, json.loads(report.read_text()), done.returncode)


def row_of_report(name: str, report: dict[str, Any], status: int) -> Row:
    """Row of a report. `ours / theirs`: the largest root mean square error of a tensor, as a multiple of theirs."""
    ratios = [rank["rms_ratio"] or 0.0 for tensor in report["tensors"] for rank in tensor["ranks"]]
    fault = report["first_fault"]
    note = "" if fault is None else f"{fault['tensor']} of layer {fault['layer']}: {'; '.join(report['likely_causes'])}"
    return Row(name, {"ours / theirs": max(ratios, default=float("nan"))}, ok=status == 0 and report["ok"], note=note)


def sanitizer(where: Where) -> Iterator[Row]:
    """NVIDIA's compute-sanitizer looks at every access to memory of one captured step that is replayed."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    if where.is_tiny:
        raise NotHere("it needs a CUDA device, at whose memory it looks")
    if tool is None:
        raise NotHere("compute-sanitizer, which comes with CUDA's toolkit, is not installed")
    done = _run(
        [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-m", "benchmarks.gpu_check.graphs"]
    )
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line]
    yield Row("memcheck", ok=done.returncode == 0, note="; ".join(lines[-3:]) or done.stderr[-600:])


def sums(where: Where) -> Iterator[Row]:
    """How two ranks sum, with the times of each way, as every start measures it."""
    from oarlock.workers.config import WorkerConfig
    from oarlock.workers.doctor.cuda import all_reduce_choice

    found = all_reduce_choice(WorkerConfig("", device=where.device, tensor_parallel_size=2))
    yield Row("all-reduce", ok=not found.fix, note=f"{found.text} {found.fix}".strip())


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
