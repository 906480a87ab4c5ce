"""Long texts: no bound is above what a text really has, and pieces have the tokens of the whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from oarlock.server.llm.text_pieces import _EAST_ASIAN_MARKS, _LETTERS, TextPieces, pieces_for
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
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"""|\s*[\r\n]+|\s+(?!\S)|\s+""",
)
CORPUS = [
    Path(__file__).read_text(encoding="utf-8"),
    "naïve façade — 中文。字符，字。 слово за словом が、ガ。 나는 학교 don't DON'T I'll\n\n\tx = 12345 ** 2\r\n" * 20,  # noqa: RUF001
]
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("<|end|>", special=True, rstrip=True),
    AddedToken("<mask>", lstrip=True),
]


def _bytes(splitter, normalizer=None):
    backend = tokenizers.Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter is None)
    patterns = (splitter,) if isinstance(splitter, str) else splitter or ()
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
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
    "nfd": lambda: _bytes(LLAMA3, normalizers.NFD()),
    "deepseek": lambda: _bytes(DEEPSEEK),
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
    "слово",
    "ή",
    "학교",
    "が",
    "か\u3099",
    "、",
    "，",  # noqa: RUF001
    "！",  # noqa: RUF001
    "：",  # noqa: RUF001
    "/",
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


LONG = {
    "Russian": "слово за словом, ",
    "Korean": "나는 학교에 간다. ",
    "Chinese": "中文的文章没有空格，也没有字母。",  # noqa: RUF001
    "Japanese": "日本語の文章には、空白がありません。",
    "French": "élève déjà pressé, ",
}


@pytest.mark.parametrize("language", LONG)
def test_languages_without_ascii_letters_before_spaces_are_cut(kind, request, language):
    backend, known = kind
    name = request.node.callspec.params["kind"]
    if name == "nfd" or (name in ("llama2", "mistral") and language in ("Chinese", "Japanese")):
        return  # marks are taken off letters there, and no pattern separates words
    text = LONG[language] * 200
    places = list(known.pieces(text, 100))
    assert max(end - start for start, end in places) < 200
    assert [token for start, end in places for token in _ids(backend, text[start:end])] == _ids(backend, text)


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


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_letters_before_a_cut_end_in_a_letter_and_marks_begin_with_punctuation(form):
    letters = [character for character in map(chr, range(0x10000)) if re.match(_LETTERS, character)]
    assert len(letters) > 20_000
    for character in letters:
        assert unicodedata.category(unicodedata.normalize(form, character)[-1])[0] in "LN"
    for mark in _EAST_ASIAN_MARKS:
        assert unicodedata.category(unicodedata.normalize(form, mark)[0]) == "Po"


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
