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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.rules import PACKAGES, ROOT

PER_WORDS = 10_000


@dataclass(frozen=True)
class Pattern:
    """One kind of wording, and the most (or for `is_least` the least) of it per `PER_WORDS` words."""

    name: str
    found: re.Pattern[str]
    limit: float
    is_least: bool = False


PATTERNS = (
    Pattern("if", re.compile(r"\bif\b", re.IGNORECASE), 60, is_least=True),
    Pattern("what-clause", re.compile(r"\bwhat(?:ever)?\b(?![^.]*\?)", re.IGNORECASE), 6),
    Pattern(
        "pronoun and relative",
        re.compile(
            r"\b(?:those|ones?|these) (?:that|which|who|whose|of|in|with|without|from|for)\b|\bthat of\b"
            r"|\b(?:whoever|whomever)\b",
            re.IGNORECASE,
        ),
        8,
    ),
    Pattern("where", re.compile(r"\bwhere\b", re.IGNORECASE), 12),
    Pattern("lie, stand", re.compile(r"\b(?:lies?|lay|lain|lying|stands?|stood|standing)\b", re.IGNORECASE), 1),
    Pattern(
        "software that speaks",
        re.compile(
            r"\b(?:says?|said|saying|tells?|told|telling|hears?|heard|speaks?|spoken?|obeys?|obeyed|promises?|promised)\b",
            re.IGNORECASE,
        ),
        5,
    ),
    Pattern("alone", re.compile(r"\balone\b", re.IGNORECASE), 2),
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

    place: str  # path:line
    text: str
    is_comment: bool


def of_python(source: str, file: str) -> Iterator[Prose]:
    """Every docstring, and every comment: lines of comments that follow each other are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Prose(f"{file}:{getattr(node, 'lineno', 1)}", text, is_comment=False)
    begun: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("#!", "# type:", "# noqa", "# ty:")):
            continue
        is_own_line = not token.line[: token.start[1]].strip()
        if begun and (not is_own_line or token.start[0] != last + 1):
            yield Prose(f"{file}:{first}", " ".join(begun), is_comment=True)
            begun = []
        first = first if begun else token.start[0]
        begun.append(token.string.lstrip("# "))
        last = token.start[0] if is_own_line else -1
    if begun:
        yield Prose(f"{file}:{first}", " ".join(begun), is_comment=True)


def of_cpp(source: str, file: str) -> Iterator[Prose]:
    """Every comment of C++; lines of `//` that follow each other are one."""
    begun: list[str] = []
    first = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        before, mark, text = line.partition("//")
        if begun and (not mark or before.strip()):
            yield Prose(f"{file}:{first}", " ".join(begun), is_comment=True)
            begun = []
        if mark:
            first = first if begun else number
            begun.append(text.strip(" /"))
            if before.strip():
                yield Prose(f"{file}:{first}", " ".join(begun), is_comment=True)
                begun = []


def of_page(text: str, file: str) -> Iterator[Prose]:
    """Every paragraph, list item and row of a table that is outside of fenced code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.strip():
            yield Prose(f"{file}:{number}", line, is_comment=False)


def product(paths: list[Path]) -> list[Prose]:
    """The prose of these Python and C++ files."""
    found: list[Prose] = []
    for path in paths:
        read = of_python if path.suffix == ".py" else of_cpp
        found += read(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    return found


def product_files(folders: list[Path]) -> list[Path]:
    """The files of the product in these folders, sorted; a file stands for itself."""
    endings = {".py", ".h", ".cpp", ".c"}
    inside = [path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*"))]
    return sorted(path for path in inside if path.suffix in endings and "__pycache__" not in path.parts)


def pages() -> list[Prose]:
    """The prose of every page, without the paragraphs that are made from the code."""
    from tests.house.documents import hand_written

    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [one for path in sorted(files) for one in of_page(hand_written(path.read_text("utf-8")), path.name)]


def num_words(prose: list[Prose]) -> int:
    """Return the number of words without code."""
    return sum(len(_WORD.findall(_CODE.sub(" ", one.text))) for one in prose)


def rates(prose: list[Prose]) -> dict[str, float]:
    """Return the rate of each pattern per `PER_WORDS` words, and the share of detached comments in percent."""
    words = max(num_words(prose), 1)
    counts = {p.name: sum(len(p.found.findall(_CODE.sub(" ", one.text))) for one in prose) for p in PATTERNS}
    comments = [one for one in prose if one.is_comment]
    detached = 100 * sum(map(is_detached, comments)) / max(len(comments), 1)
    return {name: PER_WORDS * count / words for name, count in counts.items()} | {"detached comments": detached}


def is_detached(one: Prose) -> bool:
    """Whether a comment begins with a preposition or a conjunction in lower case, so that it has no subject."""
    begins = _DETACHED.match(one.text)
    return one.is_comment and begins is not None and begins.group()[0].islower()


def beyond_the_limits(found: dict[str, float]) -> list[str]:
    """Return one line for each rate that is beyond its limit."""
    limits = {pattern.name: pattern for pattern in PATTERNS}
    late = []
    for name, rate in found.items():
        limit = limits[name].limit if name in limits else MAX_DETACHED_PERCENT
        is_least = name in limits and limits[name].is_least
        if (rate < limit) if is_least else (rate > limit):
            late.append(f"{name}: {rate:.1f}, {'at least' if is_least else 'at most'} {limit:g}")
    return late


def main(arguments: list[str]) -> int:
    """Print the rates; with paths, also each place that counts against them."""
    if arguments:
        prose = product(product_files([Path(name).resolve() for name in arguments]))
        for one in prose:
            text = _CODE.sub(" ", one.text)
            hits = [p.name for p in PATTERNS if not p.is_least and p.found.search(text)]
            hits += ["detached"] if is_detached(one) else []
            if hits:
                print(f"{one.place}: {', '.join(hits)}: {' '.join(one.text.split())[:160]}")
        parts = {"these files": prose}
    else:
        parts = {"product": product(product_files([ROOT / name for name in PACKAGES])), "pages": pages()}
    for name, prose in parts.items():
        found = rates(prose)
        print(f"\n{name}: {num_words(prose)} words")
        print("\n".join(f"  {pattern:24}{rate:8.1f}" for pattern, rate in found.items()))
        print("\n".join(f"  beyond: {line}" for line in beyond_the_limits(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
