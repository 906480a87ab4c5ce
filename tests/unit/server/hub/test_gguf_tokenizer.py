"""Tokenizers made from the settings of GGUF files: the same ids as the originals' on ordinary and nasty texts."""

from __future__ import annotations

import json
import random
from array import array
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from oarlock.base.errors import StartupError
from oarlock.server.hub.gguf_directory import _generation_config, _tokenizer_config, read_vocabulary, tokenizer_json
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.workers.model_files.gguf_model import GGUFModel, GGUFSettings
from tests.unit.server.llm.chat_templates import rendered

ROOT = Path(__file__).resolve().parents[4]
DEMO = ROOT / "models" / "oarlock-demo"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# As the published tokenizer.json files have it.
_SPLIT = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}%s| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
_TEKKEN = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def _split(pattern: str) -> Any:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PUBLISHED = {
    "qwen2": _split(_SPLIT % ""),
    "llama-bpe": _split(_SPLIT % "{1,3}"),
    "dbrx": _split(_SPLIT % "{1,3}"),
    "tekken": _split(_TEKKEN),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
_IGNORE_MERGES = ("llama-bpe", "tekken")


@cache
def corpus() -> list[str]:
    return [path.read_text("utf-8") for path in sorted((ROOT / "docs").glob("*.md"))]


def texts(count: int) -> list[str]:
    """Pieces of pages, made-up words, and texts that tokenizers stumble over."""
    draw = random.Random(4)
    nasty = [
        "", " ", "  ", "\n", "\r\n\n ", "\t x", " \u3000x", "a\u0301 \u00e1", "I'LL we'Re 'd'", "1234567 ٣٤٥ ²³",
        "\U0001f469\u200d\U0001f680", "កាន់តែ", "नमस्ते", "<|im_end|>", "a<|im_end|> b", "<|x", "\u0000\u0001", "▁▁ ▁",
        "ﬁ Å Å", "\ud7ff\ufeff\uffff", "x" * 300, " " * 70, "=" * 40 + "\n" * 9, "Ünïcode ÀÉ ǅ ʰ",
        "中文\uff0c日本語テキスト",
    ]  # fmt: skip
    alphabet = [*"abcdefgXYZ 019 \n\t'.,!<|>_-/", " ", " ", "é", "ß", "я", "中", "の", "\u0301", "🙂", "\u00a0", "\r"]
    pages = corpus()
    while len(nasty) < count:
        page = draw.choice(pages)
        start = draw.randrange(len(page))
        nasty.append(page[start : start + draw.randrange(1, 80)])
        nasty.append("".join(draw.choices(alphabet, k=draw.randrange(1, 30))))
    return nasty


def settings_of(values: dict[str, Any], architecture: str = "llama") -> GGUFSettings:
    named = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return GGUFSettings(GGUFModel((Path("model.gguf"),), named | {"general.architecture": architecture}, {}))


def converted(settings: GGUFSettings) -> Tokenizer:
    vocabulary = read_vocabulary(settings)
    described = json.dumps(tokenizer_json(settings, vocabulary))
    return Tokenizer(tokenizers.Tokenizer.from_str(described), _tokenizer_config(settings, vocabulary))


def byte_level_settings(original: tokenizers.Tokenizer, pre: str, **others: Any) -> GGUFSettings:
    """Settings that llama.cpp's converter writes for a byte-level tokenizer."""
    described = json.loads(original.to_str())
    added = {token["id"]: token for token in described["added_tokens"]}
    by_id = {index: token for token, index in original.get_vocab(with_added_tokens=True).items()}
    size = max(by_id) + 4  # models are padded
    kinds = [
        UNUSED if index not in by_id else NORMAL if index not in added else CONTROL if added[index]["special"] else USER
        for index in range(size)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(size)]
    values = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": array("i", kinds), "merges": merges}
    return settings_of(values | others)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_tokenizers_have_the_originals_ids(pre: str) -> None:
    original = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in _IGNORE_MERGES))
    if pre == "qwen2":
        original.normalizer = tokenizers.normalizers.NFC()
    original.pre_tokenizer = PUBLISHED[pre]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=["<|begin|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    original.train_from_iterator(corpus(), trainer)
    original.add_tokens([tokenizers.AddedToken("<tool_call>", normalized=False)])
    ours = converted(byte_level_settings(original, pre, bos_token_id=0, eos_token_id=1, add_bos_token=False))
    for text in [*texts(1000), "<tool_call> x<tool_call>"]:
        assert ours.encode(text) == original.encode(text, add_special_tokens=False).ids, repr(text)
    assert ours.special_ids == {0, 1}
    ids = original.encode("Grüße, 中文 <tool_call>", add_special_tokens=False).ids
    assert ours.decode(ids) == "Grüße, 中文 <tool_call>"


def test_the_demo_models_tokenizer_is_itself() -> None:
    original = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ours = converted(byte_level_settings(original, "qwen2"))
    for text in texts(800):
        assert ours.encode(text) == original.encode(text, add_special_tokens=False).ids, repr(text)


class SentencePiece:
    """SentencePiece's BPE, as slow as it is plain: the best pair of neighbours is joined until none makes a token."""

    def __init__(self, pieces: list[str], scores: list[float], prefix: bool) -> None:
        self.ids = {piece: index for index, piece in enumerate(pieces)}
        self.scores = scores
        self.prefix = "▁" if prefix else ""

    def encode(self, text: str) -> list[int]:
        parts = list(self.prefix + text.replace(" ", "▁")) if text else []
        while True:
            joined = [self.ids.get(left + right) for left, right in pairwise(parts)]
            best = max(
                (at for at, index in enumerate(joined) if index is not None),
                key=lambda at: (self.scores[joined[at] or 0], -at),
                default=None,
            )
            if best is None:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids = []
        for part in parts:
            ids += [self.ids[part]] if part in self.ids else [self.ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces of pages in the order in which SentencePiece would find them; every one is made of two others."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=2500, show_progress=False))
    merges = json.loads(trained.to_str())["model"]["merges"]
    joined = list(dict.fromkeys("".join(merge) for merge in merges))
    letters = sorted({letter for piece in joined for letter in piece})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *letters]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(joined) + len(letters))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(joined) + len(letters))
    return pieces, scores, kinds


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.slow
def test_sentencepiece_tokenizers_have_the_originals_ids(prefix: bool) -> None:
    pieces, scores, kinds = sentencepiece_vocabulary()
    values = {
        "model": "llama", "tokens": pieces, "scores": array("f", scores), "token_type": array("i", kinds),
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix,
    }  # fmt: skip
    ours, reference = converted(settings_of(values)), SentencePiece(pieces, scores, prefix)
    for text in texts(800):
        if "\0" not in text:
            assert ours.encode(text, add_special_tokens=False) == reference.encode(text), repr(text)
    assert ours.encode("x")[0] == 1 and ours.encode("x", add_special_tokens=False)[0] != 1
    ids = ours.encode("two  words, 中文 🙂\n")
    assert ours.decode(ids) == "two  words, 中文 🙂\n"
    with_eos = converted(settings_of(values | {"add_bos_token": False, "add_eos_token": True}))
    assert with_eos.encode("x") == [*ours.encode("x", add_special_tokens=False), 2]


