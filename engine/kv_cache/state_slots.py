"""Pool of slots of recurrent state: which sequences hold which slots, the checkpoints among them, and eviction.

Knows slot ids and hashes of blocks. Does not know tensors, bytes, or when a sequence runs.

A slot holds the recurrent state after some number of a sequence's tokens. It is *held* by a running sequence, which
has two, *unsaved* while a step in flight writes a checkpoint to it, a *checkpoint* that can be found by the hash of the
last block of its tokens, or *free*. Slot 0 is the null slot: it always holds the state before the first token.

A step reads one slot of a sequence and writes its other slot, so a written state never changes in place, and a refused
step can be sent again. No slot is written in a step that reads it. A sequence that starts from a checkpoint therefore
pins it until the step after its first step is scheduled, or takes it over. All other slots can be reused at once, even
while a step in flight reads or writes them, because ranks run steps in the order in which they were scheduled.

A checkpoint gets its name when the result of the step that wrote it is known. So there is never a name for a state that
was not computed, whatever happens to the step. If logits turn out not to be finite later, `forget` removes the names.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

NULL_SLOT = 0
CHECKPOINT_TOKENS = 2048  # distance of checkpoints within a long prompt
NUM_OWN_SLOTS = 2  # of a running sequence
_MIN_SLOTS = 1 + NUM_OWN_SLOTS


class HeldSlots(NamedTuple):
    """Slots of one running sequence."""

    start: int  # read by its first step: the null slot, a pinned checkpoint, or `second`
    first: int  # written by its first step
    second: int  # written by its second step

    @property
    def pinned(self) -> int:
        """The checkpoint that is pinned until the first step has read it, or the null slot."""
        return NULL_SLOT if self.start == self.second else self.start


def checkpoint_lengths(num_tokens: int, num_cached: int, num_found: int, block_size: int) -> list[int]:
    """Return the lengths in tokens, ascending, after which the state is saved while a prompt is computed.

    `num_tokens`: known tokens. `num_cached`: leading tokens that need not be computed. `num_found`: leading tokens with
    cached keys and values, at least `num_cached`. Other prompts probably share them, and differ after them.
    """
    distance = max(1, CHECKPOINT_TOKENS // block_size) * block_size
    last = (num_tokens - 1) // block_size * block_size  # a hit leaves at least one token to compute
    lengths = {num_found, last, *range(num_cached // distance * distance, last, distance)}
    return sorted(length for length in lengths if num_cached < length <= last)


class StateSlots:
    """Allocator of slots, with checkpoints that are evicted in the order of their last use."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < _MIN_SLOTS:
            raise ValueError(
                f"a pool of {num_slots} slots of recurrent state cannot run a sequence: at least {_MIN_SLOTS} are "
                "needed. Give the server more memory for the cache."
            )
        self.num_slots = num_slots
        self._free: OrderedDict[int, None] = OrderedDict((slot, None) for slot in range(1, num_slots))
        self._held: set[int] = set()
        self._unsaved: set[int] = set()  # written as checkpoints by steps in flight
        self._slot_of_hash: dict[bytes, int] = {}
        self._hash_of_slot: dict[int, bytes] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()  # checkpoints without pins, least recently used first
        self._pins: Counter[int] = Counter()  # a pinned slot may have lost its name
        self._read: list[int] = []  # pinned slots that the last scheduled step reads
        self.expected: Counter[bytes] = Counter()  # hashes of checkpoints that running sequences will leave
        self._rolling: set[int] = set()  # checkpoints that the next one of their sequence may replace
        self._saves_nothing = False  # in the step that is being scheduled, see `note_refusal`

    @property
    def num_total(self) -> int:
        return self.num_slots - 1

    @property
    def num_held(self) -> int:
        """Slots of running sequences."""
        return len(self._held)

    @property
    def num_checkpoints(self) -> int:
        """States that can be found."""
        return len(self._slot_of_hash)

    @property
    def num_available(self) -> int:
        """Slots that can be allocated: free slots, and checkpoints without pins."""
        return len(self._free) + len(self._evictable)

    # -- sequences

    def has(self, block_hash: bytes) -> bool:
        """Return whether there is a checkpoint of the state after the block with this hash."""
        return block_hash in self._slot_of_hash

    def longest(self, hashes: Sequence[bytes], num_blocks: int) -> int:
        """Return the largest number of blocks, at most `num_blocks`, after which there is a checkpoint; 0 if there is
        none. `hashes` are those of a sequence's first blocks."""
        return next((count for count in range(num_blocks, 0, -1) if hashes[count - 1] in self._slot_of_hash), 0)

    def take(self, checkpoint: bytes | None) -> HeldSlots | None:
        """Give a sequence two slots and pin the `checkpoint` from which it starts; None: it starts at its first token.

        If only one other slot is available, the checkpoint is removed and its slot becomes one of the two: the first
        step reads it, and the second step writes it. Return None, without a change, if too few slots are available.
        """
        if self.num_available < NUM_OWN_SLOTS:
            return None
        start = NULL_SLOT if checkpoint is None else self._slot_of_hash[checkpoint]
        if start in self._evictable and self.num_available == NUM_OWN_SLOTS:
            self._unname(start)
            del self._evictable[start]
            slots = HeldSlots(start, self._allocate(), start)
            self._held.update(slots[1:])
            return slots
        if start != NULL_SLOT:
            self._evictable.pop(start, None)
            self._pins[start] += 1
            self._rolling.discard(start)  # others use it, so it is kept
        slots = HeldSlots(start, self._allocate(), self._allocate())
        self._held.update(slots[1:])
        return slots

    def note_refusal(self) -> None:
        """Note that a sequence was refused memory. If it lacks the slots that steps in flight write as checkpoints, the
        step being scheduled saves none. Otherwise each step could take the slots that the one before it has saved."""
        self._saves_nothing |= self.num_available < NUM_OWN_SLOTS <= self.num_available + len(self._unsaved)

    def give_back(self, slots: HeldSlots, *, has_started: bool) -> None:
        """Free the slots of a sequence. `has_started`: its first step was scheduled, see `start`."""
        for slot in slots[1:]:
            self._held.remove(slot)
            self._free[slot] = None
        if slots.pinned != NULL_SLOT and not has_started:
            self._unpin(slots.pinned)

    def begin_step(self) -> None:
        """Unpin the checkpoints that the previous step reads: the step that is now scheduled may write them."""
        self._saves_nothing = False
        for slot in self._read:
            self._unpin(slot)
        self._read.clear()

    def start(self, slot: int) -> None:
        """Note that a sequence reads its checkpoint `slot` in the step that is being scheduled, and not again."""
        assert self._pins[slot], "a checkpoint is read without a pin"
        self._read.append(slot)

    # -- checkpoints

    def expect_no_more(self, planned: dict[int, bytes], lengths: Iterable[int]) -> None:
        """Remove `lengths` from the `planned` checkpoints of a sequence, because it has left them or will not leave
        them."""
        for length in lengths:
            block_hash = planned.pop(length)
            self.expected[block_hash] -= 1
            if not self.expected[block_hash]:
                del self.expected[block_hash]

    def allocate_save(self, replaces: bytes | None = None) -> int | None:
        """Return a slot for a checkpoint that the step being scheduled writes, or None if slots are short.

        `replaces`: hash of the sequence's last rolling checkpoint. Its slot is used again unless another sequence uses
        it.
        """
        if self._saves_nothing:
            return None
        slot = None if replaces is None else self._slot_of_hash.get(replaces)
        if slot in self._rolling and slot in self._evictable:
            self._unname(slot)
            del self._evictable[slot]
        elif self.num_available:
            slot = self._allocate()
        else:
            return None
        self._unsaved.add(slot)
        return slot

    def name(self, slot: int, block_hash: bytes, *, is_rolling: bool = False) -> None:
        """Make the unsaved `slot` a checkpoint, the most recently used one. If there is one of this state, it is used
        instead."""
        if (known := self._slot_of_hash.get(block_hash)) is not None:
            if known in self._evictable:
                self._evictable.move_to_end(known)
            self.drop(slot)
            return
        self._unsaved.remove(slot)
        self._slot_of_hash[block_hash], self._hash_of_slot[slot] = slot, block_hash
        self._evictable[slot] = None
        if is_rolling:
            self._rolling.add(slot)

    def drop(self, slot: int) -> None:
        """Free an unsaved slot, which gets no name."""
        self._unsaved.remove(slot)
        self._free[slot] = None

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Remove the checkpoints with these hashes. Sequences that start from one keep it."""
        for block_hash in hashes:
            slot = self._slot_of_hash.get(block_hash)
            if slot is not None:
                self._unname(slot)
                if slot in self._evictable:
                    del self._evictable[slot]
                    self._free[slot] = None

    def forget_all(self) -> int:
        """Remove all checkpoints; return their number."""
        num_checkpoints = self.num_checkpoints
        self.forget(list(self._slot_of_hash))
        return num_checkpoints

    def audit(self, holders: Iterable[tuple[HeldSlots, bool]]) -> None:
        """Raise AssertionError unless every slot is in exactly one state and every count is right.

        `holders`: slots of each running sequence, and whether its first step was scheduled.
        """
        own, pins = Counter[int](), Counter(self._read)
        for slots, has_started in holders:
            own.update(slots[1:])
            pins[slots.pinned] += slots.pinned != NULL_SLOT and not has_started
        assert own == Counter(self._held), "a slot is held by no sequence, or by two"
        assert +pins == +self._pins, "pins are counted wrongly"
        groups = self._free, self._held, self._unsaved, self._evictable, +self._pins
        states = Counter(slot for group in groups for slot in group)
        assert states == Counter(range(1, self.num_slots)), "a slot is lost, or in two states"
        assert {slot: name for name, slot in self._slot_of_hash.items()} == self._hash_of_slot, "a hash leads nowhere"
        assert self._hash_of_slot.keys() - self._evictable.keys() <= self._pins.keys(), "a checkpoint is written"
        assert self._evictable.keys() <= self._hash_of_slot.keys(), "a checkpoint cannot be found"
        assert self._rolling <= self._evictable.keys(), "a checkpoint in use may be replaced"

    def _allocate(self) -> int:
        if self._free:
            slot, _ = self._free.popitem(last=False)
        else:
            slot, _ = self._evictable.popitem(last=False)
            self._unname(slot)
        return slot

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            (self._evictable if slot in self._hash_of_slot else self._free)[slot] = None

    def _unname(self, slot: int) -> None:
        """Remove the name of a checkpoint. The caller moves the slot on, unless it is pinned."""
        del self._slot_of_hash[self._hash_of_slot.pop(slot)]
        self._rolling.discard(slot)
