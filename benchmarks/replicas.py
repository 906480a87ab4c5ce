"""Two replicas: what following cached prefixes brings against other ways to choose, and two replicas against two ranks.

    python -m benchmarks.replicas routing [--groups N] [--prefix TOKENS] [--requests N] [--concurrency N]
    python -m benchmarks.replicas ranks [--concurrency N ...] [--rounds N]

Both drive engines without HTTP in a closed loop; ways take turns in each round, on processes that are loaded once and
warm. Which way comes first changes from round to round.

routing   requests of several groups, each with its own beginning, in random order. The KV memory of a replica holds
          the beginnings of half of the groups and some more. "Cached" is the share of prompt tokens that the engines
          took from their caches, "first token" the time to it.
ranks     as many processor cores, as two replicas of one rank each, and as two ranks of one engine. Output tokens per
          second, and the time of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.checkpoint import SHAPES, ensure, prompts
from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.engine.data_parallel.replica import Seat
from oarlock.engine.replicas import Replicas, start_engine
from oarlock.engine.sampling_params import SamplingParams
from oarlock.engine.types import Request
from oarlock.server.config.settings import make_settings

BLOCK = 32
Choose = Callable[[Request], Seat | EngineClient]


@dataclass(frozen=True, slots=True)
class Answer:
    """Times of one request in seconds, and its cached tokens."""

    first_token: float
    whole: float
    num_cached: int


@dataclass(frozen=True, slots=True)
class Round:
    """Result of one closed loop."""

    seconds: float
    answers: list[Answer]


async def closed_loop(
    choose: Choose, new_id: Callable[[], int], work: Sequence[Sequence[int]], output_tokens: int, concurrency: int
) -> Round:
    """Run `concurrency` users, each sending its next prompt as soon as its last is answered."""
    left, answers = iter(work), list[Answer]()

    async def user() -> None:
        for prompt in left:
            params = SamplingParams(max_tokens=output_tokens, temperature=0.0, seed=0)
            request = Request(new_id(), tuple(prompt), params)
            sent, first, num_cached = time.perf_counter(), 0.0, 0
            async for event in choose(request).generate(request):
                if not first:
                    first, num_cached = time.perf_counter(), event.num_cached_tokens
            answers.append(Answer(first - sent, time.perf_counter() - sent, num_cached))

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(concurrency)))
    return Round(time.perf_counter() - began, answers)


def config(shape: str, **options: object) -> EngineConfig:
    model = str(ensure(shape))
    return make_settings({"model": model, "block_size": BLOCK, "log_level": "warning", **options}).engine_config(model)


def silent(phase: str, fraction: float, detail: str = "") -> None:
    """Ignores the progress of engines that start."""


# -- routing


def grouped(arguments: argparse.Namespace, seed: int) -> list[list[int]]:
    """Prompts in a random order, equally many of each group."""
    vocab_size = SHAPES[arguments.shape]["vocab_size"]
    beginnings = prompts(arguments.groups, arguments.prefix, vocab_size, seed)
    rests = prompts(arguments.requests, arguments.rest, vocab_size, seed + 1)
    work = [beginnings[number % arguments.groups] + rest for number, rest in enumerate(rests)]
    random.Random(seed).shuffle(work)
    return work


def choices(replicas: Replicas, seed: int) -> dict[str, Choose]:
    """The ways to choose, by name."""
    draw, turn = random.Random(seed), iter(range(1 << 30))

    def seat(number: int) -> Seat:
        return Seat(replicas.replicas[number], 0)

    return {
        "longest prefix": replicas.choose,
        "random": lambda request: seat(draw.randrange(2)),
        "in turns": lambda request: seat(next(turn) % 2),
    }


async def routing(arguments: argparse.Namespace) -> dict[str, list[Round]]:
    of_prompt = arguments.prefix + arguments.rest + arguments.output_tokens
    kept = (arguments.groups // 2 + 1) * arguments.prefix + arguments.concurrency * (of_prompt + BLOCK)
    shape = SHAPES[arguments.shape]
    bytes_per_token = 4 * shape["num_hidden_layers"] * shape["hidden_size"] // shape["num_attention_heads"]
    bytes_per_token *= shape["num_key_value_heads"]
    asked = config(
        arguments.shape,
        data_parallel_size=2,
        max_model_len=of_prompt + BLOCK,
        max_num_seqs=arguments.concurrency,
        kv_cache_memory=kept * bytes_per_token,
    )
    replicas = await start_engine(asked, silent)
    assert isinstance(replicas, Replicas)
    found: dict[str, list[Round]] = {}

    async def measure(choose: Choose, work: list[list[int]]) -> Round:
        await replicas.reset_prefix_cache()
        return await closed_loop(choose, replicas.new_request_id, work, arguments.output_tokens, arguments.concurrency)

    try:
        # First steps are slower, and engines learn from them how many tokens fit into one: that counts for no way.
        await measure(choices(replicas, 0)["in turns"], grouped(arguments, -1)[: 4 * arguments.concurrency])
        for turn in range(arguments.rounds):
            work, ways = grouped(arguments, 100 * turn), list(choices(replicas, turn).items())
            for name, choose in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
                found.setdefault(name, []).append(await measure(choose, work))
    finally:
        await replicas.close()
    return found


def routing_table(arguments: argparse.Namespace, found: dict[str, list[Round]]) -> str:
    """Table in Markdown: medians over rounds; percentiles are of all rounds together, as one has too few requests."""
    of_all = arguments.requests * (arguments.prefix + arguments.rest)
    lines = [
        "| choice | cached | first token, p50 | p90 | requests per second | beside random |",
        "|---|---:|---:|---:|---:|---:|",
    ]

    def speed(rounds: list[Round]) -> float:
        return statistics.median(len(one.answers) / one.seconds for one in rounds)

    for name in ("longest prefix", "random", "in turns"):
        rounds = found[name]
        cached = statistics.median(sum(answer.num_cached for answer in one.answers) / of_all for one in rounds)
        tens = statistics.quantiles([answer.first_token for one in rounds for answer in one.answers], n=10)
        p50, p90 = tens[4], tens[8]
        ratio = speed(rounds) / speed(found["random"])
        lines.append(f"| {name} | {cached:.0%} | {p50:.2f} s | {p90:.2f} s | {speed(rounds):.2f} | {ratio:.2f} |")
    return "\n".join(lines)


# -- ranks


async def ranks(arguments: argparse.Namespace) -> dict[tuple[str, int], list[Round]]:
    sizes = {"max_model_len": arguments.prompt + arguments.output_tokens + BLOCK, "kv_cache_memory": 1 << 29}
    both = {
        "-dp 2": await start_engine(config(arguments.shape, data_parallel_size=2, **sizes), silent),
        "-tp 2": await start_engine(config(arguments.shape, tensor_parallel_size=2, **sizes), silent),
    }
    found: dict[tuple[str, int], list[Round]] = {}

    async def measure(name: str, seed: int, concurrency: int) -> Round:
        engine, count = both[name], max(4, 2 * concurrency)
        work = prompts(count, arguments.prompt, SHAPES[arguments.shape]["vocab_size"], seed)
        return await closed_loop(engine.choose, engine.new_request_id, work, arguments.output_tokens, concurrency)

    try:
        for name in both:
            await measure(name, -1, 4)
        for turn in range(arguments.rounds):
            for concurrency in arguments.concurrency:
                for name in sorted(both, reverse=bool(turn % 2)):
                    round_ = await measure(name, 100 * turn + concurrency, concurrency)
                    found.setdefault((name, concurrency), []).append(round_)
    finally:
        for engine in both.values():
            await engine.close()
    return found


def ranks_table(arguments: argparse.Namespace, found: dict[tuple[str, int], list[Round]]) -> str:
    """Table in Markdown: medians over rounds."""
    lines = ["| users | -dp 2, tokens/s | -tp 2, tokens/s | ratio | -dp 2, a request | -tp 2 |", "|---:|" + "---:|" * 5]
    for concurrency in arguments.concurrency:
        speeds, times = list[float](), list[float]()
        for name in ("-dp 2", "-tp 2"):
            rounds = found[name, concurrency]
            speeds.append(statistics.median(len(one.answers) * arguments.output_tokens / one.seconds for one in rounds))
            times.append(statistics.median(answer.whole for one in rounds for answer in one.answers))
        cells = f"{speeds[0]:.1f} | {speeds[1]:.1f} | {speeds[0] / speeds[1]:.2f} | {times[0]:.1f} s | {times[1]:.1f} s"
        lines.append(f"| {concurrency} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    route, rank = commands.add_parser("routing"), commands.add_parser("ranks")
    for command in (route, rank):
        command.add_argument("--shape", default="small", choices=SHAPES)
        command.add_argument("--rounds", type=int, default=3)
        command.add_argument("--output-tokens", type=int, default=16)
    route.add_argument("--groups", type=int, default=8)
    route.add_argument("--prefix", type=int, default=512, help="tokens that a group shares")
    route.add_argument("--rest", type=int, default=32, help="tokens of a prompt that are its own")
    route.add_argument("--requests", type=int, default=48)
    route.add_argument("--concurrency", type=int, default=4)
    rank.add_argument("--prompt", type=int, default=64)
    rank.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 8])
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.what == "routing":
        print(routing_table(arguments, asyncio.run(routing(arguments))))
    else:
        print(ranks_table(arguments, asyncio.run(ranks(arguments))))


if __name__ == "__main__":
    main()
