"""Find faults of Markdown that a reader sees and no other program reports: tables, lists and fences that wrapping has
broken, anchors that do not exist, and links whose label names another file than their target.

Pages are parsed by `markdown-it-py`, which comes with `rich`, as CommonMark with GitHub's tables.
"""

import itertools
import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.house.rules import ROOT

_PARSER = MarkdownIt("commonmark").enable("table")
_RULE_OF_TABLE = re.compile(r"\|\s*:?-{3,}")
_FILE_NAME = re.compile(
    r"[\w./-]*\w\.(md|py|toml|yml|yaml|json|jsonl|sh|html|txt|lock|h|cpp)|[\w.-]+(/[\w.-]+)*/|Makefile|Dockerfile"
)


def pages() -> list[Path]:
    """Return every page of the repository."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def faults(text: str) -> list[str]:
    """Return the faults of a page's own text, each with the number of its line."""
    lines = text.splitlines()
    found: list[tuple[int, str]] = []
    tokens = _PARSER.parse(text)
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "inline" and token.map is not None:
            is_cell = before is not None and before.type in ("td_open", "th_open")
            found += [(token.map[0], fault) for fault in _text_faults(token, is_cell=is_cell)]
        elif token.type == "fence":
            found += _fence_faults(token, lines)
        elif token.type == "table_open":
            found += _table_faults(token, lines)
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            found += _list_faults(token, lines)
    return [f"{number + 1}: {fault}" for number, fault in sorted(found)]


def _text_faults(token: Token, *, is_cell: bool) -> Iterator[str]:
    """Yield the faults of a paragraph, a heading or a cell; code spans are not looked at."""
    children = token.children or []
    words = "".join(" " if child.type == "code_inline" else child.content or "\n" for child in children)
    if _RULE_OF_TABLE.search(token.content) and _RULE_OF_TABLE.search(words):
        yield "a table was wrapped into a paragraph"
    elif any(line.lstrip().startswith("|") for line in words.splitlines()):
        yield "a row of a table is text"
    if re.search(r"(^|\s)#{2,6}\s+\w", words) or re.search(r"^#+[^\W\d_]", words, re.M):
        yield "a heading is inside a paragraph"
    if not is_cell and re.search(r"\s\*\s+\S", words):
        yield "an item of a list is inside a paragraph"
    if "](" in words or re.search(r"\]\[\w", words):
        yield "a link is text"
    if "```" in words:
        yield "a code fence is inside a paragraph"


def _fence_faults(token: Token, lines: list[str]) -> Iterator[tuple[int, str]]:
    assert token.map is not None
    first, end = token.map
    last = re.sub(r"^[\s>]*", "", lines[end - 1]).rstrip()
    if end - first < 2 or set(last) != {token.markup[0]} or len(last) < len(token.markup):
        yield first, "a code fence is not closed"


def _table_faults(token: Token, lines: list[str]) -> Iterator[tuple[int, str]]:
    assert token.map is not None
    counts = {number: _cells(lines[number]) for number in range(*token.map)}
    for number, count in counts.items():
        if count != counts[token.map[0]]:
            yield number, f"a row has {count} cells, the head of its table {counts[token.map[0]]}"


def _cells(row: str) -> int:
    row = row.strip().replace("\\|", "")
    return len(row.removeprefix("|").removesuffix("|").split("|"))


def _list_faults(token: Token, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield a list at the margin that begins without an empty line: wrapping put a dash or a number there."""
    assert token.map is not None
    first = token.map[0]
    if (
        token.level == 0
        and first
        and lines[first - 1].strip()
        and not lines[first - 1].startswith(("#", "<!--", "```"))
    ):
        yield first, "a list begins in the middle of a paragraph"


@cache
def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: set[str] = set()
    tokens = _PARSER.parse(text)
    for before, token in itertools.pairwise(tokens):
        if before.type == "heading_open":
            words = "".join(child.content for child in token.children or [])
            kept = [c for c in words.lower() if c in " -_" or unicodedata.category(c)[0] in "LN"]
            name = "".join(kept).strip().replace(" ", "-")
            again = next(n for n in range(len(tokens)) if (f"{name}-{n}" if n else name) not in found)
            found.add(f"{name}-{again}" if again else name)
    return found | set(re.findall(r'<a (?:name|id)="([^"]+)"', text))


def links(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, label, target) of every link and picture of a page."""
    for token in _PARSER.parse(text):
        if token.type != "inline" or token.map is None:
            continue
        target, label = None, ""
        for child in token.children or []:
            if child.type == "image":
                yield token.map[0] + 1, "", str(child.attrs["src"])
            elif child.type == "link_open":
                target, label = str(child.attrs["href"]), ""
            elif child.type == "link_close" and target is not None:
                yield token.map[0] + 1, label, target
                target = None
            else:
                label += child.content


def link_faults(page: Path, text: str) -> list[str]:
    """Return the links of `page` that lead nowhere, or to another file than their label names."""
    found = []
    for line, label, target in links(text):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            found.append(f"{line}: {target} does not exist")
            continue
        if anchor and path.suffix == ".md" and anchor not in anchors(text if path == page else path.read_text("utf-8")):
            found.append(f"{line}: {target}: no heading has this anchor")
        if _FILE_NAME.fullmatch(label) and not _names(label, path):
            found.append(f"{line}: the label {label} leads to {target}")
    return found


def _names(label: str, path: Path) -> bool:
    """Whether a label that looks like a file's name is the end of this path, or of its folder."""
    folder = f"/{path.parent.as_posix()}" if label.endswith("/") and path.is_file() else f"/{path.as_posix()}"
    return folder.endswith(f"/{label.strip('./')}")
