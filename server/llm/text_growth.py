"""Upper bound of the factor by which the steps of a `tokenizer.json` can lengthen a text.

A chain of replacements that each write a hundred characters for one multiplies a text by 10^12 in six steps. The bound
is computed from the description of the chain, backwards: the weight of a character is the maximum number of characters
that it can become in the later steps.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.server.llm.character_maps import longest_replacement

# Unicode's normal forms write up to 18 characters for one (U+FDFA), but only once: their results are stable. So they
# count only if an earlier step can write unstable characters.
_NORMAL_FORM_GROWTH = 18
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_GROWTH = {
    "ByteLevel": 5,  # one character for each of up to four bytes, and a space before a word
    "BertNormalizer": 3,  # spaces around each Chinese character
    "Metaspace": 2,  # a `▁` before each word
}


def greatest_growth(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return an upper bound of the characters that `steps` write for one; infinity if it overflows.

    The growth of the input text's own characters by a Unicode normal form is not counted.
    """
    weights = _Weights()
    stable = [_is_stable(step) for step in steps]
    for index in range(len(steps) - 1, -1, -1):
        step, kind = steps[index], steps[index].get("type")
        match kind:
            case "Replace":
                weights.replace(_literal(step.get("pattern")), str(step.get("content", "")))
            case "BPEDecoder":
                weights.replace(str(step.get("suffix", "")), " ")
            case "CTC":
                weights.replace(str(step.get("word_delimiter_token", "")), " ")
            case "Prepend":
                weights.add(str(step.get("prepend", "")))
            case "Precompiled":
                weights.multiply(longest_replacement(step.get("precompiled_charsmap")))
            case _ if kind in _NORMAL_FORMS:
                weights.multiply(1 if all(stable[:index]) else _NORMAL_FORM_GROWTH)
            case _:
                weights.multiply(_GROWTH.get(str(kind), 1))
    return weights.greatest()


class _Weights:
    """Characters that each character becomes in the steps that were already counted."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._others = 1.0  # weight of each character that is not in `_of`

    def greatest(self) -> float:
        return max(self._others, *self._of.values()) if self._of else self._others

    def multiply(self, factor: float) -> None:
        """Count a step that can write any characters, `factor` for one."""
        self._others, self._of = self.greatest() * factor, {}

    def add(self, text: str) -> None:
        """Count a step that can insert `text` next to each character."""
        more = self._sum(text)
        self._others += more
        self._of = {character: weight + more for character, weight in self._of.items()}

    def replace(self, pattern: str | None, content: str) -> None:
        """Count a step that writes `content` for `pattern`; None: a regular expression, which may match nothing."""
        if not pattern:
            self.add(content)
            return
        share = self._sum(content) / len(pattern)
        self._of |= {character: max(self._of.get(character, self._others), share) for character in set(pattern)}

    def _sum(self, text: str) -> float:
        return math.fsum(self._of.get(character, self._others) for character in text)


def _literal(pattern: object) -> str | None:
    text = pattern.get("String") if isinstance(pattern, dict) else None
    return text if isinstance(text, str) else None


def _is_stable(step: Mapping[str, Any]) -> bool:
    """Return whether no normal form can lengthen a text that this step writes."""
    kind = step.get("type")
    if kind not in ("Replace", "Prepend"):
        return kind != "Precompiled"
    return str(step.get("content" if kind == "Replace" else "prepend", "")) in _STABLE or _is_ascii(step, kind)


_STABLE = ("▁",)


def _is_ascii(step: Mapping[str, Any], kind: str) -> bool:
    return str(step.get("content" if kind == "Replace" else "prepend", "")).isascii()
