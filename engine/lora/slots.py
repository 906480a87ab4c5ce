"""Slots of adapters in the device memory of the ranks, and which adapter keeps its slot.

A step computes with the adapters that are in slots, so at most `max_loras` of them. A slot is *free*, *open* (more
requests for its adapter may be queued) or *closing*: another adapter waits for it, and gets it when the requests of the
present adapter that run or are queued have ended. Pure; does not know requests.
"""

from collections.abc import Iterator

from oarlock.engine.lora.registry import Adapter
from oarlock.workers.adapters import NO_SLOT


class AdapterSlots:
    """Table of slots and their adapters. Slots are numbered from 1."""

    def __init__(self, max_loras: int) -> None:
        self.num_slots = max_loras
        self._adapters: list[Adapter | None] = [None] * (1 + max_loras)
        self._free = list(range(max_loras, 0, -1))
        self._closing: dict[int, None] = {}  # slots, ordered by the times at which they were closed

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        return self.num_slots - len(self._free) - len(self._closing)

    def adapters(self) -> Iterator[Adapter]:
        """Yield the adapters in slots, in the order of their slots."""
        return (adapter for adapter in self._adapters if adapter is not None)

    def is_open(self, adapter: Adapter) -> bool:
        """Return whether `adapter` is in a slot, and more requests for it may be queued."""
        return adapter.slot != NO_SLOT and adapter.slot not in self._closing

    def is_closing(self, adapter: Adapter) -> bool:
        return adapter.slot in self._closing

    def in_closing_slots(self) -> list[Adapter]:
        """Return the adapters in closing slots, in the order in which these were closed."""
        return [adapter for slot in self._closing if (adapter := self._adapters[slot]) is not None]

    def in_open_slots(self) -> list[Adapter]:
        """Return the adapters in open slots, the one used least recently first."""
        return sorted(filter(self.is_open, self.adapters()), key=lambda adapter: adapter.last_used)

    def fill(self, adapter: Adapter) -> int:
        """Return a free slot, which gets `adapter`."""
        slot = self._free.pop()
        self._adapters[slot] = adapter
        return slot

    def close(self, adapter: Adapter) -> None:
        """Let no more requests for `adapter` be queued."""
        assert self.is_open(adapter)
        self._closing[adapter.slot] = None

    def reopen(self, adapter: Adapter) -> None:
        """Let requests for `adapter` be queued again, since no other adapter waits for its slot now."""
        del self._closing[adapter.slot]

    def empty(self, adapter: Adapter) -> None:
        """Free the slot of `adapter`, if it has one."""
        slot, adapter.slot = adapter.slot, NO_SLOT
        if slot != NO_SLOT:
            self._closing.pop(slot, None)
            self._adapters[slot] = None
            self._free.append(slot)

    def audit(self) -> None:
        """Raise AssertionError unless every slot is either free or has one adapter, which knows it."""
        held = [slot for slot, adapter in enumerate(self._adapters) if adapter is not None]
        assert sorted(held + self._free) == list(range(1, 1 + self.num_slots)), "a slot is lost or shared"
        for slot in held:
            adapter = self._adapters[slot]
            assert adapter is not None and adapter.slot == slot, "an adapter does not know its slot"
        assert all(self._adapters[slot] is not None for slot in self._closing), "an empty slot is closing"
