"""What `--cpu-affinity auto` changes: two servers, one without pinning, in alternation with the same prompts.

    python -m tests.load.affinity_bench [--ranks N] [--concurrency N …] [--rounds N] [--quick]

Both are up at once; the one that is not asked is idle. Figures are medians over rounds, and ratios of each round.
"""

import argparse
import contextlib
import statistics

from benchmarks import load
from benchmarks.checkpoint import ensure, prompts
from tests.e2e.running import RunningServer

SETTINGS = ("none", "auto")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.load.affinity_bench", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it works")
    args = parser.parse_args(argv)
    model = ensure("quick" if args.quick else "0.5b")
    flags = ["--served-model-name", "load", "--max-model-len", "512", "--tensor-parallel-size", str(args.ranks)]
    flags += ["--kv-cache-memory", "512MiB", "--no-enable-prefix-caching"]
    speeds: dict[tuple[int, str], list[float]] = {(c, name): [] for c in args.concurrency for name in SETTINGS}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(RunningServer(model, *flags, "--cpu-affinity", name)) for name in SETTINGS}
        for turn in range(args.rounds + 1):  # the first warms up
            for c in args.concurrency:
                work = prompts(c, 128, 1000, turn)
                for name in SETTINGS if turn % 2 else SETTINGS[::-1]:
                    found = load.run(servers[name].url, "load", work, c, args.output_tokens)
                    if turn:
                        speeds[c, name].append(found.output_tokens_per_s)
    for c in args.concurrency:
        none, auto = (speeds[c, name] for name in SETTINGS)
        ratios = sorted(pinned / free for pinned, free in zip(auto, none, strict=True))
        print(
            f"{args.ranks} rank(s), {c} client(s): none {statistics.median(none):.1f} tokens/s, "
            f"auto {statistics.median(auto):.1f}, auto / none {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
