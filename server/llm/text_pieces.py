"""Token bounds and cuts of long texts: the minimum number of tokens, and cuts that do not change the tokens.

Both are derived from `tokenizer.json`, and only if they can be proven: a bound that is too high would refuse a prompt
that fits, and a cut in the wrong position would change tokens.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_STRIDE = 64 * 1024  # characters that are searched while holding the GIL
# Maximum shrinkage by Unicode's normal forms: the number of bytes, or characters, that can become one.
_MAX_SHRINK_BYTES, _MAX_SHRINK_CHARACTERS = 5, 4
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_SPACES = tuple(chr(code) for code in range(0x3001) if chr(code).isspace())
_METASPACE = "▁"  # SentencePiece writes a space like this
_WORD = "[A-Za-z0-9]"
_EAST_ASIAN = "一-龥ぁ-ゖァ-ヺ"  # Han and kana, which are written without spaces
# Letters whose NFC and NFKC forms end in a letter. Long texts in these scripts may have no ASCII letter before a space.
_LETTERS = f"[A-Za-z0-9À-ÖØ-öø-ľŁ-ɏΑ-ΡΣ-Ωα-ωЀ-ҁא-ת가-힣{_EAST_ASIAN}]"
# Punctuation that ends a run of such letters for each of the patterns below, in any normal form.
_EAST_ASIAN_MARKS = "，。！？；：、"  # noqa: RUF001

# The alternatives of published patterns. None can match white space after an ASCII letter or digit, and none looks
# further than one character ahead. So there is always a border between two matches here, wherever the text begins or
# ends.
_ENDINGS = ("", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BRANCHES = frozenset(
    {
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        "'(?i:[sdmt]|ll|ve|re)",
        r"\p{L}+",
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{ending}" for ending in _ENDINGS),
        *(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{ending}" for ending in _ENDINGS),
        r"\p{N}",
        r"\p{N}+",
        r" ?\p{N}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        # DeepSeek's alternatives, after a pattern that has isolated the digits.
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}]+[\r\n]*",
        r"\s*[\r\n]",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    }
)


@dataclass(frozen=True, slots=True)
class TextPieces:
    """Bounds on the number of tokens, and possible cuts of a text, for one tokenizer."""

    longest: int = 0  # bytes, or characters, of the longest token; 0: unknown
    longest_word: int = 0  # the same without white space
    in_bytes: bool = False
    shrinks: bool = False  # the text is first converted to a normal form
    stripping_tokens: tuple[str, ...] = ()  # added tokens that absorb any white space around them
    cuts: str = ""  # characters before which a text may be cut if a letter or digit of `word` precedes
    word: str = _WORD
    cuts_marks: bool = False  # it may also be cut between an East Asian letter and a punctuation mark
    drops_space: bool = False  # each piece gets a `▁` at its start, which represents the space, so the space is dropped

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; 0 if nothing is known."""
        if not self.longest:
            return 0
        size = _size(text, self.in_bytes)
        spaces = sum(text.count(space) * _size(space, self.in_bytes) for space in (*_SPACES, _METASPACE))
        shrink, is_changed = 1, self.shrinks and not text.isascii()
        if is_changed:
            shrink = _MAX_SHRINK_BYTES if self.in_bytes else _MAX_SHRINK_CHARACTERS
        of_words = -(-(size - spaces) // (shrink * self.longest_word))
        if any(is_changed or token in text for token in self.stripping_tokens):
            return of_words
        return max(of_words, -(-size // (shrink * self.longest)))

    def pieces(self, text: str, size: int) -> Iterator[tuple[int, int]]:
        """Yield start and end of each piece: about `size` characters, or more if the text cannot be cut."""
        start = 0
        while self.cuts and len(text) - start > size:
            cut = self._cut(text, start + size)
            if cut is None:
                break
            yield start, cut
            start = cut + self.drops_space
        yield start, len(text)

    def _cut(self, text: str, start: int) -> int | None:
        """Return the first possible cut from `start` on. Searches in strides, and releases the GIL between them."""
        pattern = f"(?<={self.word})[{self.cuts}]" + (f"(?={self.word})" if self.drops_space else "")
        if self.cuts_marks:
            pattern += f"|(?<=[{_EAST_ASIAN}])[{_EAST_ASIAN_MARKS}]"
        boundary = re.compile(pattern)
        for stride in range(start, len(text), _STRIDE):
            found = boundary.search(text, stride, stride + _STRIDE)
            if found is not None:
                return found.start()
        return None


def pieces_for(described: dict[str, Any]) -> TextPieces:
    """Return the `TextPieces` of the tokenizer that the JSON object `tokenizer.json` describes."""
    model = described["model"]
    normalizers = _steps(described.get("normalizer"), "normalizers")
    splitters = _steps(described.get("pre_tokenizer"), "pretokenizers")
    if model["type"] != "BPE" or model.get("dropout") or not all(map(_keeps_characters, normalizers)):
        return TextPieces()
    in_bytes = any(step["type"] == "ByteLevel" for step in splitters)
    added = described.get("added_tokens", [])
    words = "\0".join(model["vocab"])
    letters = [_LETTERS, _WORD] if _composes(normalizers) and (_isolates(splitters) or not in_bytes) else [_WORD]
    cuts, word, drops_space = "", _WORD, False
    for word in letters:
        cuts, drops_space = _cuts(normalizers, splitters, added, word)
        cuts = "".join(cut for cut in cuts if not _is_crossed(words, word, cut, in_bytes))
        if cuts:
            break
    if model.get("fuse_unk") and not _has_bytes(model):  # one unknown token may span any position
        cuts = ""
    longest = longest_word = 0
    if _is_lossless(model, splitters, in_bytes):
        blank = re.compile("[ĠĊčĉ]" if in_bytes else f"[{_METASPACE}{''.join(_SPACES)}]")
        texts = [(len(word), len(blank.sub("", word))) for word in model["vocab"]]
        texts += [(size, size) for size in (_size(token["content"], in_bytes) for token in added)]
        longest, longest_word = (max(sizes) for sizes in zip(*texts, strict=True))
    return TextPieces(
        longest=longest,
        longest_word=max(1, longest_word),
        in_bytes=in_bytes,
        shrinks=any(step["type"] in _NORMAL_FORMS for step in normalizers),
        stripping_tokens=tuple(token["content"] for token in added if token["lstrip"] or token["rstrip"]),
        cuts=cuts,
        word=word,
        cuts_marks=bool(cuts) and word == _LETTERS and in_bytes and not _has_marks(added),
        drops_space=drops_space,
    )


def _cuts(
    normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]], added: list[dict[str, Any]], word: str
) -> tuple[str, bool]:
    """Return the characters before which a text may be cut if no token of the model spans it, and `drops_space`."""
    drops_space = any(step["type"] == "Prepend" for step in normalizers)
    metaspace = any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in splitters)
    replaces = any(step["type"] == "Replace" for step in normalizers)
    if not all(_splits_locally(step, replaces) for step in splitters) or (drops_space and not replaces):
        return "", False
    for token in added:
        content = token["content"]
        if re.search(f"{word}[ \n{_METASPACE}]", content) or (token["single_word"] and content[:1].isspace()):
            return "", False
        if (token["rstrip"] or drops_space) and re.search(f"{word}$", content):
            return "", False
        if drops_space and re.match(word, content):
            return "", False
    return (" " if drops_space or metaspace else " \n"), drops_space


