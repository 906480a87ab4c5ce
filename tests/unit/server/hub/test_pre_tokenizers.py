"""Words of byte-level tokenizers against the patterns that the models' own tokenizers have, run by another library."""

from collections.abc import Callable

import pytest
import regex
from tokenizers import Regex, pre_tokenizers

from oarlock.server.hub.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from tests.unit.server.hub.test_gguf_tokenizer import texts

_END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# As DeepSeek V3's tokenizer.json, and as the code of Kimi K2, have them.
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_END}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_END}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
PUBLISHED = {
    "deepseek-v3": _DEEPSEEK_V3,
    "glm4": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "kimi-k2": (_KIMI,),
}


def words_of(kind: PreTokenizer) -> Callable[[str], list[str]]:
    """Words of a text, as the pre-tokenizer's patterns split it."""
    splits = [
        pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated")
        for step in kind.steps()["pretokenizers"]
        if step["type"] == "Split"
    ]
    together = pre_tokenizers.Sequence(splits)
    return lambda text: [word for word, _ in together.pre_tokenize_str(text)]


def split(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Words of a text: each pattern splits the pieces that the one before left, at its matches."""
    pieces = [text] if text else []
    for pattern in patterns:
        found = regex.compile(pattern, regex.V1)
        parts: list[str] = []
        for piece in pieces:
            at = 0
            for match in found.finditer(piece):
                parts += [piece[at : match.start()], match[0]]
                at = match.end()
            parts.append(piece[at:])
        pieces = [part for part in parts if part]
    return pieces


@pytest.mark.parametrize("name", PUBLISHED)
def test_words_are_those_of_the_published_patterns(name: str) -> None:
    words = words_of(PRE_TOKENIZERS[name])
    for text in [*texts(300), "Hello世界", "漢字かなカナ中", "HTTPServer's IT'S", "1234567", "x=[a,b]\n\n"]:
        assert words(text) == split(text, PUBLISHED[name]), repr(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-llm", ["Ask", " me", "1", "2", "中文", "!", " ok"]),
        ("deepseek-v3", ["Ask", " me", "12", "中文", "!", " ok"]),
        ("glm4", ["Ask", " me", "12", "中文", "!", " ok"]),
        ("kimi-k2", ["Ask", " me", "12", "中文", "!", " ok"]),
        ("youtu", ["Ask", " me", "1", "2", "中文", "!", " ok"]),
    ],
)
def test_words_of_a_short_text(name: str, words: list[str]) -> None:
    assert words_of(PRE_TOKENIZERS[name])("Ask me12中文! ok") == words
