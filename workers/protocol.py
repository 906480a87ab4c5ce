"""One step and its output, and their conversion to bytes.

A step is a fixed header followed by flat numpy arrays in one buffer. The limits at start give the size of the buffer,
so it cannot overflow. Each array begins at a multiple of 64 bytes, so both sides only need the lengths in the header.
Successive steps mostly have the same lengths, so offsets are cached by lengths. Nothing is pickled. Imports numpy, not
torch. Sizes in the shapes below:

    S  sequences in the step        T  query tokens in the step       N  entries of block tables that changed
    L  rows that need logits        M  logit-bias entries             K  largest requested number of top logprobs
    G  rows with a mask             W  32-bit words of one mask       D  S if there are drafts, else 0
    P  rows with penalties          F  histories of earlier ids       H  distinct ids, all histories together
    C  copies of KV blocks between pages, host memory and files
    R  S if the model has recurrent layers, else 0                   V  saved recurrent states
    Q  sequences that need vectors, not tokens                        X  ids whose logits they name; returned values
    A  S if any sequence has an adapter, else 0
    U  commands for adapters; reports about them                      B  bytes of their texts
"""

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from oarlock.workers.adapter_digest import ADAPTER_DIGEST_BYTES
from oarlock.workers.adapters import MAX_LOADING, MAX_REASON_BYTES, MAX_TEXT_BYTES, max_commands
from oarlock.workers.config import MAX_POOLED_IDS, WorkerConfig, max_pooled_values
from oarlock.workers.kv_offload import DIGEST_BYTES, MAX_COPIES
from oarlock.workers.sampling_parameters import PENALTIES, ROWS, RowColumns

MAX_LOGPROBS = 20
MAX_BIAS_PER_ROW = 3 * 1024  # a third each for stop ids banned by min_tokens, logit_bias and bad words
MAX_VOCAB_SIZE = 1 << 20  # slots are sized before the vocabulary is known; unused pages take no memory
NULL_BLOCK = 0
NONFINITE, FINITE, ALL_BANNED = 0, 1, 2  # values of `StepOutput.finite`
# Values of `StepMetadata.pool_kinds`: the hidden state of the last token, the mean of all, the hidden state of the
# first token, of each token, logits after the last token, or the labels of an encoder's head. Hidden states are taken
# after the final norm.
LAST, MEAN, CLS, TOKEN, LOGITS, LABELS = range(6)
NOT_POOLED = -1  # value of `StepOutput.pooled_lens`
_MAGIC = 0x4F41524C  # "OARL"

Made = TypeVar("Made")

# Defaults of the sections that few steps use.
_no_ints = partial(np.zeros, 0, "<i4")
_no_floats = partial(np.zeros, 0, "<f4")
_no_history = partial(np.zeros, 1, "<i4")
_no_bits = partial(np.zeros, (0, 0), "<u4")
_no_copies = partial(np.zeros, (0, 3), "<i4")
_no_digests = partial(np.zeros, (0, DIGEST_BYTES), "|u1")
_no_adapters = partial(np.zeros, (0, ADAPTER_DIGEST_BYTES), "|u1")
_no_bytes = partial(np.zeros, 0, "|u1")


