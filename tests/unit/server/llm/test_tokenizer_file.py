"""Bounds on a `tokenizer.json`: parts of published tokenizers pass, and what could take all memory or time does not."""

from __future__ import annotations

import base64
import json
import struct

import pytest
import tokenizers

from oarlock.base.errors import StartupError
from oarlock.server.llm import pattern_trial, tokenizer_file
from oarlock.server.llm.character_maps import longest_replacement
from oarlock.server.llm.text_growth import greatest_growth
from tests.unit.server.llm.checkpoint_faults import DEMO


def replace(pattern, content):
    return {
        "type": "Replace",
        "pattern": pattern if isinstance(pattern, dict) else {"String": pattern},
        "content": content,
    }


SPACES = {"Regex": " {2,}"}
NORMALIZERS = {
    "Llama": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
    "Gemma": [replace(" ", "▁")],
    "CLIP": [{"type": "NFC"}, replace({"Regex": r"\s+"}, " "), {"type": "Lowercase"}],
    "ALBERT": [
        *(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}),
        replace(SPACES, " "),
    ],
    "BERT": [{"type": "BertNormalizer", "handle_chinese_chars": True, "lowercase": True}],
    "many single characters": [
        replace("…", "..."),
        replace("㍿", "株式会社"),
        replace("½", "1/2"),
        replace("№", "No."),
    ],
}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_published_normalizers_grow_little(name):
    assert greatest_growth(NORMALIZERS[name]) <= 8


@pytest.mark.parametrize(
    ("steps", "least"),
    [
        ([replace("a", "a" * 100)] * 6, 100**6),
        ([replace("a", "bb"), replace("b", "cc"), replace("c", "dd")], 8),
        ([replace("ab", "abab")] * 3, 8),
        ([replace({"Regex": "x*"}, "y" * 50)] * 3, 50**3),
        ([replace("", "y" * 50)] * 3, 50**3),
        ([{"type": "Prepend", "prepend": "a" * 9}] * 4, 10**4),
        ([replace("a", "\ufdfa"), {"type": "NFKD"}, replace("ص", "\ufdfa"), {"type": "NFKD"}], 18 * 2),
        ([{"type": "ByteLevel"}] * 400, 2.0**400),
        ([{"type": "BPEDecoder", "suffix": ""}] * 10, 2**10),
    ],
)
def test_the_growth_of_a_chain_is_not_underestimated(steps, least):
    assert greatest_growth(steps) >= least


@pytest.mark.parametrize("text", ["a" * 7, "ab" * 5, "x"])
def test_a_chain_grows_no_more_than_computed(text):
    steps = [replace("a", "ba"), replace("b", "cac"), replace({"Regex": "c*"}, "dd")]
    chain = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Replace(one["pattern"].get("String") or tokenizers.Regex("c*"), one["content"])
            for one in steps
        ]
    )
    # An empty match at the end of a text is beside a character of it too.
    assert len(chain.normalize_str(text)) <= greatest_growth(steps) * (len(text) + 1)


PATTERNS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4o": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    "BLOOM": r" ?[^(\s|[.,!?…。、।،])]+",
    "right to left": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))",
    "SMILES": r"\[[^\]]+]|Br?|Cl?|N|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]",
    "a brace": "a{b}c{,d}",
}


@pytest.mark.parametrize("name", PATTERNS)
def test_published_patterns_pass(name):
    assert pattern_trial.fault(PATTERNS[name]) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|a)*b",
        "(?:a|ab)+c",
        "(?>a*)*b",
        "((a{1,100}){1,100}){1,100}",
        "(a?){50}a{50}",
        "a{1,2}{3,900}x",
        r"(?<n>a|b\g<n>)",
        "([)]+)+x",
        r"(\p{L}+)+x",
        "[^x]*[^x]*xy",
        pytest.param(".*.*.*x", marks=pytest.mark.soak),  # takes many seconds, as it may
        "a{0,900}" * 4,
        "[",
    ],
)
def test_endless_patterns_do_not(pattern):
    assert pattern_trial.fault(pattern) is not None


def character_map(units: list[int], texts: bytes) -> str:
    return base64.b64encode(struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts).decode()


@pytest.mark.parametrize(
    ("units", "texts", "longest"),
    [
        ([0] * 256, b"ab\0c\0", 2),
        ([0] * 255 + [1 << 31 | 3], b"ab\0c\0", 2),
        ([0] * 255 + [1 << 31 | 30], b"ab\0", None),  # a replacement behind the end
        ([0] * 255 + [1 << 31 | 1], "é\0".encode(), None),  # within a character
        ([1 << 30] + [0] * 255, b"ab\0", None),  # a child behind the end
        ([0] * 200, b"ab\0", None),
        ([0] * 256, b"\xff\0", None),
    ],
)
def test_places_in_a_character_map_are_checked(units, texts, longest):
    if longest is None:
        with pytest.raises(ValueError, match=r".+"):
            longest_replacement(character_map(units, texts))
    else:
        assert longest_replacement(character_map(units, texts)) == longest


def test_the_description_is_that_of_the_library():
    backend, described = tokenizer_file.load(DEMO / "tokenizer.json")
    written = json.loads(backend.to_str())
    assert described == {name: written[name] for name in described}
    assert written.keys() - described.keys() == {"version", "truncation", "padding"}


def test_a_panic_is_an_error_of_the_start(tmp_path):
    class PanicException(BaseException):
        pass

    class Broken:
        def encode(self, *args, **options):
            raise PanicException("index out of bounds\nbacktrace")

    with pytest.raises(StartupError, match=r"tokenizer\.json cannot encode or decode a text: index out of bounds back"):
        tokenizer_file.try_out(tmp_path / "tokenizer.json", Broken())
