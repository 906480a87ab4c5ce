"""Write the files of pins: every package of a client's environment, exactly.

    python -m tests.clients.pin            # all
    python -m tests.clients.pin lm-eval    # one, after a change in matrix.py

Asks pip what it would install; torch and what only its GPU builds need are left out. Installs nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients.environments import PINS, bare_python
from tests.clients.matrix import CLIENTS, FUZZER, Kind

# Lent by the repository's own environment where a client needs it (see environments.py).
NOT_INSTALLED = ("torch", "triton", "nvidia-", "cuda-")


def resolve(requires: Sequence[str], python: Path) -> list[str]:
    """`name==version` of everything that these requirements need, sorted."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run(
            [*pip, "--dry-run", "--ignore-installed", "--report", report.name, *requires],
            check=True,
        )
        found = [entry["metadata"] for entry in json.loads(Path(report.name).read_text())["install"]]
    lines = (f"{entry['name'].lower().replace('_', '-')}=={entry['version']}" for entry in found)
    return sorted(line for line in lines if not line.startswith(NOT_INSTALLED))


def main(names: list[str]) -> int:
    """Pin the named clients, or all."""
    with tempfile.TemporaryDirectory() as directory:
        python = bare_python(Path(directory))
        for client in (*CLIENTS, FUZZER):
            if client.kind is not Kind.PYTHON or (names and client.name not in names):
                continue
            lines = resolve(client.requires, python)
            typed = " ".join(client.requires)
            (PINS / f"{client.name}.txt").write_text(f"# {typed}\n" + "\n".join(lines) + "\n")
            print(f"{client.name}: {len(lines)} packages", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