@dataclass(slots=True)
class StepMetadata(RowColumns[np.ndarray]):
    """One step as every rank reads it. Arrays are views into one buffer.

    A sequence's query tokens are `token_ids[query_start_loc[s]:query_start_loc[s + 1]]`, at absolute `positions`. After
    the step its KV cache has `seq_lens[s]` tokens. A step without sequences is a heartbeat. A step may be sent while
    the previous one runs: for tokens that the engine does not know yet, it refers to the previous step's rows of
    logits.
    """

    step_id: int
    # int32 [T]   negative only in a look-ahead step: -1 - r is the token that the previous step sampled in its row r
    token_ids: np.ndarray
    positions: np.ndarray  # int32 [T]
    query_start_loc: np.ndarray  # int32 [S + 1]
    seq_lens: np.ndarray  # int32 [S]
    rows: np.ndarray  # int32 [S]   each sequence's row of the ranks' block tables
    # Rows that need logits, one per sampled or scored token; together with the `RowColumns`.
    logits_indices: np.ndarray  # int32 [L]   index into the T tokens
    target_ids: np.ndarray  # int32 [L]   -1: sample a token; else score this id (prompt logprobs) and sample nothing
    sample_positions: np.ndarray  # int32 [L]   absolute position of the token being sampled or scored
    seeds: np.ndarray  # int64 [L]
    num_logprobs: np.ndarray  # int32 [L]   -1: none; 0: only the token's own; k: the k best as well
    # Additions to raw logits before sampling; -inf bans an id. Sorted by row.
    bias_rows: np.ndarray  # int32 [M]   index into the L rows
    bias_ids: np.ndarray  # int32 [M]   vocabulary id
    bias_values: np.ndarray  # float32 [M]
    # Entries of the block tables to write before any is read; none twice. The step in which a sequence gets a row
    # writes all entries of the row.
    table_groups: np.ndarray = field(default_factory=_no_bytes)  # uint8 [N]   group of pages, see `WorkerInfo.groups`
    table_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [N]
    table_columns: np.ndarray = field(default_factory=_no_ints)  # int32 [N]   position // block_size
    table_blocks: np.ndarray = field(default_factory=_no_ints)  # int32 [N]
    # Penalties of earlier ids, applied to the biased logits. Sorted by row. Ranks keep the histories, and add the
    # tokens that these rows sample.
    penalty_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [P]   index into the L rows
    repetition: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   divides logits above 0, else multiplies
    frequency: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   subtracted once per count
    presence: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   subtracted if the count is not 0
    # Complete histories to write before anything is sampled: in the first step that samples after a sequence got its
    # row.
    history_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [F]   row of the engine's tables, as `rows`
    history_starts: np.ndarray = field(default_factory=_no_history)  # int32 [F + 1]   each one's slice of these two:
    history_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [H]   distinct within a history
    history_counts: np.ndarray = field(default_factory=_no_ints)  # int32 [H]   times generated; 0: in the prompt only
    # The ids that a row may sample; all others get a logit of -inf. Sorted by row.
    mask_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [G]   index into the L rows
    mask_bits: np.ndarray = field(default_factory=_no_bits)  # uint32 [G, W]   bit v % 32 of word v // 32: v is allowed

    # Number of a sequence's last query tokens that are drafts: guesses of the tokens after its newest one. Such a
    # sequence has a row of logits for its newest token and one for each draft, and samples in all of them.
    num_drafts: np.ndarray = field(default_factory=_no_ints)  # int32 [D]

    # Sequences that need vectors, without rows of logits. Ranks keep the sum of a mean between chunks.
    pool_seqs: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   index into S
    pool_kinds: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   LAST, MEAN, CLS, TOKEN, LOGITS or LABELS
    pool_lens: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   `seq_lens` in the sequence's last chunk
    pool_second: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   offset of its second text; 0: it has one
    pool_num_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   number of `pool_ids` of each sequence
    pool_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [X]   vocabulary ids for LOGITS

    # Slots of recurrent state: see `oarlock.workers.recurrent.states`. A slot that is read is not written in this step.
    state_reads: np.ndarray = field(default_factory=_no_ints)  # int32 [R]   slot of the state before the step
    state_writes: np.ndarray = field(default_factory=_no_ints)  # int32 [R]   slot for the state after the step
    # Sorted: index into S, number of the sequence's tokens in this step after which the state is saved, slot.
    state_saves: np.ndarray = field(default_factory=_no_copies)  # int32 [V, 3]

    # Copies of KV blocks, made in this order before the rest of the step, even if the step is refused; see
    # `oarlock.workers.kv_offload`.
    kv_copies: np.ndarray = field(default_factory=_no_copies)  # int32 [C, 3]   `Copy`, block id, slot
    kv_digests: np.ndarray = field(default_factory=_no_digests)  # uint8 [C, 32]   of files, else 0

    # Slot of each sequence's LoRA adapter; 0: it has none. Empty if no sequence has one.
    adapter_slots: np.ndarray = field(default_factory=_no_ints)  # int32 [A]
    # Commands for adapters, run in this order before the rest of the step, even if the step is refused; see
    # `oarlock.workers.adapters`.
    adapter_commands: np.ndarray = field(default_factory=_no_copies)  # int32 [U, 3]   `CommandKind`, slot, text bytes
    adapter_digests: np.ndarray = field(default_factory=_no_adapters)  # uint8 [U, 16]
    adapter_texts: np.ndarray = field(default_factory=_no_bytes)  # uint8 [B]   of PREPARE: name, NUL, directory

    # Whether the step was sent before the output of the previous one was known. If ranks refused the previous step,
    # they refuse this one without trying it, because it depends on those results.
    is_ahead: bool = False

    kept: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)  # see `made_once`

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def adapter_slots_of_tokens(self) -> np.ndarray:
        """Slot of each token's LoRA adapter: int32 [T], zeros if no sequence has one."""
        lens = np.diff(self.query_start_loc)
        return np.repeat(self.adapter_slots, lens) if len(self.adapter_slots) else np.zeros(self.num_tokens, np.int32)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_num_logprobs(self) -> int:
        """The maximum of `num_logprobs`; -1 if no row needs logprobs."""
        return int(self.num_logprobs.max()) if len(self.num_logprobs) else -1

    def made_once(self, make: Callable[["StepMetadata"], Made]) -> Made:
        """Return the result of `make`, cached on this step object, which a `StepReader` reuses for later steps. The
        result must depend only on the lengths and addresses of the arrays, not on their content."""
        made = self.kept.get(make)
        if made is None:
            made = self.kept[make] = make(self)
        return made


