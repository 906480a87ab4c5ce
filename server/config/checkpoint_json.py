"""The small files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import StartupError

# A tokenizer without tokenizer.json is made from one of these.
VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file; an empty one if there is no such file. Raises `StartupError`."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path} is not valid JSON: {error}.", "Fetch that file of the checkpoint again.") from None
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}.", "Let this user read it.") from None
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object.", "Fetch that file of the checkpoint again.")
    return value
