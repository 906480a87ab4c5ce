"""The layout of one step and of its output, as bytes.

A step is a fixed header followed by flat numpy sections in one buffer, whose size follows from the limits at start, so
that it cannot overflow. Nothing is pickled. Imports numpy, not torch. Sizes in the shapes below:

    S  sequences in the step        T  query tokens in the step       N  entries of block tables that changed
    L  rows that want logits        M  logit-bias entries             K  largest number of top logprobs asked for
    G  rows with a mask             W  32-bit words of one mask         D  S where there are drafts, else 0
    P  rows with penalties          F  histories of earlier ids         H  distinct ids, all histories together
    C  copies of KV blocks between pages, host memory and files
    Q  sequences of which vectors are wanted, not tokens                X  ids whose logits they name; values that came
"""

import math
import struct
import zlib
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from workers.config import MAX_POOLED_IDS, WorkerConfig, max_pooled_values
from workers.kv_offload import DIGEST_BYTES, MAX_COPIES

MAX_LOGPROBS = 20
MAX_BIAS_PER_ROW = 3 * 1024  # stop ids banned by min_tokens, logit_bias and bad words, a third each
MAX_VOCAB_SIZE = 1 << 20  # slots are sized before the vocabulary is known; unused pages take no memory
NULL_BLOCK = 0
NONFINITE, FINITE, ALL_BANNED = 0, 1, 2  # of `StepOutput.finite`
# Of `StepMetadata.pool_kinds`: the hidden state of the last token, the mean of all, that of the first token, that of
# each token, logits after the last one, or the labels of an encoder's head. Hidden states: after the final norm.
LAST, MEAN, CLS, TOKEN, LOGITS, LABELS = range(6)
NOT_POOLED = -1  # of `StepOutput.pooled_lens`
_MAGIC = 0x4F41524C  # "OARL"
_ALIGN = 64
# magic, step_id, then the counts that decide every offset, a mark, and a checksum of all that stands before it
_HEADER = struct.Struct("<IQ14Ii?")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_ITEM_BYTES = {"<i4": 4, "<u4": 4, "<i8": 8, "<f4": 4, "|u1": 1}

# defaults of the sections that few steps use
_no_ints = partial(np.zeros, 0, "<i4")
_no_floats = partial(np.zeros, 0, "<f4")
_no_history = partial(np.zeros, 1, "<i4")
_no_bits = partial(np.zeros, (0, 0), "<u4")
_no_copies = partial(np.zeros, (0, 3), "<i4")
_no_digests = partial(np.zeros, (0, DIGEST_BYTES), "|u1")