@pytest.mark.slow
def test_user_defined_pieces_are_found_first_and_phi3s_special_tokens_take_the_space_behind_them() -> None:
    pieces, scores, kinds = sentencepiece_vocabulary()
    start = len(pieces)
    values = {
        "model": "llama", "tokens": [*pieces, "  ", "<|user|>"], "scores": array("f", [*scores, -1e3, -1e3]),
        "token_type": array("i", [*kinds, USER, CONTROL]), "bos_token_id": 1, "eos_token_id": 2,
        "add_space_prefix": False,
    }  # fmt: skip
    for architecture, rest in (("gemma2", "▁"), ("phi3", "")):
        ours = converted(settings_of(values, architecture))
        ids = ours.encode("<|user|> a  b", add_special_tokens=False)
        tokens = [ours.backend.id_to_token(index) for index in ids]
        assert ids[0] == start + 1 and start in ids
        assert "".join(map(str, tokens)) == f"<|user|>{rest}a  b"


def test_chat_templates_and_end_tokens_match_the_file() -> None:
    tokens = ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = array("i", [NORMAL, CONTROL, CONTROL, CONTROL])
    values = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "merges": [], "eos_token_id": 3}
    settings = settings_of(values)
    extra = {"tokenizer.chat_template": "plain {{ eos_token }}", "tokenizer.chat_template.tool_use": "tools",
             "general.sampling.temp": 0.699999988079071, "general.sampling.top_k": 20}  # fmt: skip
    settings.model.settings.update(extra)
    vocabulary = read_vocabulary(settings)
    assert _generation_config(settings, vocabulary) == {"eos_token_id": [3, 1], "temperature": 0.7, "top_k": 20}
    config = _tokenizer_config(settings, vocabulary)
    assert config["chat_template"] == [
        {"name": "default", "template": "plain {{ eos_token }}"}, {"name": "tool_use", "template": "tools"},
    ]  # fmt: skip
    assert rendered(converted(settings).template, [], False, 100) == "plain <|im_end|>"


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"pre": "brand-new"}, "pre-tokenizer 'brand-new' is not supported"),
        ({"model": "bert"}, "type 'bert' is not supported"),
        ({"merges": None}, "no setting 'tokenizer.ggml.merges'"),
        ({"token_type": array("i", [1])}, "a list of 3 numbers"),
        ({"eos_token_id": 3}, "eos_token_id is 3, and there are 3 tokens"),
        ({"tokens": None}, "no setting 'tokenizer.ggml.tokens'"),
        ({"model": "llama", "tokens": ["a" * 4000] * 5, "scores": array("f", [0.0] * 5)}, "many long tokens"),
    ],
)
def test_invalid_tokenizers_are_refused(changes: dict[str, Any], cause: str) -> None:
    values = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
    with pytest.raises(StartupError, match=cause):
        converted(settings_of(values | changes))


def test_merges_to_what_is_no_token_are_left_out() -> None:
    values = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a c", "b a", "a b", "a"]}
    ours = converted(settings_of(values))
    assert ours.encode("abba") == [2, 1, 0]
