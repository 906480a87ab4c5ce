"""Measures the streamed tokens per second that the client of `oarlock bench` can read on one core.

The server is one that computes nothing. Once it sends as fast as it can, so that many chunks come in one read, and once
each chunk alone, at a given rate.

    python -m tests.load.client_ceiling
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from oarlock.server.bench.plan import ServePlan
from oarlock.server.bench.serve import measure
from tests.load.paced_server import PacedServer


def measured(every_s: float, streams: int, tokens: int, requests: int) -> dict[str, float]:
    """Tokens per second of the clock and of the client's processor time, and how late the client was."""
    with PacedServer(0.0, every_s) as server:
        plan = ServePlan(
            server.url, concurrency=streams, num_requests=requests, input_tokens=1, output_tokens=tokens,
            warmup=streams,
        )  # fmt: skip
        result = measure(plan)
    rate, share = result.summary["output_throughput"], result.client["cpu_share"]
    return {"rate": rate, "per_cpu_second": rate / share, "cpu": share, "lag_p99_ms": result.client["lag_ms"]["p99"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="per answer")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument(
        "--rate", type=float, default=20_000, help="tokens per second of all streams, in the second run"
    )
    parser.add_argument("--quick", action="store_true", help="a few, to see that it works")
    args = parser.parse_args(argv)
    if args.quick:
        args.streams, args.tokens, args.requests = 4, 20, 8
    for name, every_s in (("as fast as sent", 0.0), (f"{args.rate:g} per second", args.streams / args.rate)):
        found = measured(every_s, args.streams, args.tokens, args.requests)
        print(
            f"{name:<20} {found['rate']:>8.0f} tokens/s, {found['per_cpu_second']:.0f} per second of the client's "
            f"processor time ({found['cpu']:.0%} of a core), event loop late {found['lag_p99_ms']:.1f} ms (p99)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