@dataclass(slots=True)
class StepMetadata:
    """One step as every rank reads it. Arrays are views into one buffer.

    A sequence's query tokens are `token_ids[query_start_loc[s]:query_start_loc[s + 1]]`, at absolute `positions`; after
    the step its KV holds `seq_lens[s]` tokens. A step with no sequence is a heartbeat. A step may be sent while the one
    before runs: it refers to that one's rows of logits for tokens that the engine does not know yet.
    """

    step_id: int
    token_ids: np.ndarray  # int32 [T]   below 0: -1 - r for the token that the step before sampled in its row r
    positions: np.ndarray  # int32 [T]
    slot_mapping: np.ndarray  # int64 [T]   block_id * block_size + offset: where the token's K and V are written
    query_start_loc: np.ndarray  # int32 [S + 1]
    seq_lens: np.ndarray  # int32 [S]
    rows: np.ndarray  # int32 [S]   each sequence's row of the block tables that ranks keep
    # rows that want logits, one per sampled or scored token
    logits_indices: np.ndarray  # int32 [L]   which of the T tokens
    target_ids: np.ndarray  # int32 [L]   -1: sample a token; else score this one (prompt logprobs), nothing is sampled
    sample_positions: np.ndarray  # int32 [L]   absolute position of the token being sampled or scored
    temperature: np.ndarray  # float32 [L]   0: greedy
    top_p: np.ndarray  # float32 [L]   1: off
    top_k: np.ndarray  # int32 [L]   0: off
    min_p: np.ndarray  # float32 [L]   0: off
    seeds: np.ndarray  # int64 [L]
    num_logprobs: np.ndarray  # int32 [L]   -1: none wanted; 0: the token's own; k: the k best as well
    # additions to raw logits before sampling; -inf bans an id. Sorted by row.
    bias_rows: np.ndarray  # int32 [M]   index into the L rows
    bias_ids: np.ndarray  # int32 [M]   vocabulary id
    bias_values: np.ndarray  # float32 [M]
    # entries of the block tables to write before any is read; none twice. A row's entries are all written by the step
    # in which a sequence gets the row.
    table_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [N]
    table_columns: np.ndarray = field(default_factory=_no_ints)  # int32 [N]   position // block_size
    table_blocks: np.ndarray = field(default_factory=_no_ints)  # int32 [N]
    # penalties of ids that came earlier, applied to the biased logits. Sorted by row. Ranks keep the histories, and add
    # the tokens that these rows sample.
    penalty_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [P]   index into the L rows
    repetition: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   divides logits above 0, else multiplies
    frequency: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   subtracted once per count
    presence: np.ndarray = field(default_factory=_no_floats)  # float32 [P]   subtracted where the count is not 0
    # histories to write whole before anything is sampled: in the first step that samples after a sequence got its row
    history_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [F]   of the engine's tables, as `rows`
    history_starts: np.ndarray = field(default_factory=_no_history)  # int32 [F + 1]   of each one's part of these two:
    history_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [H]   distinct within a history
    history_counts: np.ndarray = field(default_factory=_no_ints)  # int32 [H]   times generated; 0: in the prompt only
    # which ids a row may sample: all others get a logit of -inf. Sorted by row.
    mask_rows: np.ndarray = field(default_factory=_no_ints)  # int32 [G]   index into the L rows
    mask_bits: np.ndarray = field(default_factory=_no_bits)  # uint32 [G, W]   bit v % 32 of word v // 32: v is allowed

    # How many of a sequence's last query tokens are drafts: guesses of the tokens after its newest one. Such a sequence
    # has a row of logits for its newest token and one for each draft, and samples in all of them.
    num_drafts: np.ndarray = field(default_factory=_no_ints)  # int32 [D]

    # Sequences of which vectors are wanted, without rows of logits. Ranks keep the sum of a mean between its chunks.
    pool_seqs: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   index into S
    pool_kinds: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   LAST, MEAN, CLS, TOKEN, LOGITS or LABELS
    pool_lens: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   `seq_lens` in the sequence's last chunk
    pool_second: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   where its second text begins; 0: it is one
    pool_num_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [Q]   how many of the next are each one's
    pool_ids: np.ndarray = field(default_factory=_no_ints)  # int32 [X]   vocabulary ids; of LOGITS

    # Copies of KV blocks, made in this order before anything else of the step, and also if it is refused; see
    # `workers.kv_offload`.
    kv_copies: np.ndarray = field(default_factory=_no_copies)  # int32 [C, 3]   `Copy`, block id, slot
    kv_digests: np.ndarray = field(default_factory=_no_digests)  # uint8 [C, 32]   of files, else 0

    # Sent before the answer to the step before was known. Where that one was refused, so is this one, untried: what it
    # follows has not happened.
    is_ahead: bool = False

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def max_num_logprobs(self) -> int:
        """-1 when no row wants logprobs."""
        return int(self.num_logprobs.max()) if len(self.num_logprobs) else -1


