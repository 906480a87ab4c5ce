"""A GGUF model as a directory in the Hugging Face layout: everything but the weights, which stay where they are.

The server, the engine and the ranks read such a directory as they read any other; it holds links to the model's files.
It is made once for each file, in the user's cache.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import GGUFModel, Settings, hf_config, parts_of
from oarlock.server.hub.gguf_tokenizer import Vocabulary, read_vocabulary, tokenizer_json

_FORM = 1  # of what is written; a new number makes it be written anew
# Tokens that end an answer, by the names that published models give them. Files name only one or two of a model's.
_END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<EOT>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    }
)
_CONTROL = 3  # the type of special tokens
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def gguf_model(path: Path) -> Path | None:
    """The GGUF file that the MODEL argument `path` means: itself, or the only model in a directory without others.

    Ollama gives files no name that tells what they are; their first bytes do. Raises `StartupError` where a directory
    holds several.
    """
    if not path.is_dir():
        return path if path.suffix == ".gguf" or _begins_as_gguf(path) else None
    names = sorted(path.glob("*.gguf"))
    if not names or any(path.glob("*.safetensors")):
        return None
    first = parts_of(names[0])
    others = [name for name in names if name not in first]
    if others:
        raise StartupError(
            f"{path} holds several GGUF models: {', '.join(name.name for name in (names[0], *others))[:300]}.",
            "Name one of these files.",
        )
    return names[0]


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def described(path: Path) -> Path:
    """The directory for the GGUF model `path`, any of its parts. Raises `StartupError`."""
    paths = tuple(part.absolute() for part in parts_of(path))
    directory = _cache() / _key(paths)
    if directory.is_dir():
        return directory
    model = GGUFModel.open(paths[0])
    settings = Settings(model)
    config = hf_config(model)
    vocabulary = read_vocabulary(settings)
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(settings, vocabulary),
        "tokenizer_config.json": _tokenizer_config(settings, vocabulary),
        "generation_config.json": _generation_config(settings, vocabulary),
    }
    _write(directory, files, paths)
    return directory


def _key(paths: tuple[Path, ...]) -> str:
    facts: list[object] = [_FORM]
    for path in paths:
        try:
            found = path.stat()
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
        facts.append((str(path), found.st_size, found.st_mtime_ns))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "oarlock" / "gguf"


def _write(directory: Path, files: dict[str, dict[str, Any]], links: tuple[Path, ...]) -> None:
    """Write the directory whole or not at all: other servers may start with the same model at the same time."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".", dir=directory.parent))
        try:
            for name, content in files.items():
                (unfinished / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")
            for path in links:
                (unfinished / (path.name if path.suffix == ".gguf" else f"{path.name}.gguf")).symlink_to(path)
            unfinished.rename(directory)
        except OSError:
            shutil.rmtree(unfinished)
            if not directory.is_dir():  # else another start was faster
                raise
    except OSError as error:
        raise StartupError(
            f"The description of the GGUF model cannot be written to {directory}: {error.strerror}.",
            "Set XDG_CACHE_HOME to a directory with room that this user can write.",
        ) from None


def _tokenizer_config(settings: Settings, vocabulary: Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
    }
    for key, kind in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.name(kind)) is not None:
            config[f"{key}_token"] = token
    key = "tokenizer.chat_template"
    names = [name for name in ("default", "tool_use") if settings.has(f"{key}.{name}")]
    templates = [{"name": name, "template": settings.text(f"{key}.{name}")} for name in names]
    if settings.has(key):
        whole = {"name": "default", "template": settings.text(key)}
        templates = [whole, *(one for one in templates if one["name"] != "default")]
    if templates:
        config["chat_template"] = templates
    return config


def _generation_config(settings: Settings, vocabulary: Vocabulary) -> dict[str, Any]:
    ends = [vocabulary.special[kind] for kind in ("eos", "eot", "eom") if kind in vocabulary.special]
    ends += [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _CONTROL and token in _END_NAMES
    ]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for name, key in _SAMPLING.items():
        if settings.has(f"general.sampling.{name}"):
            config[key] = settings.number(f"general.sampling.{name}")
    if "top_k" in config:
        config["top_k"] = int(config["top_k"])
    return config
