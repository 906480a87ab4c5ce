"""Everything about the CUDA path that only a GPU can show, in one command: is it right, and how fast is it.

    make gpu-check                                   # or: python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --parts attention "decode 8b"
    python -m benchmarks.gpu_check --device cpu      # tries the logic, on tiny shapes

Each part is a process of its own, of less than eight minutes. The file of results is written after each, and a second
run goes on with those that are missing or failed. Where a check fails, nothing is timed: speed of a wrong program is no
result. Parts that are named run in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.environments import ROOT
from benchmarks.gpu_check import results
from benchmarks.gpu_check.part import Part
from benchmarks.gpu_check.process import PARTS

LIMIT_S = 480.0
DEFAULT = Path("gpu-check.json")


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
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(child.pid).children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.kill()
    child.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=DEFAULT, metavar="FILE", help=f"the results ({DEFAULT})")
    parser.add_argument("--again", action="store_true", help="run what has passed as well")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of one part")
    arguments = parser.parse_args(argv)
    machine = results.machine(arguments.device)
    if arguments.device == "cuda" and not machine["devices"]:
        print("error: no CUDA device answers, or torch was built without CUDA\nfix: oarlock doctor --device cuda")
        return 2
    kept = {} if arguments.again else results.kept(arguments.json, machine)
    chosen = [PARTS[name] for name in arguments.parts or PARTS]
    found = run_all(chosen, machine, kept, arguments)
    print(results.table(found))
    print(f"\nwrote {arguments.json}")
    return 0 if results.is_fine(found) else 1


def run_all(
    chosen: list[Part], machine: dict[str, Any], kept: dict[str, Any], arguments: argparse.Namespace
) -> dict[str, Any]:
    """The results, which are in the file after each part."""
    found = {"format": results.FORMAT, "what": "gpu-check", "machine": machine, "parts": kept}
    for part in chosen:
        if part.name in kept and results.is_over(kept[part.name]):
            continue
        if not part.is_check and not arguments.parts and results.any_wrong(kept, chosen):
            kept[part.name] = results.waiting("a check before it has failed")
        elif len(machine["devices"]) < part.needs_devices and arguments.device == "cuda":
            kept[part.name] = results.left_out(f"it needs {part.needs_devices} devices")
        elif part.needs_devices > 1 and arguments.device == "cpu":
            kept[part.name] = results.left_out("ranks on CPUs have tests of their own")
        else:
            print(f"{part.name} ...", file=sys.stderr, flush=True)
            kept[part.name] = run_part(part, arguments.device, arguments.limit)
            print(f"{part.name}: {kept[part.name]['state']}", file=sys.stderr, flush=True)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the part that runs, too
    sys.exit(main())
