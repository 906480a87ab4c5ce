"""Comparison of settings of `--cpu-affinity`: two servers with one setting each, in alternation with the same prompts.

    python -m tests.load.affinity_bench [--ranks N] [--settings A B] [--busy N] [--concurrency N …] [--rounds N]
    python -m tests.load.affinity_bench --ranks 2 --settings none '0|1' --busy 1     # beside another program

Both are up at once; the one that is not asked is idle. Figures are medians over rounds, and ratios of each round.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys

from benchmarks import load
from benchmarks.checkpoint import ensure, prompts
from tests.e2e.running import RunningServer

BUSY = [sys.executable, "-c", "while True: pass"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.affinity_bench", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--settings", nargs=2, default=["none", "auto"], help="of --cpu-affinity")
    parser.add_argument("--busy", type=int, default=0, help="programs beside it that keep a CPU busy")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    args = parser.parse_args(argv)
    model = ensure("quick" if args.quick else "0.5b")
    flags = ["--served-model-name", "load", "--max-model-len", "512", "--tensor-parallel-size", str(args.ranks)]
    flags += ["--kv-cache-memory", "512MiB", "--no-enable-prefix-caching"]
    speeds: dict[tuple[int, str], list[float]] = {(c, name): [] for c in args.concurrency for name in args.settings}
    with contextlib.ExitStack() as stack:
        servers = {
            name: stack.enter_context(RunningServer(model, *flags, "--cpu-affinity", name)) for name in args.settings
        }
        for _ in range(args.busy):
            stack.callback(subprocess.Popen(BUSY).kill)
        for turn in range(args.rounds + 1):  # the first warms up
            for c in args.concurrency:
                work = prompts(c, 128, 1000, turn)
                for name in args.settings if turn % 2 else args.settings[::-1]:
                    found = load.run(servers[name].url, "load", work, c, args.output_tokens)
                    if turn:
                        speeds[c, name].append(found.output_tokens_per_s)
    for c in args.concurrency:
        first, second = args.settings
        ratios = sorted(new / old for old, new in zip(speeds[c, first], speeds[c, second], strict=True))
        print(
            f"{args.ranks} rank(s), {c} client(s): {first} {statistics.median(speeds[c, first]):.1f} tokens/s, "
            f"{second} {statistics.median(speeds[c, second]):.1f}, {second} / {first} {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
