"""Finds the directory of a hub id: from the hub, or from the cache when offline or when the hub cannot be reached.

Small files are fetched and checked first, so a model that cannot be served costs kilobytes. It blocks, and so runs in
a process of its own (`oarlock.server.launch.fetch_model`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, HTTPError

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import DESCRIPTIONS, check_model, weight_files
from oarlock.server.hub import errors as hub_errors
from oarlock.server.hub.digests import Report, damaged, remove
from oarlock.server.hub.download import HubModel
from oarlock.server.hub.files import Download, HubFile, Snapshot, check_room, is_of_module, is_small, look_up

CheckFiles = Callable[[Path], None]  # raises `StartupError` for files beside the weights that cannot be used


def fetch(request: HubModel, report: Report, check_small_files: CheckFiles) -> str:
    """The directory of the model's files. Raises `StartupError`.

    `check_small_files` is called with the directory before any weights are fetched.
    """
    cache = Path(request.download_dir or constants.HF_HUB_CACHE).expanduser()
    if request.offline or constants.is_offline_mode():
        return _checked(request, _from_cache(request, cache), report)
    try:
        return _from_hub(request, cache, report, check_small_files)
    except HFValidationError as error:
        raise StartupError(
            f"{request.model} is neither a directory here nor a hub id ({error}).",
            "Hub ids look like Qwen/Qwen2.5-0.5B-Instruct.",
        ) from None
    except (HTTPError, OSError) as error:
        failure = hub_errors.explain(error, request.model, request.revision, cache)
        if request.check_digests or not hub_errors.is_outage(error):
            raise failure from None
        try:
            directory = _from_cache(request, cache)
        except StartupError:  # the cache has no complete copy: the outage is the cause
            raise failure from None
        sys.stderr.write(f"warning: {failure.cause} What was fetched of it earlier is served.\n")
        return directory


def _from_cache(request: HubModel, cache: Path) -> str:
    """Directory of the model in the cache. Raises `StartupError` where earlier downloads left it incomplete."""
    fix = "Start once with the network (without --offline and HF_HUB_OFFLINE), or give a directory."
    snapshot = Snapshot.remembered(cache, request.model, request.revision)
    if snapshot is not None and request.tokenizer_only:
        return str(snapshot.directory)
    if snapshot is None:
        raise StartupError(
            f"{request.model} is neither a directory here nor in the cache {cache} in revision {request.revision!r}, "
            "and the network is not to be used.",
            fix,
        )
    names = {path.name for path in snapshot.directory.iterdir() if path.exists()}
    here = f"{request.model} is in the cache {cache} only in part"
    try:
        wanted = ["config.json", *_weights(request, snapshot, names)]
    except StartupError as error:
        raise StartupError(f"{here}: {error.cause}", fix) from None
    missing = [name for name in wanted if name not in names]
    if missing:
        raise StartupError(f"{here}: {missing[0]} is missing.", fix)
    return str(snapshot.directory)


def _checked(request: HubModel, directory: str, report: Report) -> str:
    """Check that no file in `directory` is damaged, and return it. Raises `StartupError`."""
    found = damaged(Path(directory), report) if request.check_digests else []
    if found:
        raise StartupError(
            f"{found[0].name} of {request.model} is damaged: its digest differs.",
            "Pull it with the network (without --offline and HF_HUB_OFFLINE), which fetches it again.",
        )
    return directory


def _from_hub(request: HubModel, cache: Path, report: Report, check_small_files: CheckFiles) -> str:
    report(f"fetching {request.model}", 0.0, "looking it up")
    commit, files = look_up(request.model, request.revision)
    by_name = {file.name: file for file in files}
    if request.tokenizer_only:
        return _small_files(request, Snapshot(cache, request.model, commit), files, check_small_files)
    if "config.json" not in by_name:
        raise _no_config(request.model, files)
    snapshot = Snapshot(cache, request.model, commit)
    if request.check_digests and snapshot.directory.is_dir():
        remove(damaged(snapshot.directory, report))
    small = Download(request.model, snapshot, lambda phase, fraction, detail: report(phase, 0.0, "its description"))
    small.fetch([by_name[name] for name in DESCRIPTIONS if name in by_name])
    worker = replace(request.engine.worker, model_path=str(snapshot.directory))
    check_model(replace(request.engine, worker=worker))
    small.fetch([file for file in files if is_small(file)])
    check_small_files(snapshot.directory)
    weights = _weights(request, snapshot, by_name.keys())
    missing = [name for name in weights if name not in by_name]
    if missing:
        raise StartupError(
            f"{request.model} lacks {missing[0]}, which its own index names.",
            "Name a complete checkpoint, or revision.",
        )
    chosen = [by_name[name] for name in weights] + [file for file in files if is_of_module(file) and not is_small(file)]
    check_room(request.model, snapshot, chosen)
    Download(request.model, snapshot, report).fetch(chosen)
    snapshot.remember(request.revision)
    return str(snapshot.directory)


def _small_files(request: HubModel, snapshot: Snapshot, files: list[HubFile], check_small_files: CheckFiles) -> str:
    Download(request.model, snapshot, lambda *progress: None).fetch([file for file in files if is_small(file)])
    check_small_files(snapshot.directory)
    snapshot.remember(request.revision)
    return str(snapshot.directory)


def _weights(request: HubModel, snapshot: Snapshot, names: Collection[str]) -> list[str]:
    """Names of the weight files to load, of one copy where the model holds several copies of the same weights."""
    if request.engine.worker.load_format == "dummy":
        return []
    return weight_files(snapshot.directory, names, request.model)


def _no_config(model: str, files: list[HubFile]) -> StartupError:
    if any(file.name.endswith(".gguf") for file in files):
        return StartupError(
            f"{model} holds GGUF files and no config.json; GGUF is served from this machine's files only.",
            f"Download one of them (hf download {model} NAME.gguf --local-dir .), and serve that file.",
        )
    return StartupError(f"{model} has no config.json.", "Name a model in the transformers format.")
