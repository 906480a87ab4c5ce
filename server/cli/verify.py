"""`oarlock verify MODEL` and `oarlock replay FILE`: compare values with transformers', and with a recording's.

Only the model is found or fetched here; `oarlock.workers.verify` and `oarlock.engine.replay` are separate programs.
"""

import argparse
import os
from pathlib import Path

from oarlock.server.cli.arguments import KINDS_OF_MODEL, OneCommand
from oarlock.server.launch.child_process import run_program


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=f"{KINDS_OF_MODEL} (default: the demo model)")
    parser.add_argument("-tp", "--tensor-parallel-size", metavar="N", default="1", help="number of ranks (default 1)")
    parser.add_argument(
        "-pp", "--pipeline-parallel-size", metavar="N", default="1",
        help="pipeline stages, each of that many ranks (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", metavar="TYPE", default="auto",
        help="auto, float32, bfloat16 or float16; float32 is the strictest check (default auto: the "
        "checkpoint's own)",
    )  # fmt: skip
    parser.add_argument(
        "--quantization", metavar="FORM", default="none",
        help="none, int8 or int4: quantize weights as the server does, and report the error of each layer "
        "(default none)",
    )  # fmt: skip
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="dequantize quantized weights into the model's dtype, as the server does",
    )
    parser.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu or cuda (default auto)")
    parser.add_argument(
        "--lora", metavar="DIR",
        help="LoRA adapter (PEFT's directory, a GGUF file or a hub id), which is compared with merged weights",
    )  # fmt: skip
    parser.add_argument("--prompts", metavar="FILE", help="file with one prompt per line (default: built-in prompts)")
    parser.add_argument(
        "--output", metavar="FILE.json", help="write the whole report, with every tensor of every layer"
    )


def _verify(arguments: argparse.Namespace) -> int:
    from oarlock.base.errors import StartupError
    from oarlock.base.paths import expand
    from oarlock.server.config.settings import make_settings
    from oarlock.server.hub.local_model import check_names

    size, stages = arguments.tensor_parallel_size, arguments.pipeline_parallel_size
    if not size.isdecimal():
        raise StartupError(f"--tensor-parallel-size is {size!r}.", "Give an integer of at least 1.")
    if not stages.isdecimal():
        raise StartupError(f"--pipeline-parallel-size is {stages!r}.", "Give an integer of at least 1.")
    # A server's settings: a hub id is checked against them before it is fetched.
    values = {"model": arguments.model, "tensor_parallel_size": int(size), "pipeline_parallel_size": int(stages)}
    options = {name: getattr(arguments, name) for name in ("dtype", "quantization", "device")}
    settings = make_settings(values | options | {"dequantize": arguments.dequantize})
    check_names(settings)
    import asyncio  # slow, like the imports below

    from oarlock.server.hub.adapter_path import AdapterPaths
    from oarlock.server.hub.model_path import resolve
    from oarlock.server.launch.banner import Progress
    from oarlock.server.llm.vocabulary_files import check_tokenizer

    progress = Progress()
    try:
        model, adapter = asyncio.run(resolve(settings, progress)), None
        if arguments.lora is not None:
            adapter = asyncio.run(AdapterPaths(settings).resolve(arguments.lora, progress))
    finally:
        progress.finish()
    check_tokenizer(Path(model))  # transformers reads it without limits
    words = [f"--tensor-parallel-size={size}", f"--pipeline-parallel-size={stages}"]
    words += [f"--{name}={value}" for name, value in options.items()]
    words += ["--dequantize"] if arguments.dequantize else []
    if adapter is not None:
        words.append(f"--lora={adapter}")
        if not os.path.lexists(expand(arguments.lora)):
            words.append(f"--lora-name={arguments.lora}")  # a hub id, whose directory is named after a commit
    for name in ("prompts", "output"):
        value = getattr(arguments, name)
        if value is not None:
            words.append(f"--{name}={value}")
    if arguments.model is not None and (arguments.model.endswith(".gguf") or ":" in arguments.model):
        # The directory that describes a GGUF model has another name.
        words.append(f"--name={arguments.model}")
    return run_program("oarlock.workers.verify", [*words, "--", model])


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recording that `oarlock serve --record FILE` wrote")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=int, metavar="N", help="number of ranks (default: as recorded)"
    )
    parser.add_argument(
        "-pp",
        "--pipeline-parallel-size",
        type=int,
        metavar="N",
        help="number of pipeline stages, which changes no bit (default: as recorded)",
    )
    parser.add_argument(
        "--model", metavar="PATH", help="path of the same checkpoint on this machine (default: as recorded)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="allowed difference of a logprob (default: 0 if these ranks compute the same bits as the "
        "recorded ones; otherwise logprobs are reported but not limited)",
    )


def _replay(arguments: argparse.Namespace) -> int:
    options = []
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "model", "tolerance"):
        value = getattr(arguments, name)
        if value is not None:
            options.append(f"--{name.replace('_', '-')}={value}")
    return run_program("oarlock.engine.replay", [*options, "--", arguments.file])


VERIFY = OneCommand(
    "compare a model's values, layer by layer, with transformers",
    "oarlock verify Qwen/Qwen2.5-0.5B-Instruct --tensor-parallel-size 2",
    _add_verify,
    _verify,
)
REPLAY = OneCommand(
    "replay a recording of `serve --record` and compare every token",
    "oarlock replay steps.oarlock --tensor-parallel-size 2",
    _add_replay,
    _replay,
)
