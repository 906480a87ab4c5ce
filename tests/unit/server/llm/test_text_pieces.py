"""Long texts: no bound is above what a text really has, and pieces have the tokens of the whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from oarlock.server.llm.text_pieces import TextPieces, pieces_for
from oarlock.server.llm.tokenizer import Tokenizer, TooManyTokensError

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo" / "tokenizer.json"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "naïve façade — 中文。字符。 don't DON'T I'll\n\n\tx = 12345 ** 2\r\n" * 20,
]
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<mask>", lstrip=True),
]


def _bytes(splitter, normalizer=None):
    backend = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter is None)
    steps = [] if splitter is None else [pre_tokenizers.Split(Regex(splitter), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, level])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens(ADDED)
    return backend


def _sentencepiece(prepends):
    """Tokenizer like Llama 2's (a normalizer puts `▁` before each text), or like its later form and Mistral's."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if prepends:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(ADDED)
    return backend


KINDS = {
    "demo": lambda: tokenizers.Tokenizer.from_file(str(DEMO)),
    "gpt2": lambda: _bytes(None),
    "llama3": lambda: _bytes(LLAMA3),
    "tekken_nfkc": lambda: _bytes(TEKKEN, normalizers.NFKC()),
    "nfc": lambda: _bytes(LLAMA3, normalizers.NFC()),
    "llama2": lambda: _sentencepiece(True),
    "mistral": lambda: _sentencepiece(False),
}
BITS = [
    "a",
    "word",
    "Zz",
    "7",
    "123",
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    ".",
    ",",
    "'s",
    "'ll",
    "é",
    "e\u0301",
    "中文",
    "。",
    "😀",
    "\u3000",
]
BITS += [
    "<s>",
    "<|end|>",
    "<mask>",
    "▁",
    "\u212a",
    "\u1100\u1161\u11a8",
    "\U0001d400",
    "\x85",
    "\u2028",
    "____",
    "\xa0",
    "ﷺ",
    "\xb4",
]
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=60).map("".join)

# All that have a decomposition, and neighbours: CJK, private and unassigned ones stand for themselves.
ASSIGNED = list(map(chr, (*range(0x4E00), *range(0xA000, 0xAC80), *range(0xF900, 0x12000), *range(0x1D000, 0x1F200))))


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    backend = KINDS[request.param]()
    return backend, pieces_for(json.loads(backend.to_str()))


def _ids(backend, text):
    return backend.encode(text, add_special_tokens=False).ids


def test_published_kinds_are_known(kind):
    _, known = kind
    assert known.longest >= known.longest_word > 0
    assert " " in known.cuts


@settings(max_examples=75, deadline=None)
@given(text=TEXTS, size=st.integers(1, 12))
def test_pieces_have_the_tokens_of_the_whole(kind, text, size):
    backend, known = kind
    places = list(known.pieces(text, size))
    assert [token for start, end in places for token in _ids(backend, text[start:end])] == _ids(backend, text)
    for (_, end), (start, _) in itertools.pairwise(places):
        assert text[end:start] in ("", " ")


@settings(max_examples=75, deadline=None)
@given(text=TEXTS, times=st.integers(1, 50))
@pytest.mark.slow
def test_no_text_has_fewer_tokens_than_are_certain(kind, text, times):
    backend, known = kind
    assert known.least_tokens(text * times) <= len(_ids(backend, text * times))


def test_a_token_in_another_spelling_takes_white_space_too():
    backend = KINDS["tekken_nfkc"]()
    backend.add_tokens([AddedToken("<gap>", lstrip=True, normalized=True)])
    text = " " * 5000 + "\uff1cgap\uff1e"
    assert len(_ids(backend, text)) == 1
    assert pieces_for(json.loads(backend.to_str())).least_tokens(text) <= 1


def test_a_bound_is_within_a_factor_of_the_text(kind):
    _, known = kind
    for text in ("a" * 10_000, "中文" * 5_000, " " * 10_000, "<|end|>" + " x" * 10_000):
        assert known.least_tokens(text) * 300 > len(text)
    assert len(list(known.pieces("some words " * 1000, 100))) > 90


