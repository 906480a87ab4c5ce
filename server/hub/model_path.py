"""Resolution of the MODEL argument to a directory on this machine, and reading of a checkpoint's small files.

The argument is the demo model, a directory, a GGUF file or a hub id. Hub models are fetched by a separate process,
`oarlock.server.launch.fetch_model`, because threads cannot be cancelled. Its messages are lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.json_files import is_there, read_table
from oarlock.base.python_child import HUB_SECRETS, start_python
from oarlock.engine.config import EngineConfig
from oarlock.server.config.settings import Settings
from oarlock.server.hub.gguf_directory import described, gguf_model
from oarlock.server.hub.local_model import check_local, check_revision, find_local, near_path

DEMO_NAME = "oarlock-demo"
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")  # part number in the names of a model in several GGUF files
_REVISION = re.compile(r"\w[\w./-]*")


def display_name(model: str | None) -> str:
    """Return the model's name for clients, used if `--served-model-name` gives none."""
    if model is None:
        return DEMO_NAME
    if model.endswith(".gguf"):
        return Path(_PART_NUMBER.sub("", model)).stem
    return Path(model).resolve().name if os.path.isdir(model) else model


def served_names(settings: Settings) -> tuple[str, ...]:
    """Return the names that requests may use; the first is the reported name."""
    return settings.served_model_name or (display_name(settings.model),)


def names_model(settings: Settings, name: str) -> bool:
    """Return whether a request with this name means the model itself, and no adapter."""
    names = served_names(settings)
    return name in names or (settings.ignore_model_case and name.casefold() in map(str.casefold, names))


async def resolve(settings: Settings, on_progress: OnDetailedProgress, tokenizer: str | None = None) -> str:
    """Return the directory of the checkpoint. Raises `StartupError`. If cancelled, a download stops and can be resumed.

    `tokenizer`: the directory of the tokenizer, if it is not the checkpoint's own.
    """
    model = settings.model
    if model is None:
        return str(demo_directory())
    path = find_local(model, settings.download_dir)
    if path is None:
        wanted = on_hub(settings, model, _checked_revision(settings), tokenizer)
        try:
            return await download(wanted, on_progress)
        except StartupError as error:
            near = near_path(model)
            if near is None:
                raise
            fix = f"{error.fix} Or did you mean {near}, which is on this machine?"
            raise StartupError(error.cause, fix, error.exit_code) from None
    check_revision(settings)
    return _checked(path)


async def pull(settings: Settings, on_progress: OnDetailedProgress) -> str:
    """Fetch a model from the hub completely, check it, and return its directory. Raises `StartupError`."""
    model = settings.model or ""
    if not model or find_local(model, settings.download_dir) is not None:
        raise StartupError(
            f"{model or 'The demo model'} is on this machine, and not a model of the hub: nothing needs to be pulled.",
            f"`oarlock serve{f' {model}' if model else ''}` serves it.",
        )
    wanted = on_hub(settings, model, _checked_revision(settings))
    return await download(replace(wanted, check_digests=True), on_progress)


def _checked_revision(settings: Settings) -> str:
    revision = settings.revision or "main"
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise StartupError(f"--revision {revision} is not a valid revision.", "Give a branch, a tag or a full commit.")
    return revision


async def resolve_tokenizer(settings: Settings, on_progress: OnDetailedProgress) -> str | None:
    """Return the directory of the tokenizer in `--tokenizer`, or None for the model's own. Raises `StartupError`."""
    name = settings.tokenizer
    if name is None:
        return None
    path = find_local(name, settings.download_dir, "--tokenizer")
    if path is not None:
        file = gguf_model(path)
        if file is not None:
            return str(described(file))
        if path.is_dir():
            return str(path.resolve())
        raise StartupError(f"--tokenizer {path} is a file.", "Give the directory that contains the tokenizer.json.")
    wanted = replace(on_hub(settings, name, "main"), tokenizer_only=True)
    return await download(wanted, on_progress)