@dataclass(slots=True)
class StepOutput:
    """The output of the answering rank: one entry per row of `logits_indices`, in the same order."""

    step_id: int
    token_ids: np.ndarray  # int32 [L]   the sampled token, or the scored target
    # uint8 [L]   state of the row's logits. FINITE: valid. NONFINITE: the model's logits had NaN, +inf or no finite
    # value among the allowed ids. ALL_BANNED: bias and mask ban every id. The token is valid only with FINITE.
    finite: np.ndarray
    logprobs: np.ndarray | None = None  # float32 [L]   log-softmax of the raw logits at token_ids
    ranks: np.ndarray | None = None  # int32 [L]   1 = most likely
    top_ids: np.ndarray | None = None  # int32 [L, K]   most likely first
    top_logprobs: np.ndarray | None = None  # float32 [L, K]
    # int32 [D]   number of each sequence's drafts that were accepted; this many rows after its first are valid as well.
    # None if the step has no drafts.
    num_accepted: np.ndarray | None = None
    # int32 [Q]   number of values in `pooled` of each sequence: TOKEN returns vectors in every chunk, CLS in the first,
    # all others in the last. NOT_POOLED: the values had NaN or infinity, and were left out.
    pooled_lens: np.ndarray = field(default_factory=_no_ints)
    pooled: np.ndarray = field(default_factory=_no_floats)  # float32 [X]
    # Adapters whose preparation has ended on all ranks, if the step asked for reports.
    adapter_digests: np.ndarray = field(default_factory=_no_adapters)  # uint8 [U, 16]
    adapter_failures: np.ndarray = field(default_factory=_no_ints)  # int32 [U]   0: ready; else bytes of the reason
    adapter_reasons: np.ndarray = field(default_factory=_no_bytes)  # uint8 [B]
    # Whether the step was refused for lack of memory: there are no rows, and it had no effect. It may be retried,
    # smaller.
    out_of_memory: bool = False


class ProtocolError(ValueError):
    """The bytes are not a step (or an output) of this layout: a bug, or memory that something else wrote."""


_ALIGN = 64
_KEPT = 256  # cached layouts of each kind; a few KiB each


class StepShape(NamedTuple):
    """Lengths of the arrays of a step or of its output, in the order of the header."""

    num_seqs: int = 0  # S
    num_tokens: int = 0  # T
    num_table_entries: int = 0  # N
    num_rows: int = 0  # L
    num_biases: int = 0  # M
    num_penalized: int = 0  # P
    num_history_ids: int = 0  # H
    num_masks: int = 0  # G
    num_mask_words: int = 0  # W
    num_drafting: int = 0  # D
    num_histories: int = 0  # F
    num_copies: int = 0  # C
    num_pooled: int = 0  # Q
    num_pooled_values: int = 0  # X
    num_states: int = 0  # R
    num_saves: int = 0  # V
    num_adapted: int = 0  # A
    num_adapter_commands: int = 0  # U
    num_adapter_bytes: int = 0  # B


