"""Rows of the tables in `dialects.py`: parsing, the choice of a row by the value of its flag, and Markdown."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from oarlock.server.config.options import parse_count


def _adapter(text: str) -> str:
    """Return an adapter of SGLang or TGI (NAME=PATH, PATH or JSON) as a value of --lora-modules."""
    if not text.startswith("{"):
        return text if "=" in text else f"{text}={text}"
    try:
        found = json.loads(text)
        return json.dumps({"name": found["lora_name"], "path": found["lora_path"]})
    except (ValueError, KeyError, TypeError):
        return text  # the option reports the error in it


def _adapter_file(path: str) -> str:
    """Return an adapter that has no name, such as llama-server's, with the name of its file."""
    return f"{path.rpartition('/')[2].removesuffix('.gguf')}={path}"


# Placeholders that fit only some values -> (pattern of their values, conversion to ours).
_SOME: dict[str, tuple[str, Callable[[str], str]]] = {
    "count": (r"\d+[kmgtKMGT]|\d+\.\d+[kmgt]", lambda text: str(parse_count(text))),
    "number": (r"\d+", str),
    "bool": (r"(?i:true|yes|on|1|false|no|off|0)", str),
    "off": (r"(?i:false|no|off|0)", str),
    "percentile": (r"(?:50|90|99)(?:\.0+)?", str),
    "level": (r"[A-Z]+", str.lower),
    "first": (r"[^,]*", str),
    "template": (r".*/.*|.*\.(?:jinja2?|txt|json)", str),
    "address": (  # with the path of a URL
        r"(?:\[[^\]]*\]|[^:/]*|[0-9a-fA-F:]+:[0-9a-fA-F:]*)(?:/.*)?",
        lambda text: text.partition("/")[0].strip("[]") or "0.0.0.0",
    ),
    "port": (r"\d+(?:/.*)?", lambda text: text.partition("/")[0]),
    "adapter": (r".+", _adapter),
    "adapter_file": (r".+", _adapter_file),
    "hub": (r"hf\.co|huggingface\.co", str),
}
_ANY: tuple[str, Callable[[str], str]] = (r".*", str)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NAME = re.compile(r"-{1,2}[A-Za-z][\w-]*|[A-Z][A-Z0-9_]+")
Parts = dict[str, list[str]]  # placeholder -> its values


@dataclass(frozen=True, slots=True)
class Row:
    """One row of one flag. Other flags of the row in the table have rows of their own."""

    value: str  # the value that the row is for; empty: a switch
    ours: str
    note: str = ""

    def parts(self, values: Sequence[str]) -> Parts | None:
        """Return the values by placeholder, or None if the row is not for these values."""
        texts = _PLACEHOLDER.split(self.value.removesuffix("…").removesuffix(","))
        texts[::2] = [re.escape(text).replace(r"\|", "|") for text in texts[::2]]
        texts[1::2] = [f"(?P<{name}>{_SOME.get(name, _ANY)[0]})" for name in texts[1::2]]
        pattern = re.compile("".join(texts), re.DOTALL)
        if self.value.endswith(",…"):
            values = [part for value in values for part in value.split(",") if part]
        found = [match for value in values if (match := pattern.fullmatch(value))]
        if len(found) < len(values):
            return None
        return {name: [_SOME.get(name, _ANY)[1](match[name]) for match in found] for name in pattern.groupindex}


Table = dict[str, list[Row]]  # flag, variable, or "" for a word that follows no flag -> its rows


def fill(ours: str, parts: Parts) -> list[list[str]]:
    """Return our flags, each with its values, with values instead of placeholders."""
    return [_filled(flag, parts) for flag in re.split(r" (?=--)", ours)]


def _filled(flag: str, parts: Parts) -> list[str]:
    words: list[str] = []
    for word in flag.split():
        whole = _PLACEHOLDER.fullmatch(word)
        words += parts[whole[1]] if whole else [insert(word, parts)]
    return words


def insert(text: str, parts: Parts) -> str:
    return text.format(**{name: " ".join(values) for name, values in parts.items()})


def choose(rows: Sequence[Row], values: Sequence[str]) -> tuple[Row, Parts] | None:
    """Return the row for these values of a flag, and the values by placeholder. None: there is no such row."""
    if not values or not any(row.value for row in rows):
        row = next((row for row in rows if not row.value), rows[-1])
        return None if row.value and "{" not in row.value else (row, row.parts([]) or {})
    return next(((row, parts) for row in rows if row.value and (parts := row.parts(values)) is not None), None)


def known_values(rows: Sequence[Row]) -> str:
    """Return the fix for a value without a row."""
    values = ", ".join(text for row in rows for text in row.value.strip(",…").split("|") if text)
    return f"There are: {_upper(values)}."


def parse(text: str) -> Table:
    """Return the rows of each name in a table of `dialects.py`."""
    found: Table = {}
    for theirs, ours, note in _cells(text):
        for names, value in _groups(theirs):
            for name in names or [""]:
                found.setdefault(name, []).append(Row(value, ours, note))
    return found


def as_markdown(text: str) -> str:
    """Return a table of `dialects.py` for the documentation."""
    lines = ["| flag | here | note |", "|---|---|---|"]
    for theirs, ours, note in _cells(text):
        flags = [" ".join([*names, value.replace("|", " or ")]).strip() for names, value in _groups(theirs)]
        first, _, rest = ours.partition(" ")
        here = ours if first in ("the", "not", "no") else f"`{ours}`"
        if first in ("partly", "into"):
            here = f"{first} `{rest}`"
        lines.append(f"| {', '.join(f'`{flag}`' for flag in flags)} | {here} | {note} |")
    return _upper("\n".join(lines)).replace("`MODEL ", "`serve ") + "\n"


def _upper(text: str) -> str:
    return _PLACEHOLDER.sub(lambda match: match[1].upper(), text)


def _cells(text: str) -> Iterator[list[str]]:
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        yield [*line.split(" | "), ""][:3]


def _groups(theirs: str) -> Iterator[tuple[list[str], str]]:
    """Return the first cell of a row as (names, their value)."""
    names: list[str] = []
    for word in theirs.split():
        if _NAME.fullmatch(word):
            names.append(word)
        else:
            yield names, word
            names = []
    if names:
        yield names, ""