@dataclass(slots=True)
class StepOutput:
    """The output of rank 0: one entry per row of `logits_indices`, in the same order."""

    step_id: int
    token_ids: np.ndarray  # int32 [L]   the sampled token, or the scored target
    # uint8 [L]   state of the row's logits. FINITE: valid. NONFINITE: the model's held NaN, +inf or no finite value
    # where one was allowed. ALL_BANNED: bias and mask ban every id. Only with FINITE the token is valid.
    finite: np.ndarray
    logprobs: np.ndarray | None = None  # float32 [L]   log-softmax of the raw logits at token_ids
    ranks: np.ndarray | None = None  # int32 [L]   1 = most likely
    top_ids: np.ndarray | None = None  # int32 [L, K]   most likely first
    top_logprobs: np.ndarray | None = None  # float32 [L, K]
    # int32 [D]   how many of each sequence's drafts were right: so many rows after its first are valid as well. None
    # where the step has no drafts.
    num_accepted: np.ndarray | None = None
    # int32 [Q]   how many of `pooled` are each sequence's: vectors of TOKEN in every chunk, CLS in its first one, all
    # others in its last one. NOT_POOLED: NaN or infinity was among them, and they were left out.
    pooled_lens: np.ndarray = field(default_factory=_no_ints)
    pooled: np.ndarray = field(default_factory=_no_floats)  # float32 [X]
    # Whether the step was refused for lack of memory: no rows, and nothing of it holds. It may be tried again, smaller.
    out_of_memory: bool = False


class ProtocolError(ValueError):
    """The bytes are not a step (or an output) of this layout: a bug, or memory that something else wrote."""


class _Counts(NamedTuple):
    """The lengths of a step's sections, named as in the module's docstring."""

    s: int = 0
    t: int = 0
    n: int = 0
    rows: int = 0
    m: int = 0
    p: int = 0
    h: int = 0
    g: int = 0
    w: int = 0
    d: int = 0
    f: int = 0
    c: int = 0
    q: int = 0
    x: int = 0

    @staticmethod
    def of(step: StepMetadata) -> "_Counts":
        return _Counts(
            len(step.seq_lens),
            len(step.token_ids),
            len(step.table_blocks),
            len(step.logits_indices),
            len(step.bias_rows),
            len(step.penalty_rows),
            len(step.history_ids),
            *step.mask_bits.shape,
            len(step.num_drafts),
            len(step.history_rows),
            len(step.kv_copies),
            len(step.pool_seqs),
            len(step.pool_ids),
        )


_Sections = list[tuple[str, str, tuple[int, ...]]]  # name, dtype and shape of each, in buffer order


def _ints(names: str, count: int, dtype: str = "<i4") -> _Sections:
    """Sections of `count` numbers each, by the words of `names`."""
    return [(name, dtype, (count,)) for name in names.split()]


_floats = partial(_ints, dtype="<f4")


def _step_sections(n: _Counts) -> _Sections:
    return [
        *_ints("token_ids positions", n.t),
        ("slot_mapping", "<i8", (n.t,)),
        *_ints("query_start_loc", n.s + 1),
        *_ints("seq_lens rows", n.s),
        *_ints("table_rows table_columns table_blocks", n.n),
        *_ints("logits_indices target_ids sample_positions", n.rows),
        *_floats("temperature top_p", n.rows),
        *_ints("top_k", n.rows),
        *_floats("min_p", n.rows),
        ("seeds", "<i8", (n.rows,)),
        *_ints("num_logprobs", n.rows),
        *_ints("bias_rows bias_ids", n.m),
        *_floats("bias_values", n.m),
        *_ints("penalty_rows", n.p),
        *_floats("repetition frequency presence", n.p),
        *_ints("history_rows", n.f),
        *_ints("history_starts", n.f + 1),
        *_ints("history_ids history_counts", n.h),
        *_ints("mask_rows", n.g),
        ("mask_bits", "<u4", (n.g, n.w)),
        *_ints("num_drafts", n.d),
        *_ints("pool_seqs pool_kinds pool_lens pool_second pool_num_ids", n.q),
        *_ints("pool_ids", n.x),
        ("kv_copies", "<i4", (n.c, 3)),
        ("kv_digests", "|u1", (n.c, DIGEST_BYTES)),
    ]


