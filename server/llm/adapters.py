"""LoRA adapters by the names that clients use as `model`: lookup, loads at run time and at first use, unloads.

Knows names and directories. Does not know HTTP, the memory of the ranks, or which adapters are in it: the engine keeps
every name that it was given, and loads and evicts the weights as requests need them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oarlock.base.errors import EXIT_RANK_DIED, StartupError
from oarlock.base.watched_reads import StalledReadError
from oarlock.engine.errors import EngineDeadError, RequestError, StalledAdapterError, UnavailableError
from oarlock.server.config.adapter_options import MAX_NAME, REPLACEMENT, why_no_name
from oarlock.server.errors import ModelNotFoundError
from oarlock.server.hub.adapter_path import AdapterPaths, FoundAdapter
from oarlock.server.hub.model_path import OnDetailedProgress
from oarlock.server.llm.generation import Engine
from oarlock.server.observability.logs import event, logger

# Codes of errors; the engine has the same.
EXISTS, NOT_FOUND, FAILED, UNLOADED = "adapter_exists", "adapter_not_found", "adapter_failed", "adapter_unloaded"
_AT_ONCE = 4  # loads that read files; `AdapterPaths` limits downloads, for which other loads do not wait
_MOST_OPEN = 32  # loads and unloads, including loads that wait for their turn
_MOST_FAILURES = 256  # failed first uses that are remembered
_RETRY_S = 5.0  # before a failed first use is tried again
_LISTING_S = 2.0  # for which the list of `--lora-dir` is awaited
_MOST_SHOWN = 20  # names in an error
_log = logger("adapters")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """One adapter as clients see it."""

    name: str
    root: str  # path or hub id that it was loaded from, as it was given
    parent: str  # name of the model that it adapts
    directory: str  # absolute path of its files
    created: int = 0  # seconds since 1970 at which it was loaded; 0: it is loaded at its first use
    digest: str = ""  # hexadecimal, of its settings and weights; "": it is not loaded


class ServedAdapters:
    """The adapters of one engine. All methods belong to one event loop."""

    def __init__(
        self, engine: Engine, model_names: Sequence[str], paths: AdapterPaths, is_model: Callable[[str], bool]
    ) -> None:
        """`model_names`: names of the model itself; the first is the parent of adapters. `is_model`: whether requests
        with a name mean the model, so that no adapter may have the name.
        """
        self._engine, self._model_names, self._paths, self.is_model = engine, tuple(model_names), paths, is_model
        self._by_name: dict[str, ServedAdapter] = {}  # loaded adapters, ordered by the times of their loads
        self._changes: dict[str, asyncio.Task[None]] = {}  # name -> its load or unload in progress
        self._loads: set[str] = set()  # names whose change is a load
        self._turns = asyncio.Semaphore(_AT_ONCE)
        # Name -> time and error of a failed first use.
        self._failures: dict[str, tuple[float, RequestError | UnavailableError]] = {}
        self._listing: asyncio.Task[dict[str, str]] | None = None  # the last reading of `--lora-dir`
        self._listed: dict[str, str] = {}  # the last list that was read
        self._is_listing_stalled = False
        self.on_unload: list[Callable[[str], object]] = []  # called with the name once the engine has forgotten it

    # -- lookup

    def loaded(self, name: str) -> ServedAdapter | None:
        """Return a loaded adapter; None if no loaded adapter has this name."""
        return self._by_name.get(name)

    async def find(self, name: str) -> ServedAdapter | None:
        """Return a loaded adapter, or an adapter that its first use would load; None if there is no such name.

        Raises `StalledAdapterError` if `--lora-dir` cannot be read for long.
        """
        found = self._by_name.get(name)
        if found is not None or not self._paths.may_have(name) or self.is_model(name):
            return found
        try:
            directory = await self._paths.read(lambda: self._paths.find(name))
        except StalledReadError as error:
            raise StalledAdapterError(name, error.path) from None
        return None if directory is None else self._by_name.get(name) or self._unloaded(name, directory)

    async def available(self) -> Sequence[ServedAdapter]:
        """Return the loaded adapters, then all adapters that a first use would load, by name.

        Calls while the directory is being read share the result, so they occupy one thread. If the disk does not
        respond soon, the result is the last list.
        """
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list_directory(), name="adapters-listing")
        await asyncio.wait((self._listing,), timeout=_LISTING_S)
        found = self._listing.result() if self._listing.done() else self._listed
        names = [name for name in found if name not in self._by_name and not self.is_model(name)]
        return [*self._by_name.values(), *(self._unloaded(name, found[name]) for name in names)]

    async def _list_directory(self) -> dict[str, str]:
        """Return name -> path of the adapters in `--lora-dir`; the last list if it cannot be read for long."""
        try:
            self._listed, self._is_listing_stalled = await self._paths.read(self._paths.all), False
        except StalledReadError as error:
            if not self._is_listing_stalled:  # reported once, not for each call
                _log.warning(event("adapters_not_listed", cause=error.cause))
            self._is_listing_stalled = True
        return self._listed

    def _unloaded(self, name: str, directory: str) -> ServedAdapter:
        return ServedAdapter(name, directory, self._model_names[0], directory)

    def list(self) -> Sequence[ServedAdapter]:
        """Return the loaded adapters, in the order of their loads."""
        return [*self._by_name.values()]

    def not_found(self, name: str) -> ModelNotFoundError:
        """Return the error for a name that is neither of a model nor of an adapter."""
        loaded = [*self._by_name]
        more = (f"and {len(loaded) - _MOST_SHOWN} more adapters",) if len(loaded) > _MOST_SHOWN else ()
        return ModelNotFoundError(name, (*self._model_names, *loaded[:_MOST_SHOWN], *more))

    # -- changes

    async def use(self, name: str) -> str:
        """Wait until the adapter is loaded, which the first use begins, and return its name for `Request.adapter`.

        Cancelling the call does not cancel the load. Raises `ModelNotFoundError`, `RequestError` if the load fails,
        `UnavailableError` if too many adapters are being loaded or the disk does not respond, and `EngineDeadError`.
        """
        while name not in self._by_name:
            if name not in self._changes:
                found = await self.find(name)
                if name in self._by_name:
                    break
                if name not in self._changes:
                    self._begin_first_use(name, found)
            await asyncio.shield(self._changes[name])
        return name

    async def load(
        self,
        name: str,
        path: str,
        base_model_name: str | None = None,
        *,
        in_place: bool = False,
        is_trusted: bool = True,
        root: str | None = None,
    ) -> ServedAdapter:
        """Load an adapter on all ranks, under a new name. Cancelling the call does not cancel the load.

        `path`: a directory, a GGUF file or a hub id. `base_model_name`: reported as parent. `in_place`: an adapter of
        this name is replaced once the new one is loaded, which ends the requests of the old one unless the content is
        the same. `is_trusted`: any path is allowed, else only paths in `--lora-dir`, and hub ids. `root`: reported in
        place of `path`. A failed load changes nothing. Raises the same errors as `use`; `param` is `lora_name` or
        `lora_path`.
        """
        self._check_name(name)
        if name in self._by_name and not in_place:
            message = f"The adapter '{name}' is already loaded. Unload it first, or set 'load_inplace' to true."
            raise RequestError(message, "lora_name", EXISTS)
        loading = self._load(name, path, base_model_name, is_trusted=is_trusted, root=root)
        await asyncio.shield(self._begin(name, loading, is_load=True))
        loaded = self._by_name.get(name)
        if loaded is None:  # another request has unloaded the adapter since
            raise _cancelled(name)
        return loaded

    async def load_at_start(self, found: Sequence[FoundAdapter], on_progress: OnDetailedProgress) -> None:
        """Load the adapters of `--lora-modules`, in their order. Raises `StartupError`."""
        for number, ((name, path, parent), directory) in enumerate(found):
            on_progress("loading adapters", number / len(found), name)
            try:
                await self.load(name, directory, parent, root=path)
            except (RequestError, UnavailableError) as error:
                fix = f"Correct or leave out the adapter {name} of --lora-modules."
                raise StartupError(error.message, fix) from None
            except EngineDeadError as error:
                cause = f"The engine has stopped while it loaded the adapter {name}: {error}"
                raise StartupError(cause, "See the lines above for the reason.", EXIT_RANK_DIED) from None

    async def unload(self, name: str) -> None:
        """Forget an adapter, and end its requests with an error that names it. A load in progress is cancelled.

        Raises `RequestError` if it is not loaded.
        """
        if name in self._loads:
            change = self._changes[name]
            await asyncio.sleep(0)  # a task that has not begun could not report its end
            if not change.cancelling():  # a second cancellation would interrupt the end of the first
                change.cancel()
            await asyncio.wait((change,))
            if name not in self._by_name:
                return
        if name not in self._by_name:
            message = f"The adapter '{_shown(name)}' is not loaded."
            raise RequestError(message, "lora_name", NOT_FOUND)
        await asyncio.shield(self._begin(name, self._remove(name), is_load=False))

    # -- one change at a time of each name

    def _begin(self, name: str, change: Coroutine[Any, Any, None], *, is_load: bool) -> asyncio.Task[None]:
        """Start a load or unload. Raises `RequestError` if the name is being changed, or `UnavailableError`."""
        if name in self._changes:
            change.close()
            message = f"The adapter '{name}' is being loaded or unloaded by another request."
            raise RequestError(message, "lora_name", EXISTS)
        if len(self._changes) >= _MOST_OPEN:
            change.close()
            message = f"{_MOST_OPEN} adapters are being loaded or unloaded. Send the request again later."
            raise UnavailableError(message, "adapters_loading")

        async def run() -> None:
            try:
                await change
            finally:  # in the last step of the task: callbacks run later, when `use` may have found a task that is done
                del self._changes[name]
                self._loads.discard(name)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                is_expected = isinstance(error, RequestError | UnavailableError)
                level = logging.WARNING if is_expected else logging.ERROR
                _log.log(level, event("adapter_failed", adapter=name, cause=str(error)))

        task = self._changes[name] = asyncio.create_task(run(), name=f"adapter-{name}")
        if is_load:
            self._loads.add(name)
        task.add_done_callback(ended)
        return task

    def _begin_first_use(self, name: str, found: ServedAdapter | None) -> None:
        failed_at, failure = self._failures.get(name, (0.0, None))
        if found is None:
            raise self.not_found(name)
        if failure is not None and time.monotonic() - failed_at < _RETRY_S:
            raise failure.with_traceback(None)
        self._begin(name, self._load_at_first_use(found), is_load=True)

    async def _load_at_first_use(self, adapter: ServedAdapter) -> None:
        name = adapter.name
        self._failures.pop(name, None)
        try:
            await self._load(name, adapter.root, None, is_trusted=False)
        except UnavailableError as error:
            self._note_failure(name, error)
            raise
        except RequestError as error:
            if error.code != NOT_FOUND:  # another request has not cancelled it
                self._note_failure(name, RequestError(error.message, "model", FAILED))
            raise RequestError(error.message, "model", error.code or FAILED) from None

    def _note_failure(self, name: str, error: RequestError | UnavailableError) -> None:
        while len(self._failures) >= _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]
        self._failures[name] = time.monotonic(), error

    async def _load(
        self, name: str, path: str, parent: str | None, *, is_trusted: bool, root: str | None = None
    ) -> None:
        try:
            directory = await self._paths.resolve(path, is_trusted=is_trusted)
            async with self._turns:
                digest = await self._add(name, directory)
        except StalledReadError as error:
            raise StalledAdapterError(name, error.path) from None
        except StartupError as error:
            raise RequestError(f"{error.cause} {error.fix}", "lora_path", FAILED) from None
        except asyncio.CancelledError:
            self._by_name.pop(name, None)  # if it was being replaced
            with suppress(RequestError, EngineDeadError):
                await self._forget(name)
            raise _cancelled(name) from None
        parent = parent or self._model_names[0]
        self._by_name[name] = ServedAdapter(name, root or path, parent, directory, int(time.time()), digest)
        _log.info(event("adapter_loaded", adapter=name, path=directory, digest=digest))

    async def _add(self, name: str, directory: str) -> str:
        """Load the adapter on all ranks and return its digest. An adapter that has the name already is replaced."""
        old, new = self._by_name.get(name), name + REPLACEMENT
        if old is None:
            await self._engine.add_adapter(name, directory)
            return await self._digest(name)
        try:
            await self._engine.add_adapter(new, directory)
            if await self._digest(new) != old.digest:
                await self._remove(name)
            # Its content is in memory already. If that is the old content, only the directory for later loads changes.
            await self._engine.add_adapter(name, directory)
        finally:
            with suppress(RequestError):  # the engine has forgotten the name if its load has failed
                await self._engine.remove_adapter(new)
        return await self._digest(name)

    async def _digest(self, name: str) -> str:
        """Return the digest of the content that the engine has under `name`; "" if it has none."""
        return next((info.digest for info in await self._engine.list_adapters() if info.name == name), "")

    async def _remove(self, name: str) -> None:
        del self._by_name[name]  # from now on requests wait for the end of this change
        await self._forget(name)

    async def _forget(self, name: str) -> None:
        num_ended = await self._engine.remove_adapter(name)
        for callback in self.on_unload:
            callback(name)
        _log.info(event("adapter_unloaded", adapter=name, requests=num_ended))

    def _check_name(self, name: str) -> None:
        """Raise `RequestError` if an adapter cannot have this name."""
        reason = why_no_name(name)
        if reason is None and self.is_model(name):
            reason = f"An adapter cannot have the name '{name}', which is the name of the model."
        if reason is not None:
            raise RequestError(reason, "lora_name")


def _cancelled(name: str) -> RequestError:
    return RequestError(
        f"The adapter '{name}' was unloaded by another request while it was loaded.", "model", NOT_FOUND
    )


def _shown(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[:MAX_NAME] + "…"
