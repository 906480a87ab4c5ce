"""`oarlock bench throughput MODEL`: tokens per second of the engine without HTTP, all prompts given at once."""

from __future__ import annotations

import argparse

from oarlock.server.cli.bench import engine

HELP = "tokens per second of the engine without HTTP, all prompts at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    engine.add_arguments(parser, prompts="--num-requests", count=64, input_tokens=128, output_tokens=64, rounds=3)


def run(arguments: argparse.Namespace) -> int:
    return engine.finish(arguments, engine.measure(arguments, "throughput", _figures))


def _figures(seconds: float, tokens_in: int, tokens_out: int) -> dict[str, float]:
    return {"output_throughput": tokens_out / seconds, "total_token_throughput": (tokens_in + tokens_out) / seconds}
