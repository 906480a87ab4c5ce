"""Lookup of a model name on this machine, and refusal of a name without a meaning.

A name is a path, a GGUF model that `oarlock models` lists (of Ollama, llama.cpp or the hub's cache), or a hub id, which
is not looked up here. Light to import, so a command can refuse a wrong name before it starts anything.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.paths import exists, expand, home, hub_cache
from oarlock.server.config.settings import Settings

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")
_HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*")
_OLLAMA_LAYER = "application/vnd.ollama.image.model"
_MAX_MANIFEST_BYTES = 1 << 20
_MAX_REFERENCE_BYTES = 4096
_OLLAMA_HUB = "registry.ollama.ai"
_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")
_HUB_PREFIX, _HUB_SEPARATOR = "models--", "--"
_LONGEST_PART = 255  # bytes of a file name, on all usual file systems
_EXAMPLE = "hub ids look like Qwen/Qwen2.5-0.5B-Instruct"
_LIST = "`oarlock models` lists the models on this machine"


def find_local(name: str, download_dir: str | None = None, what: str = "MODEL") -> Path | None:
    """Return the path of the model `name`, or None if `name` is a hub id.

    `download_dir`: the hub's cache, if it is not the usual one. `what`: the option that has the name, for errors.
    Raises `StartupError` if there is no such path or listed model, and the name cannot be a hub id.
    """
    path = expand(name)
    if _exists(path):
        return path
    if _is_listable(name):
        for listed, file in listed_files(download_dir):
            if listed == name:
                return file
    if HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return None
    raise _not_found(name, path, download_dir, what)


def check_local(path: Path, what: str = "MODEL") -> None:
    """Refuse a path that is neither a GGUF file nor a directory with a model. Raises `StartupError`."""
    if not path.is_dir():
        if path.suffix == ".gguf" or begins_as_gguf(path):
            return
        fix = "Give a GGUF file, or the directory of a checkpoint instead of one of its files."
        raise StartupError(f"{what} {path} is a file, but not a GGUF file.", fix)
    if os.path.lexists(path / "config.json"):  # a broken link is reported by the code that reads it
        return
    if any(path.glob("*.gguf")) and not any(path.glob("*.safetensors")):
        return
    inside = [found.name for found in _entries(path) if (found / "config.json").exists()]
    fix = f"Did you mean {path / inside[0]}?" if inside else "Give a checkpoint in the Hugging Face layout."
    raise StartupError(f"The directory {path} contains no config.json and no GGUF file.", fix)


def check_names(settings: Settings) -> None:
    """Refuse a MODEL or a tokenizer that is not on this machine and cannot be a hub id. Raises `StartupError`."""
    if settings.model is not None:
        path = find_local(settings.model, settings.download_dir)
        if path is not None:
            check_revision(settings)
            check_local(path)
    if settings.tokenizer is not None:
        find_local(settings.tokenizer, settings.download_dir, "--tokenizer")


def check_revision(settings: Settings) -> None:
    """Refuse `--revision` for a model of this machine. Raises `StartupError`."""
    if settings.revision is not None:
        raise StartupError(
            f"{settings.model} is on this machine, so --revision {settings.revision} does not apply.",
            "Leave --revision out, or give a hub id.",
        )


def near_path(name: str) -> str | None:
    """Return the existing path whose last part is most similar to the last part of `name`, or None."""
    return max(_near_paths(name), default=(0.0, None))[1]


def _near_paths(name: str) -> list[tuple[float, str]]:
    """Return (similarity, path) of the entries in the directory of `name` that have names similar to its last part."""
    path = expand(name)
    names = [found.name for found in _entries(path.parent) if found.is_dir() or found.suffix == ".gguf"]
    return [(similarity, str(Path(name).parent / near)) for similarity, near in _similar(path.name, names)]


def _similar(name: str, names: Sequence[str]) -> list[tuple[float, str]]:
    near = difflib.get_close_matches(name, names)
    return [(difflib.SequenceMatcher(None, one, name).ratio(), one) for one in near]


def begins_as_gguf(path: Path) -> bool:
    """Return whether a file begins with GGUF's magic bytes, since Ollama's files have no extension."""
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def listed_files(download_dir: str | None = None) -> Iterator[tuple[str, Path]]:
    """Yield the (name, first file) of every GGUF model on this machine, as `oarlock models` lists them."""
    yield from ollama_files()
    yield from llama_cpp_files()
    try:
        cache = hub_cache(download_dir)
    except StartupError:  # this user has no cache, so no model is in it
        return
    for folder in sorted(cache.glob(f"{_HUB_PREFIX}*")) if os.path.isdir(cache) else ():
        repository = hub_name(folder)
        for directory in sorted(folder.glob("snapshots/*")):
            if not (directory / "config.json").exists():
                yield from hub_files(repository, directory)


def hub_name(folder: Path) -> str:
    """Return the hub id of a folder of the hub's cache."""
    return folder.name.removeprefix(_HUB_PREFIX).replace(_HUB_SEPARATOR, "/")


