"""Least-recently-used table of host-memory slots: which slot holds which block, and which one is taken next.

Knows slots and digests. Does not know pages, files or steps.
"""

from collections import OrderedDict


class HostTier:
    """Table of host-memory slots and their blocks. The idle slot that was used longest ago is taken first.

    A slot is *free*, *idle* (it holds a block and may be taken) or *pinned* (as often as something needs it to stay
    as it is, whether it holds a block or not).
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the one used longest ago first
        self._pins = [0] * num_slots
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: list[bytes | None] = [None] * num_slots

    @property
    def num_blocks(self) -> int:
        """Number of blocks that can be found."""
        return len(self._slot_of)

    @property
    def digests(self) -> list[bytes]:
        """Digests of all blocks that can be found."""
        return list(self._slot_of)

    def find(self, digest: bytes) -> int | None:
        return self._slot_of.get(digest)

    def digest_of(self, slot: int) -> bytes | None:
        return self._digest_of[slot]

    def take(self) -> int | None:
        """Pin a slot for new content and return it; its old block can no longer be found. None when all are pinned."""
        if self._free:
            slot = self._free.pop()
        elif self._idle:
            slot, _ = self._idle.popitem(last=False)
            self._unname(slot)
        else:
            return None
        self._pins[slot] = 1
        return slot

    def name(self, slot: int, digest: bytes) -> None:
        """Record that the pinned `slot` holds the block of `digest`, or will before it is read. No other slot does."""
        assert self._pins[slot] and digest not in self._slot_of and self._digest_of[slot] is None
        self._slot_of[digest] = slot
        self._digest_of[slot] = digest

    def pin(self, slot: int) -> None:
        if self._pins[slot] == 0:
            del self._idle[slot]
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if self._pins[slot] == 0:
            if self._digest_of[slot] is None:
                self._free.append(slot)
            else:
                self._idle[slot] = None

    def forget(self, digest: bytes) -> None:
        """Drop the block of `digest`: no slot holds it after all."""
        slot = self._slot_of.get(digest)
        if slot is None:
            return
        self._unname(slot)
        if self._pins[slot] == 0:
            del self._idle[slot]
            self._free.append(slot)

    def forget_all(self) -> None:
        for digest in list(self._slot_of):
            self.forget(digest)

    def audit(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state and every digest leads to its slot."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot in range(self.num_slots):
            states = (slot in free) + (slot in self._idle) + (self._pins[slot] > 0)
            assert states == 1, f"slot {slot} is in {states} states"
            digest = self._digest_of[slot]
            assert digest is None or self._slot_of.get(digest) == slot, f"slot {slot} cannot be found"
            assert slot not in self._idle or digest is not None, f"slot {slot} is idle and holds nothing"
            assert slot not in free or digest is None, f"slot {slot} is free but can be found"
        assert len(self._slot_of) == sum(digest is not None for digest in self._digest_of), "a digest leads nowhere"

    @property
    def num_pins(self) -> int:
        return sum(self._pins)

    def _unname(self, slot: int) -> None:
        digest = self._digest_of[slot]
        assert digest is not None
        del self._slot_of[digest]
        self._digest_of[slot] = None
