"""Requests that wait for their LoRA adapter, and the choice of the adapters that are in slots.

Only requests without an adapter, or whose adapter is in a slot, are in the queue. All others are *parked*: they hold
nothing and delay nobody. `assign` gives slots and host memory to the adapters of parked requests, in the order in which
these requests would be admitted from the queue. An adapter gets, in this order, a free slot; the slot of an adapter
that no request needs, used least recently; the slot of an adapter whose requests all come later in that order and have
not begun; or it waits for a slot that is *closing*: requests that run with its adapter or come earlier in the order go
on, later ones are parked, and the slot is free when the last of them has ended. Requests of low priority are preempted
if they alone keep a slot from a request of normal priority.

So each parked request gets its turn, since no request that comes later in the order begins on a slot that it waits for.
The one exception: when an adapter gets a slot, its requests begin together as far as there are rows, wherever they are
in the order, since the first of them would keep the slot about as long.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from oarlock.base.watched_reads import STALL_S
from oarlock.engine.errors import RequestError
from oarlock.engine.lora.registry import UNLOADED, Adapter, AdapterRegistry, AdapterState, load_error
from oarlock.engine.lora.slots import AdapterSlots
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.stats import AWAITS_LOAD, AWAITS_SLOT, MAX_ADAPTER_LABELS, OTHER_ADAPTERS, EngineStats
from oarlock.engine.types import AdapterInfo, TokenEvent
from oarlock.workers.adapters import MAX_LOADING, STALLED, AdapterCommand, AdapterReport
from oarlock.workers.config import WorkerConfig

logger = logging.getLogger("oarlock.engine")

_AFTER_REQUESTS = 1 << 62  # loads for no request come after the requests of the same time
Keys = dict[tuple[bool, str], tuple[float, int]]
# Sequence, message, now, field at fault (None: the server is), code.
Fail = Callable[[Sequence, str, float, str | None, str], TokenEvent]


class Turn(NamedTuple):
    """Position in the order of admission; the least is next."""

    is_low_priority: bool
    client_time: float  # work done for its client
    key: tuple[float, int]


class AdapterQueue:
    """Parked requests of one scheduler, and the slots and host memory of their adapters."""

    def __init__(
        self, config: WorkerConfig, waiting: RequestQueue, running: list[Sequence], stats: EngineStats, fail: Fail
    ) -> None:
        """`fail`: ends a request because of its adapter, and returns its event."""
        self.registry = AdapterRegistry(config.num_host_adapters)
        self.slots = AdapterSlots(config.max_loras)
        self._waiting, self._running, self._stats, self._fail = waiting, running, stats, fail
        self._parked: dict[Adapter, dict[int, Sequence]] = {}  # adapter -> its parked requests by id; none is empty
        # Adapter -> first keys of its parked requests, by (is_low_priority, client), as far as they were asked for.
        self._first_keys: dict[Adapter, Keys] = {}
        self._wanted: dict[Adapter, tuple[float, int]] = {}  # adapters to load for no request -> time, number
        self._num_wanted = 0
        self.may_assign = False  # whether anything has changed that `assign` depends on
        self.num_parked = 0
        self._now = 0.0  # time of the call that may park requests or queue parked ones
        # Whether no adapter may leave host memory for a request; then none may for a later one in the order either.
        self._none_may_leave = False
        self._left: dict[bool, dict[Adapter, int]] = {}  # results of `_tokens_left` in one call of `assign`
        # Adapters that get a slot in the next step. It is closed after that at the earliest, so that their requests
        # begin together as far as there are rows, not one after the other.
        self._new: set[Adapter] = set()
        self.to_preempt: list[Sequence] = []  # running requests that keep a slot from a request of higher priority
        self.loading: Iterable[Sequence] = ()  # requests that left the queue until their blocks are read from files
        self.on_park: Callable[[Sequence], object] = lambda seq: None  # called with each request before it is parked

    # -- names

    def add(self, name: str, digest: str, directory: str, now: float) -> None:
        """Let `name` refer to an adapter, and load it. The registry's `outcomes` have the end of the load.

        Raises `RequestError` if the name is taken.
        """
        adapter = self.registry.add(name, digest, directory)
        if adapter.state is AdapterState.READY:
            self.registry.outcomes.append((name, None))
        elif adapter.state is AdapterState.ON_DISK and adapter not in self._wanted:
            self._num_wanted += 1
            self._wanted[adapter] = now, _AFTER_REQUESTS + self._num_wanted
            self.may_assign = True

    def remove(self, name: str, sequences: Iterable[Sequence], now: float) -> list[TokenEvent]:
        """Forget `name`, and end its requests among `sequences`, in this order. Return their events.

        Raises `RequestError` if the name is not known.
        """
        adapter = self.registry.resolve(name)
        own = [seq for seq in sequences if seq.request.adapter == name]
        events = [self._fail(seq, unloaded(name), now, "model", UNLOADED) for seq in own]
        if adapter.names.keys() == {name}:
            assert adapter not in self._parked, "a request has an adapter without a name"
            self._wanted.pop(adapter, None)
            self.slots.empty(adapter)
        self.registry.remove(name)
        self.may_assign = True
        return events

    def infos(self, sequences: Iterable[Sequence]) -> list[AdapterInfo]:
        """Return a description of each name, with the number of its requests among `sequences`."""
        counts = Counter(seq.request.adapter for seq in sequences)
        return [
            AdapterInfo(name, adapter.digest, adapter.names[name], adapter.state.value, adapter.slot, counts[name])
            for name, adapter in self.registry.by_name.items()
        ]

    # -- requests

    def enqueue(self, seq: Sequence, now: float) -> None:
        """Queue a request, or park it until its adapter is in an open slot."""
        adapter, self._now = seq.adapter, now
        if adapter is None or self.slots.is_open(adapter):
            self._waiting.push(seq)
            return
        self._park(seq)
        self.may_assign = True

    def discard(self, seq: Sequence) -> bool:
        """Forget a request that has ended. Return whether it was parked."""
        self.may_assign = True
        assert seq.adapter is not None
        parked = self._parked.get(seq.adapter)
        if parked is None or parked.pop(seq.request_id, None) is None:
            return False
        self._count_parked(seq, -1)
        self._first_keys.pop(seq.adapter, None)
        if not parked:
            del self._parked[seq.adapter]
        return True

    def started(self, seq: Sequence) -> None:
        """Record that a request begins to run."""
        assert seq.adapter is not None and seq.adapter.slot, "a request runs without its adapter"
        self.registry.use(seq.adapter)
        self.may_assign = True

    def ended(self, seq: Sequence) -> None:
        """Count a request that has ended in any way."""
        by_adapter, name = self._stats.by_adapter, seq.request.adapter
        assert name is not None
        if name not in by_adapter and len(by_adapter) >= MAX_ADAPTER_LABELS:
            unloaded = by_adapter.keys() - self.registry.by_name.keys() - {OTHER_ADAPTERS}
            if unloaded:  # its label is free for another name
                del by_adapter[next(old for old in by_adapter if old in unloaded)]
            else:
                name = OTHER_ADAPTERS
        counts = by_adapter.setdefault(name, [0, 0, 0])
        counts[0] += 1
        counts[1] += seq.num_prompt_tokens
        counts[2] += seq.num_generated_tokens

    def parked(self) -> Iterator[Sequence]:
        """Yield the parked requests."""
        for parked in self._parked.values():
            yield from parked.values()

    def _park(self, seq: Sequence) -> None:
        assert seq.adapter is not None
        self.on_park(seq)
        self._parked.setdefault(seq.adapter, {})[seq.request_id] = seq
        if (keys := self._first_keys.get(seq.adapter)) is not None:
            _add_first(keys, seq)
        self._count_parked(seq, 1)
        self._note_wait(seq.adapter, seq)

    def _count_parked(self, seq: Sequence, change: int) -> None:
        self.num_parked += change
        self._waiting.count_parked(seq, change)

    def _unpark(self, adapter: Adapter) -> None:
        """Queue the parked requests of `adapter`, which is in an open slot."""
        self._first_keys.pop(adapter, None)
        for seq in self._parked.pop(adapter, {}).values():
            self._count_parked(seq, -1)
            seq.timeline.awaits_adapter(None, self._now)
            self._waiting.push(seq)

    def _note_wait(self, adapter: Adapter, *parked: Sequence) -> None:
        """Record in the timelines of `parked` requests for `adapter` whether they wait for its load or for a slot."""
        awaited = AWAITS_SLOT if adapter.state is AdapterState.READY else AWAITS_LOAD
        for seq in parked:
            seq.timeline.awaits_adapter(awaited, self._now)

    # -- reports

    def report(self, reports: list[AdapterReport], step_id: int, now: float) -> list[TokenEvent]:
        """Process the reports of step `step_id`. Return the events of requests whose adapter could not be loaded."""
        events: list[TokenEvent] = []
        for adapter, failure in self.registry.report(reports, step_id):
            self.may_assign = True
            self._wanted.pop(adapter, None)
            if failure is None:
                self._now = now
                self._note_wait(adapter, *self._parked.get(adapter, {}).values())
                continue
            cause = f"nothing was read for {STALL_S:g} s" if failure == STALLED else failure
            fields = adapter.digest, adapter.directory, cause
            logger.warning("event=adapter_failed digest=%s path=%r cause=%r", *fields)
            for seq in list(self._parked.get(adapter, {}).values()):
                assert seq.request.adapter is not None
                error = load_error(seq.request.adapter, adapter, failure)
                param = "model" if isinstance(error, RequestError) else None
                events.append(self._fail(seq, error.message, now, param, str(error.code)))
        return events

    # -- slots and host memory

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded, so that a later step may have work even if this one has none."""
        return self.registry.num_loading > 0

    def assign(self, now: float) -> None:
        """Give slots and host memory to the adapters of parked requests, if anything has changed."""
        self._now = now
        if not self.may_assign:
            return
        self.may_assign, self.to_preempt, self._none_may_leave = False, [], False
        self._left.clear()
        if not self._parked and not self._wanted:
            self._reopen(self.slots.in_closing_slots())
            return
        used, queued = {seq.adapter for seq in self._running if seq.adapter is not None}, self._queued_turns()
        for adapter in self.slots.in_closing_slots():
            if adapter not in used and adapter not in queued:
                self.slots.empty(adapter)
        reserved = self.slots.in_closing_slots()  # each is for one adapter that waits for a slot
        for adapter, turn in self._candidates():
            if adapter in reserved:
                reserved.remove(adapter)
                self._reopen([adapter])
                queued[adapter] = min(turn, queued.get(adapter, turn))
            elif adapter.slot or adapter.state is AdapterState.LOADING:
                continue  # its slot is closing for an earlier one, or its load has not ended
            elif adapter.state is AdapterState.ON_DISK and (
                self._load(adapter, turn, used, queued) or adapter not in self._parked
            ):
                continue  # without requests it needs no slot
            elif adapter.state is AdapterState.READY and self._take_slot(adapter, turn, used, queued):
                queued[adapter] = turn
            else:
                self._await_slot(turn, reserved, queued)
        self._reopen(reserved)
        self.may_assign |= bool(self._new)

    def _candidates(self) -> list[tuple[Adapter, Turn]]:
        """Return the adapters that wait for memory or a slot, in the order of their first requests."""
        turns = {adapter: self._first_parked(adapter) for adapter in self._parked}
        for adapter, key in self._wanted.items():
            turn = Turn(False, self._waiting.time_of(""), key)
            turns[adapter] = min(turn, turns.get(adapter, turn))
        return sorted(turns.items(), key=lambda item: item[1])

    def _queued_turns(self) -> dict[Adapter, Turn]:
        """Return the turn of the first request of each adapter that is queued, or will be after reading files."""
        turns: dict[Adapter, Turn] = {}
        for seq in self.loading:
            if seq.adapter is not None:
                turn = self._turn(seq)
                turns[seq.adapter] = min(turn, turns.get(seq.adapter, turn))
        for (is_low_priority, client), line in self._waiting.lines.items():
            time, firsts = self._waiting.time_of(client), dict[Adapter, tuple[float, int]]()
            for seq in line:  # ordered by keys
                if seq.adapter is not None:
                    firsts.setdefault(seq.adapter, seq.key)
            for adapter, key in firsts.items():
                turn = Turn(is_low_priority, time, key)
                turns[adapter] = min(turn, turns.get(adapter, turn))
        return turns

    def _first_parked(self, adapter: Adapter) -> Turn:
        """Return the turn of the first parked request of `adapter`, which has one."""
        keys = self._first_keys.get(adapter)
        if keys is None:
            keys = self._first_keys[adapter] = {}
            for seq in self._parked[adapter].values():
                _add_first(keys, seq)
        return min(Turn(is_low, self._waiting.time_of(client), key) for (is_low, client), key in keys.items())

    def _turn(self, seq: Sequence) -> Turn:
        request = seq.request
        return Turn(request.is_low_priority, self._waiting.time_of(request.client), seq.key)

    def _load(self, adapter: Adapter, turn: Turn, used: set[Adapter], queued: dict[Adapter, Turn]) -> bool:
        """Begin to load `adapter`, in place of another one if host memory is full, or let it wait for the end of other
        loads. Return False if host memory is full of adapters that may not leave now."""
        registry = self.registry
        if registry.num_loading == MAX_LOADING:
            return True
        if registry.is_full:
            victim = None if self._none_may_leave else self._least_needed(turn, used, queued)
            if victim is None:
                self._none_may_leave = True
                return registry.num_loading > 0  # the end of a load may change that
            self._repark(victim)
            queued.pop(victim, None)
            self.slots.empty(victim)
            registry.evict(victim)
            self._note_wait(victim, *self._parked.get(victim, {}).values())
        registry.load(adapter)
        return True

    def _least_needed(self, turn: Turn, used: set[Adapter], queued: dict[Adapter, Turn]) -> Adapter | None:
        """Return the adapter in host memory that leaves for a request with `turn`. No request needs it, or else its
        requests come later and have not begun."""
        unused = (adapter for adapter in self.registry.ready() if adapter not in used)
        candidates = [adapter for adapter in unused if not self.slots.is_closing(adapter)]
        idle = [adapter for adapter in candidates if adapter not in queued and adapter not in self._parked]
        if idle:
            return min(idle, key=lambda adapter: (adapter.slot > 0, adapter.last_used))
        first = {adapter: self._first_turn(adapter, queued) for adapter in candidates}
        later = [adapter for adapter, own in first.items() if own > turn]
        return max(later, key=lambda adapter: first[adapter], default=None)

    def _first_turn(self, adapter: Adapter, queued: dict[Adapter, Turn]) -> Turn:
        turns = [self._first_parked(adapter)] if adapter in self._parked else []
        return min(turns + ([queued[adapter]] if adapter in queued else []))

    def _take_slot(self, adapter: Adapter, turn: Turn, used: set[Adapter], queued: dict[Adapter, Turn]) -> bool:
        """Put `adapter` into a slot with which no request runs, and queue its requests. Return False if there is
        none."""
        if not self.slots.num_free:
            if not self.slots.num_open:
                return False
            unused = [other for other in self.slots.in_open_slots() if other not in used]
            idle = [other for other in unused if other not in queued]
            victim = idle[0] if idle else next((other for other in unused if queued[other] > turn), None)
            if victim is None:
                return False
            self._repark(victim)
            queued.pop(victim, None)
            self.slots.empty(victim)
        self.registry.put(adapter, self.slots.fill(adapter))
        self._new.add(adapter)
        self.registry.use(adapter)
        self._unpark(adapter)
        return True

    def _await_slot(self, turn: Turn, reserved: list[Adapter], queued: dict[Adapter, Turn]) -> None:
        """Let a request with `turn` wait for one of the closing slots in `reserved`, or else close the slot that will
        be free first, as far as `max_tokens` shows.

        A slot that only requests of lower priority keep is closed even if others are reserved.
        """
        if not reserved and self.slots.num_open <= len(self._new):
            return
        left = self._tokens_left(turn.is_low_priority)

        def order(adapter: Adapter) -> tuple[bool, bool, int]:
            has_earlier = adapter in queued and queued[adapter] < turn
            return has_earlier, adapter in left, left.get(adapter, 0)

        # The first of equals was used least recently.
        open_ones = (adapter for adapter in self.slots.in_open_slots() if adapter not in self._new)
        first = min(open_ones, key=order, default=None)
        yielding = [adapter for adapter in reserved if adapter not in left]
        if first is None and not reserved:
            return
        if first is None or yielding or (reserved and any(order(first)[:2])):
            adapter = (yielding or reserved)[0]
            reserved.remove(adapter)
        else:
            adapter = first
            self.slots.close(adapter)
            self._repark(adapter, after=turn)
            if adapter in queued and queued[adapter] > turn:
                del queued[adapter]
        self._preempt_for(turn, adapter)

    def _tokens_left(self, is_low_priority: bool) -> dict[Adapter, int]:
        """Return the most tokens that a request of each adapter has left, without requests that yield to a request with
        this priority."""
        if (left := self._left.get(is_low_priority)) is None:
            left = self._left[is_low_priority] = {}
            for seq in self._running:
                if seq.adapter is not None and seq.request.is_low_priority <= is_low_priority:
                    left[seq.adapter] = max(left.get(seq.adapter, 0), seq.final_len - seq.num_tokens)
        return left

    def _preempt_for(self, turn: Turn, adapter: Adapter) -> None:
        """Let the requests that run with `adapter`, whose slot is closing, be preempted if the request with `turn` has
        a higher priority."""
        own = [seq for seq in self._running if seq.adapter is adapter]
        if all(seq.request.is_low_priority > turn.is_low_priority for seq in own):
            self.to_preempt += own

    def _repark(self, adapter: Adapter, after: Turn | None = None) -> None:
        """Park the queued requests of an adapter that loses its slot; with `after`, only later requests."""
        if not adapter.slot:
            return
        own = [seq for line in self._waiting.lines.values() for seq in line if seq.adapter is adapter]
        for seq in own if after is None else [seq for seq in own if self._turn(seq) > after]:
            self._waiting.remove(seq)
            self._park(seq)
            self.may_assign = True

    def _reopen(self, closing: list[Adapter]) -> None:
        """Reopen slots that no other adapter waits for any more."""
        for adapter in closing:
            self.slots.reopen(adapter)
            self._unpark(adapter)

    # -- steps

    def has_commands(self, now: float) -> bool:
        """Return whether the next step has commands for adapters."""
        return self.registry.has_commands(now)

    def take_commands(self, step_id: int, now: float) -> list[AdapterCommand] | None:
        """Take the commands of step `step_id`; None: it has none."""
        registry = self.registry
        self._new.clear()
        return registry.take_commands(step_id, now) if registry.commands or registry.num_loading else None

    def restore_commands(self, commands: list[AdapterCommand] | None) -> None:
        """Put the commands of a step that was not sent before the commands of the next step."""
        self.registry.restore_commands(commands or [])

    def refresh_gauges(self) -> None:
        """Update the statistics of adapters."""
        stats, registry = self._stats, self.registry
        stats.num_adapters, stats.num_adapters_loaded = len(registry), registry.num_ready
        stats.num_adapters_in_slots = self.slots.num_slots - self.slots.num_free
        stats.num_requests_waiting_for_adapter = self.num_parked
        stats.running_adapters, stats.waiting_adapters = _names(self._running), _names(self.parked())
        stats.num_adapter_loads, stats.num_adapter_failures = registry.num_loads, registry.num_failures
        stats.num_adapter_evictions, stats.num_adapter_puts = registry.num_evictions, registry.num_puts

    def audit(self) -> None:
        """Raise AssertionError unless each running or queued request has its adapter in a slot."""
        self.registry.audit()
        self.slots.audit()
        assert all(seq.adapter.slot for seq in self._running if seq.adapter is not None), "it runs without its adapter"
        assert all(seq.adapter.slot for seq in self._waiting if seq.adapter is not None), "a queued request has no slot"
        in_slots = set(self.slots.adapters())
        for adapter in self.registry.by_name.values():
            assert (adapter in in_slots) == (adapter.slot > 0) and not (
                adapter.slot and adapter.state is not AdapterState.READY
            ), "a slot has an adapter that is not loaded"
        named = set(self.registry.by_name.values())
        assert in_slots | self._parked.keys() | self._wanted.keys() <= named, "an adapter without a name is kept"
        assert all(self._parked.values()), "an empty list of requests is kept"
        assert self.num_parked == sum(map(len, self._parked.values()))
        for adapter in list(self._first_keys):
            turn, parked = self._first_parked(adapter), self._parked[adapter].values()
            assert turn == min(map(self._turn, parked)), "the first parked request is another one"


def unloaded(name: str) -> str:
    """Return the error of requests whose adapter was unloaded."""
    return f"The adapter {name!r} was unloaded before this request was complete."


def _add_first(keys: Keys, seq: Sequence) -> None:
    line = seq.request.is_low_priority, seq.request.client
    keys[line] = min(seq.key, keys.get(line, seq.key))


def _names(sequences: Iterable[Sequence]) -> list[str]:
    """Return the names of the adapters of `sequences`, each once, as far as there are labels for them."""
    names = dict.fromkeys(seq.request.adapter for seq in sequences)
    return [name for name in names if name is not None][:MAX_ADAPTER_LABELS]
