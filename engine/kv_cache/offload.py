"""Tiers of KV blocks below the pool, in slots of host memory and in files: decides every copy that ranks make.

A block is saved to a slot, and from there written to a file, if the pool evicts it, if a second prompt begins with it,
and when the engine ends. A prompt's prefix is loaded from slots when its sequence is admitted, a long one already in
the steps before. Blocks in files are read into slots earlier, while the sequence waits. Pure: no clock, no files, no
tensors; the same calls give the same copies. Knows digests, block ids and numbers of requests.

`HostTier` knows which slot contains which block, and which slot is taken next. `Flush` writes the blocks that have no
file when the engine ends.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from oarlock.engine.stats import EngineStats
from oarlock.workers.config import StepCost
from oarlock.workers.kv_offload import MAX_COPIES, Copy, KVOffloadInfo, KVReport, KVReportKind

MAX_LOADS = 32  # maximum sequences that wait for files at the same time
LOAD_TIMEOUT_S = 30.0  # limit of a load, then the sequence is computed: the file system may never respond
_FIXED_READ_S = 0.002  # cost of any load: two more iterations of the loop
STEP_LOAD_BYTES = 64 << 20  # limit of a rank's copies from slots to pages in a step, some ten milliseconds of a core


class HostTier:
    """Table of host-memory slots and their blocks. The least recently used idle slot is taken first.

    A slot is *free*, *idle* (it contains a block and may be taken) or *pinned* (its content must not change; pins are
    counted, and it may be empty).
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
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
        """Pin a slot for new content and return it; its old block can no longer be found. None if all are pinned."""
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
        """Record that the pinned `slot` contains the block of `digest`, or will before it is read. No other slot
        does."""
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
        """Drop the block of `digest`, which no slot contains after all."""
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


@dataclass(slots=True, eq=False)
class Copies:
    """Copies that ranks make in one step, in this order. The slots are pinned until the step's output arrives."""

    commands: list[tuple[Copy, int, int, bytes]] = field(default_factory=list)  # kind, block, slot, digest
    slots: list[int] = field(default_factory=list)  # pinned, once for each entry
    num_loads: int = 0  # number of loads among the commands
    num_saves: int = 0  # number of saves among the commands

    def __bool__(self) -> bool:
        return bool(self.commands)


@dataclass(slots=True, eq=False)
class _Load:
    """Load of the blocks for one waiting sequence. A request that loads again gets a new one."""

    slots: list[int]  # pinned
    num_left: int  # slots that are not read yet
    deadline_s: float
    is_over: bool = False  # `take_ready` has returned it


@dataclass(slots=True)
class _Transfer:
    """Transfer of one slot from the ranks' files, or to them."""

    digest: bytes
    num_left: int  # ranks that have not reported
    failed: bool = False
    loads: list[_Load] = field(default_factory=list)  # loads that wait for it, including ended ones


