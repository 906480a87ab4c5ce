"""`oarlock replay FILE`: feed a recording to ranks, without engine or server, and compare their answers.

Knows the command's own arguments. The work is done by `engine.replay`, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HELP = "replay a recording of `serve --record` and compare every token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `oarlock serve --record FILE` wrote")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=int, metavar="N", help="ranks to replay with (default: as recorded)"
    )
    parser.add_argument("--model", metavar="PATH", help="where the same checkpoint lies here (default: as recorded)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of a logprob that passes (default: 0 with the recorded number of ranks; with "
        "another, logprobs are reported and not judged)",
    )


def run(arguments: argparse.Namespace) -> int:
    """The child shares this terminal: it prints, and Ctrl-C reaches it too."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-P", "-m", "engine.replay"]
    for name in ("tensor_parallel_size", "model", "tolerance"):
        value = getattr(arguments, name)
        if value is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    command += ["--", arguments.file]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue  # the child got it as well, and ends in its own way
