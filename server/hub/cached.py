"""The models on this machine: in the hub's cache, and the GGUF files of Ollama and llama.cpp; which can be served."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import ENCODERS, GGUFModel, check_model, hf_config, open_model, parts_of, weight_files
from oarlock.server.hub.model_path import VOCABULARY_FILES, read_json

_PREFIX, _SEPARATOR = "models--", "--"
_PARTIAL = ".incomplete"
_OLLAMA_LAYER = "application/vnd.ollama.image.model"
_OLLAMA_HUB = "registry.ollama.ai"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One commit of one repository, or one GGUF model."""

    name: str  # the hub id, or as Ollama or the file says
    commit: str  # empty: of a GGUF model
    revisions: tuple[str, ...]  # branches and tags that mean this commit
    size: int  # in bytes; a file that two commits share counts for each
    architecture: str  # of a model that can be served
    why_not: str  # one sentence; empty: it can be served
    directory: str  # or the file
    source: str = "hub"

    @property
    def is_served(self) -> bool:
        return not self.why_not

    @property
    def argument(self) -> str:
        """The MODEL that `serve` is given for it."""
        return self.name if "main" in self.revisions else self.directory


def cached_models(cache: Path, config: EngineConfig) -> Iterator[CachedModel]:
    """Every model in the hub's cache, by name, and each GGUF file in it by itself.

    `config`: with which they would be served; its `model_path` does not count.
    """
    if not cache.is_dir():
        return
    for folder in sorted(cache.glob(f"{_PREFIX}*")):
        name = folder.name.removeprefix(_PREFIX).replace(_SEPARATOR, "/")
        revisions = _revisions(folder / "refs")
        snapshots = [path for path in sorted(folder.glob("snapshots/*")) if path.is_dir()]
        for directory in snapshots:
            files = _gguf_files(directory)
            if files and not (directory / "config.json").exists():
                yield from (_gguf(f"{name}/{file.relative_to(directory)}", file, "hub") for file in files)
                continue
            named = tuple(revision for revision, commit in revisions if commit == directory.name)
            architecture, why_not = _verdict(directory, config, unfinished=_size_of_partial(folder) > 0)
            size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
            yield CachedModel(name, directory.name, named, size, architecture, why_not, str(directory))
        if not snapshots and (partial := _size_of_partial(folder)):
            yield CachedModel(name, "", (), partial, "", "Its download was interrupted: nothing is whole.", str(folder))


def gguf_models() -> Iterator[CachedModel]:
    """Every GGUF model that Ollama and llama.cpp have fetched, by name."""
    root = os.environ.get("OLLAMA_MODELS")
    roots = [Path(root)] if root else [Path.home() / ".ollama/models", Path("/usr/share/ollama/.ollama/models")]
    for models in roots:
        for manifest in sorted(models.glob("manifests/*/*/*/*")):
            if (file := _ollama_file(manifest, models / "blobs")) is not None:
                host, namespace, name, tag = manifest.relative_to(models / "manifests").parts
                before = "" if host == _OLLAMA_HUB else f"{host}/"
                before += "" if before == "" and namespace == "library" else f"{namespace}/"
                yield _gguf(f"{before}{name}:{tag}", file, "ollama")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    for file in _gguf_files(Path(os.environ.get("LLAMA_CACHE") or Path(cache) / "llama.cpp")):
        yield _gguf(file.name, file, "llama.cpp")


def _ollama_file(manifest: Path, blobs: Path) -> Path | None:
    """The weights of a model of Ollama; None where there are none that this user may read."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_LAYER]
        files = [blobs / digest.replace(":", "-") for digest in digests]
        return next((file for file in files if os.access(file, os.R_OK)), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _gguf_files(folder: Path) -> list[Path]:
    """The first file of each GGUF model below `folder`, without the projectors that come beside some."""
    files = [path for path in sorted(folder.rglob("*.gguf")) if not path.name.startswith("mmproj")]
    later = set()
    for path in files:
        try:
            later.update(parts_of(path)[1:])
        except StartupError:  # a part is missing: the verdict says so
            continue
    return [path for path in files if path not in later]


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
        return "", "It has no config.json."
    worker = config.worker.with_(model_path=str(directory))
    try:
        architecture = str((read_json(directory / "config.json").get("architectures") or [""])[0])
        if architecture in ENCODERS:
            check_model(replace(config, worker=worker))
            weight_files(directory, names, str(directory))
        else:
            open_model(worker)
    except StartupError as error:
        return "", f"Its download was interrupted. {error.cause}" if unfinished else error.cause
    if names.isdisjoint(("tokenizer.json", *VOCABULARY_FILES)):
        return "", "It has no tokenizer; --tokenizer names another."
    return architecture, ""
