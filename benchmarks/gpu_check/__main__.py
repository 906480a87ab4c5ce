"""Everything about the CUDA path that only a GPU can show, in one command: is it right, and how fast is it.

    python -m benchmarks.gpu_check --budget 540                     # what settles most, in nine minutes
    make gpu-check                                                  # all of it
    python -m benchmarks.gpu_check --parts attention "decode 8b"
    python -m benchmarks.gpu_check --device cpu                     # tries the logic, on tiny shapes

Where no CUDA device answers, the first three do what the last one does: the page says so on top, and they exit with 2.

It needs Python, torch with its Triton, transformers, safetensors and pytest, and no network; parts that take more are
left out with that reason, or get it from a folder of wheels (--wheels). Each part is a process of its own, which is
ended after its time. Two files are written after each part, the results and a page about them, and a second run goes on
with what is missing, was broken off or failed. A part that fails stops no other: the page says which numbers are wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import results, wheels
from benchmarks.gpu_check.part import Part
from benchmarks.gpu_check.process import LONG, PARTS, ROOT

DEFAULT = Path("gpu-check.json")
STATUS = """exit status: 0: nothing is wrong. 1: a part failed, was broken off or had no time. 2: no CUDA device
answers: with --device cuda nothing has run, without --device parts have run on the CPU, and none is wrong."""
FAULT = """error: no CUDA device responds, or torch was built without CUDA
fix: oarlock doctor --device cuda"""
LEAST_S = 5.0  # a part that has less begins in vain


def run_part(part: Part, device: str, limit_s: float) -> dict[str, Any]:
    """The part's entry in the results, however it ends."""
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        rows, log = Path(folder) / "rows", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu_check.process", part.name, "--device", device]
        started = time.monotonic()
        with log.open("w") as output:
            child = subprocess.Popen([*command, "--rows", str(rows)], cwd=ROOT, stdout=output, stderr=output)
            try:
                status: int | None = child.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(child)
        written = rows.read_text().splitlines() if rows.exists() else []
        found = [json.loads(line) for line in written]
        return results.entry(found, status, time.monotonic() - started, log.read_text(errors="replace"))


def end(child: subprocess.Popen[Any]) -> None:
    """Ends a part with everything below it, as servers and ranks that it started."""
    for pid in [*_below(child.pid), child.pid] if child.poll() is None else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    child.wait()


def _below(pid: int) -> list[int]:
    """Processes that `pid` has started, those that they have, and so on."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for tasks in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (tasks / "children").read_text().split()):
                found += [child, *_below(child)]
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0], epilog=STATUS
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where one answers; cpu: tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=DEFAULT, metavar="FILE", help=f"the results ({DEFAULT})")
    parser.add_argument("--again", action="store_true", help="run what has passed as well")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it; parts are in order of worth")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels of packages that this machine lacks")
    arguments = parser.parse_args(argv)
    begun = time.monotonic()
    machine = results.machine(arguments.device or "cuda")
    has_none = machine["device"] == "cuda" and not machine["devices"]
    if has_none:
        print(FAULT, flush=True)
        if arguments.device == "cuda":
            return 2
        print("Parts run on the CPU instead, on tiny shapes: nothing here is about a GPU.", flush=True)
        machine["device"] = "cpu"
    arguments.device = machine["device"]
    kept = {} if arguments.again else results.kept(arguments.json, machine)
    chosen = [PARTS[name] for name in arguments.parts or PARTS]
    until = float("inf") if arguments.budget is None else begun + arguments.budget
    with tempfile.TemporaryDirectory(prefix="oarlock-wheels-") as unpacked:
        if arguments.wheels is not None:
            print("unpacked:", ", ".join(wheels.unpack(arguments.wheels, Path(unpacked))), file=sys.stderr)
        _environment(unpacked, arguments.json, arguments.device)
        found = run_all(chosen, machine, kept, arguments, until)
    print(results.page(found))
    print(f"\nwrote {arguments.json} and {arguments.json.with_suffix('.txt')}")
    if not results.is_fine(found):
        return 1
    return 2 if has_none else 0


def _environment(unpacked: str, file: Path, device: str) -> None:
    """Sets the variables that all parts inherit. Kernels are compiled once for all of them, and for the next run."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), unpacked, os.environ.get("PYTHONPATH"))))
    os.environ.setdefault("TRITON_CACHE_DIR", str(file.with_suffix(".kernels").absolute()))
    os.environ["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


def run_all(
    chosen: list[Part],
    machine: dict[str, Any],
    kept: dict[str, Any],
    arguments: argparse.Namespace,
    until: float = float("inf"),
) -> dict[str, Any]:
    """The results, which are in the files after each part. `until`: on the clock `time.monotonic`."""
    found = {"format": results.FORMAT, "what": "gpu-check", "machine": machine, "parts": kept}
    for part in chosen:
        if part.name in kept and results.is_done(kept[part.name]):
            continue
        left = until - time.monotonic()
        if part.needs_devices > max(1, len(machine["devices"])):
            kept[part.name] = results.left_out(f"it needs {part.needs_devices} CUDA devices")
        elif left < LEAST_S:
            kept[part.name] = results.waiting("no time was left")
        else:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            limit = part.limit_s if arguments.device == "cuda" else LONG  # a CPU may be shared with much else
            limit = min(limit, max(LEAST_S, left / 2))  # the others have the other half
            kept[part.name] = run_part(part, arguments.device, limit)
            print(f"{part.name}: {kept[part.name]['state']}", file=sys.stderr, flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        arguments.json.with_suffix(".txt").write_text(results.page(found) + "\n")
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part that runs, too
    sys.exit(main())
