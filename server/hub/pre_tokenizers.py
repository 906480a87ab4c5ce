"""Byte-level tokenizers by the name of their words: how each splits a text into words before it looks for tokens.

GGUF files only name the way of splitting, and Kimi's own checkpoints have it in their code. The patterns here are the
original tokenizers' patterns as quoted in llama.cpp's src/llama-vocab.cpp, or llama.cpp's own version if it quotes no
original.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_SEED_CODER = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = _WORDS % (f"{_ENDINGS}?", f"{_ENDINGS}?", r"\p{N}{1,3}")
_TEKKEN = _WORDS % ("", "", r"\p{N}")
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
# Letters that have two cases.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    r"\p{N}",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ\u30a0-ヿ]+",
    rf"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{{|}}~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    _WORDS % (f"{_ENDINGS}?", f"{_ENDINGS}?", r"\p{N}"),
)
# Words of letters without Chinese ones, which are words of their own.
_UPPER_BUT_HAN, _LOWER_BUT_HAN = (f"[{letters[1:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_BUT_HAN}*{_LOWER_BUT_HAN}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_BUT_HAN}+{_LOWER_BUT_HAN}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One kind of byte-level tokenizer."""

    patterns: tuple[str, ...] = ()  # each splits the pieces left by the one before; empty: GPT-2's pattern
    digits: bool = False  # each digit becomes a word, before the patterns apply
    normal_form: str | None = None  # Unicode normalization form applied to the text first
    ignores_merges: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # default if the file does not specify it

    def steps(self) -> dict[str, Any]:
        """Return the `pre_tokenizer` of a `tokenizer.json`."""
        steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if self.digits else []
        steps += [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        plain = {"add_prefix_space": False, "trim_offsets": True, "use_regex": not self.patterns}
        return {"type": "Sequence", "pretokenizers": [*steps, {"type": "ByteLevel", **plain}]}


_GPT2 = PreTokenizer()
_SMOLLM = PreTokenizer(digits=True)
_LIKE_LLAMA3 = PreTokenizer((_LLAMA3,))
_LIKE_QWEN2 = PreTokenizer((_QWEN2,))
_BY_KIND = {
    # llama.cpp's default for tokenizers that its converter did not know.
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    replace(_LIKE_LLAMA3, ignores_merges=True, adds_bos=True): "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0",
    _LIKE_LLAMA3: "dbrx smaug-bpe",
    replace(_LIKE_QWEN2, normal_form="NFC"): "qwen2 megrez",
    _LIKE_QWEN2: "deepseek-r1-qwen kormo hunyuan",
    PreTokenizer((_GPT4O,)): "gpt-4o kanana2 minimax-m2",
    PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True): "tekken",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    PreTokenizer(_DEEPSEEK_LLM): "deepseek-llm",
    PreTokenizer(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense",
    replace(_LIKE_LLAMA3, ignores_merges=True): "glm4 glm5",
    PreTokenizer(_YOUTU, ignores_merges=True): "youtu",
    PreTokenizer((_KIMI,), ignores_merges=True): "kimi-k2",
    _GPT2: "gpt-2 phi-2 mellum a.x-4.0 gigachat olmo mpt trillion",
    _SMOLLM: "smollm starcoder refact codeshell minerva-7b",
    replace(_SMOLLM, normal_form="NFC"): "command-r",
}
PRE_TOKENIZERS = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}


def _byte_alphabet() -> dict[str, int]:
    """Return the characters that represent bytes in byte-level BPE: printable Latin-1 as is, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def byte_level_tokenizer(kind: PreTokenizer, ids: Mapping[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the parts of a `tokenizer.json` that turn a text into tokens and back.

    `ids`: token -> id, with GPT-2's character for each byte of a token. `merges`: pairs of tokens, the best first.
    """
    return {
        "normalizer": {"type": kind.normal_form} if kind.normal_form else None,
        "pre_tokenizer": kind.steps(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": kind.ignores_merges,
            "vocab": dict(ids),
            "merges": [list(pair) for pair in merges],
        },
    }
