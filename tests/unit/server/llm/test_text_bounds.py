"""Bounds on what the tokenizer does for one text or one list of ids, and failures of its library."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from oarlock.server.llm.detokenizer import TokenizerError, WindowDetokenizer
from oarlock.server.llm.tokenizer import MOST_DECODED, MOST_UNCUT_BYTES, Tokenizer

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
# Runs that no rule for cutting can divide.
RUNS = {"letter": "a", "digit": "1", "mark": "\u0301", "space": " ", "emoji": "😀", "kana": "ア", "joiner": "\u200d"}
NEEDS = {"all": {"most": 1 << 30}, "its end": {"last": 10}, "its beginning": {"first": 10}, "without a limit": {}}


@pytest.fixture(scope="module")
def demo():
    loaded = Tokenizer.load(DEMO)
    yield loaded
    loaded.close()


def panicking_tokenizer():
    """A tokenizer whose library panics on more than twenty `a`: its expression tries too many ways to match."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a|aa)+b|a+"), "isolated")
    backend.decoder = decoders.Strip("b", 0, 3)  # which panics on a `b` alone
    return Tokenizer(backend, {})


@pytest.mark.parametrize("needed", NEEDS)
@pytest.mark.parametrize("run", RUNS)
def test_a_part_that_cannot_be_cut_is_refused_beyond_the_bound(demo, monkeypatch, run, needed):
    seen = []
    monkeypatch.setattr(demo, "encode", lambda text, **_: seen.append(text) or [5])
    size = len(RUNS[run].encode())
    fits, too_long = (RUNS[run] * ((MOST_UNCUT_BYTES + more) // size) for more in (0, size))
    asyncio.run(demo.aencode(fits, False, **NEEDS[needed]))
    assert seen == [fits]
    with pytest.raises(TokenizerError, match=f"at most {MOST_UNCUT_BYTES} can be tokenized at once") as refused:
        asyncio.run(demo.aencode(too_long, False, **NEEDS[needed], param="input"))
    assert refused.value.param == "input"
    assert seen == [fits]


def test_only_the_end_that_is_kept_must_be_cut(demo):
    words = "some words " * 200
    text = "a" * (MOST_UNCUT_BYTES + 1) + " " + words
    kept = asyncio.run(demo.aencode(text, last=100, param="prompt"))
    assert kept[-100:] == demo.encode(words)[-100:]
    with pytest.raises(TokenizerError):
        asyncio.run(demo.aencode(text, last=1000, param="prompt"))


def test_a_panic_of_the_library_is_an_error_of_the_request(caplog):
    loaded = panicking_tokenizer()
    with pytest.raises(TokenizerError, match="fails on this text") as failed:
        asyncio.run(loaded.aencode("a" * 100, param="prompt"))
    assert failed.value.param == "prompt"
    with pytest.raises(TokenizerError, match="fails on these token ids") as failed:
        asyncio.run(loaded.atext([1], frozenset(), "tokens"))
    assert failed.value.param == "tokens"
    assert loaded.encode("aaa") == [0, 0, 0]
    assert "tokenizer_failed" in caplog.text and "aaaa" not in caplog.text
    loaded.close()


def test_ids_of_too_much_text_are_refused(demo):
    longest = max(range(demo.vocab_size), key=lambda token: len(demo.token_bytes(token)))
    fits = MOST_DECODED // len(demo.token_bytes(longest))
    assert len(demo.decode([longest] * fits)) <= MOST_DECODED
    with pytest.raises(TokenizerError, match=f"more than {MOST_DECODED} characters"):
        demo.decode([longest] * (fits + 1))


def test_ids_that_complete_no_character_do_not_make_the_window_grow():
    class Backend:
        longest = 0

        def id_to_token(self, id):
            return None

        def decode(self, ids, skip_special_tokens=True):
            self.longest = max(self.longest, len(ids))
            return "\ufffd" * len(ids)

    backend = Backend()
    detokenizer = WindowDetokenizer(backend)
    text = detokenizer.push([7] * 1000) + detokenizer.flush()
    assert text == "\ufffd" * 1000
    assert backend.longest <= 64
