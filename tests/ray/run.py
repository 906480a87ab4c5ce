"""The Ray Serve application on a real cluster on this machine: faults, and what follows.

    python -m tests.ray.run                    # all
    python -m tests.ray.run killed-server      # these
    python -m tests.ray.run --write-docs       # all, and the table in docs/replicas.md

Makes Ray's environment, runs `trials` in it, and prints a line per trial; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.e2e.running import ROOT
from tests.ray.environment import prepare
from tools.made_parts import filled

PAGE, MARKER = ROOT / "docs" / "replicas.md", "ray"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TRIAL", help="none means all")
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/replicas.md")
    given = parser.parse_args()
    if given.write_docs and given.names:
        parser.error("--write-docs wants all trials: leave the names out")
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results.json"
        status = run_trials([*given.names, "--results", str(results)])
        if given.write_docs and not status:
            PAGE.write_text(filled(PAGE.read_text(), MARKER, as_markdown(json.loads(results.read_text()))))
            print(f"wrote the table in {PAGE.relative_to(ROOT)}")
    return status


def as_markdown(rows: list[list[str]]) -> str:
    """Format the table of trials: the action, its consequence, and the requests lost."""
    lines = ["| what was done | what followed | requests lost |", "|---|---|---|"]
    lines += [f"| {done} | {followed} | {lost} |" for done, followed, lost in rows]
    return "\n".join([*lines, "", f"Run on {datetime.datetime.now(datetime.UTC).date().isoformat()}."])


def run_trials(arguments: list[str]) -> int:
    """Run trials in Ray's environment; return the exit status."""
    python = prepare()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OARLOCK_", "RAY_", "OPENAI_"))}
    changes = {
        "PATH": f"{python.parent}:{kept['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    # From the root, which the interpreter searches first because of -m: the server's own packages stay out of the way.
    return subprocess.run([python, "-m", "tests.ray.trials", *arguments], cwd=ROOT, env=kept | changes).returncode


if __name__ == "__main__":
    sys.exit(main())
