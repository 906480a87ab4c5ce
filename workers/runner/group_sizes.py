"""Sizes of the memory groups of one rank: how the room is divided among pools of pages and slots. Torch-free.

Each group has its own pool, sized at start. The rule:

* A model with one group of pages gets all the room, as whole sequences of `max_model_len` need it.
* Otherwise slots come first: two for each running sequence, and as many again for checkpoints. If that is too much
  before the weights are read, `max_num_seqs` is lowered (`with_sequences_that_fit`); afterwards there are fewer
  checkpoints, down to none.
* A group of pages with a window needs at most its span and the tokens of the largest step of one sequence, rounded up
  to blocks, and one block more. Every group holds at least one sequence of `max_model_len`.
* The rest of the room is divided so that the pools hold as many sequences of a typical length as possible: an eighth
  of `max_model_len`, or the longest window if that is longer. Most contexts are short: they should not wait for blocks
  of windows while blocks of full attention are free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oarlock.base.errors import EXIT_OUT_OF_MEMORY, StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.config import GroupInfo, WorkerConfig, window_blocks
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.memory_spec import MemoryGroup, PagesSpec
from oarlock.workers.platform.dtypes import ITEM_BYTES, KV_CACHE_DTYPES, KVShape
from oarlock.workers.runner.kv_room import KVRoom

# Block 0 is the null block, and a backend may keep one page that is never written. Slot 0 is the null slot, and one
# more is for padding sequences.
RESERVED_BLOCKS = 2
LEAST_COUNTS = 2  # blocks or slots of each group for a trial, including number 0
RUNNING_SLOTS, CHECKPOINT_SLOTS = 2, 2  # slots for each running sequence, and for its checkpoints
_UNLIMITED = 1 << 40  # blocks of a group without layers on the rank
_LEAST_SLOTS = 5  # including the null slot, for one sequence and the self-tests
_TYPICAL_SHARE = 8  # `max_model_len` divided by this is the length of a typical sequence
SLOTS_SHARE = 0.5  # largest share of the room for slots, if there are pages: `max_num_seqs` is lowered until they fit


@dataclass(frozen=True, slots=True)
class GroupSize:
    """Size of one memory group on one rank."""

    num_layers: int  # layers of the rank's stage with own memory in the group; may be 0
    bytes_per_block: int  # of a block or slot
    pages: KVShape | None  # None: slots
    span: int | None = None  # of pages

    @property
    def is_recurrent(self) -> bool:
        return self.pages is None


def group_size(config: WorkerConfig, group: MemoryGroup, layers: range) -> GroupSize:
    """Return the size of `group` on a rank with `layers`. `config` must have a resolved dtype."""
    own, ranks = sum(layer in layers for layer in group.layers), config.tensor_parallel_size
    memory = group.memory
    if not isinstance(memory, PagesSpec):
        return GroupSize(own, own * memory.bytes_of_rank(ranks, config.dtype), None)
    shape = KVShape(
        num_layers=own,
        num_kv_heads=memory.heads_of_rank(ranks),
        head_dim=memory.key_width,
        block_size=config.block_size,
        item_bytes=ITEM_BYTES[config.dtype],
        cache_dtype=KV_CACHE_DTYPES.get(config.kv_cache_dtype, config.kv_cache_dtype),
        value_dim=memory.value_width,
        value_in_key=memory.value_in_key,
    )
    return GroupSize(own, shape.bytes_per_block, shape, memory.span)


class GroupSizes:
    """The memory groups of one rank, and the division of room among them."""

    def __init__(self, config: WorkerConfig, groups: Sequence[GroupSize]) -> None:
        """Describe a rank with `groups`. `config` must have resolved lengths."""
        assert config.max_model_len is not None, "preflight resolves the context length"
        self._config, self._length = config, config.max_model_len
        self.groups = list(groups)
        self.pages = [group for group in self.groups if not group.is_recurrent]
        self.slot_bytes = sum(group.bytes_per_block for group in self.groups if group.is_recurrent)
        self.has_slots = len(self.pages) < len(self.groups)
        self._is_plain = len(self.groups) == len(self.pages) == 1

    @staticmethod
    def of(config: WorkerConfig, spec: DecoderSpec, stage: int = 0) -> GroupSizes:
        """Describe a rank of `stage`. `config` must have a resolved dtype and resolved lengths."""
        layers = spec.layers_of_stage(stage, config.pipeline_parallel_size)
        return GroupSizes(config, [group_size(config, group, layers) for group in spec.groups])

    # -- needs of sequences

    def blocks_of_sequence(self, group: GroupSize, length: int) -> int:
        """Return the most blocks of `group` that a sequence of `length` tokens holds at a time."""
        blocks = -(-length // self._config.block_size)
        if group.span is None or self._is_plain:
            return blocks
        step = min(self._config.max_num_batched_tokens, self._length)
        return min(blocks, window_blocks(group.span, step, self._config.block_size))

    def bytes_of_sequence(self, length: int) -> int:
        """Return the bytes of the blocks and slots of one sequence of `length` tokens, with the reserve."""
        blocks = sum(
            (self.blocks_of_sequence(one, length) + RESERVED_BLOCKS) * one.bytes_per_block for one in self.pages
        )
        return blocks + (_LEAST_SLOTS + 1) * self.slot_bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all groups of pages."""
        return sum(group.pages.bytes_per_token for group in self.groups if group.pages is not None)

    @property
    def is_rounded(self) -> bool:
        """Whether all keys and values are rounded when they are stored in pages."""
        return all(group.pages is None or group.pages.is_rounded for group in self.groups)

    @property
    def longest_span(self) -> int | None:
        """The longest window or chunk, in tokens, if every group of pages has one; else None."""
        spans = [group.span for group in self.pages if group.span is not None]
        return max(spans) if spans and len(spans) == len(self.pages) else None

    def sequences(self, counts: Sequence[int], length: int) -> int:
        """Return the number of sequences of `length` tokens that `counts` blocks and slots hold at once."""
        found = []
        for group, count in zip(self.groups, counts, strict=True):
            each = RUNNING_SLOTS if group.is_recurrent else self.blocks_of_sequence(group, length)
            found.append(max(0, count - 1) // each)
        return min(found)

    def sequences_with_slots(self, room: KVRoom) -> int:
        """Return the number of sequences, at least 1 and at most `max_num_seqs`, whose slots and checkpoints fit into
        their share of `room`: half of it if there are pages, and no more than the pages of one sequence of
        `max_model_len` leave."""
        config, share = self._config, room.available
        if not self.slot_bytes:
            return config.max_num_seqs
        if self.pages:
            share = int(room.available * SLOTS_SHARE)
        left = room.available - self.bytes_of_sequence(self._length)
        if left >= 0 and not config.fit_model_len:  # otherwise the longest sequence must be shorter
            share = min(share, left + (_LEAST_SLOTS + 1) * self.slot_bytes)
        fitting = (share // self.slot_bytes - RESERVED_BLOCKS) // (RUNNING_SLOTS + CHECKPOINT_SLOTS)
        return max(1, min(config.max_num_seqs, fitting))

    # -- division of room

    def counts_that_fit(self, room: KVRoom) -> list[int]:
        """Return the numbers of blocks and slots of each group, including number 0.

        Raises `StartupError` (exit code 4) if one sequence of `max_model_len` does not fit; if the context length is
        fitted to the memory, one block of each group is enough. Measured host memory is used up to the need of
        `max_num_seqs` full sequences. A given size and device memory are used completely, because spare blocks keep
        cached prefixes for later requests.
        """
        available, length = room.available, self._length
        of_more = (self._least_slots - _LEAST_SLOTS) * self.slot_bytes  # slots of more sequences than one
        if self._config.fit_model_len:
            length = self._longest_that_fits(available - of_more)
        if not length or self.bytes_of_sequence(length) > available:
            raise self._too_small(room)
        if self.bytes_of_sequence(length) + of_more > available:
            raise self._too_few_slots(available - self.bytes_of_sequence(length) + (_LEAST_SLOTS + 1) * self.slot_bytes)
        slots = self._wanted_slots
        if self.slot_bytes:
            fitting = (available - self.bytes_of_sequence(length)) // self.slot_bytes + _LEAST_SLOTS
            slots = min(slots, fitting)
            available -= (slots + 1) * self.slot_bytes
        blocks = iter(self._blocks_that_fit(available, length))
        return [slots if group.is_recurrent else next(blocks) for group in self.groups]

    def given_counts(self, num_blocks: int) -> list[int]:
        """Return `num_blocks` of every group of pages, and the slots that all sequences need."""
        return [self._wanted_slots if group.is_recurrent else num_blocks for group in self.groups]

    @property
    def _least_slots(self) -> int:
        return max(_LEAST_SLOTS, self._config.max_num_seqs * RUNNING_SLOTS + 1)

    @property
    def _wanted_slots(self) -> int:
        wanted = self._config.max_num_seqs * (RUNNING_SLOTS + CHECKPOINT_SLOTS) + 1
        return max(_LEAST_SLOTS, wanted)

    def _longest_that_fits(self, available: int) -> int:
        """Return the longest sequence in whole blocks that fits, up to `max_model_len`; 0 if one block does not."""
        size, low, high = self._config.block_size, 0, -(-self._length // self._config.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.bytes_of_sequence(middle * size) <= available
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(self._length, low * size)

    def _blocks_that_fit(self, available: int, length: int) -> list[int]:
        """Return the blocks of each group of pages, including the null block."""
        config, pages = self._config, self.pages
        sizes = [group.bytes_per_block for group in pages]
        left = available - RESERVED_BLOCKS * sum(sizes)
        least = [self.blocks_of_sequence(group, length) for group in pages]
        most = [self.blocks_of_sequence(group, self._length) * config.max_num_seqs for group in pages]
        spans = [group.span for group in pages if group.span is not None]
        typical = min(length, max([length // _TYPICAL_SHARE, *spans]))
        blocks = _shared(left, sizes, [self.blocks_of_sequence(group, typical) for group in pages], least)
        if config.kv_cache_bytes is None and config.device != "cuda":
            blocks = [min(pair) for pair in zip(blocks, most, strict=True)]
        return [count + 1 for count in blocks]

    # -- results

    def bytes_of(self, counts: Sequence[int]) -> int:
        """Return the bytes of `counts` blocks and slots, with the slots for padding sequences."""
        blocks = sum(count * group.bytes_per_block for group, count in zip(self.groups, counts, strict=True))
        return blocks + self.slot_bytes

    def joint_blocks(self, counts: Sequence[int]) -> int:
        """Return the number of blocks that limits whole sequences, including the null block.

        It is the smallest number of the groups without a window, or else with one. A model without pages has as many
        blocks as its sequences would take.
        """
        of_pages = [(group, count) for group, count in zip(self.groups, counts, strict=True) if not group.is_recurrent]
        full = [count for group, count in of_pages if group.span is None] or [count for _, count in of_pages]
        if full:
            return min(full)
        return -(-self._length // self._config.block_size) * self._config.max_num_seqs + 1

    def fitted_length(self, counts: Sequence[int]) -> int:
        """Return the longest sequence for `counts` blocks. It is `max_model_len`, unless the length may be fitted."""
        if not self._config.fit_model_len:
            return self._length
        found = [self._length]
        for group, count in zip(self.groups, counts, strict=True):
            if not group.is_recurrent and count - 1 < self.blocks_of_sequence(group, self._length):
                found.append((count - 1) * self._config.block_size)
        return min(found)

    def infos(self, counts: Sequence[int]) -> tuple[GroupInfo, ...]:
        """Return the groups as the engine knows them."""
        return tuple(
            GroupInfo(count, group.bytes_per_block, group.is_recurrent, group.span)
            for group, count in zip(self.groups, counts, strict=True)
        )

    # -- errors

    def _too_small(self, room: KVRoom) -> StartupError:
        config, need = self._config, self.bytes_of_sequence(self._length)
        largest = self._longest_that_fits(room.available)
        parts = [self._arithmetic(group) for group in self.groups]
        cause = (
            f"Not enough KV memory for one sequence of {self._length} tokens: it needs {human_bytes(need)} per rank "
            f"({', plus '.join(parts)}), and {room.source} {human_bytes(room.available)}."
        )
        eight = "use --kv-cache-dtype int8, " if not self.is_rounded and config.device != "cuda" else ""
        shorter = f"lower --max-model-len to {largest} or less" if largest else "free memory or use a smaller model"
        if config.device == "cuda" and config.kv_cache_bytes is None:
            fix = (
                "Lower --max-num-batched-tokens, raise --gpu-memory-utilization, use more ranks "
                f"(--tensor-parallel-size), or {shorter}."
            )
        else:
            fix = f"Raise --kv-cache-memory to {-(-need // 2**20)}MiB, {eight}or {shorter}."
        return StartupError(cause, fix, EXIT_OUT_OF_MEMORY)

    def _arithmetic(self, group: GroupSize) -> str:
        """Return the bytes of one sequence in `group` as a multiplication for messages."""
        if group.pages is None:
            return (
                f"{_LEAST_SLOTS + 1} slots x {human_bytes(group.bytes_per_block)} of recurrent state in "
                f"{group.num_layers} layers"
            )
        pages, blocks = group.pages, self.blocks_of_sequence(group, self._length)
        window = "" if group.span is None or self._is_plain else f" of a window of {group.span} tokens and a step"
        keys, values = _row(pages, pages.head_dim, pages.key_bytes), _row(pages, pages.value_width, pages.value_bytes)
        row = f"2 x {pages.num_layers} layers x {pages.num_kv_heads} KV heads x {keys}"
        if pages.value_in_key:
            row = f"{pages.num_layers} layers x {keys}"
        elif pages.value_width != pages.head_dim:
            row = f"{pages.num_layers} layers x {pages.num_kv_heads} KV heads x ({keys} + {values})"
        return (
            f"{blocks} + {RESERVED_BLOCKS} blocks{window} x {pages.block_size} tokens x {pages.bytes_per_token} bytes "
            f"= {row} bytes a token"
        )

    def _too_few_slots(self, available: int) -> StartupError:
        config, least = self._config, self._least_slots + 1
        most = (available // self.slot_bytes - RESERVED_BLOCKS) // RUNNING_SLOTS
        return StartupError(
            f"Not enough memory for the recurrent state of {config.max_num_seqs} sequences: {RUNNING_SLOTS} slots for "
            f"each and {RESERVED_BLOCKS} more, {least} x {human_bytes(self.slot_bytes)}, take "
            f"{human_bytes(least * self.slot_bytes)} per rank, and {human_bytes(available)} is left.",
            f"Lower --max-num-seqs to {most} or less." if most > 0 else "Free memory or use a smaller model.",
            EXIT_OUT_OF_MEMORY,
        )


def _row(pages: KVShape, width: int, num_bytes: int) -> str:
    """Return the bytes of one KV head's key or value of one token, as a multiplication for messages."""
    item, scale = divmod(num_bytes, width)
    return f"({width} x {item} + {scale})" if scale else f"{width} x {item}"


def _shared(room: int, sizes: Sequence[int], each: Sequence[int], least: Sequence[int]) -> list[int]:
    """Return the blocks of each group: as many times `each` as fit into `room`, but not fewer than `least`.

    `sizes`: bytes of a block of each group; 0 if the rank has no layers of it.
    """
    short = {group for group, size in enumerate(sizes) if not size}  # groups that do not share in the room
    blocks = [least[group] if size else _UNLIMITED for group, size in enumerate(sizes)]
    while True:
        sharing = [group for group in range(len(sizes)) if group not in short]
        left = room - sum(least[group] * sizes[group] for group in short)
        unit = sum(each[group] * sizes[group] for group in sharing)
        for group in sharing:
            blocks[group] = left * each[group] // unit
        below = {group for group in sharing if blocks[group] < least[group]}
        if not below:
            return blocks
        for group in below:
            blocks[group] = least[group]
        short |= below


def with_sequences_that_fit(config: WorkerConfig, spec: DecoderSpec, room: KVRoom) -> WorkerConfig:
    """Return `config` with `max_num_seqs` lowered, if slots of recurrent state of all sequences would take more than
    their share of `room`."""
    stages = range(config.pipeline_parallel_size)
    fitting = min(GroupSizes.of(config, spec, stage).sequences_with_slots(room) for stage in stages)
    return config if fitting >= config.max_num_seqs else config.with_(max_num_seqs=fitting)
