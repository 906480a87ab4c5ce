"""Whether the numbers are right on the device: kernels by their own tests, models beside transformers, text by text."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.environments import ROOT
from benchmarks.gpu_check.part import NotHere, Row, Where

QUICK = "test_triton_rotation"  # the file whose tests take least


def tests_of_kernels() -> list[Path]:
    """The files whose tests run on a device where there is one: each kernel beside the slow way to compute the same."""
    files = sorted((ROOT / "tests" / "unit" / "workers").rglob("test_*.py"))
    return [
        file
        for file in files
        if file.stem.startswith("test_triton_") or "torch.cuda.is_available()" in file.read_text("utf-8")
    ]


def kernels(file: Path, where: Where) -> Iterator[Row]:
    """The tests of one file. In bfloat16, too, which Triton's interpreter does not compute as devices do."""
    if importlib.util.find_spec("pytest") is None:
        raise NotHere("pytest is not installed: make check installs it")
    if where.is_tiny and file.stem != QUICK:
        raise NotHere("make test runs them on the CPU")
    chosen = ["-k", "cuda"] if file.stem == "test_attention" else []
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), *chosen]
        done = _run([*command, f"--junitxml={report}"])
        if not report.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}")
        yield from rows_of_tests(report.read_text("utf-8"))


def rows_of_tests(report: str) -> Iterator[Row]:
    """One row of all tests, and one of each that failed."""
    cases = list(ElementTree.fromstring(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    passed = len(cases) - len(failed) - len(skipped)
    counts = {"passed": float(passed), "failed": float(len(failed)), "skipped": float(len(skipped))}
    yield Row("tests", counts, ok=not failed and passed > 0, note="" if cases else "no test ran")
    for case in failed:
        fault = next(found for kind in ("failure", "error") if (found := case.find(kind)) is not None)
        yield Row(case.get("name", "a test"), ok=False, note=(fault.get("message") or "")[:300])


def families(dtype: str, where: Where) -> Iterator[Row]:
    """`oarlock verify` on a tiny model of every family: each tensor of each layer within the bounds of accuracy.md."""
    from tests.golden.tiny_models import FAMILIES, make_tiny

    for family in FAMILIES[:1] if where.is_tiny else FAMILIES:
        with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
            model = make_tiny(Path(folder), family, seed=7, dtype=getattr(torch, dtype))
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
        command = [sys.executable, "-P", "-m", "oarlock", "verify", str(model), "--device", where.device]
        command += ["--dtype", dtype, "--tensor-parallel-size", str(ranks), "--output", str(report), *options]
        done = _run(command)
        if not report.exists():
            return Row(name, ok=False, note=f"status {done.returncode}: {done.stderr[-600:]}")
        return row_of_report(name, json.loads(report.read_text()), done.returncode)


def row_of_report(name: str, report: dict[str, Any], status: int) -> Row:
    """Row of a report. `ours / theirs`: the largest root mean square error of a tensor, as a multiple of theirs."""
    ratios = [rank["rms_ratio"] or 0.0 for tensor in report["tensors"] for rank in tensor["ranks"]]
    fault = report["first_fault"]
    note = "" if fault is None else f"{fault['tensor']} of layer {fault['layer']}: {'; '.join(report['likely_causes'])}"
    return Row(name, {"ours / theirs": max(ratios, default=float("nan"))}, ok=status == 0 and report["ok"], note=note)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
