"""The models on this machine and whether they can be served: the hub's cache, GGUF files of Ollama and llama.cpp."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.server.hub.local_model import hub_files, hub_name, llama_cpp_files, ollama_files, read_reference
from oarlock.server.hub.model_path import VOCABULARY_FILES, read_json
from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.checkpoint import weight_files
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.preflight import check_without_weights, is_encoder_model, open_model

_PREFIX = "models--"
_PARTIAL = ".incomplete"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One commit of one repository, or one GGUF model."""

    name: str  # hub id, Ollama's name, or the name of the file
    commit: str  # empty for a GGUF model
    revisions: tuple[str, ...]  # branches and tags that refer to this commit
    size: int  # bytes; a file shared by two commits counts for each
    architecture: str  # empty if the model cannot be served
    why_not: str  # one sentence; empty: it can be served
    directory: str  # the snapshot's directory, or the GGUF file
    source: str = "hub"

    @property
    def is_served(self) -> bool:
        return not self.why_not

    @property
    def argument(self) -> str:
        """The MODEL argument of `serve` for this model."""
        return self.name if self.source == "ollama" or "main" in self.revisions else self.directory


def cached_models(cache: Path, config: EngineConfig) -> Iterator[CachedModel]:
    """Yield every model in the hub's cache by name, and each GGUF file in it separately.

    `config`: the configuration with which they would be served; its `model_path` is ignored.
    """
    if not os.path.isdir(cache):  # missing, or hidden from this user
        return
    for folder in sorted(cache.glob(f"{_PREFIX}*")):
        name = hub_name(folder)
        revisions = _revisions(folder / "refs")
        snapshots = [path for path in sorted(folder.glob("snapshots/*")) if path.is_dir()]
        for directory in snapshots:
            files = hub_files(name, directory)
            if files and not (directory / "config.json").exists():
                yield from (_gguf(listed, file, "hub") for listed, file in files)
                continue
            named = tuple(revision for revision, commit in revisions if commit == directory.name)
            architecture, why_not = _verdict(directory, config, unfinished=_size_of_partial(folder) > 0)
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            yield CachedModel(name, directory.name, named, size, architecture, why_not, str(directory))
        if not snapshots and (partial := _size_of_partial(folder)):
            yield CachedModel(
                name, "", (), partial, "", "Its download was interrupted, and no file is complete.", str(folder)
            )


def gguf_models() -> Iterator[CachedModel]:
    """Yield every GGUF model that Ollama and llama.cpp have fetched, by name."""
    for name, file in ollama_files():
        yield _gguf(name, file, "ollama")
    for name, file in llama_cpp_files():
        yield _gguf(name, file, "llama.cpp")


def _gguf(name: str, file: Path, source: str) -> CachedModel:
    try:
        model = GGUFModel.open(file)
        found, why_not = hf_config(model)["architectures"][0], ""
        size = sum(part.stat().st_size for part in model.paths)
    except (StartupError, OSError) as error:
        found, why_not = "", error.cause if isinstance(error, StartupError) else str(error)
        size = file.stat().st_size if file.exists() else 0
    return CachedModel(name, "", (), size, found, why_not, str(file), source)


def disk_usage(cache: Path) -> int:
    """Return the bytes of all model files in the cache; each file counts once."""
    return sum(
        path.stat().st_size
        for folder in cache.glob(f"{_PREFIX}*")
        for part in ("blobs", "snapshots")
        for path in (folder / part).rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def _revisions(refs: Path) -> list[tuple[str, str]]:
    """Return the branches and tags that were fetched, each as (name, commit)."""
    found = [path for path in sorted(refs.rglob("*")) if path.is_file()] if refs.is_dir() else []
    return [(os.fspath(path.relative_to(refs)), read_reference(path)) for path in found]


def _size_of_partial(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob(f"blobs/*{_PARTIAL}"))


def _verdict(directory: Path, config: EngineConfig, *, unfinished: bool) -> tuple[str, str]:
    """Return (architecture, "") for a cached model, or ("", reason) if it cannot be served."""
    names = {path.name for path in directory.iterdir() if path.exists()}
    if "config.json" not in names:
        return "", "It has no config.json."
    worker = config.worker.with_(model_path=str(directory))
    try:
        architecture = str((read_json(directory / "config.json").get("architectures") or [""])[0])
        if is_encoder_model(directory):
            check_without_weights(worker)
            weight_files(directory, names, str(directory))
        else:
            open_model(worker)
    except StartupError as error:
        return "", f"Its download was interrupted. {error.cause}" if unfinished else error.cause
    if names.isdisjoint(("tokenizer.json", *VOCABULARY_FILES)):
        return "", "It has no tokenizer; --tokenizer names another one."
    return architecture, ""
