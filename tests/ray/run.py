"""The Ray Serve application on a real cluster on this machine: faults, and what follows.

    python -m tests.ray.run                    # all
    python -m tests.ray.run killed-server      # these

Makes Ray's environment, runs `trials` in it, and prints a line per trial; the exit status is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.e2e.running import ROOT
from tests.ray.environment import prepare


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ray.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="TRIAL", help="none means all")
    return run_trials(parser.parse_args().names)


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
