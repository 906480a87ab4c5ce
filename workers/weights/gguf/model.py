"""A model in GGUF: its settings, and its tensors by the names they have there, in one file or in several parts.

Torch-free; reads no tensor.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import Located
from oarlock.workers.weights.gguf.header import GGUFHeader, Value, read_header

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 1000


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The settings are those of the first file."""

    paths: tuple[Path, ...]
    settings: dict[str, Value]
    tensors: dict[str, Located]

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.paths[0]

    @staticmethod
    def open(path: Path) -> "GGUFModel":
        """`path`: of the only file, or of any part. Raises `StartupError` naming the file at fault."""
        paths = parts_of(path)
        headers = [read_header(part) for part in paths]
        settings = headers[0].settings
        if len(headers) == 1 and settings.get("split.count", 1) not in (0, 1):
            raise StartupError(
                f"{path} is one of {settings['split.count']} parts of a model.",
                "Give all parts the names that they were published with: NAME-00001-of-0000N.gguf.",
            )
        tensors: dict[str, Located] = {}
        for number, header in enumerate(headers):
            if len(headers) > 1:
                _check_part(header, number, len(headers))
            for name, entry in header.tensors.items():
                if name in tensors:
                    raise StartupError(
                        f"tensor {name!r} is both in {tensors[name].path.name} and in {header.path.name}.",
                        "Download the parts again; they do not belong together.",
                    )
                tensors[name] = Located(header.path, entry)
        announced = settings.get("split.tensors.count", len(tensors))
        if len(headers) > 1 and announced != len(tensors):
            raise StartupError(
                f"{paths[0]} announces {announced} tensors in {len(paths)} parts, which hold {len(tensors)}.",
                "Download the parts again; they do not belong together.",
            )
        return GGUFModel(paths, settings, tensors)


def parts_of(path: Path) -> tuple[Path, ...]:
    """`path` itself, or all parts in order where its name says that it is one of several."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MOST_PARTS:
        raise StartupError(f"{path} has the number of no part.", "Give it the name that it was published with.")
    paths = tuple(path.with_name(f"{found['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(
            f"{path} is one of {count} parts, and {missing[0]}{more} is missing beside it.",
            "Download the missing parts.",
        )
    return paths


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    found = header.settings.get("split.no", number), header.settings.get("split.count", count)
    if found != (number, count):
        raise StartupError(
            f"{header.path} says that it is part {found[0]} of {found[1]}, and its name that it is {number} of {count}"
            " (counted from 0).",
            "Give the parts the names that they were published with.",
        )
