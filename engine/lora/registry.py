"""Registry of LoRA adapters: names, contents, and the commands that move them into the memory of the ranks and out.

A name refers to a content, which its digest identifies; several names may have one content. A content is on disk, is
being loaded, or is in the host memory of all ranks, which holds a limited number; there it may also be in a slot
(`oarlock.engine.lora.slots`). Commands are collected for the next step and run on the ranks in its order, so a command
may rely on all earlier ones, and on no result: only a preparation may fail, and its report is awaited.

Pure: no clock, no files. Does not know requests or the reasons for which an adapter is loaded or leaves.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from oarlock.engine.errors import RequestError, StalledAdapterError
from oarlock.workers.adapters import (
    MAX_DIRECTORY_BYTES,
    MAX_LOADING,
    MAX_NAME_BYTES,
    NO_SLOT,
    STALLED,
    AdapterCommand,
    AdapterReport,
    CommandKind,
)

# Interval at which ranks are asked for the end of preparations, if no step is slower. It grows to about 5 % of the time
# since the last load began, so that a file that is read slowly, or never, costs little.
POLL_S, MAX_POLL_S, POLL_GROWTH = 0.005, 0.5, 1.05
UNKNOWN, IN_USE, FAILED, UNLOADED = "adapter_not_found", "adapter_exists", "adapter_failed", "adapter_unloaded"


LoadError = RequestError | StalledAdapterError


class AdapterState(StrEnum):
    """Memory that contains an adapter."""

    ON_DISK = "on_disk"  # only its directory
    LOADING = "loading"
    READY = "ready"  # in the host memory of every rank; `Adapter.slot` shows whether it is in a slot as well


@dataclass(slots=True, eq=False)
class Adapter:
    """One content, under all of its names."""

    digest: str
    directory: str  # of the name that was added last: directories of names that were removed may be gone
    names: dict[str, str] = field(default_factory=dict)  # name -> directory, ordered by the times of their addition
    loaded_names: set[str] = field(default_factory=set)  # names of which a load has succeeded
    state: AdapterState = AdapterState.ON_DISK
    slot: int = NO_SLOT
    last_used: int = 0  # grows with each use of any adapter
    prepared_at: int | None = None  # step with its PREPARE; None: that was not sent yet

    def rename(self, names: dict[str, str]) -> None:
        """Replace the names and their directories."""
        self.names = names
        self.directory = next(reversed(names.values()), self.directory)


class AdapterRegistry:
    """Names and contents of one engine's adapters, and the commands for its next step."""

    def __init__(self, max_in_host_memory: int) -> None:
        """`max_in_host_memory`: adapters that fit into the host memory of a rank, including adapters being loaded."""
        self.max_in_host_memory = max_in_host_memory
        self._by_name: dict[str, Adapter] = {}
        self._by_digest: dict[str, Adapter] = {}
        self.commands: list[AdapterCommand] = []  # commands of the next step
        self.num_loading = 0
        self.num_ready = 0
        self.outcomes: list[tuple[str, LoadError | None]] = []  # (name, error) of each load that has ended, until taken
        self.num_loads = self.num_failures = self.num_evictions = self.num_puts = 0
        self._num_uses = 0
        self.next_poll_s = 0.0
        self._poll_s = POLL_S

    # -- names

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._by_name)

    @property
    def by_name(self) -> dict[str, Adapter]:
        """Adapters by name, in the order in which the names were added. Must not be changed."""
        return self._by_name

    def resolve(self, name: str) -> Adapter:
        """Return the adapter that `name` refers to now. Raises `RequestError`."""
        adapter = self._by_name.get(name)
        if adapter is None:
            raise RequestError(f"There is no adapter {name!r}. It was never loaded, or was unloaded.", "model", UNKNOWN)
        return adapter

    def add(self, name: str, digest: str, directory: str) -> Adapter:
        """Let `name` refer to the content `digest`, which later loads read from `directory`.

        Raises `RequestError` if the name is taken by another content, or is too long.
        """
        size = len(name.encode(errors="replace"))
        if not name or "\0" in name or size > MAX_NAME_BYTES:
            raise RequestError(f"The name of an adapter has 1 to {MAX_NAME_BYTES} bytes, not {size}.", "lora_name")
        if len(directory.encode(errors="surrogateescape")) > MAX_DIRECTORY_BYTES:
            raise RequestError(f"The path of {name!r} is longer than {MAX_DIRECTORY_BYTES} bytes.", "lora_path")
        adapter = self._by_name.get(name)
        if adapter is not None and adapter.digest != digest:
            raise RequestError(
                f"The name {name!r} is taken by another adapter. Unload it first, or use another name.",
                "lora_name",
                IN_USE,
            )
        if adapter is None:
            adapter = self._by_name[name] = self._by_digest.setdefault(digest, Adapter(digest, directory))
            if adapter.state is AdapterState.READY:
                adapter.loaded_names.add(name)
        adapter.rename({other: path for other, path in adapter.names.items() if other != name} | {name: directory})
        return adapter

    def remove(self, name: str) -> Adapter:
        """Forget `name`. If it was the last one, its content leaves the ranks; its slot must have been emptied before.

        Raises `RequestError` if the name is not known.
        """
        adapter = self.resolve(name)
        del self._by_name[name]
        adapter.rename({other: path for other, path in adapter.names.items() if other != name})
        adapter.loaded_names.discard(name)
        if adapter.state is not AdapterState.READY:
            self.outcomes.append((name, load_error(name, adapter, "it was unloaded before it was loaded")))
        if not adapter.names:
            if adapter.state is not AdapterState.ON_DISK:
                self._drop(adapter)
            del self._by_digest[adapter.digest]
        return adapter

    # -- memory

    @property
    def is_full(self) -> bool:
        """Whether host memory has no room for another adapter."""
        return self.num_loading + self.num_ready == self.max_in_host_memory

    def ready(self) -> list[Adapter]:
        """Return the adapters in host memory, in the order in which their contents were first added."""
        return [adapter for adapter in self._by_digest.values() if adapter.state is AdapterState.READY]

    def load(self, adapter: Adapter) -> None:
        """Begin to load an adapter that is on disk. There must be room, and fewer than `MAX_LOADING` other loads."""
        assert adapter.state is AdapterState.ON_DISK and not self.is_full and self.num_loading < MAX_LOADING
        adapter.state, adapter.prepared_at, self._poll_s = AdapterState.LOADING, None, POLL_S
        self.num_loading += 1
        name = next(reversed(adapter.names))
        self.commands.append(
            AdapterCommand(CommandKind.PREPARE, adapter.digest, name=name, directory=adapter.directory)
        )

    def evict(self, adapter: Adapter) -> None:
        """Remove an adapter that is in no slot from the memory of the ranks. Its names stay."""
        assert adapter.state is AdapterState.READY and adapter.slot == NO_SLOT
        self._drop(adapter)
        self.num_evictions += 1

    def put(self, adapter: Adapter, slot: int) -> None:
        """Copy an adapter to `slot`, in place of the adapter that the ranks have there."""
        assert adapter.state is AdapterState.READY and adapter.slot == NO_SLOT
        adapter.slot = slot
        # Only the last content of a slot is sent, so that commands that were not sent stay few.
        self.commands = [one for one in self.commands if (one.kind, one.slot) != (CommandKind.PUT, slot)]
        self.commands.append(AdapterCommand(CommandKind.PUT, adapter.digest, slot))
        self.num_puts += 1

    def use(self, adapter: Adapter) -> None:
        """Record a use, since the adapter used least recently leaves first."""
        self._num_uses += 1
        adapter.last_used = self._num_uses

    def _drop(self, adapter: Adapter) -> None:
        """Remove an adapter from the ranks. Commands that were not sent are withdrawn instead."""
        digest, kept, was_sent = adapter.digest, [], True
        for command in self.commands:
            if command.digest != digest or command.kind not in (CommandKind.PREPARE, CommandKind.PUT):
                kept.append(command)
            elif command.kind is CommandKind.PREPARE:
                was_sent = False
        self.commands = kept
        if was_sent:
            self.commands.append(AdapterCommand(CommandKind.DROP, digest))
        if adapter.state is AdapterState.LOADING:
            self.num_loading -= 1
        else:
            self.num_ready -= 1
        adapter.state, adapter.prepared_at = AdapterState.ON_DISK, None

    # -- steps

    def has_commands(self, now: float) -> bool:
        """Return whether the next step has commands, or must ask for reports."""
        return bool(self.commands) or (self.num_loading > 0 and now >= self.next_poll_s)

    def take_commands(self, step_id: int, now: float) -> list[AdapterCommand]:
        """Take the commands of step `step_id`, perhaps none."""
        if not self.has_commands(now):
            return []
        commands, self.commands = self.commands, []
        for command in commands:
            if command.kind is CommandKind.PREPARE:
                self._by_digest[command.digest].prepared_at = step_id
        if self.num_loading and now >= self.next_poll_s:
            commands.append(AdapterCommand(CommandKind.REPORT))
            self.next_poll_s = now + self._poll_s
            self._poll_s = min(MAX_POLL_S, POLL_GROWTH * self._poll_s)
        return commands

    def restore_commands(self, commands: list[AdapterCommand]) -> None:
        """Put the commands of a step that was not sent before the commands of the next step."""
        self.commands[:0] = [command for command in commands if command.kind is not CommandKind.REPORT]
        for command in commands:
            if command.kind is CommandKind.PREPARE:
                self._by_digest[command.digest].prepared_at = None
        self.next_poll_s = 0.0

    def report(self, reports: list[AdapterReport], step_id: int) -> list[tuple[Adapter, str | None]]:
        """Process the reports in the output of step `step_id`. Return the adapters whose loads have ended, and why they
        failed.

        A failed adapter loses the names that were never loaded. The others stay: only the requests that wait fail, and
        the next request tries again. Reports of earlier loads of the same content are ignored.
        """
        ended = []
        for digest, failure in reports:
            adapter = self._by_digest.get(digest)
            if adapter is None or adapter.state is not AdapterState.LOADING:
                continue
            if adapter.prepared_at is None or adapter.prepared_at > step_id:
                continue
            self.num_loading -= 1
            self.outcomes += [
                (name, None if failure is None else load_error(name, adapter, failure)) for name in adapter.names
            ]
            ended.append((adapter, failure))
            if failure is None:
                adapter.state = AdapterState.READY
                adapter.loaded_names.update(adapter.names)
                self.num_ready += 1
                self.num_loads += 1
                continue
            adapter.state = AdapterState.ON_DISK
            self.num_failures += 1
            self._forget_new_names(adapter)
        return ended

    def _forget_new_names(self, adapter: Adapter) -> None:
        for name in adapter.names:
            if name not in adapter.loaded_names:
                del self._by_name[name]
        adapter.rename({name: path for name, path in adapter.names.items() if name in adapter.loaded_names})
        if not adapter.names:
            del self._by_digest[adapter.digest]

    def take_outcomes(self) -> list[tuple[str, LoadError | None]]:
        """Take the ends of loads: (name, error)."""
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def audit(self) -> None:
        """Raise AssertionError unless names, contents and counts agree."""
        adapters = list(self._by_digest.values())
        names = sorted(name for adapter in adapters for name in adapter.names)
        assert names == sorted(self._by_name), "a name leads nowhere, or an adapter has lost its name"
        for name, adapter in self._by_name.items():
            assert name in adapter.names and self._by_digest[adapter.digest] is adapter
        states = [adapter.state for adapter in adapters]
        assert states.count(AdapterState.LOADING) == self.num_loading <= MAX_LOADING
        assert states.count(AdapterState.READY) == self.num_ready
        assert self.num_loading + self.num_ready <= self.max_in_host_memory, "too many adapters in host memory"
        assert all(adapter.names for adapter in adapters), "an adapter without a name is kept"


def load_error(name: str, adapter: Adapter, failure: str) -> LoadError:
    """Return the error of a failed load of `adapter`, one of whose names is `name`. `failure`: the reason, or
    `STALLED`."""
    if failure == STALLED:
        return StalledAdapterError(name, adapter.directory)
    return RequestError(f"The adapter {name!r} could not be loaded: {failure}", "lora_path", FAILED)