class KVOffload:
    """Planner of the copies of KV blocks between the pool, slots of host memory and files."""

    def __init__(self, info: KVOffloadInfo, block_size: int, step_cost: StepCost | None, stats: EngineStats) -> None:
        """Start with empty tiers. `info`: the tiers of the ranks."""
        self.info = info
        self.host = HostTier(info.num_slots)
        self._most_writes = max(1, info.num_slots // 2)
        self._block_size = block_size
        self._step_cost = step_cost
        self._most_loads = min(MAX_COPIES // 2, max(1, STEP_LOAD_BYTES // max(1, info.bytes_per_block)))
        self._stats = stats
        self._on_disk: set[bytes] = set()  # never iterated
        self._next = Copies()
        self._num_sent = 0  # pins of steps whose output has not arrived
        self._reads: dict[int, _Transfer] = {}  # slot -> transfer
        self._read_slot: dict[bytes, int] = {}
        self._writes: dict[int, _Transfer] = {}  # slot -> transfer
        self._written: set[bytes] = set()  # the digests of `_writes`
        self._loads: dict[int, _Load] = {}  # request id -> load
        stats.kv_offload_host_blocks_total = info.num_slots
        stats.kv_offload_disk_bytes_total = info.max_disk_bytes

    @property
    def has_disk(self) -> bool:
        return self.info.read_bytes_per_s is not None

    # -- called for the pool's blocks

    def save(self, block: int, digest: bytes) -> None:
        """Save `block`, which has the content of `digest`: the next step may give it to another sequence."""
        if self.host.find(digest) is not None:
            return
        slot = None if self._is_full else self.host.take()
        if slot is None:
            self._stats.kv_offload_dropped_blocks += 1
            return
        self.host.name(slot, digest)
        self._copy(Copy.SAVE, block, slot)
        self._stats.kv_offload_saved_blocks += 1

    def save_reused(self, block: int, digest: bytes | None) -> None:
        """Save and write `block` when another sequence takes it from the cache.

        The pool may never evict a block that many requests begin with, but other replicas and the next start need its
        file.
        """
        if self.has_disk and digest is not None and digest not in self._on_disk:
            self.save(block, digest)

    def write_to_file(self, block: int | None, digest: bytes) -> bool:
        """Write the content of `digest`, in a slot or in `block`, to a file. Returns False if there is no room now."""
        if digest in self._on_disk or digest in self._written:
            return True
        num_saving = self._next.num_saves + self._num_sent
        if self._is_full or len(self._writes) + num_saving >= self._most_writes:
            return False
        slot = self.host.find(digest)
        if slot is not None:
            self._write(slot)
        elif block is not None:
            self.save(block, digest)  # written when the step's output arrives
        return True

    @property
    def is_idle(self) -> bool:
        """Whether no copy is planned or sent, and no file is being read or written."""
        return not (self._next or self._num_sent or self._reads or self._writes)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Drop blocks from host memory that were not computed after all, or must not be found."""
        for digest in digests:
            self.host.forget(digest)

    @property
    def num_loads_left(self) -> int:
        """Number of blocks that the next step may still load without becoming too long."""
        return max(0, self._most_loads - self._next.num_loads)

    def pin(self, digests: Iterable[bytes]) -> list[int]:
        """Pin the slots of the longest prefix of `digests` in host memory until `load` or `unpin`; return them."""
        slots: list[int] = []
        for digest in digests:
            slot = self.host.find(digest)
            if slot is None:
                break
            self.host.pin(slot)
            slots.append(slot)
        return slots

    def unpin(self, slots: Iterable[int]) -> None:
        """Unpin slots that were held and are not loaded now."""
        for slot in slots:
            self.host.unpin(slot)

    def load(self, slot: int, block: int) -> None:
        """Copy the content of the held `slot` into `block` before the next step."""
        self._next.num_loads += 1
        self._next.commands.append((Copy.LOAD, block, slot, b""))
        self._next.slots.append(slot)
        self._stats.kv_offload_loaded_blocks += 1
        self._stats.kv_offload_hit_tokens += self._block_size

    # -- steps

    @property
    def _is_full(self) -> bool:
        """Whether the next step takes no more copies other than loads, for which half of the room is reserved."""
        return len(self._next.commands) >= MAX_COPIES // 2

    @property
    def has_copies(self) -> bool:
        return bool(self._next)

    def take_copies(self) -> Copies | None:
        """Take the copies of the next step; None: it has none."""
        if not self._next.commands:
            return None
        copies, self._next = self._next, Copies()
        self._num_sent += len(copies.slots)
        return copies

    def restore_copies(self, copies: Copies) -> None:
        """Put the copies of a step that was not sent before the copies of the next step."""
        self._num_sent -= len(copies.slots)
        self._next.commands[:0] = copies.commands
        self._next.slots[:0] = copies.slots
        self._next.num_loads += copies.num_loads
        self._next.num_saves += copies.num_saves

    def finish_copies(self, copies: Copies) -> None:
        """Complete the step's copies between pages and slots, which were made even if the step itself was refused."""
        for kind, _, slot, _ in copies.commands:
            if kind is Copy.SAVE:
                self._write(slot)
        for slot in copies.slots:
            self.host.unpin(slot)
        self._num_sent -= len(copies.slots)

    def _write(self, slot: int) -> None:
        """Begin to write the content of `slot` to files, unless too many slots are being written."""
        digest = self.host.digest_of(slot)
        if not self.has_disk or digest is None or digest in self._on_disk or digest in self._written:
            return
        if self._is_full or slot in self._writes or len(self._writes) >= self._most_writes:
            self._stats.kv_offload_dropped_blocks += 1
            return
        self.host.pin(slot)
        self._writes[slot] = _Transfer(digest, self.info.num_ranks)
        self._written.add(digest)
        self._copy(Copy.WRITE, 0, slot, digest, pin=True)

    def _copy(self, kind: Copy, block: int, slot: int, digest: bytes = b"", *, pin: bool = False) -> None:
        """Add a copy to the next step. `pin`: pin the slot once more, because its first pin belongs to a transfer."""
        if pin:
            self.host.pin(slot)
        self._next.commands.append((kind, block, slot, digest))
        self._next.slots.append(slot)
        self._next.num_saves += kind is Copy.SAVE

    # -- loads

    def begin_load(self, request_id: int, digests: Iterable[bytes], first_column: int, now: float) -> bool:
        """Begin to read a sequence's blocks from files. Returns True if it must wait until `take_ready` returns it.

        `digests`: of its full blocks from `first_column` on, the first column that the pool lacks.
        """
        if not self.has_disk or len(self._loads) >= MAX_LOADS:
            return False
        known = list(self._known(digests))
        missing = [column for column, digest in enumerate(known) if self.host.find(digest) is None]
        if not missing:
            return False
        if not self._is_worth_reading(len(missing), first_column + missing[0], first_column + len(known)):
            return False
        load = _Load([], 0, now + LOAD_TIMEOUT_S)
        for digest in known:
            slot = self.host.find(digest)
            if slot is not None:
                self.host.pin(slot)
            else:
                slot = self._read(digest, load)
                if slot is None:
                    break
                load.num_left += 1
            load.slots.append(slot)
        if not load.num_left:
            self.unpin(load.slots)
            return False
        self._loads[request_id] = load
        return True

    def take_ready(self, now: float) -> list[int]:
        """Return the requests whose loads have ended, successfully or not, or have timed out. Their blocks stay in host
        memory until `release`."""
        ready = []
        for number, load in self._loads.items():
            if not load.is_over and (not load.num_left or now > load.deadline_s):
                load.is_over = True
                ready.append(number)
        return ready

    def release(self, request_id: int) -> None:
        """Release the blocks of a sequence that has stopped waiting: it has them, or it has ended."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            self.unpin(load.slots)

    def _known(self, digests: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the longest prefix of `digests` that is in host memory or files."""
        for digest in digests:
            if self.host.find(digest) is None and digest not in self._on_disk:
                return
            yield digest

    def _is_worth_reading(self, num_reads: int, first_column: int, end_column: int) -> bool:
        """Return whether reading `num_reads` blocks is faster than computing the columns from first to end."""
        assert self.info.read_bytes_per_s is not None
        if self._step_cost is None:
            return True
        first, end = first_column * self._block_size, end_column * self._block_size
        context = (first + end) // 2
        computing_s = (end - first) * (self._step_cost.token_s + self._step_cost.context_s * context)
        return _FIXED_READ_S + num_reads * self.info.bytes_per_block / self.info.read_bytes_per_s < computing_s

    def _read(self, digest: bytes, load: _Load) -> int | None:
        """Pin for `load` a slot into which ranks read the block. None if no slot or no copy is left."""
        slot = self._read_slot.get(digest)
        if slot is None:
            slot = None if self._is_full else self.host.take()
            if slot is None:
                return None
            self._reads[slot] = _Transfer(digest, self.info.num_ranks)
            self._read_slot[digest] = slot
            self._copy(Copy.READ, 0, slot, digest, pin=True)
        self.host.pin(slot)
        self._reads[slot].loads.append(load)
        return slot

    # -- reports of ranks

    def report(self, report: KVReport) -> None:
        """Process one report of one rank."""
        if report.kind is KVReportKind.READ:
            for slot, succeeded in report.results:
                self._has_read(slot, succeeded)
        elif report.kind is KVReportKind.WRITTEN:
            for slot, succeeded in report.results:
                self._has_written(slot, succeeded)
        elif report.kind is KVReportKind.APPEARED:
            self._on_disk.update(report.digests)
        elif report.kind is KVReportKind.VANISHED:
            self._on_disk.difference_update(report.digests)
        else:
            self._stats.kv_offload_disk_bytes = report.num_bytes
            self._stats.kv_offload_disk_blocks = report.num_blocks

    def _has_read(self, slot: int, succeeded: bool) -> None:
        read = self._reads[slot]
        read.num_left, read.failed = read.num_left - 1, read.failed or not succeeded
        if read.num_left:
            return
        del self._reads[slot], self._read_slot[read.digest]
        if read.failed:
            # The block will be computed, and then written again.
            self._on_disk.discard(read.digest)
            self._stats.kv_offload_failed_blocks += 1
        else:
            self._stats.kv_offload_read_blocks += 1
            if self.host.find(read.digest) is None:
                self.host.name(slot, read.digest)
        for load in read.loads:
            load.num_left -= 1
        self.host.unpin(slot)

    def _has_written(self, slot: int, succeeded: bool) -> None:
        write = self._writes[slot]
        write.num_left, write.failed = write.num_left - 1, write.failed or not succeeded
        if write.num_left:
            return
        del self._writes[slot]
        self._written.discard(write.digest)
        if write.failed:
            self._stats.kv_offload_failed_blocks += 1
        else:
            self._stats.kv_offload_written_blocks += 1
            self._on_disk.add(write.digest)
        self.host.unpin(slot)

    def audit(self) -> None:
        """Raise AssertionError unless every slot is accounted for."""
        self.host.audit()
        pins = sum(len(load.slots) for load in self._loads.values()) + len(self._reads) + len(self._writes)
        assert self.host.num_pins == pins + len(self._next.slots) + self._num_sent, "a slot is pinned for nothing"


class Flush:
    """Writer of the blocks in host memory and in the pool that have no file yet. No sequence may run any more."""

    def __init__(self, offload: KVOffload, blocks: Iterable[tuple[int, bytes]]) -> None:
        """Collect the blocks to write. `blocks`: the pool's, with their digests, most important first."""
        self._offload = offload
        self._left = deque[tuple[int | None, bytes]]((None, digest) for digest in offload.host.digests)
        self._left.extend(blocks)

    @property
    def num_left(self) -> int:
        """Number of blocks that no step has been asked to copy."""
        return len(self._left)

    def add_copies(self) -> bool:
        """Add copies to the next step until it is full. Returns False if all blocks are written."""
        while self._left and self._offload.write_to_file(*self._left[0]):
            self._left.popleft()
        return not self._offload.is_idle