def on_hub(settings: Settings, model: str, revision: str, tokenizer: str | None = None) -> HubModel:
    """Return the request for a model of the hub. `tokenizer`: as in `resolve`."""
    return HubModel(
        model,
        revision,
        settings.download_dir,
        settings.offline,
        settings.engine_config(""),
        tokenizer=tokenizer,
        chat_template=settings.chat_template,
        runner=settings.runner,
    )


def _checked(path: Path) -> str:
    """Return `path` if it may be a checkpoint's directory; for a GGUF model, the directory that describes it."""
    check_local(path)
    file = gguf_model(path)
    return str(path.resolve()) if file is None else str(described(file))


def demo_directory() -> Path:
    """Return the model shipped with Oarlock: next to the packages in a checkout, under `share` in an installation."""
    candidates = [
        Path(__file__).resolve().parents[2] / "models" / DEMO_NAME,
        Path(sys.prefix) / "share" / "oarlock" / "models" / DEMO_NAME,
    ]
    for candidate in candidates:
        if (candidate / "config.json").is_file():
            return candidate
    raise StartupError(
        f"The demo model is not installed (looked in {candidates[0]} and {candidates[1]}).",
        "Give a model: oarlock serve Qwen/Qwen2.5-0.5B-Instruct",
    )


# Files from which a tokenizer without tokenizer.json can be made.
VOCABULARY_FILES = (
    "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model",
)  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in this file, or an empty object if there is no such file. Raises `StartupError`."""
    return read_table(path) if is_there(path) else {}


OnDetailedProgress = Callable[[str, float, str], object]  # phase, fraction, detail


@dataclass(frozen=True, slots=True)
class HubModel:
    """The model to fetch, and the configuration to check it against before its weights are fetched."""

    model: str
    revision: str
    download_dir: str | None  # None: the cache of `huggingface_hub`
    offline: bool
    engine: EngineConfig  # its `model_path` is still unknown
    tokenizer: str | None = None  # directory of the tokenizer in use; None: the model's own
    chat_template: str | None = None  # file of the chat template in use; None: the tokenizer's
    check_digests: bool = False  # check the files that are already here, and fetch damaged files again
    runner: str = "auto"  # the `--runner` with which it will be served
    tokenizer_only: bool = False  # fetch only the small files of the model
    adapter_only: bool = False  # it is a LoRA adapter: fetch its settings and weights

    def to_json(self) -> str:
        plain = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "engine"}
        return json.dumps(plain | {"engine": self.engine.to_json()})

    @staticmethod
    def from_json(text: str | bytes) -> HubModel:
        plain = json.loads(text)
        return HubModel(**plain | {"engine": EngineConfig.from_json(plain["engine"])})


async def download(request: HubModel, on_progress: OnDetailedProgress) -> str:
    """Return the model's directory. Raises `StartupError`. If cancelled, ends the process and keeps partial files."""
    ours, theirs = socket.socketpair()  # closing our end makes the process end, even if this process is killed
    with theirs:
        process = start_python(
            ["-m", "oarlock.server.launch.fetch_model", "--fd", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            secrets=HUB_SECRETS,
        )
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(request.to_json().encode() + b"\n")
        async for line in reader:
            message = json.loads(line)
            if message["kind"] == "progress":
                on_progress(message["phase"], message["fraction"], message["detail"])
            elif message["kind"] == "failed":
                raise StartupError(message["cause"], message["fix"], message["exit_code"])
            elif message["kind"] == "done":
                return message["directory"]
        raise _unexpected_end(request.model, process.wait())
    finally:
        process.kill()
        process.wait()
        (writer or ours).close()


def _unexpected_end(model: str, status: int) -> StartupError:
    how = f"exit code {status}" if status >= 0 else f"it was killed by {signal.Signals(-status).name}"
    return StartupError(
        f"The process that fetches {model} ended unexpectedly ({how}).",
        "See the lines above, if there are any. Start again: files that have arrived are kept.",
    )