def cached_snapshot(model: str, revision: str, download_dir: str | None = None) -> Path | None:
    """Return the directory of a revision of a hub id in the hub's cache, which may be incomplete; None if it is not
    there."""
    folder = hub_cache(download_dir) / f"{_HUB_PREFIX}{model.replace('/', _HUB_SEPARATOR)}"
    reference = folder / "refs" / revision
    found = folder / "snapshots" / (read_reference(reference) if reference.is_file() else revision)
    return found if found.is_dir() else None


def hub_files(repository: str, directory: Path) -> list[tuple[str, Path]]:
    """Return the (name, first file) of each GGUF model in a snapshot of a repository of the hub."""
    return [(f"{repository}/{file.relative_to(directory)}", file) for file in _first_files(directory)]


def ollama_files() -> Iterator[tuple[str, Path]]:
    """Yield the (name, file) of every model that Ollama has fetched and that this user may read."""
    root, own = os.environ.get("OLLAMA_MODELS"), home()
    homes = [Path("/usr/share/ollama")] if own is None else [own, Path("/usr/share/ollama")]
    roots = [expand(root)] if root else [folder / ".ollama/models" for folder in homes]
    for models in filter(os.path.isdir, roots):  # skips folders that this user may not see
        for manifest in sorted(models.glob("manifests/*/*/*/*")):
            if (file := _ollama_file(manifest, models / "blobs")) is not None:
                host, namespace, name, tag = manifest.relative_to(models / "manifests").parts
                before = "" if host == _OLLAMA_HUB else f"{host}/"
                before += "" if before == "" and namespace == "library" else f"{namespace}/"
                yield f"{before}{name}:{tag}", file


def llama_cpp_files() -> Iterator[tuple[str, Path]]:
    """Yield the (name, first file) of every model in llama.cpp's cache."""
    own = home()
    cache = os.environ.get("XDG_CACHE_HOME") or (own and own / ".cache")
    folder = os.environ.get("LLAMA_CACHE") or (cache and Path(cache) / "llama.cpp")
    for file in _first_files(expand(folder)) if folder else ():
        yield file.name, file


def _ollama_file(manifest: Path, blobs: Path) -> Path | None:
    """Return the weights of a model of Ollama, or None if there are none that this user may read."""
    try:
        layers = json.loads(_beginning(manifest, _MAX_MANIFEST_BYTES))["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _OLLAMA_LAYER]
        files = [blobs / digest.replace(":", "-") for digest in digests]
        return next((file for file in files if os.access(file, os.R_OK)), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_reference(path: Path) -> str:
    """Return the commit in a file of the hub cache's references."""
    return _beginning(path, _MAX_REFERENCE_BYTES).decode("utf-8", "replace").strip()


def _beginning(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(most)


def _first_files(folder: Path) -> list[Path]:
    """Return the first file of each GGUF model below `folder`, without the projectors that belong to some models."""
    if not os.path.isdir(folder):  # missing, or hidden from this user
        return []
    found = (path for path in sorted(folder.rglob("*.gguf")) if not path.name.startswith("mmproj"))
    # The first of several files represents a model. A later part without it is listed, and the verdict names the parts.
    return [path for path in found if not (_LATER_PART.fullmatch(path.name) and _first_of(path).exists())]


def _first_of(part: Path) -> Path:
    """Return the path of the first file of the GGUF model to which `part` belongs."""
    return part.with_name(re.sub(r"-\d{5}(?=-of-\d{5}\.gguf$)", "-00001", part.name))


def _is_listable(name: str) -> bool:
    """Return whether a model can be listed under this name: all these names end in .gguf or have a tag."""
    return name.endswith(".gguf") or ":" in name


def _not_found(name: str, path: Path, download_dir: str | None, what: str) -> StartupError:
    shown = name if what == "MODEL" else f"{what} {name}"
    if (address := _HUB_ADDRESS.fullmatch(name)) is not None and ":" not in name.partition("//")[2]:
        return StartupError(f"{shown} is an address, not a name.", f"Give the hub id: {address[1]}")
    listed = [known for known, _ in listed_files(download_dir)] if _is_listable(name) else []
    near = max([*_near_paths(name), *_similar(name, listed)], default=(0.0, None))[1]
    fix = f"Did you mean {near}?" if near else f"Check the path: {_LIST}, and {_EXAMPLE}."
    folder = path.parent.absolute()
    if near is None and "/" in name and not _exists(folder):
        fix = f"Check the path: the directory {folder} does not exist."
    if name.endswith(".gguf"):
        has_folder = "has no such file" if _exists(folder) else "does not exist"
        return StartupError(f"The GGUF file {shown} does not exist: the directory {folder} {has_folder}.", fix)
    if ":" in name and not name.startswith(("/", ".", "~")):
        return StartupError(f"{shown} is not an Ollama model on this machine, and a hub id has no colon.", fix)
    return StartupError(f"{shown} is neither a directory, nor a GGUF file, nor a hub id.", fix)


def _exists(path: Path) -> bool:
    """Return whether the path exists. Raises `StartupError` if this user may not look there."""
    return all(len(os.fsencode(part)) <= _LONGEST_PART for part in path.parts) and exists(path)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
