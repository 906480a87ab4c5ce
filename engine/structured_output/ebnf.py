"""Translation of a grammar in EBNF to the Lark dialect of llguidance.

EBNF here is GBNF, the notation of llama.cpp, with the text-related extensions of XGrammar: rules of several lines, dots
in names, more escapes and `[^]`. A construct that has another meaning in Lark, or none, is refused by name.

llguidance matches the terminals of Lark greedily: the longest possible terminal wins. With `name ::= [a-z]+` as a
terminal, `name "b"` could never be finished, and of `"a" "bd" | "ab" "c"` the first half could not be written. So every
rule stays a rule, and each terminal is one character. Does not know llguidance, requests or tokens.
"""

import json
import re
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
    (?P<space> (?: \s | \#[^\n]* )+ )
  | (?P<define> ::= )
  | (?P<options> \[ [A-Za-z_]+ = [^\]\n]* \] (?= [ \t]* ::= ) )
  | (?P<text> "(?: [^"\\\n] | \\. )*" )
  | (?P<class> \[ (?: [^\]\\\n] | \\. )* \] )
  | (?P<repeat> \{ \s* (?P<least> \d+ ) \s* (?P<open> , \s* (?P<most> \d* ) )? \s* \} )
  | (?P<token> !? < [^>\n]* > )
  | (?P<ahead> \( \s* = )
  | (?P<macro> (?: TagDispatch | TokenTagDispatch | Token | ExcludeToken ) \s* \( )
  | (?P<name> [A-Za-z0-9_.-]*[A-Za-z0-9_-] )
  | (?P<sign> [()|*+?.] )
    """,
    re.VERBOSE,
)
_SIMPLE = {"n": 0x0A, "r": 0x0D, "t": 0x09, "b": 0x08, "f": 0x0C, "a": 0x07, "v": 0x0B, "0": 0x00, "e": 0x1B}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_CODE = 0x10FFFF
_EMPTY = '""'
_ANY = "/(?s:.)/"
_MAX_TIMES = 100_000


class EbnfError(ValueError):
    """Raised for a grammar that cannot be translated. The text names the line and the fix."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int
    times: tuple[int, int | None] = (0, None)


def lark_of(text: str) -> str:
    """Return the same grammar in Lark. Raises `EbnfError`, or `RecursionError` if the grammar is nested too deep."""
    return _Parser(text).grammar()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = 0
        self._names: dict[str, str] = {}  # rule names: EBNF -> Lark
        self._mentions: dict[str, int] = {}  # rule name -> index of its first mention

    def grammar(self) -> str:
        """Return all rules in Lark. The root is named `start`."""
        rules: dict[str, str] = {}
        while self._peek() is not None:
            name = self._take()
            if name.kind != "name":
                raise self._error(name.at, f"expected the name of a rule, found {name.text[:20]!r}")
            self._check_head()
            if name.text in rules:
                raise self._error(name.at, f"the rule '{name.text[:40]}' is defined twice")
            rules[name.text] = self._alternatives()
        if "root" not in rules:
            raise EbnfError("the grammar has no rule 'root', which is the start rule")
        for name, at in self._mentions.items():
            if name not in rules:
                raise self._error(at, f"the rule '{name[:40]}' is not defined")
        return "\n".join(f"{self._lark_name(name)}: {body}" for name, body in rules.items())

    def _check_head(self) -> None:
        """Take the `::=` of a rule."""
        token = self._take()
        if token.kind == "options":
            raise self._error(token.at, f"the rule option {token.text[:40]} is not supported; remove it")
        if token.kind != "define":
            raise self._error(token.at, f"expected ::= after the name of a rule, found {token.text[:20]!r}")

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._is_sign("|"):
            self._take()
            found.append(self._sequence())
        return " | ".join(found)

    def _sequence(self) -> str:
        pieces: list[str] = []
        while (token := self._peek()) is not None and not self._is_sign("|") and not self._is_sign(")"):
            if token.kind == "name" and self._begins_rule():
                break
            pieces.append(self._repeated(self._element()))
        return " ".join(pieces) or _EMPTY

    def _element(self) -> str:
        """Return Lark text that an operator may follow."""
        token = self._take()
        if token.kind == "text":
            return self._literal(token)
        if token.kind == "class":
            return self._class(token)
        if token.kind == "name":
            self._mentions.setdefault(token.text, token.at)
            return self._lark_name(token.text)
        if token.text == ".":
            return _ANY
        if token.text == "(":
            inner = self._alternatives()
            if not self._is_sign(")"):
                raise self._error(token.at, "this parenthesis is not closed")
            self._take()
            return f"({inner})"
        if token.kind == "token":
            raise self._error(
                token.at, f"{token.text[:40]} matches a token by its id or name; write its text in quotes"
            )
        if token.kind == "macro":
            name = token.text.rstrip(" (")
            raise self._error(token.at, f"{name} is not supported: a grammar describes text here; use rules")
        if token.kind == "ahead":
            raise self._error(token.at, "look-ahead (= …) is not supported; remove it")
        raise self._error(token.at, f"unexpected {token.text[:20]!r}")

    def _repeated(self, piece: str) -> str:
        token = self._peek()
        if token is None:
            return piece
        if token.kind == "sign" and token.text in "*+?":
            found = f"{piece}{self._take().text}"
        elif token.kind == "repeat":
            found = self._counted(piece, self._take())
        else:
            return piece
        again = self._peek()
        if again is not None and (again.kind == "repeat" or (again.kind == "sign" and again.text in "*+?")):
            raise self._error(again.at, "two operators follow each other; put parentheses around the first")
        return found

    def _counted(self, inner: str, token: _Token) -> str:
        least, most = token.times
        if max(least, most or 0) > _MAX_TIMES:
            raise self._error(token.at, f"more than {_MAX_TIMES} repetitions are not supported")
        if most is not None and most < least:
            raise self._error(token.at, f"{token.text} has a maximum of {most}, below its minimum of {least}")
        if most == 0:
            return _EMPTY
        return f"{inner}{{{least},{'' if most is None else most}}}"

    def _literal(self, token: _Token) -> str:
        codes = self._codes(token.text[1:-1], token.at + 1)
        letters = [json.dumps(chr(code), ensure_ascii=False) for code, _ in codes]
        return letters[0] if len(letters) == 1 else f"({' '.join(letters) or _EMPTY})"

    def _class(self, token: _Token) -> str:
        inside, at = token.text[1:-1], token.at + 1
        is_negated = inside.startswith("^")
        if is_negated:
            inside, at = inside[1:], at + 1
        if not inside:
            if is_negated:
                return _ANY
            raise self._error(token.at, "the class [] matches nothing")
        codes, parts, index = self._codes(inside, at), [], 0
        while index < len(codes):
            first = last = codes[index][0]
            if index + 2 < len(codes) and codes[index + 1] == (ord("-"), False):
                last, index = codes[index + 2][0], index + 2
            if last < first:
                raise self._error(token.at, f"a range of {token.text[:40]} ends before it begins")
            parts.append(rf"\x{{{first:x}}}" + ("" if first == last else rf"-\x{{{last:x}}}"))
            index += 1
        return f"/[{'^' if is_negated else ''}{''.join(parts)}]/"

    def _codes(self, text: str, at: int) -> list[tuple[int, bool]]:
        """Return the code points, each with whether it was escaped."""
        found: list[tuple[int, bool]] = []
        index = 0
        while index < len(text):
            if text[index] != "\\":
                found.append((ord(text[index]), False))
                index += 1
                continue
            code, length = self._escaped(text[index + 1 :], at + index)
            found.append((code, True))
            index += 1 + length
        return found

    def _escaped(self, rest: str, at: int) -> tuple[int, int]:
        """Return the code point of an escape, and its length after the backslash."""
        kind = rest[0]
        if kind in _SIMPLE:
            return _SIMPLE[kind], 1
        if kind in _HEX_DIGITS:
            length = _HEX_DIGITS[kind]
            digits = rest[1 : 1 + length]
            if re.fullmatch(rf"[0-9A-Fa-f]{{{length}}}", digits) is None:
                raise self._error(at, rf"\{kind} needs {length} hexadecimal digits")
            if kind == "x" and re.match("[0-9A-Fa-f]", rest[1 + length :]):
                # llama.cpp ends the escape after two digits, XGrammar takes all digits that follow.
                raise self._error(
                    at, rf"\x{digits} followed by another hexadecimal digit is ambiguous; write \u00{digits}"
                )
            code = int(digits, 16)
            if code > _MAX_CODE or 0xD800 <= code < 0xE000:
                raise self._error(at, rf"\{kind}{digits} is not a character")
            return code, 1 + length
        if kind.isascii() and not kind.isalnum():
            return ord(kind), 1
        raise self._error(at, rf"the escape \{kind} is not supported; write out its characters, such as [0-9] for \d")

    def _lark_name(self, name: str) -> str:
        if name not in self._names:
            readable = re.sub(r"[^a-z0-9_]", "_", name.lower())
            self._names[name] = "start" if name == "root" else f"r{len(self._names)}_{readable}"
        return self._names[name]

    def _begins_rule(self) -> bool:
        following = self._tokens[self._next + 1 : self._next + 2]
        return bool(following) and following[0].kind in ("define", "options")

    def _is_sign(self, sign: str) -> bool:
        token = self._peek()
        return token is not None and token.kind == "sign" and token.text == sign

    def _peek(self) -> _Token | None:
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def _take(self) -> _Token:
        token = self._peek()
        if token is None:
            raise EbnfError("the grammar ends within a rule")
        if token.kind == "unreadable":
            raise self._error(token.at, f"cannot read {token.text!r}")
        self._next += 1
        return token

    def _split(self) -> list[_Token]:
        found: list[_Token] = []
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                found.append(_Token("unreadable", self._text[at : at + 20], at))
                break
            kind = match.lastgroup or ""
            if kind != "space":
                times: tuple[int, int | None] = (0, None)
                if kind == "repeat":
                    least = int(match["least"])
                    times = least, least if match["open"] is None else int(match["most"]) if match["most"] else None
                found.append(_Token(kind, match[0], at, times))
            at = match.end()
        return found

    def _error(self, at: int, problem: str) -> EbnfError:
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        return EbnfError(f"line {line}, column {column}: {problem}")
