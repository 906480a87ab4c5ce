"""`oarlock doctor [MODEL]`: the machine's resources, the choices of `serve` on it, and problems with their fixes.

Reads the settings and finds the model; the checks are in `oarlock.workers.doctor`, a separate program.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace

from oarlock.base.errors import StartupError
from oarlock.server.cli.arguments import add_settings, loaded_settings
from oarlock.server.config.nodes import nodes_config
from oarlock.server.config.settings import Settings
from oarlock.server.launch.child_process import run_program

HELP = "check this machine, and show the settings that a server would choose"
EXAMPLE = "oarlock doctor Qwen/Qwen2.5-0.5B-Instruct --tensor-parallel-size 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine and MODEL for `serve` with the same flags. The first line shows whether this version "
        "serves the model, and as which known checkpoint. Loads no weights and fetches nothing. "
        "Exit code 0 if a server can start, 1 if not."
    )
    parser.add_argument("--memory", action="store_true", help="measure the memory bandwidth (takes seconds)")
    parser.add_argument("--all-reduce", action="store_true", help="measure the all-reduce (takes seconds)")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_settings(parser, positional=True)


def run(arguments: argparse.Namespace) -> int:
    from oarlock.server.hub.description import description

    settings = loaded_settings(arguments).settings
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    found = description(settings)
    if found is not None and not arguments.json:
        print(found.line, flush=True)
    model, adapters, reason = _find(settings)
    words = [f"--config={settings.engine_config(model).worker.with_(lora_adapters=adapters).to_json()}", *reason]
    words += _nodes(settings)
    words += [f"--host={settings.host}", f"--port={settings.port}"]
    if found is not None and arguments.json:
        words.append(f"--description={json.dumps(asdict(found))}")
    words += [f"--{name.replace('_', '-')}" for name in ("memory", "all_reduce", "json") if getattr(arguments, name)]
    return run_program("oarlock.workers.doctor", words)


def _nodes(settings: Settings) -> list[str]:
    """Return the arguments for the program about other hosts, if there are any."""
    try:
        nodes = nodes_config(settings, os.environ)
    except StartupError as error:
        return [f"--nodes-wrong={json.dumps([error.cause, error.fix])}"]
    return [] if nodes is None else [f"--nodes={json.dumps(asdict(nodes))}"]


def _find(settings: Settings) -> tuple[str, tuple[tuple[str, str], ...], list[str]]:
    """Return the directories of the model and of its adapters on this machine; or an empty text, and an argument with
    the reason why the model or an adapter is not there."""
    import asyncio

    from oarlock.server.hub.adapter_path import find_local_adapters
    from oarlock.server.llm.generation_config import GenerationConfig
    from oarlock.server.llm.pooler_config import PoolerConfig
    from oarlock.server.llm.tokenizer import find_files

    try:
        files = asyncio.run(find_files(replace(settings, offline=True), lambda *progress: None))
        GenerationConfig.load(files.model, settings.generation_config)
        PoolerConfig.load(files.model, settings.runner, settings.classifier_from_token)
        files.load_tokenizer().close()
    except StartupError as error:
        if _is_on_hub(settings):
            return "", (), [f"--missing={error.cause} Fetch it first: oarlock pull {settings.model}"]
        return "", (), _wrong(error)
    try:
        adapters, notes = asyncio.run(find_local_adapters(settings))
    except StartupError as error:
        return "", (), _wrong(error)
    sys.stderr.writelines(f"note: {note}\n" for note in notes)
    return files.model, adapters, []


def _wrong(error: StartupError) -> list[str]:
    return [f"--model-wrong={json.dumps([error.cause, error.fix])}"]


def _is_on_hub(settings: Settings) -> bool:
    """Return whether the model can be fetched, because its name is a hub id."""
    from oarlock.server.hub.local_model import find_local

    try:
        return settings.model is not None and find_local(settings.model, settings.download_dir) is None
    except StartupError:
        return False
