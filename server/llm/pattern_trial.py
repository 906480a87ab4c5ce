"""Check that the regular expressions of a `tokenizer.json` match any text within an acceptable time.

Oniguruma backtracks: `(a+)+$` takes twice as long for each further character, and ends with a panic. Two checks find
such patterns. The first parses the pattern: a repeated group must not contain anything of variable length, and few
items of an alternative may be repeated without limit. The second matches it against runs of one character, doubling the
length, and stops when that becomes slow. Quadratic time is accepted: published patterns need it for runs of digits.
"""

import time
from collections.abc import Iterator

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Split

from oarlock.engine.panics import ENDS_TASK

MAX_CHARACTERS = 8192
_MAX_REPEATS = 8  # limit for a group whose length varies
_ENDLESS = 100  # repeats that count as unlimited
_MAX_ENDLESS = 3  # items of one alternative that are repeated without limit: published patterns have two
_LONGEST_RUN = 4096
# Time limit for one run. Published patterns need a small part of it; cubic patterns need minutes.
_LIMIT_S = 0.6
# Each of them must take too long: on a crowded machine, processor time includes time in which others had the processor.
_MAX_TRIES = 3
_SAMPLES = " \n\ta1A.-_'中éя"  # characters of the kinds that published patterns distinguish
_MAX_LITERALS = 32  # limit for characters of the pattern itself that are also tried


def fault(pattern: str) -> str | None:
    """Return the reason to refuse `pattern`, as a phrase; None if it is accepted."""
    if len(pattern) > MAX_CHARACTERS:
        return f"has more than {MAX_CHARACTERS} characters"
    if (found := _endless(pattern)) is not None:
        return f"{found}, which can take unlimited time"
    try:
        split = Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        return f"is not a regular expression ({str(error)[:80]})"
    literals = dict.fromkeys(character for character in pattern if character.isalnum())
    tried = [*_SAMPLES, *list(literals)[:_MAX_LITERALS]]
    # The library searches first for literals that a match must contain. The tail has them, but does not complete a
    # match.
    tail = "\0\n" + "".join(reversed(literals)) + "\n" + "".join(literals)
    for character in dict.fromkeys(tried):
        if _is_slow(split, character, tail):
            return f"takes too long to match a run of {character!r}"
    return None


def _is_slow(split: PreTokenizer, character: str, tail: str) -> bool:
    length = 8
    while length <= _LONGEST_RUN:
        try:
            if all(_seconds(split, character * length + tail) > _LIMIT_S for _ in range(_MAX_TRIES)):
                return True
        except BaseException as error:
            if isinstance(error, ENDS_TASK):
                raise
            return True  # it gave up after ten million steps
        length *= 2
    return False


def _seconds(split: PreTokenizer, text: str) -> float:
    begun = time.thread_time()
    split.pre_tokenize_str(text)
    return time.thread_time() - begun


def _endless(pattern: str) -> str | None:
    """Return the construct of `pattern` whose match time can grow faster than the text; None: there is none."""
    varies = [False]  # for each open group, outermost first: whether its length varies
    last_varies = False  # whether the length of the previous item varies
    endless = 0  # number of unlimited items in this alternative
    for item in _items(pattern):
        match item[0]:
            case "(":
                varies.append(False)
                last_varies = False
            case ")":
                last_varies = varies.pop() if len(varies) > 1 else False
                varies[-1] |= last_varies
            case "|":
                varies[-1], last_varies = True, False
                endless = 0 if len(varies) == 1 else endless
            case "{":
                least, most = _bounds(item)
                if last_varies and most > _MAX_REPEATS:
                    return "repeats a group of varying length"
                endless += most > _ENDLESS and least != most
                if endless > _MAX_ENDLESS:
                    return f"repeats more than {_MAX_ENDLESS} items of an alternative"
                varies[-1] |= least != most
                last_varies |= least != most
            case "\\" if item[1:] and item[1:] in "123456789kg":
                return "refers to a group"
            case _:
                last_varies = False
    return None


def _bounds(quantifier: str) -> tuple[float, float]:
    least, _, most = quantifier[1:-1].partition(",")
    return float(least or 0), float(most or "inf") if "," in quantifier else float(least or 0)


_QUANTIFIERS = {"*": "{0,}", "+": "{1,}", "?": "{0,1}"}


def _items(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern: group start `(` and group end `)`, `|`, quantifiers as `{n,m}`, and others."""
    at, end = 0, len(pattern)
    while at < end:
        character = pattern[at]
        start = at
        at += 1
        if character == "\\":
            at += 1
            yield pattern[start:at]
            if pattern[at - 1 : at] in ("p", "P", "x", "o", "u") and pattern[at : at + 1] == "{":
                at = pattern.find("}", at) + 1 or end
        elif character == "[":
            at = _class_end(pattern, at)
            yield "[]"
        elif character == "(":
            if pattern[at : at + 1] == "?":
                while at < end and pattern[at] in "?:=!<>#-imxa":  # a group's kind and options
                    at += 1
            yield "("
        elif character in _QUANTIFIERS or character == "{":
            quantifier = _QUANTIFIERS.get(character) or _counted(pattern, start)
            if quantifier is None:
                yield character.replace("{", "\\{")
                continue
            at = start + (1 if character in _QUANTIFIERS else len(quantifier))
            if pattern[at : at + 1] in ("?", "+"):  # lazy or possessive
                at += 1
            yield quantifier
        else:
            yield character


def _class_end(pattern: str, at: int) -> int:
    """Return the index after a character class, which may contain classes."""
    depth = 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and depth:
        character = pattern[at]
        at += 2 if character == "\\" else 1
        depth += (character == "[") - (character == "]")
    return at


def _counted(pattern: str, start: int) -> str | None:
    """Return the quantifier `{n}`, `{n,}` or `{n,m}` at this index; None if the brace is a literal."""
    quantifier = pattern[start : pattern.find("}", start) + 1]
    inside = quantifier[1:-1].replace(",", "", 1)
    return quantifier if len(quantifier) > 2 and inside.isascii() and inside.isdigit() else None
