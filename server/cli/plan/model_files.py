"""The model of a plan: its description is enough, and of its weights the headers where they are on this machine."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import OpenModel, open_model
from oarlock.server.config.settings import Settings
from oarlock.server.hub.model_path import resolve

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.gguf")
_EXIT_CODE = 2


def find_model(settings: Settings) -> tuple[OpenModel, bool]:
    """The model, and whether its weights are here. Raises `StartupError`."""
    directory = _directory(settings)
    has_weights = any(any(directory.glob(pattern)) for pattern in _WEIGHTS)
    worker = settings.engine_config(str(directory)).worker
    return open_model(worker if has_weights else worker.with_(load_format="dummy")), has_weights


def has_vectors(settings: Settings, model: OpenModel) -> bool:
    """Whether it is served for embeddings or scores. Raises `StartupError`."""
    from oarlock.server.llm.pooler_config import PoolerConfig

    try:
        found = PoolerConfig.load(model.config.model_path, settings.runner, settings.classifier_from_token)
    except StartupError as error:
        raise StartupError(error.cause, error.fix, _EXIT_CODE) from None
    return not found.generates


def _directory(settings: Settings) -> Path:
    """Directory of this machine's copy; of a model on the hub without one, only the description is fetched."""
    try:
        return Path(asyncio.run(resolve(replace(settings, offline=True), lambda *progress: None)))
    except StartupError as error:
        model = settings.model
        is_offline = settings.offline or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
        if model is None or is_offline or Path(model).expanduser().exists() or "hub id" in error.cause:
            raise StartupError(error.cause, error.fix, _EXIT_CODE) from None
    return _fetched(settings, model)


def _fetched(settings: Settings, model: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, HTTPError

    from oarlock.engine.preflight import DESCRIPTIONS
    from oarlock.server.hub.errors import explain
    from oarlock.server.hub.files import Download, Snapshot, look_up

    revision = settings.revision or "main"
    cache = Path(settings.download_dir or constants.HF_HUB_CACHE).expanduser()
    try:
        commit, files = look_up(model, revision)
        snapshot = Snapshot(cache, model, commit)
        described = [file for file in files if file.name in DESCRIPTIONS]
        Download(model, snapshot, lambda *progress: None).fetch(described)
    except HFValidationError as error:
        raise StartupError(f"{model} is no hub id ({error}).", "Name a directory or a hub id.", _EXIT_CODE) from None
    except (HTTPError, OSError) as error:
        failure = explain(error, model, revision, cache)
        raise StartupError(failure.cause, failure.fix, _EXIT_CODE) from None
    if not (snapshot.directory / "config.json").exists():
        raise StartupError(f"{model} has no config.json.", "Name a model in the transformers format.", _EXIT_CODE)
    return snapshot.directory
