"""A GGUF model as a directory in the Hugging Face layout: everything except the weights, which stay in their files.

The server, the engine and the ranks read such a directory like any other; it has links to the model's files. It is made
once for each file, in the user's cache.

`tokenizer.json` is made from the model's vocabulary: byte-level BPE (`gpt2`), or SentencePiece's BPE with a score for
each token and byte fallback (`llama`). Other kinds are refused by name.
"""

import hashlib
import json
import shutil
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import cache_home
from oarlock.server.hub.local_model import begins_as_gguf
from oarlock.server.hub.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer, byte_level_tokenizer
from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.gguf_model import GGUFModel, GGUFSettings, parts_of

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5  # token types
_SPACE = "▁"
_MOST_MERGE_WORK = 1 << 26  # sum of the squared token lengths; Gemma's is 11 million
# Phi-3's special tokens that do not strip the white space after them. GGUF does not record this.
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, and which of them are special."""

    tokens: Sequence[str]
    types: Sequence[int]
    special: Mapping[str, int]  # "bos", "eos" and other kinds named in the file -> id
    adds_bos: bool
    adds_eos: bool

    def name(self, kind: str) -> str | None:
        """Return the token of this kind as written, or None."""
        return self.tokens[self.special[kind]] if kind in self.special else None

    def ids(self) -> dict[str, int]:
        """Return token -> id without unused tokens; the first id of equal tokens."""
        found: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                found.setdefault(token, index)
        return found


def read_vocabulary(settings: GGUFSettings) -> Vocabulary:
    """Read the vocabulary. Raises `StartupError` for an unsupported kind of tokenizer, and for a damaged vocabulary."""
    tokens = settings.texts("tokenizer.ggml.tokens")
    types = array("i", [_NORMAL] * len(tokens))
    if settings.has("tokenizer.ggml.token_type"):
        types = settings.numbers("tokenizer.ggml.token_type", len(tokens))
    special = {}
    for kind in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{kind}_token_id"
        if settings.has(key):
            special[kind] = settings.count(key)
            if special[kind] >= len(tokens):
                raise StartupError(
                    f"{settings.model.path}: {key} is {special[kind]}, and there are {len(tokens)} tokens.",
                    "Use a file that llama.cpp's converter wrote.",
                )
    bos = True if _kind(settings) == "llama" else _pre_tokenizer(settings).adds_bos
    return Vocabulary(
        tokens,
        types,
        special,
        adds_bos=settings.flag("tokenizer.ggml.add_bos_token", bos) and "bos" in special,
        adds_eos=settings.flag("tokenizer.ggml.add_eos_token", False) and "eos" in special,
    )


def tokenizer_json(settings: GGUFSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the content of `tokenizer.json`."""
    parts = _sentencepiece if _kind(settings) == "llama" else _byte_level
    strips = settings.architecture == "phi3" and _kind(settings) == "llama"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary, strips),
        **parts(settings, vocabulary),
        "post_processor": _template(vocabulary),
    }


def _kind(settings: GGUFSettings) -> str:
    kind = settings.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise StartupError(
            f"{settings.model.path}: the tokenizer type {kind[:80]!r} is not supported.", "Supported: gpt2, llama."
        )
    return kind


def _pre_tokenizer(settings: GGUFSettings) -> PreTokenizer:
    name = settings.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise StartupError(
            f"{settings.model.path}: the pre-tokenizer {name[:80]!r} is not supported.",
            f"Supported: {', '.join(PRE_TOKENIZERS)}.",
        )
    return PRE_TOKENIZERS[name]


def _byte_level(settings: GGUFSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    kind, ids = _pre_tokenizer(settings), vocabulary.ids()
    pairs = [merge.partition(" ")[::2] for merge in settings.texts("tokenizer.ggml.merges")]
    # Merges with parts or results that are not tokens are dropped: the library would refuse them.
    merges = [[left, right] for left, right in pairs if left in ids and right in ids and left + right in ids]
    return byte_level_tokenizer(kind, ids, merges)


def _sentencepiece(settings: GGUFSettings, vocabulary: Vocabulary) -> dict[str, Any]:
    if sum(len(token) ** 2 for token in vocabulary.tokens) > _MOST_MERGE_WORK:
        raise StartupError(
            f"{settings.model.path} has too many long tokens to derive the merges of its vocabulary.",
            "Use a file that llama.cpp's converter wrote.",
        )
    scores = settings.numbers("tokenizer.ggml.scores", len(vocabulary.tokens))
    has_prefix = settings.flag("tokenizer.ggml.add_space_prefix", True)
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    from_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prefix = [{"type": "Prepend", "prepend": _SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = vocabulary.name("unknown") or next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == _UNKNOWN), None
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, from_spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids(),
            "merges": merges_of_scores(vocabulary, scores),
        },
    }


