"""The file of results: how a part ended, what of an earlier run still holds, and the table of it all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.part import missing_package
from oarlock.workers.platform import cuda_driver

FORMAT = 1
# States of a part. Passed and measured ones are not run again; one that was left out may have got its package.
PASSED, MEASURED, FAILED, BROKEN, LEFT_OUT, WAITING = "passed", "measured", "failed", "broken", "left out", "waiting"
_DONE = (PASSED, MEASURED)
_OVER = (*_DONE, LEFT_OUT)
_LOG_LINES = 30
NO_DEVICE = "NO CUDA DEVICE WAS USED: parts ran on the CPU, on tiny shapes. Nothing on this page is about a GPU."


def machine(device: str) -> dict[str, Any]:
    """Machine and commit that the figures are from. Results of another machine, or of other code, are not continued."""
    import torch

    devices = []
    if device == "cuda" and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(f"{found.name}, {found.major}.{found.minor}, {found.total_memory / 2**30:.1f} GiB")
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") is not None else None
    return {
        "device": device,
        "devices": devices,
        "driver": cuda_driver.driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """Commit of this checkout, with a plus sign if files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    if shutil.which("git") is None:
        return "unknown"
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def kept(file: Path, this: dict[str, Any]) -> dict[str, Any]:
    """The parts in an earlier file of the same machine and code that were run, or left out."""
    if not file.exists():
        return {}
    earlier = json.loads(file.read_text())
    if earlier.get("format") != FORMAT or earlier.get("machine") != this:
        return {}
    return {name: part for name, part in earlier["parts"].items() if is_over(part)}


def entry(rows: Sequence[dict[str, Any]], status: int | None, seconds: float, log: str) -> dict[str, Any]:
    """Result of one part. `status`: of its process, None where it ran out of time. `log`: what it printed."""
    reasons = [row["left_out"] for row in rows if "left_out" in row]
    found: dict[str, Any] = {"seconds": round(seconds, 1), "rows": [row for row in rows if "left_out" not in row]}
    checks = [row["ok"] for row in found["rows"] if row["ok"] is not None]
    if status and status > 0 and not reasons and (why := missing_package(log)):
        reasons = [why]
    if reasons and all(checks):
        return found | {"state": LEFT_OUT, "note": reasons[0]}
    if status is None:
        return found | {"state": BROKEN, "note": f"not over after {seconds:.0f} s", "log": _end(log)}
    if status != 0 and not reasons:
        return found | {"state": BROKEN, "note": f"ended with status {status}", "log": _end(log)}
    if not all(checks):
        return found | {"state": FAILED, "note": "".join(reasons), "log": _end(log)}
    return found | {"state": PASSED if checks else MEASURED, "note": ""}


def left_out(why: str) -> dict[str, Any]:
    return {"state": LEFT_OUT, "note": why, "seconds": 0.0, "rows": []}


def waiting(why: str) -> dict[str, Any]:
    return {"state": WAITING, "note": why, "seconds": 0.0, "rows": []}


def is_done(part: dict[str, Any]) -> bool:
    """Whether the part need not run again."""
    return part["state"] in _DONE


def is_over(part: dict[str, Any]) -> bool:
    return part["state"] in _OVER


def is_fine(found: dict[str, Any]) -> bool:
    return all(is_over(part) for part in found["parts"].values())


def page(found: dict[str, Any]) -> str:
    """One page of text: the machine, what is wrong, the three worst shares of ceilings, what is missing, all rows."""
    about, parts = found["machine"], found["parts"]
    lines = [
        f"{'; '.join(about['devices']) or about['device']}; driver for CUDA {about['driver']}, torch {about['torch']}, "
        f"Triton {about['triton']}, Python {about['python']}, commit {about['commit']}"
    ]
    if about["device"] == "cpu":
        lines = [NO_DEVICE, "", *lines]
    wrong = [name for name, part in parts.items() if part["state"] in (FAILED, BROKEN)]
    if wrong:
        lines += ["", f"WRONG or broken: {'; '.join(wrong)}. Figures of what depends on these are no result."]
    if about["device"] == "cuda" and (worst := worst_shares(parts)):
        lines += ["", "The worst shares of ceilings:"]
        lines += [f"  {share:.0%} of its {of}: {part}, {row}" for share, of, part, row in worst]
    for state, title in ((LEFT_OUT, "Left out"), (WAITING, "Not run yet")):
        missing = [f"  {name}: {part['note']}" for name, part in parts.items() if part["state"] == state]
        lines += ["", f"{title}:", *missing] if missing else []
    for name, part in parts.items():
        if part["state"] in (LEFT_OUT, WAITING):
            continue
        note = f": {part['note']}" if part["note"] else ""
        lines += ["", f"{name}: {part['state']} in {part['seconds']:.0f} s{note}"]
        width = max((len(row["name"]) for row in part["rows"]), default=0)
        for row in part["rows"]:
            mark = {True: "ok    ", False: "WRONG ", None: ""}[row["ok"]]
            figures = "  ".join(f"{key} {_number(value)}" for key, value in row["figures"].items())
            lines.append(f"  {mark}{row['name']:<{width}}  {figures}  {row['note']}".rstrip())
        lines += [f"    | {line}" for line in part.get("log", "").splitlines()]
    return "\n".join(lines)


_SHARE = "share of "


def worst_shares(parts: dict[str, Any], count: int = 3) -> list[tuple[float, str, str, str]]:
    """Share, ceiling, part and row where least of what the device allows is used.

    A row that stands beside several ceilings is bound by the one that it comes nearest to.
    """
    found = []
    for name, part in parts.items():
        for row in part["rows"]:
            shares = [(value, key.removeprefix(_SHARE)) for key, value in row["figures"].items() if _SHARE in key]
            if shares:
                found.append((*max(shares), name, row["name"]))
    return sorted(found)[:count]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _end(log: str) -> str:
    return "\n".join(log.splitlines()[-_LOG_LINES:])