# Magic, step id, the shape, the largest number of top logprobs of an output, a flag; then a checksum of these.
HEADER = struct.Struct(f"<IQ{len(StepShape._fields)}Ii?")
CHECKSUM = struct.Struct("<I")
HEADER_BYTES = HEADER.size + CHECKSUM.size

_I4, _U4, _I8, _F4, _U1 = (np.dtype(code) for code in ("<i4", "<u4", "<i8", "<f4", "|u1"))
_Array = tuple[str, np.dtype, tuple[int, ...]]  # name, dtype and shape


class _ArrayPosition(NamedTuple):
    """Position of one array that is not empty."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """Offsets of all arrays in a buffer."""

    num_bytes: int  # includes the header
    positions: tuple[_ArrayPosition, ...]  # in the buffer's order, without the empty ones
    empty: dict[str, np.ndarray]  # the empty arrays, each of its dtype and shape

    def views(self, buffer: memoryview) -> dict[str, np.ndarray]:
        """Return the arrays by name. Non-empty arrays are views of `buffer`."""
        views = self.empty.copy()
        for name, dtype, shape, count, offset in self.positions:
            flat = np.frombuffer(buffer, dtype, count, offset)
            views[name] = flat if len(shape) == 1 else flat.reshape(shape)
        return views

    def write(self, buffer: memoryview, source: object, without: str = "") -> None:
        """Copy each array from the attribute of `source` with its name, except for the array `without`."""
        for name, dtype, shape, count, offset in self.positions:
            if name != without:
                flat = np.frombuffer(buffer, dtype, count, offset)
                flat[...] = getattr(source, name) if len(shape) == 1 else getattr(source, name).ravel()

    def span(self, name: str) -> tuple[int, int]:
        """Return begin and end of an array in the buffer, in bytes; (0, 0) if it is empty."""
        for position in self.positions:
            if position.name == name:
                return position.offset, position.offset + aligned(position.count * position.dtype.itemsize)
        return 0, 0


def aligned(num_bytes: int) -> int:
    """Return the next multiple of the alignment."""
    return (num_bytes + _ALIGN - 1) // _ALIGN * _ALIGN


@lru_cache(_KEPT)
def step_layout(shape: StepShape) -> MessageLayout:
    """Return the layout of a step."""
    return _layout(_step_arrays(shape))


@lru_cache(_KEPT)
def output_layout(shape: StepShape, num_top: int) -> MessageLayout:
    """Return the layout of an output with `num_top` top logprobs in each row; -1: without logprobs."""
    return _layout(_output_arrays(shape, num_top))


def _layout(arrays: list[_Array]) -> MessageLayout:
    positions: list[_ArrayPosition] = []
    empty: dict[str, np.ndarray] = {}
    offset = aligned(HEADER_BYTES)
    for name, dtype, shape in arrays:
        count = math.prod(shape)
        if count:
            positions.append(_ArrayPosition(name, dtype, shape, count, offset))
            offset += aligned(count * dtype.itemsize)
        else:
            empty[name] = _empty(shape, dtype)
    return MessageLayout(offset, tuple(positions), empty)


@lru_cache(_KEPT)
def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array without elements, shared by all arrays of this shape and dtype."""
    return np.empty(shape, dtype)


def _ints(names: str, count: int, dtype: np.dtype = _I4) -> list[_Array]:
    """Return arrays of `count` values each, for the space-separated `names`."""
    return [(name, dtype, (count,)) for name in names.split()]


_floats = partial(_ints, dtype=_F4)


