"""Pre-tokenizers of byte-level tokenizers, which cut a text into words, by the names that GGUF files give them.

The patterns are those of the original tokenizers, as llama.cpp's src/llama-vocab.cpp quotes them; where it has only its
own form, that one.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One kind of byte-level tokenizer."""

    patterns: tuple[str, ...] = ()  # each cuts what the one before left; none: GPT-2's
    digits: bool = False  # each digit is a word, before the patterns
    normal_form: str | None = None  # of Unicode, to which a text is brought first
    ignores_merges: bool = False  # a word that is a token needs no merges
    adds_bos: bool = False  # where the file does not say it

    def steps(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a `tokenizer.json`."""
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
    # What llama.cpp does where a converter did not know the tokenizer.
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")): "default",
    replace(_LIKE_LLAMA3, ignores_merges=True, adds_bos=True): "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0",
    _LIKE_LLAMA3: "dbrx smaug-bpe",
    replace(_LIKE_QWEN2, normal_form="NFC"): "qwen2 megrez",
    _LIKE_QWEN2: "deepseek-r1-qwen kormo hunyuan",
    PreTokenizer((_GPT4O,)): "gpt-4o kanana2",
    PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True): "tekken",
    PreTokenizer((_SEED_CODER,)): "seed-coder",
    PreTokenizer(_DEEPSEEK_CODER): "deepseek-coder",
    _GPT2: "gpt-2 phi-2 mellum a.x-4.0 gigachat olmo mpt trillion",
    _SMOLLM: "smollm starcoder refact codeshell minerva-7b",
    replace(_SMOLLM, normal_form="NFC"): "command-r",
}
PRE_TOKENIZERS = {name: kind for kind, names in _BY_KIND.items() for name in names.split()}
