"""The models in the cache: what each takes on the disk, and whether it can be served."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import open_model
from oarlock.server.hub.model_path import VOCABULARY_FILES, read_json

_PREFIX, _SEPARATOR = "models--", "--"
_PARTIAL = ".incomplete"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One commit of one repository."""

    name: str  # the hub id
    commit: str
    revisions: tuple[str, ...]  # branches and tags that mean this commit
    size: int  # in bytes; a file that two commits share counts for each
    architecture: str  # of a model that can be served
    why_not: str  # one sentence; empty: it can be served
    directory: str

    @property
    def is_served(self) -> bool:
        return not self.why_not


def cached_models(cache: Path, config: EngineConfig) -> Iterator[CachedModel]:
    """Every model, by name. `config`: with which they would be served; its `model_path` does not count."""
    if not cache.is_dir():
        return
    for folder in sorted(cache.glob(f"{_PREFIX}*")):
        name = folder.name.removeprefix(_PREFIX).replace(_SEPARATOR, "/")
        revisions = _revisions(folder / "refs")
        snapshots = [path for path in sorted(folder.glob("snapshots/*")) if path.is_dir()]
        for directory in snapshots:
            named = tuple(revision for revision, commit in revisions if commit == directory.name)
            architecture, why_not = _verdict(directory, config, unfinished=_size_of_partial(folder) > 0)
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            yield CachedModel(name, directory.name, named, size, architecture, why_not, str(directory))
        if not snapshots and (partial := _size_of_partial(folder)):
            yield CachedModel(name, "", (), partial, "", "Its download was interrupted: nothing is whole.", str(folder))


def disk_usage(cache: Path) -> int:
    """Bytes that the cache's files of models take, each once."""
    return sum(
        path.stat().st_size
        for folder in cache.glob(f"{_PREFIX}*")
        for part in ("blobs", "snapshots")
        for path in (folder / part).rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def _revisions(refs: Path) -> list[tuple[str, str]]:
    """Branches and tags that were fetched, each as (name, commit)."""
    found = [path for path in sorted(refs.rglob("*")) if path.is_file()] if refs.is_dir() else []
    return [(os.fspath(path.relative_to(refs)), path.read_text(encoding="utf-8").strip()) for path in found]


def _size_of_partial(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"blobs/*{_PARTIAL}"))


def _verdict(directory: Path, config: EngineConfig, *, unfinished: bool) -> tuple[str, str]:
    """Architecture of a cached model, and the reason why it cannot be served; one of the two is empty."""
    names = {path.name for path in directory.iterdir() if path.exists()}
    if "config.json" not in names:
        if any(name.endswith(".gguf") for name in names):
            return "", "It holds GGUF files and no config.json: name one of the files as MODEL."
        return "", "It has no config.json."
    worker = config.worker.with_(model_path=str(directory))
    try:
        open_model(worker)
    except StartupError as error:
        return "", f"Its download was interrupted. {error.cause}" if unfinished else error.cause
    if names.isdisjoint(("tokenizer.json", *VOCABULARY_FILES)):
        return "", "It has no tokenizer; --tokenizer names another."
    return read_json(directory / "config.json")["architectures"][0], ""
