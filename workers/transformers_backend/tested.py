"""The table of classes that were compared with transformers' own results, from `tested_classes.json`. Torch-free.

`python -m benchmarks.model_classes` writes the table. A class that is not in it is not served, however right its
structure looks.
"""

import json
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from oarlock.base.errors import StartupError

RELEASE = "5.23"  # minor version of transformers with which the classes were tested; pyproject.toml has the same
_FILE = Path(__file__).with_name("tested_classes.json")


def check_release() -> None:
    """Raise `StartupError` unless the installed transformers has the minor version that was tested."""
    found = version("transformers")
    if found.split(".")[:2] != RELEASE.split("."):
        raise StartupError(
            f"transformers {found} is installed, and its code for model classes was tested with {RELEASE} only.",
            f"Install that version: pip install 'transformers=={RELEASE}.*'",
        )


class Tested(NamedTuple):
    """The result for one class."""

    ranks: int  # largest of 1 and 2 ranks that was right; 2: a look tells whether more can divide the class
    refused: str | None  # reason why the class is not served; None: it is


@lru_cache(maxsize=1)
def tested_classes() -> dict[str, Tested]:
    """Return the results, by the names of the classes."""
    table = json.loads(_FILE.read_text("utf-8"))["classes"]
    return {name: Tested(row.get("ranks", 0), row.get("refused")) for name, row in table.items()}
