"""Whether this version serves a model, by its `config.json` or the settings of its GGUF file: reads neither weights nor
tokenizer, so the answer takes a fraction of a second.
"""

from dataclasses import dataclass
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import Settings
from oarlock.server.hub.gguf_directory import gguf_model
from oarlock.server.hub.local_model import cached_snapshot, check_local, find_local
from oarlock.server.hub.model_path import demo_directory
from oarlock.workers.catalogue import served_as


@dataclass(frozen=True, slots=True)
class Description:
    """The class that describes or computes a model; or cause and fix, if none does."""

    text: str
    fix: str = ""  # empty if the model is served

    @property
    def line(self) -> str:
        return f"refused: {self.text} {self.fix}" if self.fix else f"served: {self.text}"


def description(settings: Settings) -> Description | None:
    """Return the description of the model of `settings`, or None if no file of it is on this machine."""
    try:
        path = _path(settings)
        if path is None:
            return None
        return Description(served_as(settings.engine_config(str(path)).worker, gguf_model(path)))
    except StartupError as error:
        return Description(error.cause, error.fix)


def _path(settings: Settings) -> Path | None:
    """Return the directory or the GGUF file of the model."""
    if settings.model is None:
        return demo_directory()
    path = find_local(settings.model, settings.download_dir)
    if path is None:
        snapshot = cached_snapshot(settings.model, settings.revision or "main", settings.download_dir)
        return snapshot if snapshot is not None and (snapshot / "config.json").exists() else None
    check_local(path)
    return path
