"""`oarlock bench latency MODEL`: how long one batch takes in the engine without HTTP."""

from __future__ import annotations

import argparse

from oarlock.server.cli.bench import engine

HELP = "how long one batch takes in the engine without HTTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # The lengths and the batch of `vllm bench latency`.
    engine.add_arguments(parser, prompts="--batch-size", count=8, input_tokens=32, output_tokens=128, rounds=10)


def run(arguments: argparse.Namespace) -> int:
    return engine.finish(arguments, engine.measure(arguments, "latency", _figures))


def _figures(seconds: float, tokens_in: int, tokens_out: int) -> dict[str, float]:
    return {"latency_ms": 1e3 * seconds}
