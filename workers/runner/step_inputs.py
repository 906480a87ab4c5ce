"""Inputs of a step on the device, at fixed addresses, from which graphs read them.

The many small arrays are in one buffer, so that one copy transfers them. Copies from and to pinned host memory run
while the host continues. So there are two such buffers on the host: one may be written while the other is copied.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.blocks_by_slot import BLOCK_ROWS, BlocksBySlot, num_blocks, write_blocks
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch, with_sampled
from oarlock.workers.protocol import MAX_BIAS_PER_ROW, NULL_BLOCK, StepMetadata, mask_words
from oarlock.workers.recurrent.states import NULL_SLOT, StateStep
from oarlock.workers.sampling.columns import SamplingColumns, bias_entries, write_rows
from oarlock.workers.sampling.columns import sections as sampling_sections

_ALIGN = 64  # bytes; the widest access of a kernel, and a cache line of the host
_TORCH = {"<i4": torch.int32, "<i8": torch.int64, "<f4": torch.float32, "|u1": torch.uint8}

_STATES = ("state_reads", "state_writes", "save_starts", "save_lens", "save_slots")  # `StateStep` after its starts

Section = tuple[str, str, tuple[int, ...]]  # name, dtype in numpy's notation, shape


class Layout:
    """Offsets of sections that are stored one after the other."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._places: list[tuple[Section, int]] = []
        self.num_bytes = 0
        for section in sections:
            self._places.append((section, self.num_bytes))
            size = math.prod(section[2]) * np.dtype(section[1]).itemsize
            self.num_bytes += -(-size // _ALIGN) * _ALIGN

    def arrays(self, memory: np.ndarray) -> dict[str, np.ndarray]:
        """Return views of the sections in `memory`, uint8 [at least `num_bytes`]."""
        return {
            name: np.frombuffer(memory, dtype, math.prod(shape), start).reshape(shape)
            for (name, dtype, shape), start in self._places
        }

    def tensors(self, memory: Tensor) -> dict[str, Tensor]:
        """Return views of the sections in `memory`, a uint8 tensor [at least `num_bytes`]."""
        views = {}
        for (name, dtype, shape), start in self._places:
            kind = _TORCH[dtype]
            stop = start + math.prod(shape) * kind.itemsize
            views[name] = memory[start:stop].view(kind).view(shape)
        return views


class StagingBuffer:
    """A buffer of `num_bytes` on the device, and a buffer of twice the size on the host, whose halves are used in
    turn."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self.on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._halves = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=on_cuda) for _ in range(2)]
        # A thread that waits for such an event sleeps instead of spinning.
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)] if on_cuda else None
        self._current = 0

    def turn(self) -> None:
        """Switch to the other half, after its copy has finished."""
        self._current = 1 - self._current
        if self._copied is not None:
            self._copied[self._current].synchronize()

    @property
    def on_host(self) -> np.ndarray:
        """The half in use: uint8 [num_bytes]."""
        return self._halves[self._current].numpy()

    def to_device(self, num_bytes: int) -> None:
        """Copy the first `num_bytes` to the device, in the order of its other work, without waiting."""
        self.on_device[:num_bytes].copy_(self._halves[self._current][:num_bytes], non_blocking=True)
        self._record()

    def to_host(self, num_bytes: int) -> Callable[[], np.ndarray]:
        """Switch to the other half, and start a copy to it.

        Returns a function that waits for the copy and returns the half: uint8, valid until the half is used again.
        """
        self.turn()
        current = self._current
        self._halves[current][:num_bytes].copy_(self.on_device[:num_bytes], non_blocking=True)
        self._record()

        def copied() -> np.ndarray:
            if self._copied is not None:
                self._copied[current].synchronize()
            return self._halves[current].numpy()

        return copied

    def _record(self) -> None:
        if self._copied is not None:
            self._copied[self._current].record()


class Shape(NamedTuple):
    """Numbers of tokens, sequences, rows of logits and table entries of a step, or the largest numbers that fit."""

    tokens: int
    seqs: int
    logits: int
    entries: int  # changed entries of block tables
    groups: int = 1  # groups of pages of the model
    states: int = 0  # sequences, if the model has recurrent layers, else 0
    saves: int = 0  # saved states
    slots: int = 0  # slots of adapters; 0: steps have none

    def of(self, step: StepMetadata) -> "Shape":
        """Return the shape of `step` of the same model."""
        sizes = step.num_tokens, step.num_seqs, len(step.logits_indices), len(step.table_blocks)
        states, saves = step.num_seqs if self.states else 0, len(step.state_saves)
        return Shape(*sizes, self.groups, states, saves, self.slots if len(step.adapter_slots) else 0)

    def bucket(self, size: int) -> "Shape":
        """Return the shape of `size` plain decodes of the same model: one token each, and at most one new block of each
        group."""
        saves = size if self.states else 0
        return Shape(size, size, size, size * self.groups, self.groups, saves, saves, self.slots)

    def prompts(self, size: int, seqs: int, logits: int) -> "Shape":
        """Return the shape of steps of the same model of up to `size` tokens, fewer than `seqs` sequences and `logits`
        rows of logits."""
        states, saves = (seqs, size) if self.states else (0, 0)
        return Shape(size, seqs, logits, size * self.groups, self.groups, states, saves, self.slots)

    def sections(self) -> list[Section]:
        """Return the sections that the model reads, then the sections that depend on the number of rows of logits."""
        tokens, seqs, logits, entries, groups, states, saves, slots = self
        of_states = [
            ("state_reads", "<i4", (states,)),
            ("state_writes", "<i4", (states,)),
            ("save_starts", "<i4", (states + 1,)),
            ("save_lens", "<i4", (saves,)),
            ("save_slots", "<i4", (saves,)),
        ]
        return [
            ("token_ids", "<i8", (tokens,)),
            ("positions", "<i8", (tokens,)),
            ("slots", "<i8", (groups, tokens + tokens % 2)),  # 16 divides the address of each group's slots
            ("query_start_loc", "<i4", (seqs + 1,)),
            ("seq_lens", "<i4", (seqs,)),
            ("rows", "<i4", (seqs,)),
            ("table_places", "<i8", (entries,)),
            ("table_blocks", "<i4", (entries,)),
            *(of_states if states else ()),
            *(_block_sections("adapter", tokens, slots) if slots else ()),
            ("logits_indices", "<i8", (logits,)),
            *(_block_sections("logits", logits, slots) if slots else ()),
            *sampling_sections(logits),
        ]


def _block_sections(name: str, rows: int, slots: int) -> list[Section]:
    """Return the sections of a `BlocksBySlot` of `rows` rows."""
    blocks = num_blocks(rows, slots)
    return [(f"{name}_order", "<i4", (blocks * BLOCK_ROWS,)), (f"{name}_blocks", "<i4", (blocks,))]


class InputPlace:
    """Device memory for steps of one shape, one at a time."""

    def __init__(self, shape: Shape, memory: Tensor, tables: BlockTables, bias: Tensor, mask_bits: Tensor) -> None:
        self.shape = shape
        self.layout = Layout(shape.sections())
        self.tensors = self.layout.tensors(memory)
        self._tables = tables
        columns = {name: self.tensors[name] for name, _, _ in sampling_sections(shape.logits)}
        self.columns = SamplingColumns(**columns, bias=bias, mask_bits=mask_bits)

    def batch(
        self, query_lens: Sequence[int], context_lens: Sequence[int], sampled: Tensor, *, adapts: bool = False
    ) -> ForwardBatch:
        """Return the step in this memory, after its block table entries have been written on the device.

        `sampled` integers [R]: tokens that the previous step sampled, which replace references in `token_ids`.
        `context_lens` may be upper bounds. `adapts`: for a step with adapters.
        """
        on_device = self.tensors
        if self.shape.entries:
            flat = self._tables.tables.view(-1)
            flat.index_copy_(0, on_device["table_places"], on_device["table_blocks"])
        return ForwardBatch(
            num_tokens=self.shape.tokens,
            num_logits=self.shape.logits,
            query_lens=list(query_lens),
            context_lens=list(context_lens),
            token_ids=with_sampled(on_device["token_ids"], sampled),
            positions=on_device["positions"],
            slots=dict(zip(self._tables.groups, on_device["slots"][:, : self.shape.tokens], strict=True)),
            query_start_loc=on_device["query_start_loc"],
            seq_lens=on_device["seq_lens"],
            rows=on_device["rows"],
            block_tables=self._tables.of_group,
            logits_indices=on_device["logits_indices"],
            state=self._state() if self.shape.states else None,
            adapters=self._blocks("adapter") if adapts else None,
        )

    def logits_adapters(self, first: int) -> BlocksBySlot:
        """Return the adapters of the rows of logits from number `first` on, of a step with adapters."""
        return self._blocks("logits").from_row(first)

    def _blocks(self, name: str) -> BlocksBySlot:
        return BlocksBySlot(self.tensors[f"{name}_order"], self.tensors[f"{name}_blocks"])

    def _state(self) -> StateStep:
        """Return the slots of recurrent state that the step in this memory reads and writes."""
        return StateStep(self.tensors["query_start_loc"], *(self.tensors[name] for name in _STATES))


class StepInputs:
    """Copier of steps to the device: one copy for each step, and one more for bias and for masks if there are any."""

    def __init__(self, tables: BlockTables, largest: Shape, sampled_rows: int, vocab_size: int) -> None:
        """Allocate the buffers. `largest`: shape of the largest step. `sampled_rows`: most rows of a step that are
        sampled, not only scored."""
        device, words = tables.tables.device, mask_words(vocab_size)
        self._tables, self._largest = tables, largest
        self.sink = NULL_SLOT  # slot that padding sequences write; set when the slots are allocated
        self._padded_seqs = largest.seqs + 1  # sequences of steps with prompts; one more for the padding tokens
        entries = max(largest.entries, largest.tokens * largest.groups)
        states, saves = (self._padded_seqs, largest.tokens) if largest.states else (0, 0)
        sizes = largest.tokens, self._padded_seqs, largest.logits, entries
        room = Shape(*sizes, largest.groups, states, saves, largest.slots)
        self._staging = StagingBuffer(Layout(room.sections()).num_bytes, device)
        self._bias = StagingBuffer(sampled_rows * MAX_BIAS_PER_ROW * 8, device)
        self._masks = StagingBuffer(sampled_rows * words * 4, device)
        self._bias_view = self._bias.on_device.view(torch.int32).view(-1, 2)  # [M, 2]
        self._masks_view = self._masks.on_device.view(torch.int32).view(-1, words)  # [G, W]
        self._buckets: dict[int, InputPlace] = {}

    def bucket(self, size: int) -> InputPlace:
        """Return the memory for padded steps of `size` sequences: always the same."""
        if size not in self._buckets:
            self._buckets[size] = self._place(self._largest.bucket(size))
        return self._buckets[size]

    def stage(self, step: StepMetadata, bucket: int | None = None, prompts: int | None = None) -> InputPlace:
        """Copy `step` to the device, padded to `bucket` sequences or to `prompts` tokens, or unpadded.

        Does not wait until the device has finished its work.
        """
        assert self._largest.slots or not len(step.adapter_slots), "no adapters are served"
        if bucket is not None:
            place = self.bucket(bucket)
        elif prompts is not None:
            place = self._place(self._largest.prompts(prompts, self._padded_seqs, len(step.logits_indices)))
        else:
            place = self._place(self._largest.of(step))
        if len(step.table_blocks) > place.shape.entries:
            self._tables.write(step)
        else:
            self._tables.write_on_host(step)
        self._staging.turn()
        arrays = place.layout.arrays(self._staging.on_host)
        write_step(arrays, step, self._tables)
        if place.shape.states:
            write_states(arrays, step, self.sink)
        if len(step.adapter_slots) or (place.shape.slots and not step.num_tokens):
            write_adapters(arrays, step)  # other steps do not read them
        write_rows(step, arrays)
        self._staging.to_device(place.layout.num_bytes)
        if len(step.bias_rows):
            _send(self._bias, bias_entries(step))
        return place

    def stage_masks(self, step: StepMetadata) -> None:
        """Copy the masks of the most recently staged step."""
        if len(step.mask_rows):
            _send(self._masks, step.mask_bits)

    def _place(self, shape: Shape) -> InputPlace:
        return InputPlace(shape, self._staging.on_device, self._tables, self._bias_view, self._masks_view)


def _send(buffer: StagingBuffer, array: np.ndarray) -> None:
    """Copy `array` to the start of `buffer` on the device."""
    buffer.turn()
    buffer.on_host[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    buffer.to_device(array.nbytes)


def write_step(into: dict[str, np.ndarray], step: StepMetadata, tables: BlockTables) -> None:
    """Write `step` into the sections of a `Shape`, followed by padding.

    Block table entries are not written if they exceed the shape.
    """
    for name in ("token_ids", "positions"):
        _fill(into[name], getattr(step, name), 0)
    tables.slots(step, into["slots"][:, : step.num_tokens])
    into["slots"][:, step.num_tokens :] = 0
    _fill(into["rows"], step.rows, tables.null_row)
    starts, known = into["query_start_loc"], len(step.query_start_loc)
    # Padding sequences have one token each while there are tokens, and the last sequence has the rest.
    starts[:known] = step.query_start_loc
    starts[known:] = np.minimum(step.num_tokens + 1 + np.arange(len(starts) - known), len(into["token_ids"]))
    starts[-1] = len(into["token_ids"])
    into["seq_lens"][: step.num_seqs] = step.seq_lens
    into["seq_lens"][step.num_seqs :] = np.maximum(np.diff(starts[step.num_seqs :]), 1)
    rows = into["logits_indices"]
    rows[: len(step.logits_indices)] = step.logits_indices
    rows[len(step.logits_indices) :] = step.num_tokens + np.arange(len(rows) - len(step.logits_indices))
    if len(step.table_blocks) <= len(into["table_blocks"]):
        _fill(into["table_places"], tables.table_indices(step), tables.null_index)
        _fill(into["table_blocks"], step.table_blocks, NULL_BLOCK)
    else:
        into["table_places"][:] = tables.null_index
        into["table_blocks"][:] = NULL_BLOCK


def write_states(into: dict[str, np.ndarray], step: StepMetadata, sink: int) -> None:
    """Write the slots of `step` into the sections of a `Shape`. Padding sequences read the null slot and write `sink`;
    padding saves belong to no sequence."""
    _fill(into["state_reads"], step.state_reads, NULL_SLOT)
    _fill(into["state_writes"], step.state_writes, sink)
    starts = into["save_starts"]
    starts[:] = np.searchsorted(step.state_saves[:, 0], np.arange(len(starts)))
    _fill(into["save_lens"], step.state_saves[:, 1], 0)
    _fill(into["save_slots"], step.state_saves[:, 2], sink)


def write_adapters(into: dict[str, np.ndarray], step: StepMetadata) -> None:
    """Write the slots of adapters of `step` into the sections of a `Shape`. Padding has no adapter."""
    slot_of = np.zeros(len(into["token_ids"]), np.int32)
    slot_of[: step.num_tokens] = step.adapter_slots_of_tokens
    write_blocks(slot_of, into["adapter_order"], into["adapter_blocks"])
    of_logits = np.zeros(len(into["logits_indices"]), np.int32)
    of_logits[: len(step.logits_indices)] = slot_of[step.logits_indices]
    write_blocks(of_logits, into["logits_order"], into["logits_blocks"])


def _fill(into: np.ndarray, array: np.ndarray, padding: int) -> None:
    into[: len(array)] = array
    into[len(array) :] = padding