def _is_crossed(words: str, word: str, cut: str, in_bytes: bool) -> bool:
    """Return whether a token of the model spans a position before `cut`.

    Bytes of non-ASCII letters are not examined: only a tokenizer that isolates words may cut after them.
    """
    if in_bytes:
        return re.search(f"{_WORD}[{'Ġ' if cut == ' ' else 'Ċ'}]", words) is not None
    return re.search(f"{word}[{f' {_METASPACE}' if cut == ' ' else cut}]", words) is not None


def _composes(normalizers: list[dict[str, Any]]) -> bool:
    """Return whether no normalizer separates marks from letters, which would put a mark before the next space."""
    return not any(step["type"] in ("NFD", "NFKD") for step in normalizers)


def _isolates(splitters: list[dict[str, Any]]) -> bool:
    """Return whether a pattern separates words, so that no token spans two words."""
    return any("Regex" in step.get("pattern", ()) or step.get("use_regex") for step in splitters)


def _has_marks(added: list[dict[str, Any]]) -> bool:
    """Return whether an added token could be found on only one side of a position before an East Asian mark."""
    return any(re.search(f"[{_EAST_ASIAN_MARKS}]", token["content"]) for token in added)


def _keeps_characters(step: dict[str, Any]) -> bool:
    """Return whether a normalizer drops nothing, and treats a position before white space like the end of a text."""
    if step["type"] == "Replace":
        return step["pattern"] == {"String": " "} and step["content"] == _METASPACE
    return step["type"] in _NORMAL_FORMS or (step["type"] == "Prepend" and step["prepend"] == _METASPACE)


def _splits_locally(step: dict[str, Any], replaces_spaces: bool) -> bool:
    """Return whether a cut changes nothing for this pre-tokenizer on either side of the cut."""
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    if step["type"] == "Split":
        if "String" in step["pattern"]:  # splits at spaces, which the normalizer has replaced
            return step["pattern"]["String"] == " " and replaces_spaces
        return step["behavior"] == "Isolated" and set(_alternatives(step["pattern"]["Regex"])) <= _BRANCHES
    return step["type"] in ("Digits", "Metaspace")


def _is_lossless(model: dict[str, Any], splitters: list[dict[str, Any]], in_bytes: bool) -> bool:
    """Return whether all characters of a text are in tokens, and no token represents unlimited characters."""
    for step in splitters:
        if step["type"] not in ("ByteLevel", "Digits", "Metaspace") and (
            step["type"] != "Split" or step["behavior"] == "Removed"
        ):
            return False
    if in_bytes:
        return all(byte in model["vocab"] for byte in ByteLevel.alphabet())
    return _has_bytes(model) or bool(model.get("unk_token") and not model.get("fuse_unk"))


def _has_bytes(model: dict[str, Any]) -> bool:
    """Return whether characters that are not in the vocabulary are written byte by byte."""
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))


def _alternatives(pattern: str) -> list[str]:
    """Return the branches of a regular expression, as written."""
    found, depth, start, position = [], 0, 0, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character in "([":
            depth += 1
        elif character in ")]":
            depth -= 1
        elif character == "|" and not depth:
            found.append(pattern[start:position])
            start = position + 1
        position += 1
    return [*found, pattern[start:]]


def _steps(step: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Return a part of the pipeline as a flat list."""
    if step is None:
        return []
    return [inner for one in step[name] for inner in _steps(one, name)] if step["type"] == "Sequence" else [step]


def _size(text: str, in_bytes: bool) -> int:
    return len(text.encode(errors="replace")) if in_bytes else len(text)