def _output_sections(n: _Counts, k: int) -> _Sections:
    """Sections of an output; `k` is -1 without logprobs."""
    rows = n.rows
    sections: _Sections = [("token_ids", "<i4", (rows,)), ("finite", "|u1", (rows,))]
    if k >= 0:
        sections += [*_floats("logprobs", rows), *_ints("ranks", rows)]
        sections += [("top_ids", "<i4", (rows, k)), ("top_logprobs", "<f4", (rows, k))]
    if n.d:
        sections.append(("num_accepted", "<i4", (n.d,)))
    if n.q:
        sections += [("pooled_lens", "<i4", (n.q,)), ("pooled", "<f4", (n.x,))]
    return sections


def _counts_of_output(output: StepOutput) -> tuple[_Counts, int]:
    """The arguments of `_output_sections`."""
    num_top = -1 if output.top_ids is None else output.top_ids.shape[1]
    num_drafted = 0 if output.num_accepted is None else len(output.num_accepted)
    rows, q, x = len(output.token_ids), len(output.pooled_lens), len(output.pooled)
    return _Counts(rows=rows, d=num_drafted, q=q, x=x), num_top


def _aligned(size: int) -> int:
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


def _size(sections: _Sections) -> int:
    total = _aligned(_HEADER_BYTES)
    for _, dtype, shape in sections:
        total += _aligned(_ITEM_BYTES[dtype] * math.prod(shape))
    return total


def _views(buffer: memoryview, sections: _Sections, *, with_empty: bool = True) -> dict[str, np.ndarray]:
    views = {}
    offset = _aligned(_HEADER_BYTES)
    for name, dtype, shape in sections:
        count = math.prod(shape)
        if count or with_empty:
            views[name] = np.frombuffer(buffer, dtype, count, offset).reshape(shape)
        offset += _aligned(_ITEM_BYTES[dtype] * count)
    return views


def empty_step(step_id: int) -> StepMetadata:
    """A heartbeat: no sequence, nothing to compute."""
    sections = {name: np.zeros(shape, dtype) for name, dtype, shape in _step_sections(_Counts())}
    return StepMetadata(step_id, is_ahead=False, **sections)


