"""Loading and validation of a `tokenizer.json`.

The file is foreign content, and the library that uses it has no limits: it panics on damaged tables, and a small file
can make it use all memory, when it is loaded or when a request arrives. So the file is first checked as plain JSON,
then loaded, then tried with a text. The limits are at least twice the values of all published tokenizers.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import read_table
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.llm import pattern_trial
from oarlock.server.llm.character_maps import longest_replacement
from oarlock.server.llm.text_growth import greatest_growth

MAX_BYTES = 64 << 20  # the largest known, Gemma's, has 34 MB
MAX_VALUES = 3_000_000  # Gemma's has 1.9 million
MAX_NAMES = 800_000  # keys of objects: one per token, and seven per added token. Gemma's has 0.3 million
_MAX_TOKENS = 524_288  # the largest known vocabularies have 262,144
_MAX_ID = 2**31 - 2  # ids are sent as int32, and one more is counted
_MAX_TOKEN_CHARACTERS = 4096  # the longest known tokens are 512 spaces
# Unigram tries every token that begins at each position of a text. Its longest known tokens have 64 characters.
_MAX_UNIGRAM_CHARACTERS = 512
_MAX_WORD = 1000  # characters of a word, which WordPiece searches in quadratic time; published tokenizers have 100
_MAX_STEPS = 64  # limit for a chain; the longest known has ten
# Characters that a chain writes for one. Published normalizers reach 36, and the other parts 5.
_MAX_GROWTH = {"normalizer": 64, "pre_tokenizer": 16, "decoder": 64}
_MAX_ADDED_IDS = 64  # limit for ids that a post-processor adds to a text; at most five are known
_CHAINS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# Letters, digits, marks, white space, several scripts, and characters that hardly any vocabulary contains.
_TRIAL = (
    "Hello, world! It's 12,345.60 \n\t  \u4e2d\u6587 \u00e9e\u0301 \u044f \U0001f600 \ufb01 \ufdfa \U000f1234 \u0378"
)
_FIX = "Fetch that file of the checkpoint again."


def load(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer in `file`, and its description as a JSON object, with all defaults except the model's.

    Raises `StartupError` if the file is unusable.
    """
    return made(file, read_table(file, MAX_BYTES, MAX_VALUES, MAX_NAMES), is_stored=True)


def made(
    file: Path, described: Mapping[str, Any], *, is_stored: bool = False
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the tokenizer that is `described` as in a `tokenizer.json`, and its complete description.

    `file` is its source, and has the same content if `is_stored`. Raises `StartupError` if it is unusable.
    """
    check(file, described)
    try:
        if is_stored:
            backend = tokenizers.Tokenizer.from_file(str(file))
        else:
            backend = tokenizers.Tokenizer.from_str(json.dumps(described))
    except BaseException as error:
        raise _library_fault(file, "cannot be read", error) from None
    try_out(file, backend)
    return backend, _complete(backend, described["model"])


def _complete(backend: tokenizers.Tokenizer, model: dict[str, Any]) -> dict[str, Any]:
    """Return the description of `backend`. `model` is known already: the library would serialize it again."""
    parts = {name: getattr(backend, name) for name in _CHAINS}
    added = backend.get_added_tokens_decoder()
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        "added_tokens": [{"id": id, **{name: getattr(added[id], name) for name in fields}} for id in sorted(added)],
        **{name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()},
        "model": {**model, "type": type(backend.model).__name__},
    }


def try_out(file: Path, backend: tokenizers.Tokenizer) -> None:
    """Encode and decode a text, with and without added tokens. Raises `StartupError` if that fails."""
    try:
        ids = backend.encode(_TRIAL, add_special_tokens=False).ids
        backend.encode(_TRIAL, _TRIAL, add_special_tokens=True)
        backend.decode(ids, skip_special_tokens=False)
    except BaseException as error:
        raise _library_fault(file, "cannot encode or decode a text", error) from None


def _library_fault(file: Path, what: str, error: BaseException) -> StartupError:
    if isinstance(error, ENDS_TASK):
        raise error
    return _fault(file, f"{what}: {' '.join(str(error).split())[:200]}")


def _fault(file: Path, what: str) -> StartupError:
    return StartupError(f"The tokenizer {file} {what}.", _FIX)


def check(file: Path, described: Mapping[str, Any]) -> None:
    """Raise `StartupError` if the object describes a tokenizer beyond the limits, or with a fault that would panic."""
    ids = _check_tokens(file, described)
    for part, inner in _CHAINS.items():
        steps = list(_steps(described.get(part), inner))
        if len(steps) > _MAX_STEPS:
            raise _fault(file, f"has {len(steps)} steps in its {part}; at most {_MAX_STEPS} are allowed")
        for step in steps:
            _check_step(file, part, step)
        most = _MAX_GROWTH.get(part)
        if most is not None and greatest_growth(steps) > most:
            raise _fault(file, f"has a {part} that can make a text more than {most} times longer")
        if part == "post_processor":
            _check_added(file, steps, ids)


def _steps(step: object, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part of the tokenizer in order, with sequences expanded."""
    if isinstance(step, dict) and isinstance(step.get(inner), list):
        for one in step[inner]:
            yield from _steps(one, inner)
    elif isinstance(step, dict):
        yield step


def _check_step(file: Path, part: str, step: Mapping[str, Any]) -> None:
    kind = step.get("type")
    if kind == "FixedLength" and step.get("length") == 0:
        raise _fault(file, f"has a {part} that splits text into pieces of 0 characters")
    if kind == "Precompiled":
        try:
            longest_replacement(step.get("precompiled_charsmap"))
        except ValueError as error:
            raise _fault(file, f"has a damaged precompiled_charsmap in its {part}: {error}") from None
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str) and (problem := pattern_trial.fault(regex)) is not None:
        raise _fault(file, f"has a pattern in its {part} that {problem}: {shown(regex)}")


