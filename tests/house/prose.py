"""Measure how plain the prose of the repository is: rates of the words that readers stumbled over.

The limits are a thermometer. They hold for the docstrings and comments of the product and for the pages separately.

Run `python -m tests.house.prose` for the table, or `python -m tests.house.prose PATH ...` for the rates of files or
folders and for each place that counts against them.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.rules import PACKAGES, ROOT
from tools.made_parts import hand_written

PER_WORDS = 10_000


@dataclass(frozen=True)
class Pattern:
    """One kind of wording, and the most (or for `is_least` the least) of it per `PER_WORDS` words."""

    name: str
    words: str  # a regular expression
    limit: float
    is_least: bool = False

    def found(self, text: str) -> list[str]:
        """Return the words of this kind in a text without its code."""
        return [match.group() for match in re.finditer(rf"\b(?:{self.words})", _CODE.sub(" ", text), re.IGNORECASE)]


PATTERNS = (
    Pattern("if", r"if\b", 60, is_least=True),
    Pattern("what-clause", r"what(?:ever)?\b(?![^.]*\?)", 6),
    Pattern(
        "pronoun and relative",
        r"(?:those|ones?|these) (?:that|which|who|whose|of|in|with|without|from|for)\b|that of\b|who(?:m?)ever\b",
        8,
    ),
    Pattern("where", r"where\b", 12),
    Pattern("lie, stand", r"(?:lies?|lay|lain|lying|stands?|stood|standing)\b", 1),
    Pattern(
        "software that speaks",
        r"(?:says?|said|saying|tells?|told|telling|hears?|heard|speaks?|spoken?|obeys?|obeyed|promises?|promised)\b",
        5,
    ),
    Pattern("alone", r"alone\b", 2),
)
MAX_DETACHED_PERCENT = 5.0
# A comment that begins so, and has no verb before its first comma, names no subject.
_DETACHED = re.compile(
    r"(?:of|for|in|by|with|without|from|to|at|on|as|before|after|beyond|until|between|behind|beside|under|over|per|"
    r"plus|during|through|against|into|not|and|or|but|else|also|so|since|than|which|whose|that)\b",
    re.IGNORECASE,
)
_CODE = re.compile(r"`[^`]*`|\bhttps?://\S+")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Prose:
    """One docstring, comment or paragraph."""

    place: str  # path:line, or the name of a page
    text: str
    is_comment: bool


def of_python(source: str, file: str) -> Iterator[Prose]:
    """Yield every docstring, and every comment: lines of comments that follow each other are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Prose(f"{file}:{getattr(node, 'lineno', 1)}", text, is_comment=False)
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# type:", "# noqa", "# ty:")):
            comments[token.start[0]] = (bool(token.line[: token.start[1]].strip()), token.string.lstrip("# "))
    yield from _joined(comments, file)


def of_cpp(source: str, file: str) -> Iterator[Prose]:
    """Yield every comment of C++; lines of `//` that follow each other are one."""
    parts = {number: line.partition("//") for number, line in enumerate(source.splitlines(), 1)}
    comments = {number: (bool(part[0].strip()), part[2].strip(" /")) for number, part in parts.items() if part[1]}
    yield from _joined(comments, file)


def _joined(comments: dict[int, tuple[bool, str]], file: str) -> Iterator[Prose]:
    """Yield comments by line, given as (is behind code, text); a comment behind code is joined with no other."""
    lines: list[str] = []
    for number, (is_behind_code, text) in comments.items():
        lines.append(text)
        if is_behind_code or comments.get(number + 1, (True, ""))[0]:
            yield Prose(f"{file}:{number - len(lines) + 1}", " ".join(lines), is_comment=True)
            lines = []


def product(paths: Iterable[Path] = tuple(ROOT / name for name in PACKAGES)) -> list[Prose]:
    """Return the prose of the Python and C++ files at and below these paths."""
    inside = [path for top in paths for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    found: list[Prose] = []
    for path in inside:
        if path.suffix in {".py", ".h", ".cpp", ".c"}:
            read = of_python if path.suffix == ".py" else of_cpp
            found += read(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    return found


def pages() -> list[Prose]:
    """Return the lines of every page, without fenced code and the parts that are made from the code."""
    found: list[Prose] = []
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]):
        text = re.sub(r"^ *```.*?^ *```$", "", hand_written(path.read_text("utf-8")), flags=re.MULTILINE | re.DOTALL)
        found += [Prose(path.name, line, is_comment=False) for line in text.splitlines() if line.strip()]
    return found


def num_words(prose: list[Prose]) -> int:
    """Return the number of words without code."""
    return sum(len(_WORD.findall(_CODE.sub(" ", one.text))) for one in prose)


def rates(prose: list[Prose]) -> dict[str, float]:
    """Return the rate of each pattern per `PER_WORDS` words, and the share of detached comments in percent."""
    words = max(num_words(prose), 1)
    counts = {p.name: sum(len(p.found(one.text)) for one in prose) for p in PATTERNS}
    comments = [one for one in prose if one.is_comment]
    detached = 100 * sum(map(is_detached, comments)) / max(len(comments), 1)
    return {name: PER_WORDS * count / words for name, count in counts.items()} | {"detached comments": detached}


def is_detached(one: Prose) -> bool:
    """Return whether a comment begins with a preposition or a conjunction in lower case, so that it has no subject."""
    begins = _DETACHED.match(one.text)
    return one.is_comment and begins is not None and begins.group()[0].islower()


def beyond_the_limits(found: dict[str, float]) -> list[str]:
    """Return one line for each rate that is beyond its limit."""
    limits = {one.name: (one.limit, one.is_least) for one in PATTERNS} | {
        "detached comments": (MAX_DETACHED_PERCENT, False)
    }
    return [
        f"{name}: {rate:.1f}, {'at least' if is_least else 'at most'} {limit:g}"
        for name, rate in found.items()
        for limit, is_least in [limits[name]]
        if (rate < limit if is_least else rate > limit)
    ]


def main(arguments: list[str]) -> int:
    """Print the rates; with paths, also each place that counts against them."""
    if arguments:
        prose = product(Path(name).resolve() for name in arguments)
        for one in prose:
            hits = [p.name for p in PATTERNS if not p.is_least and p.found(one.text)]
            hits += ["detached"] if is_detached(one) else []
            if hits:
                print(f"{one.place}: {', '.join(hits)}: {' '.join(one.text.split())[:160]}")
        parts = {"these files": prose}
    else:
        parts = {"product": product(), "pages": pages()}
    for name, prose in parts.items():
        found = rates(prose)
        print(f"\n{name}: {num_words(prose)} words")
        print("\n".join(f"  {pattern:24}{rate:8.1f}" for pattern, rate in found.items()))
        print("\n".join(f"  beyond: {line}" for line in beyond_the_limits(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
