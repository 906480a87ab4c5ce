"""Resolution of LoRA adapters to files on this machine: a directory in PEFT's layout, a GGUF file, or a hub id.

The operator may name any path. Clients may name hub ids and paths in `--lora-dir`, the only directory that they can
reach: symbolic links are resolved before a path is compared with it, and an error about another path does not show
whether the path exists.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand
from oarlock.base.watched_reads import StalledReadError, WatchedReads
from oarlock.server.config.adapter_options import LoraModule, parse_lora_modules, why_no_name
from oarlock.server.config.settings import Settings
from oarlock.server.hub.local_model import HUB_ID
from oarlock.server.hub.model_path import OnDetailedProgress, download, names_model, on_hub
from oarlock.workers.adapter_digest import GGUF_SUFFIX, SETTINGS_FILE, adapter_files

T = TypeVar("T")
_MOST_LISTED = 1000
_DOWNLOADS = 2  # at a time, each in a process of its own
_LONGEST_ID = 193  # characters of a hub id
_WRITTEN = f"Give the directory that PEFT has written, with {SETTINGS_FILE}, or a GGUF file."


def _ignored(phase: str, fraction: float, detail: str) -> None:
    """Drop the progress of a download that nobody watches."""


class FoundAdapter(NamedTuple):
    """One adapter of `--lora-modules` with the absolute path of its directory or GGUF file."""

    module: LoraModule
    directory: str


async def find_start_adapters(settings: Settings, on_progress: OnDetailedProgress) -> tuple[FoundAdapter, ...]:
    """Return the adapters of `--lora-modules`, which may be fetched from the hub. Raises `StartupError`."""
    paths, found = AdapterPaths(settings), []
    for module in await paths.modules():
        try:
            found.append(FoundAdapter(module, await paths.resolve(module.path, on_progress)))
        except StartupError as error:
            raise _of_adapter(module.name, error) from None
    return tuple(found)


async def find_local_adapters(settings: Settings) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Return the name and the path of each adapter of `--lora-modules` on this machine, fetching nothing, and a note
    for each adapter of the hub that is not here. Raises `StartupError`."""
    paths, found, notes = AdapterPaths(replace(settings, offline=True)), [], []
    for name, path, _ in await paths.modules():
        try:
            found.append((name, await paths.resolve(path)))
        except StartupError as error:
            if isinstance(error, StalledReadError) or os.path.lexists(expand(path)) or not HUB_ID.fullmatch(path):
                raise _of_adapter(name, error) from None
            notes.append(f"adapter {name} is not looked at: {error.cause}")
    return tuple(found), notes


def _of_adapter(name: str, error: StartupError) -> StartupError:
    return StartupError(f"{name}: {error.cause}", error.fix, error.exit_code)


