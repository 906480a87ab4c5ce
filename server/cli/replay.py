"""`oarlock replay FILE`: feed a recording to ranks, without engine or server, and compare their answers.

The work is done by `oarlock.engine.replay`, a program of its own.
"""

from __future__ import annotations

import argparse

from oarlock.server.launch.child_process import run_program

HELP = "replay a recording of `serve --record` and compare every token"
EXAMPLE = "oarlock replay steps.oarlock --tensor-parallel-size 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording that `oarlock serve --record FILE` wrote")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=int, metavar="N", help="ranks to replay with (default: as recorded)"
    )
    parser.add_argument(
        "-pp",
        "--pipeline-parallel-size",
        type=int,
        metavar="N",
        help="stages to replay with; their number changes no bit (default: as recorded)",
    )
    parser.add_argument("--model", metavar="PATH", help="where the same checkpoint lies here (default: as recorded)")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest difference of a logprob that passes (default: 0 where these ranks have the same bits as the "
        "recorded ones; elsewhere logprobs are reported but not limited)",
    )


def run(arguments: argparse.Namespace) -> int:
    options = []
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "model", "tolerance"):
        value = getattr(arguments, name)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={value}")
    return run_program("oarlock.engine.replay", [*options, "--", arguments.file])
