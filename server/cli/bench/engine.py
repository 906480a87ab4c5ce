"""`oarlock bench throughput MODEL`, `oarlock bench latency MODEL`: rounds of the engine without HTTP."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oarlock.base.paths import expand
from oarlock.server.cli.arguments import add_settings, loaded_settings, whole
from oarlock.server.config.settings import OPTIONS, SERVER_ONLY
from oarlock.server.hub.local_model import check_names

if TYPE_CHECKING:
    from oarlock.server.bench.metrics import Result
    from oarlock.server.config.settings import Settings
    from oarlock.server.offline.inputs import LoRARequest

# Only text generation is measured, and only with the adapters of --lora-modules.
_UNUSED = SERVER_ONLY | {"runner", "classifier_from_token", "lora_dir"}


@dataclass(frozen=True, slots=True)
class EngineMeasure:
    """Command that measures rounds of the engine. `prompts`: the flag for their number in a round."""

    kind: str
    HELP: str
    EXAMPLE: str
    prompts: tuple[str, ...]
    count: int
    input_tokens: int
    output_tokens: int
    rounds: int
    figures: Callable[[float, int, int], dict[str, float]]  # seconds, tokens in, tokens out -> figures by name

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags. They also have vLLM's names."""
        group = parser.add_argument_group("measurement")
        group.add_argument(
            *self.prompts, dest="prompts", type=whole(1), default=self.count, metavar="N",
            help=f"requests per round (default {self.count})",
        )  # fmt: skip
        for flag, alias, default in (
            ("--input-tokens", "--input-len", self.input_tokens),
            ("--output-tokens", "--output-len", self.output_tokens),
        ):
            group.add_argument(flag, alias, type=whole(1), default=default, metavar="N", help=f"default {default}")
        group.add_argument(
            "--rounds", "--num-iters", type=whole(1), default=self.rounds, metavar="N",
            help=f"rounds, each with new prompts (default {self.rounds})",
        )  # fmt: skip
        group.add_argument(
            "--warmup", "--num-iters-warmup", type=whole(0), default=1, metavar="N",
            help="warm-up rounds, not counted (default 1)",
        )  # fmt: skip
        group.add_argument(
            "--output",
            "--output-json",
            type=expand,
            metavar="FILE.json",
            help="file for the figures of each round, for `bench compare`",
        )
        add_settings(parser, positional=True, without=_UNUSED)

    def run(self, arguments: argparse.Namespace) -> int:
        """Measure, print the table, write the file, and return the exit code."""
        settings = loaded_settings(arguments).settings
        check_names(settings)
        for note in arguments.notes:
            sys.stderr.write(f"note: {note}\n")
        from oarlock.server.bench.metrics import write  # slow to import
        from oarlock.server.bench.report import aligned

        result = self._measure(arguments, settings)
        for name in ("model", "compute", "prompts", "adapters"):
            if name in result.settings:
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

    def _measure(self, arguments: argparse.Namespace, settings: Settings) -> Result:
        """Load the model and run the rounds; Ctrl-C ends them early. Raises `StartupError` and `OptionError`."""
        from oarlock.server.bench.metrics import Result
        from oarlock.server.bench.workload import IdPrompts
        from oarlock.server.launch.banner import CountedProgress
        from oarlock.server.offline.inputs import SamplingParams
        from oarlock.server.offline.llm import LLM

        options = {name: getattr(settings, name) for name in OPTIONS if name not in _UNUSED}
        params = SamplingParams(max_tokens=arguments.output_tokens, temperature=0, ignore_eos=True)
        adapters = _adapters(settings, arguments.prompts)
        series: dict[str, list[float]] = {}
        interrupted = False
        with (
            CountedProgress("rounds", arguments.warmup + arguments.rounds) as bar,
            LLM(**options) as llm,
        ):
            info = llm.info
            try:
                for number in range(-arguments.warmup, arguments.rounds):
                    draw = IdPrompts(info.vocab_size, settings.seed or 0)
                    prompts = [draw.piece(f"{number} {at}", arguments.input_tokens) for at in range(arguments.prompts)]
                    began = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
                    took = time.perf_counter() - began
                    produced = sum(output.num_tokens for output in outputs)
                    bar.add()
                    if number >= 0:
                        tokens_in = arguments.prompts * arguments.input_tokens
                        for name, value in self.figures(took, tokens_in, produced).items():
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
        names = dict.fromkeys(adapter.lora_name for adapter in adapters if adapter is not None)
        described |= {"adapters": f"{', '.join(names)}, in turn"} if names else {}
        return Result(self.kind, described, _summary(series), series=series, is_interrupted=interrupted)


def _adapters(settings: Settings, count: int) -> list[LoRARequest | None]:
    """Return the adapter of each of `count` prompts, from --lora-modules in turn; None: no adapter."""
    from oarlock.server.config.adapter_options import parse_lora_modules
    from oarlock.server.offline.inputs import LoRARequest

    modules = enumerate(parse_lora_modules(settings.lora_modules), 1)
    adapters = [LoRARequest(module.name, number, module.path) for number, module in modules]
    return [adapters[at % len(adapters)] if adapters else None for at in range(count)]


def _summary(series: dict[str, list[float]]) -> dict[str, Any]:
    from oarlock.server.bench.metrics import statistics_of

    found = {}
    for name, values in series.items():
        found[name] = (statistics_of(values) or {}) | {"min": min(values), "max": max(values)}
    return found


THROUGHPUT = EngineMeasure(
    kind="throughput",
    HELP="measure the engine without HTTP: tokens per second with all prompts at once",
    EXAMPLE="oarlock bench throughput Qwen/Qwen2.5-0.5B-Instruct --num-requests 64 --output-tokens 128",
    prompts=("--num-requests", "--num-prompts"),
    count=64, input_tokens=128, output_tokens=64, rounds=3,
    figures=lambda seconds, tokens_in, tokens_out: {
        "output_throughput": tokens_out / seconds,
        "total_token_throughput": (tokens_in + tokens_out) / seconds,
    },
)  # fmt: skip
LATENCY = EngineMeasure(  # the lengths and the batch of `vllm bench latency`
    kind="latency",
    HELP="measure the engine without HTTP: the time of one batch",
    EXAMPLE="oarlock bench latency Qwen/Qwen2.5-0.5B-Instruct --batch-size 8",
    prompts=("--batch-size",),
    count=8, input_tokens=32, output_tokens=128, rounds=10,
    figures=lambda seconds, tokens_in, tokens_out: {"latency_ms": 1e3 * seconds},
)  # fmt: skip