def _step_arrays(shape: StepShape) -> list[_Array]:
    rows = shape.num_rows
    return [
        *_ints("token_ids positions", shape.num_tokens),
        *_ints("query_start_loc", shape.num_seqs + 1),
        *_ints("seq_lens rows", shape.num_seqs),
        ("table_groups", _U1, (shape.num_table_entries,)),
        *_ints("table_rows table_columns table_blocks", shape.num_table_entries),
        *_ints("logits_indices target_ids sample_positions", rows),
        *((row.column, np.dtype(row.dtype), (rows,)) for row in ROWS),
        ("seeds", _I8, (rows,)),
        *_ints("num_logprobs", rows),
        *_ints("bias_rows bias_ids", shape.num_biases),
        *_floats("bias_values", shape.num_biases),
        *_ints("penalty_rows", shape.num_penalized),
        *((row.column, np.dtype(row.dtype), (shape.num_penalized,)) for row in PENALTIES),
        *_ints("history_rows", shape.num_histories),
        *_ints("history_starts", shape.num_histories + 1),
        *_ints("history_ids history_counts", shape.num_history_ids),
        *_ints("mask_rows", shape.num_masks),
        ("mask_bits", _U4, (shape.num_masks, shape.num_mask_words)),
        *_ints("num_drafts", shape.num_drafting),
        *_ints("pool_seqs pool_kinds pool_lens pool_second pool_num_ids", shape.num_pooled),
        *_ints("pool_ids", shape.num_pooled_values),
        *_ints("state_reads state_writes", shape.num_states),
        ("state_saves", _I4, (shape.num_saves, 3)),
        ("kv_copies", _I4, (shape.num_copies, 3)),
        ("kv_digests", _U1, (shape.num_copies, DIGEST_BYTES)),
        *_ints("adapter_slots", shape.num_adapted),
        ("adapter_commands", _I4, (shape.num_adapter_commands, 3)),
        ("adapter_digests", _U1, (shape.num_adapter_commands, ADAPTER_DIGEST_BYTES)),
        ("adapter_texts", _U1, (shape.num_adapter_bytes,)),
    ]


def _output_arrays(shape: StepShape, num_top: int) -> list[_Array]:
    rows = shape.num_rows
    arrays: list[_Array] = [("token_ids", _I4, (rows,)), ("finite", _U1, (rows,))]
    if num_top >= 0:
        arrays += [*_floats("logprobs", rows), *_ints("ranks", rows)]
        arrays += [("top_ids", _I4, (rows, num_top)), ("top_logprobs", _F4, (rows, num_top))]
    if shape.num_drafting:
        arrays.append(("num_accepted", _I4, (shape.num_drafting,)))
    if shape.num_pooled:
        arrays += [("pooled_lens", _I4, (shape.num_pooled,)), ("pooled", _F4, (shape.num_pooled_values,))]
    if num_reports := shape.num_adapter_commands:
        arrays += [
            ("adapter_digests", _U1, (num_reports, ADAPTER_DIGEST_BYTES)),
            ("adapter_failures", _I4, (num_reports,)),
        ]
        arrays.append(("adapter_reasons", _U1, (shape.num_adapter_bytes,)))
    return arrays


def _shape_of(step: StepMetadata) -> StepShape:
    num_masks, num_words = step.mask_bits.shape
    return StepShape(
        num_seqs=len(step.seq_lens),
        num_tokens=len(step.token_ids),
        num_table_entries=len(step.table_blocks),
        num_rows=len(step.logits_indices),
        num_biases=len(step.bias_rows),
        num_penalized=len(step.penalty_rows),
        num_history_ids=len(step.history_ids),
        num_masks=num_masks,
        num_mask_words=num_words,
        num_drafting=len(step.num_drafts),
        num_histories=len(step.history_rows),
        num_copies=len(step.kv_copies),
        num_pooled=len(step.pool_seqs),
        num_pooled_values=len(step.pool_ids),
        num_states=len(step.state_reads),
        num_saves=len(step.state_saves),
        num_adapted=len(step.adapter_slots),
        num_adapter_commands=len(step.adapter_commands),
        num_adapter_bytes=len(step.adapter_texts),
    )


def _shape_of_output(output: StepOutput) -> tuple[StepShape, int]:
    """Return the arguments of `output_layout`."""
    shape = StepShape(
        num_rows=len(output.token_ids),
        num_drafting=0 if output.num_accepted is None else len(output.num_accepted),
        num_pooled=len(output.pooled_lens),
        num_pooled_values=len(output.pooled),
        num_adapter_commands=len(output.adapter_failures),
        num_adapter_bytes=len(output.adapter_reasons),
    )
    return shape, -1 if output.top_ids is None else output.top_ids.shape[1]


