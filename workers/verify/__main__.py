"""`oarlock verify`: compares every tensor of a model on N ranks with transformers' own.

Checks the arguments, runs the reference, runs the ranks, compares and prints the report. Exit codes: 0 all right, 1
something differs, 2 wrong command line, 3 wrong model or file, 4 out of memory, 6 a rank hangs.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from oarlock.base.errors import StartupError
from oarlock.base.python_child import die_with_parent, run_while_read
from oarlock.workers.config import WorkerConfig
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.transformers_backend.choice import class_by_name
from oarlock.workers.verify.launch import run_ranks, run_reference
from oarlock.workers.verify.request import (
    BUILT_IN_PROMPTS,
    NEW_TOKENS,
    NUM_SLOTS,
    Text,
    VerifyRequest,
    has_tokenizer,
    random_prompts,
    read_prompts,
    tokenize,
)

if TYPE_CHECKING:
    from oarlock.workers.verify.report import VerifyReport

BLOCK_SIZE = 16  # small, so that short prompts fill several blocks


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.parent is not None:
        die_with_parent(arguments.parent, signal.SIGTERM)  # its handler removes the folder as well
    try:
        report = verify(arguments)
        print(report.to_text())
        if arguments.output is not None:
            _write(report, arguments.output)
    except StartupError as error:
        sys.stderr.write(f"error: {' '.join(error.cause.split())}\nfix: {' '.join(error.fix.split())}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0 if report.comparison.ok else 1


def verify(arguments: argparse.Namespace) -> VerifyReport:
    """Run a verification, and print only its progress. Raises `StartupError` if the model or the arguments cannot be
    used."""
    started = time.monotonic()
    config, prompts = checked(arguments)
    spec = read_spec(config.model_path)
    with tempfile.TemporaryDirectory(prefix="oarlock-verify-") as name:
        folder = Path(name)
        request = VerifyRequest(
            config.model_path, config.dtype, config.device, prompts, NEW_TOKENS, quantization=config.quantization,
            dequantize=config.dequantize, adapter=None if arguments.lora is None else str(arguments.lora),
        )  # fmt: skip
        request.write(folder)
        report_line("transformers: starting")
        run_reference(folder, report_line)
        report_line(f"our {config.ranks_per_node} rank(s): starting")
        run_ranks(config, folder, report_line)
        report_line("comparing")
        # Imported late, because torch takes seconds. All checks that do not need it have been made by now.
        from oarlock.workers.verify.compare import compare
        from oarlock.workers.verify.dequantised_reference import RoundingLoss
        from oarlock.workers.verify.diagnosis import explain
        from oarlock.workers.verify.expert_choices import ranks_choose_otherwise
        from oarlock.workers.verify.report import VerifyReport

        if ranks_choose_otherwise(folder, spec):
            replace(request, follows_choices=True).write(folder)
            report_line("transformers: starting again, for near-ties of experts in which it is to follow our choice")
            run_reference(folder, report_line)
        size = config.tensor_parallel_size
        has_scales = config.quantization != "none" and not config.dequantize
        stages = config.pipeline_parallel_size
        comparison = compare(folder, spec, size, config.dtype, has_scales=has_scales, stages=stages)
        causes = explain(comparison, folder, Path(config.model_path), spec, size, config.quantization)
        return VerifyReport(
            model=Path(arguments.name or config.model_path).name,
            architecture=spec.architecture,
            dtype=config.dtype,
            size=size,
            tokens=Text.read(folder).num_tokens,
            comparison=comparison,
            causes=causes,
            versions={package: version(package) for package in ("torch", "transformers")},
            seconds=time.monotonic() - started,
            quantization=config.quantization,
            dequantize=config.dequantize,
            loss=RoundingLoss.read(folder),
            stages=stages,
            adapter=None if arguments.lora is None else arguments.lora_name or arguments.lora.name,
        )


def _write(report: VerifyReport, path: Path) -> None:
    try:
        path.write_text(json.dumps(report.to_json(), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise StartupError(f"--output: {path} cannot be written: {error.strerror}.", "Name another file.") from None
    report_line(f"the whole report is in {path}")


def checked(arguments: argparse.Namespace) -> tuple[WorkerConfig, list[list[int]]]:
    """Return the resolved configuration and the prompts, before any weight is read."""
    model = Path(arguments.model)
    texts = list(BUILT_IN_PROMPTS) if arguments.prompts is None else read_prompts(arguments.prompts)
    if arguments.output is not None and not arguments.output.parent.is_dir():
        raise StartupError(f"--output: the directory {arguments.output.parent} does not exist.", "Make it first.")
    if arguments.output is not None and arguments.output.is_dir():
        raise StartupError(f"--output: {arguments.output} is a directory.", "Name a file in it.")
    config = WorkerConfig(
        str(model),
        device=arguments.device,
        dtype=arguments.dtype,
        quantization=arguments.quantization,
        dequantize=arguments.dequantize,
        tensor_parallel_size=arguments.tensor_parallel_size,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        share_device=True,
        block_size=BLOCK_SIZE,
        log_level="WARNING",
    )
    if (found := class_by_name(config)) is not None:
        raise StartupError(
            f"transformers' code computes {found[0]}, so there is no other code to compare it with.",
            "Serve it: the first start compares the model with its class's own forward.",
        )
    config = preflight(config if arguments.lora is None else _with_adapter(config, arguments))
    if config.share_device:
        report_line(f"{config.ranks_per_node} ranks share the CUDA devices, and all-reduces go through host memory")
    assert config.max_model_len is not None, "preflight resolves the context length"
    vocab_size, longest = read_spec(config.model_path).vocab_size, config.max_model_len - NEW_TOKENS
    if has_tokenizer(model):
        prompts = tokenize(model, texts, vocab_size, longest)
    elif arguments.prompts is not None:
        raise StartupError(
            f"{model} has no tokenizer to read --prompts with.", "Add its tokenizer.json, or leave --prompts out."
        )
    else:
        prompts = random_prompts(vocab_size, longest)
    config = config.with_(
        max_model_len=max(map(len, prompts)) + NEW_TOKENS,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=max(sum(map(len, prompts)), len(prompts)),
    )
    return config, prompts


def _with_adapter(config: WorkerConfig, arguments: argparse.Namespace) -> WorkerConfig:
    """Return the configuration with slots for the adapter, which is checked first. Raises `StartupError`."""
    arguments.lora = arguments.lora.absolute()
    adapter = Adapter.open(arguments.lora, read_spec(config.model_path), arguments.lora_name or "")
    return config.with_(max_loras=NUM_SLOTS, max_lora_rank=adapter.max_rank)


def report_line(line: str) -> None:
    """Print one line of progress."""
    print(f"verify: {line}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m oarlock.workers.verify", allow_abbrev=False)
    parser.add_argument("model", metavar="DIRECTORY")
    parser.add_argument("--parent", type=int, help="id of the parent process; this process ends with it")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--name", help="of the model, for the report (default: its directory's)")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--dequantize", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lora", type=Path)
    parser.add_argument("--lora-name", help="of the adapter, for the report (default: its directory's)")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an orderly end removes the folder and the ranks
    raise SystemExit(run_while_read(lambda: main(sys.argv[1:])))