def merges_of_scores(vocabulary: Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """Return every pair of tokens that makes a third token, ordered by the third token's score, best first.

    This matches transformers' conversion of a SentencePiece model (`generate_merges` in convert_slow_tokenizer.py).
    """
    kinds = enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    normal = {token: index for index, (token, kind) in kinds if kind == _NORMAL}
    merges = []
    for token, index in normal.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in halves if left in normal and right in normal]
        pairs.sort(key=lambda pair: (normal[pair[0]], normal[pair[1]]))
        merges += [(scores[index], len(left), len(right), left, right) for left, right in pairs]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [[left, right] for *_, left, right in merges]


def _added_tokens(vocabulary: Vocabulary, strips: bool) -> list[dict[str, Any]]:
    """Return the tokens that are searched in a text before all other processing."""
    ids = vocabulary.ids()
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in _PHI3_PLAIN,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and ids[token] == index and token
    ]


def _template(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return the post-processor that adds the special tokens around a text, or None if the model adds none."""
    before = [vocabulary.name("bos")] if vocabulary.adds_bos else []
    behind = [vocabulary.name("eos")] if vocabulary.adds_eos else []
    if not before and not behind:
        return None

    def around(*letters: str) -> list[dict[str, Any]]:
        tokens = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in (before, behind)]
        return [*tokens[0], *({"Sequence": {"id": letter, "type_id": 0}} for letter in letters), *tokens[1]]

    ids = {"bos": before, "eos": behind}
    special = {
        token: {"id": token, "ids": [vocabulary.special[kind]], "tokens": [token]}
        for kind, tokens in ids.items()
        for token in tokens
    }
    return {"type": "TemplateProcessing", "single": around("A"), "pair": around("A", "B"), "special_tokens": special}


_FORM = 1  # version of the written files; a new number makes every model be written again
# Tokens that end a response, by their names in published models. A file names only one or two of its model's.
_END_NAMES = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<|return|>"),
        *("<end_of_turn>", "<|end_of_turn|>", "<EOT>", "<｜end▁of▁sentence｜>"),  # noqa: RUF001
    }
)
_CONTROL = 3  # token type of special tokens
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def gguf_model(path: Path) -> Path | None:
    """Return the GGUF file of the MODEL argument `path`: the path itself, or the only model in a directory.

    None if `path` is not a GGUF model, such as a directory with safetensors. Ollama's files have no extension, but are
    recognized by their first bytes. Raises `StartupError` if a directory holds several models.
    """
    if not path.is_dir():
        return path if path.suffix == ".gguf" or begins_as_gguf(path) else None
    names = sorted(path.glob("*.gguf"))
    if not names or any(path.glob("*.safetensors")):
        return None
    first = parts_of(names[0])
    others = [name for name in names if name not in first]
    if others:
        raise StartupError(
            f"{path} contains several GGUF models: {', '.join(name.name for name in (names[0], *others))[:300]}.",
            "Give one of these files.",
        )
    return names[0]


def described(path: Path) -> Path:
    """Return the directory for the GGUF model `path`, which may be any of its parts. Raises `StartupError`."""
    paths = tuple(part.absolute() for part in parts_of(path))
    directory = _cache() / _key(paths)
    if directory.is_dir():
        return directory
    model = GGUFModel.open(paths[0])
    settings = GGUFSettings(model)
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
    return cache_home() / "oarlock" / "gguf"


def _write(directory: Path, files: dict[str, dict[str, Any]], links: tuple[Path, ...]) -> None:
    """Write the directory completely or not at all: other servers may start with the same model at the same time."""
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
            if not directory.is_dir():  # otherwise another start was faster
                raise
    except OSError as error:
        raise StartupError(
            f"The description of the GGUF model cannot be written to {directory}: {error.strerror}.",
            "Set XDG_CACHE_HOME to a directory with free space that this user can write to.",
        ) from None


def _tokenizer_config(settings: GGUFSettings, vocabulary: Vocabulary) -> dict[str, Any]:
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


def _generation_config(settings: GGUFSettings, vocabulary: Vocabulary) -> dict[str, Any]:
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