def empty_step(step_id: int) -> StepMetadata:
    """Return a heartbeat: no sequence, nothing to compute."""
    layout = step_layout(StepShape())
    zeros = layout.views(memoryview(bytes(layout.num_bytes)))
    return StepMetadata(step_id, is_ahead=False, **{name: array.copy() for name, array in zeros.items()})


def table_width(config: WorkerConfig) -> int:
    """Return the maximum number of blocks of one sequence."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.block_size)


def mask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in the mask of one row."""
    if vocab_size > MAX_VOCAB_SIZE:
        raise ProtocolError(f"a vocabulary of {vocab_size} ids; at most {MAX_VOCAB_SIZE} fit a step")
    return -(-vocab_size // 32)


def max_step_bytes(config: WorkerConfig) -> int:
    """Return the bytes of the largest step within these limits, which is the size of a ring slot."""
    assert config.max_model_len is not None
    s, t = config.max_num_seqs, config.max_num_batched_tokens
    history = s * min(config.max_model_len, MAX_VOCAB_SIZE)
    words = mask_words(MAX_VOCAB_SIZE)
    sampled = s * (1 + config.num_speculative_tokens)  # rows
    bias = sampled * MAX_BIAS_PER_ROW
    copies = MAX_COPIES if config.offloads_kv else 0
    entries, ids = s * table_width(config) * config.pages_groups, s * MAX_POOLED_IDS
    largest = StepShape(
        num_seqs=s,
        num_tokens=t,
        num_table_entries=entries,
        num_rows=max(s, t),
        num_biases=bias,
        num_penalized=sampled,
        num_history_ids=history,
        num_masks=sampled,
        num_mask_words=words,
        num_drafting=s,
        num_histories=s,
        num_copies=copies,
        num_pooled=s,
        num_pooled_values=ids,
        num_states=s,
        num_saves=2 * s + t // config.block_size,
        num_adapted=s if config.max_loras else 0,
        num_adapter_commands=max_commands(config),
        num_adapter_bytes=MAX_LOADING * MAX_TEXT_BYTES if config.max_loras else 0,
    )
    return step_layout(largest).num_bytes


def max_output_bytes(config: WorkerConfig) -> int:
    """Return the bytes of the largest output within these limits."""
    s, t = config.max_num_seqs, config.max_num_batched_tokens
    values = max_pooled_values(config, config.hidden_size)
    reports = MAX_LOADING if config.max_loras else 0
    largest = StepShape(
        num_rows=max(s, t),
        num_drafting=s,
        num_pooled=s,
        num_pooled_values=values,
        num_adapter_commands=reports,
        num_adapter_bytes=reports * MAX_REASON_BYTES,
    )
    return output_layout(largest, MAX_LOGPROBS).num_bytes


def step_bytes(step: StepMetadata) -> int:
    """Return the bytes that `pack_step` writes."""
    return step_layout(_shape_of(step)).num_bytes


def output_bytes(output: StepOutput) -> int:
    """Return the bytes that `pack_output` writes."""
    return output_layout(*_shape_of_output(output)).num_bytes


def pack_step(step: StepMetadata, buffer: memoryview, *, without_masks: bool = False) -> int:
    """Write `step` into `buffer` and return the bytes used.

    `without_masks` leaves the bytes of `mask_bits` unwritten: write them later into `unpack_step(buffer).mask_bits`.
    """
    shape = _shape_of(step)
    layout = step_layout(shape)
    if layout.num_bytes > len(buffer):
        raise ProtocolError(f"step {step.step_id} needs {layout.num_bytes} bytes, the slot holds {len(buffer)}")
    layout.write(buffer, step, without="mask_bits" if without_masks else "")
    HEADER.pack_into(buffer, 0, _MAGIC, step.step_id, *shape, -1, step.is_ahead)
    CHECKSUM.pack_into(buffer, HEADER.size, zlib.crc32(buffer[: HEADER.size]))
    return layout.num_bytes


def unpack_step(buffer: memoryview) -> StepMetadata:
    """Return views of the step in `buffer`, valid until the slot is written again. Raises `ProtocolError` on foreign
    bytes."""
    step_id, shape, _, is_ahead = _read_header(buffer)
    return _views_of_step(buffer, step_id, shape, is_ahead=is_ahead)


def _views_of_step(buffer: memoryview, step_id: int, shape: StepShape, *, is_ahead: bool) -> StepMetadata:
    layout = step_layout(shape)
    if layout.num_bytes > len(buffer):
        raise ProtocolError("the header describes more data than the buffer has")
    return StepMetadata(step_id=step_id, is_ahead=is_ahead, **layout.views(buffer))


class StepReader:
    """Reader of the steps in a ring's slots, which keeps the arrays of each slot.

    If a step has the same lengths as the last one in its slot, as decode steps mostly do, the same object is returned.
    Its arrays keep their addresses, so values cached on the step (see `made_once`) remain valid.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[memoryview, StepShape, StepMetadata]] = {}  # identity of a slot -> its last step

    def read(self, slot: memoryview) -> StepMetadata:
        """Return the step in `slot`, valid until the next call with it. Raises `ProtocolError` on foreign bytes."""
        step_id, shape, _, is_ahead = _read_header(slot)
        last = self._last.get(id(slot))
        if last is not None and shape == last[1]:
            step = last[2]
            step.step_id, step.is_ahead = step_id, is_ahead
            return step
        step = _views_of_step(slot, step_id, shape, is_ahead=is_ahead)
        self._last[id(slot)] = slot, shape, step
        return step


def mask_span(buffer: memoryview) -> tuple[int, int]:
    """Return begin and end of `mask_bits` in a packed step, in bytes, reading only its header."""
    _, shape, _, _ = _read_header(buffer)
    return step_layout(shape).span("mask_bits")


def pack_output(output: StepOutput, buffer: memoryview) -> int:
    """Write `output` into `buffer` and return the bytes used."""
    shape, num_top = _shape_of_output(output)
    layout = output_layout(shape, num_top)
    if layout.num_bytes > len(buffer):
        needed = layout.num_bytes
        raise ProtocolError(f"the answer to step {output.step_id} needs {needed} bytes, the slot holds {len(buffer)}")
    layout.write(buffer, output)
    HEADER.pack_into(buffer, 0, _MAGIC, output.step_id, *shape, num_top, output.out_of_memory)
    CHECKSUM.pack_into(buffer, HEADER.size, zlib.crc32(buffer[: HEADER.size]))
    return layout.num_bytes


def unpack_output(buffer: memoryview) -> StepOutput:
    """Return a copy of the output in `buffer`. Raises `ProtocolError` on foreign bytes."""
    step_id, shape, num_top, out_of_memory = _read_header(buffer)
    layout = output_layout(shape, num_top)
    if layout.num_bytes > len(buffer):
        raise ProtocolError("the header describes more data than the buffer has")
    own = memoryview(bytearray(buffer[: layout.num_bytes]))
    return StepOutput(step_id=step_id, out_of_memory=out_of_memory, **layout.views(own))


def refusal(step_id: int) -> StepOutput:
    """Return the output of a step for which there is not enough memory."""
    return StepOutput(step_id, np.empty(0, np.int32), np.empty(0, np.uint8), out_of_memory=True)


def _read_header(buffer: memoryview) -> tuple[int, StepShape, int, bool]:
    """Return step id, shape, largest number of top logprobs and flag. Raises `ProtocolError` if the checksum is
    wrong."""
    if len(buffer) < HEADER_BYTES:
        raise ProtocolError(f"{len(buffer)} bytes cannot hold a header")
    (checksum,) = CHECKSUM.unpack_from(buffer, HEADER.size)
    magic, step_id, *lengths, num_top, mark = HEADER.unpack_from(buffer, 0)
    if magic != _MAGIC or checksum != zlib.crc32(buffer[: HEADER.size]):
        raise ProtocolError("not a step of this layout: wrong magic or checksum")
    return step_id, StepShape(*lengths), num_top, mark
