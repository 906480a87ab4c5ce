"""`oarlock models`: list the models on this machine, or the classes that are served. `oarlock pull`: fetch a model."""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

from oarlock.server.cli.arguments import OneCommand, UsageError, add_settings, loaded_settings
from oarlock.server.config.settings import OPTIONS

if TYPE_CHECKING:
    from oarlock.workers.catalogue import Entry

_PULLED_SETTINGS = {
    "model", "model_impl", "trust_remote_code", "revision", "download_dir", "offline", "load_format", "runner",
}  # fmt: skip
_NAME_SIZE = 48  # characters of a name to which others are aligned
_SHORT = 8  # characters of a commit


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List the models in the hub cache, and the GGUF files of Ollama and llama.cpp, each with its size "
        "and whether this version can serve it, judged by config.json and the headers of the weights. "
        "Loads nothing and fetches nothing."
    )
    parser.add_argument(
        "--supported",
        action="store_true",
        help="list the classes of models that this version serves instead, each with a known checkpoint",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_settings(parser, positional=False, without=OPTIONS.keys() - {"download_dir"})


def _list_models(arguments: argparse.Namespace) -> int:
    if arguments.supported:
        return _list_supported(arguments)
    from dataclasses import asdict

    from oarlock.base.paths import hub_cache
    from oarlock.server.config.options import format_size
    from oarlock.server.hub.cached import cached_models, disk_usage, gguf_models

    settings = loaded_settings(arguments).settings
    cache = hub_cache(settings.download_dir)
    found = [*cached_models(cache, settings.engine_config("")), *gguf_models()]
    if arguments.json:
        models = [asdict(model) | {"is_served": model.is_served, "argument": model.argument} for model in found]
        print(json.dumps({"cache": str(cache), "bytes": disk_usage(cache), "models": models}, indent=1))
        return 0
    if not found:
        print(f"There are no models in {cache}, nor of Ollama or llama.cpp. `oarlock pull MODEL` fetches one.")
        return 0
    width = min(_NAME_SIZE, max(len(model.name) for model in found))
    for model in found:
        revision = ", ".join(model.revisions) or model.commit[:_SHORT] or model.source
        verdict = f"served ({model.architecture})" if model.is_served else f"not served: {model.why_not}"
        print(f"{model.name:<{width}}  {revision:<{_SHORT}}  {format_size(model.size):>10}  {verdict}")
    print(f"{format_size(disk_usage(cache))} in {cache}")
    for model in found:
        if model.is_served and model.argument != model.name:
            print(f"oarlock serve {shlex.quote(model.argument)}  # {model.name}")
    return 0


def _list_supported(arguments: argparse.Namespace) -> int:
    """Print every class that is served: described ones by families, then the classes of transformers' code."""
    for name in ("config", "download_dir"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} has no effect on --supported.", "Leave one of the two out.")
    from oarlock.workers.catalogue import CATALOGUE, by_family, classes_of_transformers

    entries, others = list(CATALOGUE.values()), classes_of_transformers()
    if arguments.json:
        print(json.dumps({"supported": [entry.as_json() for entry in entries], "by_transformers": others}, indent=1))
        return 0
    widths = [max(len(row[column]) for row in map(_cells, entries)) for column in range(3)]
    for family, members in by_family(entries).items():
        print(family)
        for row in map(_cells, members):
            cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)]
            print("  " + "  ".join([*cells, row[-1]]).rstrip())
    print("computed by transformers' code, slower (docs/models.md)")
    print("".join(f"  {name}\n" for name in others), end="")
    print(f"{len(entries)} + {len(others)} classes. `oarlock doctor MODEL` shows the class of a model on this machine.")
    return 0


def _cells(entry: "Entry") -> tuple[str, ...]:
    """Return the texts of one line: class, checkpoint, names in GGUF files, notes."""
    task = () if entry.task == "text" else (entry.task,)
    gguf = f"GGUF {', '.join(entry.gguf)}" if entry.gguf else ""
    return entry.architecture, entry.checkpoint, gguf, ", ".join((*task, *entry.notes))


def _add_pull(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Fetch a model from the hub into its cache. Files that arrived before are reused, and interrupted "
        "ones resumed. The digest of every file is checked, and damaged files are fetched again. A model "
        "that cannot be served is refused before its weights are fetched."
    )
    add_settings(parser, positional=True, without=OPTIONS.keys() - _PULLED_SETTINGS)


def _pull(arguments: argparse.Namespace) -> int:
    import asyncio
    from pathlib import Path

    from oarlock.server.config.options import format_size
    from oarlock.server.hub.model_path import pull
    from oarlock.server.launch.banner import Progress

    settings = loaded_settings(arguments).settings
    if settings.model is None:
        raise UsageError("MODEL is missing.", "Give a hub id: oarlock pull Qwen/Qwen2.5-0.5B-Instruct")
    progress = Progress()
    try:
        directory = Path(asyncio.run(pull(settings, progress)))
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted: the data is saved, and the same command resumes\n")
        raise
    finally:
        progress.finish()
    files = [path for path in directory.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{settings.model}: {format_size(size)} in {len(files)} files, digests checked\n{directory}")
    return 0


MODELS = OneCommand(
    "list the models on this machine, or all classes that are served", "oarlock models", _add_models, _list_models
)
PULL = OneCommand(
    "fetch a model from the hub, and check the files that are here already",
    "oarlock pull Qwen/Qwen2.5-0.5B-Instruct",
    _add_pull,
    _pull,
)
