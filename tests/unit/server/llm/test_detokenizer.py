"""Incremental text against the library's decode of the whole: byte-level BPE, SentencePiece style, and the rest."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from oarlock.server.llm.detokenizer import BytesDetokenizer, WindowDetokenizer
from oarlock.server.llm.tokenizer import Tokenizer

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"


@pytest.fixture(scope="module")
def demo():
    loaded = Tokenizer.load(DEMO)
    yield loaded
    loaded.close()


def _metaspace_backend():
    """Llama 2's arrangement: `▁` for spaces, bytes as fallback, one space stripped at the start."""
    words = ["▁", "▁Hello", "▁world", "Hello", "world", "!", "▁the", "é", "s"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocabulary |= {word: 259 + index for index, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return backend


@pytest.fixture(scope="module")
def metaspace():
    loaded = Tokenizer(_metaspace_backend(), {"bos_token": "<s>", "eos_token": "</s>"})
    yield loaded
    loaded.close()


def _in_pieces(detokenizer, ids, sizes):
    pieces, start = [], 0
    while start < len(ids):
        size = sizes.pop() if sizes else 1
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return pieces, detokenizer.flush()


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_byte_level_pieces_equal_the_whole_decode(demo, data):
    """Random ids: broken characters, special tokens and all."""
    ids = data.draw(st.lists(st.integers(0, 4095), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=40))
    pieces, rest = _in_pieces(demo.detokenizer(), ids, sizes)
    assert "".join(pieces) + rest == demo.backend.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
@pytest.mark.slow
def test_valid_text_never_shows_a_broken_character(demo, text):
    ids = demo.encode(text, add_special_tokens=False)
    pieces, rest = _in_pieces(demo.detokenizer(), ids, [])
    assert all("\ufffd" not in piece for piece in pieces)
    assert rest == ""
    assert "".join(pieces) == demo.backend.decode(ids)


def test_an_emoji_comes_in_one_piece(demo):
    ids = demo.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    pieces, rest = _in_pieces(demo.detokenizer(), ids, [])
    assert [piece for piece in pieces if piece] == ["😀"]
    assert rest == ""
    assert _in_pieces(demo.detokenizer(), ids[:-1], [])[1] == "\ufffd"


def test_a_prompt_may_end_inside_a_character(demo):
    ids = demo.encode("x😀y", add_special_tokens=False)
    for split in range(1, len(ids)):
        before = demo.detokenizer().push(ids[:split])
        after = demo.detokenizer(ids[:split])
        assert before + after.push(ids[split:]) + after.flush() == "x😀y"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["▁", "▁Hello", "▁world", "Hello", "!", "é", "<s>", "</s>", "😀", "中"]), max_size=20))
@pytest.mark.slow
def test_sentencepiece_pieces_equal_the_whole_decode(metaspace, names):
    ids = []
    for name in names:
        known = metaspace.backend.token_to_id(name)
        ids += [known] if known is not None else [3 + byte for byte in name.encode()]
    pieces, rest = _in_pieces(metaspace.detokenizer(), ids, [])
    assert "".join(pieces) + rest == metaspace.backend.decode(ids)
    for split in range(1, len(ids)):  # the leading space is the prompt's matter
        after = metaspace.detokenizer(ids[:split])
        tail = after.push(ids[split:]) + after.flush()
        head = metaspace.detokenizer().push(ids[:split])
        assert head + tail == metaspace.backend.decode(ids)


def test_a_completion_keeps_its_leading_space(metaspace):
    hello, world = (metaspace.backend.token_to_id(name) for name in ("▁Hello", "▁world"))
    assert metaspace.detokenizer([1, hello]).push([world]) == " world"
    assert metaspace.detokenizer([1]).push([world]) == "world"


def test_decoders_of_other_kinds_go_through_the_window():
    vocabulary = {"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3, ",": 4}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    loaded = Tokenizer(backend, {})
    assert isinstance(loaded.detokenizer(), WindowDetokenizer)
    random.seed(0)
    for _ in range(50):
        ids = [1, *random.choices(range(1, 5), k=8)]
        pieces, rest = _in_pieces(loaded.detokenizer(), ids, [])
        assert "".join(pieces) + rest == backend.decode(ids)
    loaded.close()


def test_the_window_shows_no_broken_character(demo):
    ids = demo.encode("a😀 中 b", add_special_tokens=False)
    window = WindowDetokenizer(demo.backend)
    pieces, rest = _in_pieces(window, ids, [])
    assert "".join(pieces) + rest == "a😀 中 b"
    assert all("\ufffd" not in piece for piece in pieces)


def test_added_tokens_that_are_not_special_are_shown(demo):
    backend = tokenizers.Tokenizer.from_str(demo.backend.to_str())
    backend.add_tokens(["<tool é>"])
    loaded = Tokenizer(backend, {})
    ids = loaded.encode("a<tool é>b", add_special_tokens=False)
    assert isinstance(loaded.detokenizer(), BytesDetokenizer)
    assert loaded.decode(ids) == backend.decode(ids) == "a<tool é>b"
    loaded.close()


def test_ids_without_a_token_add_nothing(demo):
    assert demo.decode([10**6]) == ""
    assert demo.token_text(10**6) == ""
