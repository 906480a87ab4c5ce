"""Self-tests of classes that were right, remembered beside the kernels' cache. Torch-free.

A file's name is a hash of everything on which the result depends, so a changed checkpoint, setting or version is tested
again. A file that cannot be read counts as none.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import cache_home
from oarlock.workers import fingerprint
from oarlock.workers.config import WorkerConfig

_SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "block_size", "tensor_parallel_size", "device", "served_class"),
    *("attention_backend", "batch_invariant", "load_format"),
)

logger = logging.getLogger("oarlock.runner")


class Successes:
    """The file that exists if a start with the same class, checkpoint, settings and versions was right."""

    def __init__(self, architecture: str, config: WorkerConfig, facts: Callable[[], Any]) -> None:
        """Set the facts on which the start depends. `config` is resolved; `facts`: returns further ones, such as the
        kernels, after the weights are read."""
        self._architecture, self._config, self._facts = architecture, config, facts

    @cached_property
    def path(self) -> Path:
        """The file, which need not exist."""
        return _folder() / f"{success_key(self._architecture, self._config, self._facts())}.json"

    def has(self) -> bool:
        """Return whether there is such a start."""
        try:
            return self.path.stat().st_uid == os.getuid() and json.loads(self.path.read_text("utf-8"))["right"] is True
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def add(self, facts: dict[str, float]) -> None:
        """Write the file, with `facts` for readers. Only a warning is logged if it cannot be written."""
        text = json.dumps({"right": True, "class": self._architecture, **facts}, indent=1)
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, delete=False, encoding="utf-8") as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError as error:
            logger.warning("event=class_self_test_not_remembered file=%r reason=%r", str(self.path), error.strerror)


def success_key(architecture: str, config: WorkerConfig, facts: Any) -> str:
    """Return a hash of everything that decides whether the class is right with this checkpoint."""
    directory = Path(config.model_path)
    parts = [
        architecture,
        {name: getattr(config, name) for name in _SETTINGS},
        fingerprint.model_sums(directory),
        fingerprint.code_sums(directory) if config.trust_remote_code else {},
        fingerprint.versions(),
        fingerprint.sources(),
        facts,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _folder() -> Path:
    try:
        return cache_home() / "oarlock" / "classes"
    except StartupError:  # no directory is private: `add` cannot write here
        return Path(os.devnull) / "classes"
