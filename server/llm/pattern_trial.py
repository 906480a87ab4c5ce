"""Regular expressions of a `tokenizer.json`: whether they match a text within a time that anyone can wait for.

Oniguruma backtracks: `(a+)+$` takes twice as long for each further character, and ends with a panic. Two checks find
such patterns. One reads the pattern: a repeated group must not hold anything whose length varies, and few items of an
alternative may be repeated endlessly. The other matches it against runs of one character, each twice as long as the one
before, and stops when that becomes slow. Quadratic time passes, as published patterns need it for runs of digits.
"""

import time
from collections.abc import Iterator

from tokenizers import Regex
from tokenizers.pre_tokenizers import PreTokenizer, Split

from oarlock.engine.panics import ENDS_TASK

MAX_CHARACTERS = 8192
_MAX_REPEATS = 8  # of a group whose length varies
_ENDLESS = 100  # repeats that count as endless
_MAX_ENDLESS = 3  # items of one alternative that are repeated endlessly: published patterns have two
_LONGEST_RUN = 4096
# Published patterns need a millisecond for the longest run, or 30 if they look ahead over all digits. Cubic ones need
# minutes.
_LIMIT_S = 0.3
_SAMPLES = " \n\ta1A.-_'中éя"  # characters of the kinds that published patterns distinguish
_MAX_LITERALS = 32  # characters of the pattern itself that are tried besides


def fault(pattern: str) -> str | None:
    """Return the reason why `pattern` is refused, as a phrase; None if it is not."""
    if len(pattern) > MAX_CHARACTERS:
        return f"has more than {MAX_CHARACTERS} characters"
    if (found := _endless(pattern)) is not None:
        return f"{found}, which can take endlessly long"
    try:
        split = Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises bare Exception
        return f"is not a regular expression ({str(error)[:80]})"
    literals = dict.fromkeys(character for character in pattern if character.isalnum())
    tried = [*_SAMPLES, *list(literals)[:_MAX_LITERALS]]
    # The library first looks for the literals that a match must hold: they stand where they do not complete one.
    tail = "\0\n" + "".join(reversed(literals)) + "\n" + "".join(literals)
    for character in dict.fromkeys(tried):
        if _is_slow(split, character, tail):
            return f"takes too long to match a run of {character!r}"
    return None


def _is_slow(split: PreTokenizer, character: str, tail: str) -> bool:
    length = 8
    while length <= _LONGEST_RUN:
        begun = time.thread_time()
        try:
            split.pre_tokenize_str(character * length + tail)
        except BaseException as error:
            if isinstance(error, ENDS_TASK):
                raise
            return True  # it gave up after ten million steps
        if time.thread_time() - begun > _LIMIT_S:
            return True
        length *= 2
    return False


def _endless(pattern: str) -> str | None:
    """Return the construct of `pattern` for which the time of a match can grow faster than the text; None: none."""
    varies = [False]  # of each open group, the outermost first
    last_varies = False  # of the item before this place
    endless = 0  # items of this alternative
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
    """Yield the parts of a pattern: a group's beginning `(` and end `)`, `|`, quantifiers as `{n,m}`, and others."""
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
    """Return the place behind a class of characters, which may hold classes."""
    depth = 1
    at += pattern[at : at + 1] == "^"
    at += pattern[at : at + 1] == "]"
    while at < len(pattern) and depth:
        character = pattern[at]
        at += 2 if character == "\\" else 1
        depth += (character == "[") - (character == "]")
    return at


def _counted(pattern: str, start: int) -> str | None:
    """Return the quantifier `{n}`, `{n,}` or `{n,m}` at this place; None if the brace is a character."""
    quantifier = pattern[start : pattern.find("}", start) + 1]
    inside = quantifier[1:-1].replace(",", "", 1)
    return quantifier if len(quantifier) > 2 and inside.isascii() and inside.isdigit() else None
