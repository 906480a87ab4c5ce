"""Kimi's tokenizers as a `tokenizer.json`: the vocabulary in `tiktoken.model`, and the special tokens of the settings.

The checkpoints of Kimi K2, Kimi Linear and Moonlight have no `tokenizer.json`, but code of their own that reads the
vocabulary. That code is not run: its way of splitting words is known here.
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import is_there, read_table, read_text
from oarlock.server.hub.pre_tokenizers import BYTE_OF, PRE_TOKENIZERS, byte_level_tokenizer

FILE = "tiktoken.model"  # a line for each token: its bytes in base64, and its rank, which is its id
_MAX_BYTES = 32 << 20  # Kimi K2's has 3 MB
_MAX_TOKENS = 262_144  # Kimi K2 has 163,584
_MAX_TOKEN_BYTES = 4096
_MAX_WORK = 1 << 26  # limit for the sum of squared token lengths
_MAX_MERGES = 2_000_000  # limit for the pairs of tokens that make a token
_RESERVED = 256  # ids after the vocabulary, which are special tokens
_CLASSES = ("tokenization_kimi.TikTokenTokenizer", "tokenization_moonshot.TikTokenTokenizer")
_FIX = "Fetch that file of the checkpoint again."
_CHARACTERS = {byte: character for character, byte in BYTE_OF.items()}


def tiktoken_json(folder: Path) -> dict[str, Any]:
    """Return the content of the `tokenizer.json` of a checkpoint with a `tiktoken.model`.

    Raises `StartupError` for a tokenizer of unknown code, and for a damaged file.
    """
    settings = folder / "tokenizer_config.json"
    config = read_table(settings) if is_there(settings) else {}
    _check_class(settings, config)
    ids = _read_ranks(folder / FILE)
    added = _added_tokens(settings, config, len(ids))
    special: dict[str, int] = {}
    for token in added:
        if token["content"] in ids or token["content"] in special:
            raise StartupError(f"{settings} names a special token {shown(token['content'])} that exists already.", _FIX)
        special[token["content"]] = token["id"]
    merges = merges_of_ranks(ids)
    if len(merges) > _MAX_MERGES:
        raise _fault(folder / FILE, f"has tokens that can be made in more than {_MAX_MERGES} ways")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **byte_level_tokenizer(PRE_TOKENIZERS["kimi-k2"], ids | special, merges),
        "post_processor": None,
    }


def merges_of_ranks(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, in the order of that token's id, which is its rank.

    tiktoken joins the neighbours whose token has the lowest rank, whatever they were made of themselves. The list ends
    early if it is longer than allowed.
    """
    merges: list[tuple[str, str]] = []
    for token in sorted(ids, key=ids.__getitem__):
        cuts = [at for at in range(1, len(token)) if token[:at] in ids]
        known = [(token[:at], token[at:]) for at in cuts if token[at:] in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        if len(merges) > _MAX_MERGES:
            break
    return merges


def _check_class(settings: Path, config: Mapping[str, Any]) -> None:
    """Raise `StartupError` if the code that reads the vocabulary is not that of a known model."""
    classes = config.get("auto_map")
    named = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    name = named[0] if isinstance(named, list) and named else named
    if not isinstance(name, str) or name.rpartition("--")[2] not in _CLASSES:  # a name may begin with its repository
        raise StartupError(
            f"{settings}: auto_map has the tokenizer {shown(name)}, whose code splits words in an unknown way.",
            f"Known with {FILE}: {', '.join(_CLASSES)}. Put a tokenizer.json next to the weights, or name another "
            "directory with --tokenizer.",
        )


def _read_ranks(file: Path) -> dict[str, int]:
    """Return token -> rank, with GPT-2's characters for its bytes."""
    ids: dict[str, int] = {}
    lines = read_text(file, _MAX_BYTES).splitlines()
    if len(lines) > _MAX_TOKENS:
        raise _fault(file, f"has {len(lines)} tokens; at most {_MAX_TOKENS} are allowed")
    work = 0
    for number, line in enumerate(lines):
        word, _, rank = line.partition(" ")
        try:
            token = base64.b64decode(word, validate=True)
        except (binascii.Error, ValueError):
            token = b""
        if not token or rank != str(number):
            raise _fault(file, f"has a line {number + 1} that is not a token in base64 and the rank {number}")
        work += len(token) ** 2
        if len(token) > _MAX_TOKEN_BYTES or work > _MAX_WORK:
            raise _fault(file, "has too many long tokens to convert it")
        ids["".join(map(_CHARACTERS.__getitem__, token))] = number
    if len(ids) != len(lines) or not ids.keys() >= set(_CHARACTERS.values()):
        raise _fault(file, "has a token twice, or lacks a byte")
    return ids


def _added_tokens(settings: Path, config: Mapping[str, Any], first: int) -> list[dict[str, Any]]:
    """Return the special tokens, whose ids begin with `first`. Tokens without a name have one that no text contains."""
    named = config.get("added_tokens_decoder") or {}
    if not isinstance(named, dict) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and token["content"]
        for token in named.values()
    ):
        raise StartupError(f"{settings}: added_tokens_decoder must hold an object with content for each token.", _FIX)
    found = []
    for index in range(first, first + _RESERVED):
        token = named.get(str(index), {"content": f"<|reserved_token_{index}|>"})
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        found.append({"id": index, "content": token["content"], **plain, "special": token.get("special") is not False})
    return found


def _fault(file: Path, what: str) -> StartupError:
    return StartupError(f"{file} {what}.", _FIX)