class AdapterPaths:
    """Adapters that a server can load: of this machine, and of the hub.

    Methods that are not coroutines, except `may_have`, read the disk, which may block them for ever: call them by
    `read`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._downloads = asyncio.Semaphore(_DOWNLOADS)
        self._reads = WatchedReads()

    @cached_property
    def _folder(self) -> Path | None:
        """The real path of `--lora-dir`."""
        given = self._settings.lora_dir
        return None if given is None else Path(os.path.realpath(expand(given)))

    async def read(self, function: Callable[[], T], path: str | None = None) -> T:
        """Return the result of `function`, which reads `path` (None: `--lora-dir`), from another thread.

        Raises `StalledReadError` if it takes very long, and its errors.
        """
        return await self._reads.run(lambda _: function(), path or self._settings.lora_dir or "")

    def may_have(self, name: str) -> bool:
        """Return whether `name` can be the name of an adapter in `--lora-dir`, without a look at the disk."""
        return self._settings.lora_dir is not None and _is_segment(name)

    async def modules(self) -> list[LoraModule]:
        """Return the adapters of `--lora-modules`. Raises `StartupError` for a name of the model, and for
        `--lora-dir`."""
        settings, folder = self._settings, self._settings.lora_dir
        modules = parse_lora_modules(settings.lora_modules)
        if folder is not None and not await self.read(lambda: os.path.isdir(expand(folder))):
            raise StartupError(f"--lora-dir {folder} is not a directory.", "Create it, or name another.")
        taken = next((module.name for module in modules if names_model(settings, module.name)), None)
        if taken is not None:
            raise StartupError(
                f"--lora-modules has an adapter with the name {taken}, which is the name of the model.",
                "Give the adapter another name, or the model with --served-model-name.",
            )
        return modules

    def find(self, name: str) -> str | None:
        """Return the path of the adapter `name` in `--lora-dir`; None if there is none. Reads the disk."""
        if self._folder is None or not self.may_have(name):
            return None
        try:
            return str(_inside(self._folder, name))
        except StartupError:
            return None

    def all(self) -> dict[str, str]:
        """Return name -> path of the adapters in `--lora-dir`, sorted; of a very long list, only the first."""
        found: dict[str, str] = {}
        if self._folder is None:
            return found
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder))
        except OSError:
            return found
        for name in names:
            path = self.find(name) if len(found) < _MOST_LISTED else None
            if path is not None:
                found[name] = path
        return found

    async def resolve(self, path: str, on_progress: OnDetailedProgress = _ignored, *, is_trusted: bool = True) -> str:
        """Return the absolute path of the adapter's directory or GGUF file, after fetching it if `path` is a hub id.

        `is_trusted`: the operator gives the path, which may be anywhere. Raises `StartupError`, and `StalledReadError`
        if the disk does not respond.
        """
        find: Callable[[str], Path | None] = _trusted if is_trusted else self._allowed
        try:
            found = await self.read(lambda: find(path), path if is_trusted else None)
        except OSError as error:
            raise StartupError(f"The adapter {path} cannot be read: {error.strerror}.", _WRITTEN) from None
        if found is not None:
            return str(found)
        wanted = replace(on_hub(self._settings, path, "main"), adapter_only=True)
        async with self._downloads:
            return await download(wanted, on_progress)

    def _allowed(self, path: str) -> Path | None:
        """Return the adapter that a client names by a path in `--lora-dir`, or None for a hub id."""
        is_id = len(path) <= _LONGEST_ID and HUB_ID.fullmatch(path) is not None and ".." not in path
        is_path = "\0" not in path and not path.startswith("~")
        if self._folder is not None and is_path and (not is_id or os.path.lexists(self._folder / path)):
            return _inside(self._folder, path)
        if is_id:
            return None
        if self._folder is None:
            raise StartupError(
                f"{path!r:.200} is not a hub id, and this server has no directory of adapters.",
                "Start the server with --lora-dir DIR, the directory that contains the adapter.",
            )
        raise StartupError(
            f"{path!r:.200} is neither a path in --lora-dir, nor a hub id.", "Hub ids look like org/name."
        )


def _trusted(path: str) -> Path | None:
    """Return the path of an adapter that the operator names, or None for a hub id. Raises `StartupError`, `OSError`."""
    found = expand(path)
    if os.path.lexists(found):
        real = found.resolve(strict=True)
        adapter_files(real)
        return real
    if HUB_ID.fullmatch(path) and not path.endswith(GGUF_SUFFIX):
        return None
    raise StartupError(f"The adapter {path} is neither a directory, nor a GGUF file, nor a hub id.", _WRITTEN)


def _inside(folder: Path, path: str) -> Path:
    """Return the real path of an adapter if it and its files are in `folder`. Raises `StartupError`."""
    real = Path(os.path.realpath(folder / path))
    outside = StartupError(f"{path!r:.200} is not the path of an adapter in --lora-dir.", _WRITTEN)
    if folder not in real.parents:
        raise outside
    try:
        files = adapter_files(real).paths
    except OSError:
        raise outside from None
    if not all(folder in Path(os.path.realpath(file)).parents for file in files):
        raise outside
    return real


def _is_segment(name: str) -> bool:
    """Return whether `name` can be one entry of a directory and the name of an adapter, and is not hidden."""
    return why_no_name(name) is None and not name.startswith(".") and not any(mark in name for mark in "/\\")
