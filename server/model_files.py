"""From the MODEL argument to a directory on this machine: the demo model, a directory, or a hub id.

Only weights in safetensors, JSON and tokenizer files are ever fetched: nothing that could run code. Knows the layout of
a checkpoint folder's names, not their content.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from server.settings import Settings

DEMO_NAME = "oarlock-demo"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")
_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
_IGNORED = ["*/*", "*.bin", "*.pt", "*.pth", "*.pkl", "*.py"]  # subfolders hold other formats of the same weights


def display_name(model: str | None) -> str:
    """What clients call the model when no name was given."""
    return DEMO_NAME if model is None else (Path(model).resolve().name if Path(model).is_dir() else model)


def served_names(settings: Settings) -> tuple[str, ...]:
    """The names that requests may use; the first is the one reported."""
    return settings.served_model_name or (display_name(settings.model),)


def resolve(model: str | None, on_progress: Callable[[str, float], None]) -> str:
    """The directory of the checkpoint. Raises `StartupError`."""
    if model is None:
        return str(_demo())
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise StartupError(
                f"The directory {path} holds no config.json.", "Give a checkpoint in the Hugging Face layout."
            )
        return str(path.resolve())
    if path.exists():
        raise StartupError(f"{path} is a file.", "Give the directory of the checkpoint, not one of its files.")
    if not _HUB_ID.fullmatch(model):
        raise StartupError(
            f"{model} is neither a directory nor a hub id.",
            "Check the path; hub ids look like Qwen/Qwen2.5-0.5B-Instruct.",
        )
    return _download(model, on_progress)


def _demo() -> Path:
    """The model that ships with Oarlock: beside the packages in a checkout, under `share` in an installation."""
    candidates = [
        Path(__file__).resolve().parent.parent / "models" / DEMO_NAME,
        Path(sys.prefix) / "share" / "oarlock" / "models" / DEMO_NAME,
    ]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise StartupError(
        f"The demo model is not installed (looked in {candidates[0]} and {candidates[1]}).",
        "Name a model: oarlock serve Qwen/Qwen2.5-0.5B-Instruct",
    )


def _download(model: str, on_progress: Callable[[str, float], None]) -> str:
    """The snapshot of a hub repository, from the cache when it is there."""
    from huggingface_hub import snapshot_download  # slow to import, and a directory needs none of it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    on_progress(f"fetching {model}", 0.0)
    try:
        path = snapshot_download(
            model, allow_patterns=_PATTERNS, ignore_patterns=_IGNORED, tqdm_class=_progress_bar(model, on_progress)
        )
    except RepositoryNotFoundError:
        raise StartupError(
            f"{model} is neither a directory here nor a model on the hub.",
            "Check the spelling; for a private or gated model set HF_TOKEN.",
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        detail = " ".join(str(error).split())[:160]
        raise StartupError(
            f"{model} is neither a directory here nor a model that can be fetched from the hub ({detail}).",
            "Check the name and the network, or give a local directory.",
        ) from None
    if not (Path(path) / "config.json").is_file():
        raise StartupError(f"{model} has no config.json.", "Name a model in the transformers format.")
    return path


def _progress_bar(model: str, on_progress: Callable[[str, float], None]) -> Any:
    """The library reports through a tqdm class; ours passes the fraction on and prints nothing."""
    from tqdm.std import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            result = super().update(n)
            if self.total:
                on_progress(f"fetching {model}", min(1.0, self.n / self.total))
            return result

    return Bar


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        return None
