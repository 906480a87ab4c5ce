"""The small files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oarlock.engine.preflight import is_there, read_table

# A tokenizer without tokenizer.json is made from one of these.
VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file; an empty one if there is no such file. Raises `StartupError`."""
    return read_table(path) if is_there(path) else {}