def test_normal_forms_shrink_no_more_than_is_assumed():
    """The heaviest input for each character of a decomposition, summed over what a character is composed of."""
    heaviest: dict[str, float] = {}
    for character in ASSIGNED:
        parts = unicodedata.normalize("NFKD", character)
        words = [part for part in parts if not part.isspace()]
        assert words or character.isspace(), "no word becomes white space"
        for part in words or parts:
            share = len(character.encode()) / len(words or parts)
            heaviest[part] = max(heaviest.get(part, 0), share)
    for character in filter(lambda character: unicodedata.is_normalized("NFKC", character), ASSIGNED):
        parts = unicodedata.normalize("NFKD", character)
        assert sum(heaviest.get(part, 0) for part in parts) <= 5 * len(character.encode())
        assert len(parts) <= 4


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+ \w+"}, "behavior": "Isolated", "invert": False}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
)
def test_nothing_is_cut_where_nothing_is_known(change):
    described = json.loads(tokenizers.Tokenizer.from_file(str(DEMO)).to_str()) | change
    known = pieces_for(described)
    assert known.cuts == ""
    assert list(known.pieces("one two " * 20, 8)) == [(0, 160)]


def test_a_token_across_words_forbids_cuts():
    described = json.loads(tokenizers.Tokenizer.from_file(str(DEMO)).to_str())
    described["model"]["vocab"]["ofĠthe"] = 4095
    assert pieces_for(described).cuts == "\n"
    described["added_tokens"].append(
        {"id": 5000, "content": "end\nof", "lstrip": False, "rstrip": False, "single_word": False}
    )
    assert pieces_for(described).cuts == ""
    assert TextPieces().least_tokens("x" * 100) == 0


def test_a_text_that_can_be_cut_does_not_wait_for_one_that_cannot(monkeypatch):
    loaded = Tokenizer(KINDS["demo"](), {})
    begun, release, encode = threading.Event(), threading.Event(), loaded.encode

    def blocked(text, **how):
        if " " not in text:
            begun.set()
            release.wait(40)
        return encode(text, **how)

    monkeypatch.setattr(loaded, "encode", blocked)
    words = "some words " * 30_000

    async def both():
        uncut = asyncio.create_task(loaded.aencode("x" * 300_000))
        await asyncio.to_thread(begun.wait, 40)
        try:
            return await asyncio.wait_for(loaded.aencode(words), 60)
        finally:
            release.set()
            await uncut

    assert asyncio.run(both()) == encode(words)
    loaded.close()


@pytest.mark.parametrize(
    ("added", "add_bos"), [("<s> $A", None), ("<s> $A <|end|>", True), ("<s> $A", False), ("$A", True)]
)
def test_a_long_text_gets_its_special_tokens_once(monkeypatch, added, add_bos):
    monkeypatch.setattr("oarlock.server.llm.tokenizer._PIECE", 30)
    backend = KINDS["llama3"]()
    ids = [(name, backend.token_to_id(name)) for name in ("<s>", "<|end|>")]
    backend.post_processor = TemplateProcessing(single=added, special_tokens=ids)
    loaded = Tokenizer(backend, {"bos_token": "<s>", "add_bos_token": add_bos})
    words = "some words 字 and more. " * 20

    async def check():
        for text in (words, f"<s>{words}"):
            for add in (True, False):
                whole = loaded.encode(text, add_special_tokens=add)
                assert await loaded.aencode(text, add) == whole
                assert await loaded.aencode(text, add, most=len(whole)) == whole
                for last in (1, 50, len(whole), len(whole) + 5):
                    assert (await loaded.aencode(text, add, last=last))[-last:] == whole[-last:]
                for first in (1, 50, len(whole) + 5):
                    own = loaded.encode(text, add_special_tokens=False)
                    assert (await loaded.aencode(text, False, first=first))[:first] == own[:first]
                with pytest.raises(TooManyTokensError) as refused:
                    await loaded.aencode(text, add, most=20)
                assert 20 < refused.value.at_least <= len(whole)

    asyncio.run(check())
    loaded.close()
