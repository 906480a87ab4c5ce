"""Rounds of the engine without HTTP, which `bench throughput` and `bench latency` measure."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oarlock.server.cli.arguments import add_settings, given_settings, loaded_settings
from oarlock.server.cli.bench import numbers
from oarlock.server.config.settings import OPTIONS, SERVER_ONLY

if TYPE_CHECKING:
    from oarlock.server.bench.result import Result

_UNUSED = SERVER_ONLY | {"runner", "classifier_from_token"}  # what is measured is texts
Round = Callable[[float, int, int], dict[str, float]]  # seconds, tokens in, tokens out -> its figures by name


def add_arguments(
    parser: argparse.ArgumentParser, *, prompts: str, count: int, input_tokens: int, output_tokens: int, rounds: int
) -> None:
    """Add the common flags. `prompts`: the flag for their number in a round. Flags have vLLM's names, too."""
    group = parser.add_argument_group("measurement")
    names = (prompts, "--num-prompts") if prompts == "--num-requests" else (prompts,)
    group.add_argument(
        *names, dest="prompts", type=numbers.whole(1), default=count, metavar="N", help=f"per round (default {count})"
    )
    for flag, alias, default in (
        ("--input-tokens", "--input-len", input_tokens),
        ("--output-tokens", "--output-len", output_tokens),
    ):
        group.add_argument(flag, alias, type=numbers.whole(1), default=default, metavar="N", help=f"default {default}")
    group.add_argument(
        "--rounds", "--num-iters", type=numbers.whole(1), default=rounds, metavar="N",
        help=f"each with new prompts (default {rounds})",
    )  # fmt: skip
    group.add_argument(
        "--warmup", "--num-iters-warmup", type=numbers.whole(0), default=1, metavar="N",
        help="rounds not counted (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--output", "--output-json", type=Path, metavar="FILE.json", help="every round, for `bench compare`"
    )
    add_settings(parser, positional=True, without=_UNUSED)


def measure(arguments: argparse.Namespace, kind: str, figures: Round) -> Result:
    """Load the model and run the rounds; Ctrl-C ends them early. Raises `StartupError` and `OptionError`."""
    settings = loaded_settings(arguments, given_settings(arguments)).settings
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    from tqdm import tqdm

    from oarlock.server.bench.result import Result
    from oarlock.server.bench.workload.prompts import IdPrompts
    from oarlock.server.offline.llm import LLM
    from oarlock.server.offline.sampling_params import SamplingParams

    options = {name: getattr(settings, name) for name in OPTIONS if name not in _UNUSED}
    params = SamplingParams(max_tokens=arguments.output_tokens, temperature=0, ignore_eos=True)
    series: dict[str, list[float]] = {}
    interrupted = False
    with (
        tqdm(total=arguments.warmup + arguments.rounds, unit=" rounds", disable=None, leave=False) as bar,
        LLM(**options) as llm,
    ):
        info = llm.info
        try:
            for number in range(-arguments.warmup, arguments.rounds):
                draw = IdPrompts(info.vocab_size, settings.seed or 0)
                prompts = [draw.piece(f"{number} {at}", arguments.input_tokens) for at in range(arguments.prompts)]
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                took = time.perf_counter() - began
                produced = sum(output.num_tokens for output in outputs)
                bar.update()
                if number >= 0:
                    for name, value in figures(took, arguments.prompts * arguments.input_tokens, produced).items():
                        series.setdefault(name, []).append(value)
        except KeyboardInterrupt:
            interrupted = True
    described: dict[str, Any] = {
        "url": "the engine, without HTTP",
        "model": settings.model or "the demo model",
        "compute": f"{info.dtype} on {info.device} x {info.tensor_parallel_size}"
        f"{'' if info.data_parallel_size == 1 else f' x {info.data_parallel_size} replicas'}"
        f", attention {info.attention_backend}",
        "prompts": f"{arguments.prompts} of {arguments.input_tokens} tokens, {arguments.output_tokens} out",
        "seed": settings.seed or 0,
    }
    return Result(kind, described, _summary(series), series=series, is_interrupted=interrupted)


def finish(arguments: argparse.Namespace, result: Result) -> int:
    """Print the table, write the file, and choose the exit code."""
    from oarlock.server.bench.report.table import aligned
    from oarlock.server.bench.result import write

    for name in ("model", "compute", "prompts"):
        print(f"{name:<8}  {result.settings[name]}")
    rounds = max((len(values) for values in result.series.values()), default=0)
    print(f"rounds    {rounds}{' until it was interrupted' if result.is_interrupted else ''}\n")
    rows = [["", "median", "mean", "lowest", "highest"]]
    for name, found in result.summary.items():
        rows.append([name, *(f"{found[column]:.2f}" for column in ("p50", "mean", "min", "max"))])
    print(aligned(rows))
    if arguments.output is not None:
        write(result, arguments.output)
    return 130 if result.is_interrupted else 0


def _summary(series: dict[str, list[float]]) -> dict[str, Any]:
    from oarlock.server.bench.metrics import statistics_of

    found = {}
    for name, values in series.items():
        found[name] = (statistics_of(values) or {}) | {"min": min(values), "max": max(values)}
    return found