def table_width(config: WorkerConfig) -> int:
    """Most blocks one sequence can hold."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.block_size)


def mask_words(vocab_size: int) -> int:
    """32-bit words in the mask of one row."""
    if vocab_size > MAX_VOCAB_SIZE:
        raise ProtocolError(f"a vocabulary of {vocab_size} ids; at most {MAX_VOCAB_SIZE} fit a step")
    return -(-vocab_size // 32)


def max_step_bytes(config: WorkerConfig) -> int:
    """Bytes of the largest step these limits allow: what one ring slot must hold."""
    assert config.max_model_len is not None
    s, t = config.max_num_seqs, config.max_num_batched_tokens
    history = s * min(config.max_model_len, MAX_VOCAB_SIZE)
    words = mask_words(MAX_VOCAB_SIZE)
    sampled = s * (1 + config.num_speculative_tokens)  # rows
    bias = sampled * MAX_BIAS_PER_ROW
    copies = MAX_COPIES if config.offloads_kv else 0
    entries, ids = s * table_width(config), s * MAX_POOLED_IDS
    counts = _Counts(s, t, entries, max(s, t), bias, sampled, history, sampled, words, s, s, copies, s, ids)
    return _size(_step_sections(counts))


def max_output_bytes(config: WorkerConfig) -> int:
    """Bytes of the largest output these limits allow."""
    s, t = config.max_num_seqs, config.max_num_batched_tokens
    values = max_pooled_values(config, config.hidden_size)
    return _size(_output_sections(_Counts(rows=max(s, t), d=s, q=s, x=values), MAX_LOGPROBS))


def step_bytes(step: StepMetadata) -> int:
    """Bytes that `pack_step` writes."""
    return _size(_step_sections(_Counts.of(step)))


def output_bytes(output: StepOutput) -> int:
    """Bytes that `pack_output` writes."""
    return _size(_output_sections(*_counts_of_output(output)))


def pack_step(step: StepMetadata, buffer: memoryview, *, without_masks: bool = False) -> int:
    """Write `step` into `buffer` and return the bytes used.

    `without_masks` leaves the bytes of `mask_bits` unwritten: write them later into `unpack_step(buffer).mask_bits`.
    """
    counts = _Counts.of(step)
    sections = _step_sections(counts)
    size = _size(sections)
    if size > len(buffer):
        raise ProtocolError(f"step {step.step_id} needs {size} bytes, the slot holds {len(buffer)}")
    for name, view in _views(buffer, sections, with_empty=False).items():
        if not (without_masks and name == "mask_bits"):
            view[...] = getattr(step, name)
    _write_header(buffer, step.step_id, counts, -1, step.is_ahead)
    return size


def unpack_step(buffer: memoryview) -> StepMetadata:
    """Views of the step in `buffer`: valid until the slot is written again. Raises `ProtocolError` on foreign bytes."""
    step_id, counts, _, is_ahead = _read_header(buffer)
    sections = _step_sections(counts)
    if _size(sections) > len(buffer):
        raise ProtocolError("the header announces more than the buffer holds")
    return StepMetadata(step_id=step_id, is_ahead=is_ahead, **_views(buffer, sections))


def mask_span(buffer: memoryview) -> tuple[int, int]:
    """Where the bytes of `mask_bits` begin and end in a packed step, of which the header is enough."""
    _, counts, _, _ = _read_header(buffer)
    offset = _aligned(_HEADER_BYTES)
    for name, dtype, shape in _step_sections(counts):
        size = _aligned(_ITEM_BYTES[dtype] * math.prod(shape))
        if name == "mask_bits":
            return offset, offset + size
        offset += size
    raise AssertionError("every step has that section")


def pack_output(output: StepOutput, buffer: memoryview) -> int:
    """Write `output` into `buffer` and return the bytes used."""
    counts, k = _counts_of_output(output)
    sections = _output_sections(counts, k)
    size = _size(sections)
    if size > len(buffer):
        raise ProtocolError(f"the answer to step {output.step_id} needs {size} bytes, the slot holds {len(buffer)}")
    for name, view in _views(buffer, sections).items():
        view[...] = getattr(output, name)
    _write_header(buffer, output.step_id, counts, k, output.out_of_memory)
    return size


def unpack_output(buffer: memoryview) -> StepOutput:
    """A copy of the output in `buffer`. Raises `ProtocolError` on foreign bytes."""
    step_id, counts, k, out_of_memory = _read_header(buffer)
    sections = _output_sections(counts, k)
    if _size(sections) > len(buffer):
        raise ProtocolError("the header announces more than the buffer holds")
    views = {name: view.copy() for name, view in _views(buffer, sections).items()}
    return StepOutput(step_id=step_id, out_of_memory=out_of_memory, **views)


def refusal(step_id: int) -> StepOutput:
    """The answer to a step for which there is not enough memory."""
    return StepOutput(step_id, np.empty(0, np.int32), np.empty(0, np.uint8), out_of_memory=True)


def _write_header(buffer: memoryview, step_id: int, counts: _Counts, k: int, mark: bool) -> None:
    _HEADER.pack_into(buffer, 0, _MAGIC, step_id, *counts, k, mark)
    _CHECKSUM.pack_into(buffer, _HEADER.size, zlib.crc32(buffer[: _HEADER.size]))


def _read_header(buffer: memoryview) -> tuple[int, _Counts, int, bool]:
    """The header's numbers, which decide every offset, and its mark. `ProtocolError` if the checksum is wrong."""
    if len(buffer) < _HEADER_BYTES:
        raise ProtocolError(f"{len(buffer)} bytes cannot hold a header")
    (checksum,) = _CHECKSUM.unpack_from(buffer, _HEADER.size)
    magic, step_id, *counts, k, mark = _HEADER.unpack_from(buffer, 0)
    if magic != _MAGIC or checksum != zlib.crc32(buffer[: _HEADER.size]):
        raise ProtocolError("not a step of this layout: wrong magic or checksum")
    return step_id, _Counts(*counts), k, mark
