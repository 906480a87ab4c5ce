"""The table of docs/dependencies.md: each direct requirement, what it is for, its installed size, who maintains it.

    python -m tools.requirements_table      # measures what is installed here, and writes the table

The tests compare names, pins and purposes, and that the code imports each; sizes and names of people are those of the
day on which it was written.
"""

from __future__ import annotations

import re
from email.utils import getaddresses
from importlib.metadata import Distribution, distribution

from tests.house.rules import ROOT
from tools.made_parts import filled

PAGE = "docs/dependencies.md"
MARKER = "requirements"
# What each is for, in the order of requirements.txt.
PURPOSES = {
    "torch": "tensors, CUDA, the reference implementation of every kernel, groups of hosts",
    "transformers": "tokenizers; classes without a description; the reference of `verify` and of the tests",
    "tokenizers": "text to token ids, and back",
    "safetensors": "writing checkpoints, and reading them for the reference; the server parses headers itself",
    "numpy": "arrays of a step, token tables",
    "fastapi": "routes, and the OpenAPI document",
    "starlette": "requests, responses, middleware",
    "uvicorn": "HTTP on sockets",
    "httptools": "parsing HTTP, in the server and in `bench`",
    "uvloop": "the event loop of the server and of `bench`",
    "pydantic": "strict schemas of bodies",
    "sse-starlette": "server-sent events",
    "prometheus-client": "`/metrics`, and reading it in `top`",
    "psutil": "memory, processes and ports, in sizes and in error messages",
    "jinja2": "chat templates, in a sandbox",
    "huggingface_hub": "looking up and fetching models",
    "llguidance": "structured output: masks of grammars and schemas",
    "regex": "patterns of a checkpoint's quantisation settings, matched within a time limit",
    "rich": "Markdown and tables in `chat` and `top`",
    "shtab": "completion scripts for shells",
    "cryptography": "reading certificates before they are served",
    "msgspec": "messages between the server and the engine, and KV events",
}
_MOST_NAMES = 2


def pins() -> dict[str, str]:
    """Name -> version of requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def size_of(found: Distribution) -> int:
    """Bytes of its installed files."""
    return sum(file.size or 0 for file in found.files or ())


def maintainers(found: Distribution) -> str:
    """Who maintains it as its metadata says, else who wrote it; without addresses."""
    for field in ("Maintainer-email", "Author", "Author-email"):
        value = " ".join(found.metadata.get_all(field, [])[:1])
        named = [name for name, _ in getaddresses([value])] if field.endswith("email") else [value]
        names = [re.sub(r" \(.*", "", name) for name in named if name]
        if names:
            more = len(names) - _MOST_NAMES
            others = "" if more <= 0 else f" and {more} other{'s' if more > 1 else ''}"
            return ", ".join(names[:_MOST_NAMES]) + others
    return "-"


def repository(found: Distribution) -> str:
    """Its repository on GitHub."""
    known = [
        *found.metadata.get_all("Project-URL", []),
        *found.metadata.get_all("Home-page", []),
        *found.metadata.get_all("Description", []),
    ]
    match = re.search(r"https://github\.com/(?!sponsors/)([\w.-]+/[\w.-]+)", " ".join(known))
    return f"[{match[1]}](https://github.com/{match[1]})" if match else "-"


def table() -> str:
    """The rows, measured here."""
    rows = ["| package | what it is for | installed | who maintains it | where |", "|---|---|---:|---|---|"]
    total = 0
    for name, pin in pins().items():
        found = distribution(name)
        assert found.version.partition("+")[0] == pin, f"{name} {found.version} is installed, not {pin}"
        size = size_of(found)
        total += size
        shown = f"{size / 2**20:.2f} MiB"
        rows.append(f"| `{name}` {pin} | {PURPOSES[name]} | {shown} | {maintainers(found)} | {repository(found)} |")
    return "\n".join([*rows, f"| all {len(pins())} | | {total / 2**20:.2f} MiB | | |"])


def main() -> None:
    path = ROOT / PAGE
    path.write_text(filled(path.read_text(), MARKER, table()))


if __name__ == "__main__":
    main()
