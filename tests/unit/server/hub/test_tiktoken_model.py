"""Kimi's tokenizers, from `tiktoken.model`: the same ids as tiktoken's way of joining tokens gives."""

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from oarlock.base.errors import StartupError
from oarlock.server.hub import tiktoken_model
from oarlock.server.hub.tiktoken_model import FILE
from oarlock.server.llm.tokenizer import Tokenizer
from tests.unit.server.hub.test_gguf_tokenizer import corpus, texts
from tests.unit.server.hub.test_pre_tokenizers import PUBLISHED, split

_CLASS = "tokenization_kimi.TikTokenTokenizer"


@cache
def ranks() -> dict[bytes, int]:
    """Tokens of pages by their rank: single bytes first, as in published files not in their order."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    )
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    values = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocabulary = trained.get_vocab()
    return {
        bytes(values[letter] for letter in token): rank
        for rank, token in enumerate(sorted(vocabulary, key=vocabulary.__getitem__))
    }


def plain(text: str) -> list[int]:
    """The ids of a text, by joining the neighbours of the lowest rank until none make a token."""
    ids = []
    for word in split(text, PUBLISHED["kimi-k2"]):
        parts = [bytes([byte]) for byte in word.encode()]
        while len(parts) > 1:
            pairs = [(ranks().get(parts[at] + parts[at + 1], 10**9), at) for at in range(len(parts) - 1)]
            best, at = min(pairs)
            if best == 10**9:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [ranks()[part] for part in parts]
    return ids


def checkpoint(folder: Path, named: str | list[str | None] | None = _CLASS, **changes: Any) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items()]
    (folder / FILE).write_text("\n".join(lines) + "\n")
    first = len(ranks())
    tokens = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 90: "<think>"}
    config = {
        "added_tokens_decoder": {
            str(first + index): {"content": token, "special": token != "<think>"} for index, token in tokens.items()
        },
        "bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": named},
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
    return folder


def test_ids_are_those_of_tiktoken(tmp_path: Path) -> None:
    ours, first = Tokenizer.load(str(checkpoint(tmp_path, [_CLASS, None]))), len(ranks())
    for text in [*texts(400), "Hello世界", "HTTPServer's"]:
        if "<|im_end|>" not in text:
            assert ours.encode(text) == plain(text), repr(text)
    assert ours.encode("[BOS]a<think><|im_end|>") == [first, ranks()[b"a"], first + 90, first + 2]
    assert ours.encode(f"<|reserved_token_{first + 255}|>") == [first + 255]
    assert ours.decode([first, *plain("Grüße, 世界\n"), first + 90]) == "Grüße, 世界\n<think>"
    assert {first, first + 1, first + 2, first + 255} <= ours.special_ids and first + 90 not in ours.special_ids


Damage = Callable[[list[str]], list[str]]
DAMAGED: dict[str, tuple[Damage, str]] = {
    "a rank that is not the line's": (lambda lines: [lines[0], *lines], "line 2"),
    "no base64": (lambda lines: ["?? 0", *lines[1:]], "line 1"),
    "no rank": (lambda lines: [lines[0].split()[0], *lines[1:]], "line 1"),
    "no token": (lambda lines: [" 0", *lines[1:]], "line 1"),
    "a token twice": (lambda lines: [lines[1].split()[0] + " 0", *lines[1:]], "a token twice"),
    "too few bytes": (lambda lines: lines[:255], "lacks a byte"),
    "a long token": (
        lambda lines: [*lines, f"{base64.b64encode(b'a' * 5000).decode()} {len(lines)}"], "long tokens"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGED[case]
    file = checkpoint(tmp_path) / FILE
    file.write_text("\n".join(damage(file.read_text().splitlines())))
    with pytest.raises(StartupError, match=message) as error:
        Tokenizer.load(str(tmp_path))
    assert FILE in error.value.cause


def test_tokens_that_can_be_made_in_many_ways_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiktoken_model, "_MAX_MERGES", 1000)
    with pytest.raises(StartupError, match="more than 1000 ways"):
        Tokenizer.load(str(checkpoint(tmp_path)))


@pytest.mark.parametrize(
    ("named", "changes", "message"),
    [
        ("tokenization_other.TikTokenTokenizer", {}, "splits words in an unknown way"),
        (None, {}, "splits words in an unknown way"),
        (_CLASS, {"auto_map": "x"}, "splits words in an unknown way"),
        (_CLASS, {"added_tokens_decoder": [1]}, "added_tokens_decoder"),
        (_CLASS, {"added_tokens_decoder": {"1201": {"content": 5}}}, "added_tokens_decoder"),
        (_CLASS, {"added_tokens_decoder": {"1201": {"content": "a"}}}, "exists already"),
    ],
)
def test_unknown_settings_are_refused(tmp_path: Path, named: str | None, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        Tokenizer.load(str(checkpoint(tmp_path, named, **changes)))