def _check_tokens(file: Path, described: Mapping[str, Any]) -> set[int]:
    """Return the ids of all tokens. Raises `StartupError` if a length or an id is invalid."""
    model, added = described.get("model"), described.get("added_tokens")
    model = model if isinstance(model, dict) else {}
    vocabulary = model.get("vocab")
    longest, ids = _MAX_TOKEN_CHARACTERS, []
    if isinstance(vocabulary, dict):
        texts, ids = list(vocabulary), list(vocabulary.values())
    elif isinstance(vocabulary, list):  # Unigram: pairs of a token and its score
        texts = [pair[0] for pair in vocabulary if isinstance(pair, list) and pair]
        ids, longest = list(range(len(vocabulary))), _MAX_UNIGRAM_CHARACTERS
    else:
        texts = []
    others = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    _check_lengths(file, texts, longest)
    _check_lengths(file, [token.get("content") for token in others], _MAX_TOKEN_CHARACTERS)
    ids += [token.get("id") for token in others]
    if len(ids) > _MAX_TOKENS:
        raise _fault(file, f"has {len(ids)} tokens; at most {_MAX_TOKENS} are allowed")
    if not ids and vocabulary is not None:  # otherwise the library reports the fault
        raise _fault(file, "has no tokens")
    wrong = next((one for one in ids if type(one) is not int or not 0 <= one <= _MAX_ID), None)
    if wrong is not None:
        raise _fault(file, f"gives a token the id {shown(wrong)}, which is not an integer from 0 to {_MAX_ID}")
    word = model.get("max_input_chars_per_word")
    if type(word) is int and word > _MAX_WORD:
        raise _fault(file, f"has max_input_chars_per_word {shown(word)}, more than {_MAX_WORD}")
    return set(ids)


def _check_lengths(file: Path, texts: list[Any], most: int) -> None:
    if not all(isinstance(text, str) for text in texts):
        wrong = next(text for text in texts if not isinstance(text, str))
        raise _fault(file, f"has the token {shown(wrong)}, which is not a string")
    longest = max(texts, key=len, default="")
    if len(longest) > most:
        raise _fault(file, f"has a token of {len(longest)} characters; at most {most} are allowed")


def _check_added(file: Path, steps: list[dict[str, Any]], known: set[int]) -> None:
    """Raise `StartupError` if post-processors add too many ids to a text, or unknown ids, or write the text twice."""
    total = 0
    for step in steps:
        special = step.get("special_tokens")
        special = special if isinstance(special, dict) else {}
        counts = [0]
        for name in ("single", "pair"):
            pieces = step.get(name)
            counts.append(_count_added(file, pieces if isinstance(pieces, list) else [], special))
        marks = [mark[1] for mark in (step.get("sep"), step.get("cls")) if isinstance(mark, list) and len(mark) == 2]
        total += max(*counts, len(marks))
        ids = [one for token in special.values() for one in _ids_of(token)] if total <= _MAX_ADDED_IDS else []
        unknown = next((one for one in (*marks, *ids) if type(one) is not int or one not in known), None)
        if unknown is not None:
            raise _fault(
                file, f"has a post_processor that adds the id {shown(unknown)}, which does not belong to a token"
            )
    if total > _MAX_ADDED_IDS:
        raise _fault(file, f"has a post_processor that adds {total} tokens to a text, more than {_MAX_ADDED_IDS}")


def _count_added(file: Path, pieces: list[Any], special: Mapping[str, Any]) -> int:
    count, texts = 0, []
    for piece in pieces:
        kind, inside = next(iter(piece.items()), ("", None)) if isinstance(piece, dict) else ("", None)
        name = inside.get("id") if isinstance(inside, dict) else None
        if kind == "Sequence":
            texts.append(str(name))
        elif kind == "SpecialToken":
            if not isinstance(name, str) or name not in special:
                raise _fault(file, f"has a post_processor that adds {shown(name)}, which special_tokens does not have")
            count += len(_ids_of(special[name]))
    if len(set(texts)) != len(texts):
        raise _fault(file, "has a post_processor that repeats a text")
    return count


def _ids_of(token: object) -> list[Any]:
    ids = token.get("ids") if isinstance(token, dict) else None
    return ids if isinstance(ids, list) else []
