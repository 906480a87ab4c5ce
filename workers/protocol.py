"""The layout of one step and of its answer, as bytes. The receiver owns the form: this is what a rank can read.

A step is a fixed header followed by flat numpy sections in one buffer, sized from the limits at start: it cannot
overflow. Nothing is pickled. Names are the field's usual ones:

    S  sequences in the step        T  query tokens in the step       B  block-table columns
    L  rows that want logits        M  logit-bias entries             K  largest number of top logprobs asked for

Knows numpy. Does not know torch, requests, scheduling or text.
"""

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from workers.config import WorkerConfig

MAX_LOGPROBS = 20
MAX_BIAS_PER_ROW = 1024
NULL_BLOCK = 0
_MAGIC = 0x4F41524C  # "OARL"
_ALIGN = 64
# magic, step_id, then six counts that decide every offset, then a checksum of all that stands before it
_HEADER = struct.Struct("<IQIIIIIi")
_CHECKSUM = struct.Struct("<I")
_HEADER_BYTES = _HEADER.size + _CHECKSUM.size


@dataclass(slots=True)
class StepMetadata:
    """One step as every rank reads it. Arrays are views into one buffer.

    A sequence's query tokens are `token_ids[query_start_loc[s]:query_start_loc[s + 1]]`, at absolute `positions`; after
    the step its KV holds `seq_lens[s]` tokens. A step with no sequence is a heartbeat.
    """

    step_id: int
    token_ids: np.ndarray  # int32 [T]
    positions: np.ndarray  # int32 [T]
    slot_mapping: np.ndarray  # int64 [T]   block_id * block_size + offset: where the token's K and V are written
    query_start_loc: np.ndarray  # int32 [S + 1]
    seq_lens: np.ndarray  # int32 [S]
    block_tables: np.ndarray  # int32 [S, B]   padded with NULL_BLOCK
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
    """Rank 0's answer: one entry per row of `logits_indices`, in the same order."""

    step_id: int
    token_ids: np.ndarray  # int32 [L]   the sampled token, or the scored target
    finite: np.ndarray  # bool [L]   False: the row's logits held NaN or no finite value, the token means nothing
    logprobs: np.ndarray | None = None  # float32 [L]   log-softmax of the raw logits at token_ids
    ranks: np.ndarray | None = None  # int32 [L]   1 = most likely
    top_ids: np.ndarray | None = None  # int32 [L, K]   most likely first
    top_logprobs: np.ndarray | None = None  # float32 [L, K]


class ProtocolError(ValueError):
    """The bytes are not a step (or an answer) of this layout: our own bug, or memory that someone else wrote."""


def _step_sections(s: int, t: int, b: int, rows: int, m: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every section, in buffer order."""
    return [
        ("token_ids", "<i4", (t,)),
        ("positions", "<i4", (t,)),
        ("slot_mapping", "<i8", (t,)),
        ("query_start_loc", "<i4", (s + 1,)),
        ("seq_lens", "<i4", (s,)),
        ("block_tables", "<i4", (s, b)),
        ("logits_indices", "<i4", (rows,)),
        ("target_ids", "<i4", (rows,)),
        ("sample_positions", "<i4", (rows,)),
        ("temperature", "<f4", (rows,)),
        ("top_p", "<f4", (rows,)),
        ("top_k", "<i4", (rows,)),
        ("min_p", "<f4", (rows,)),
        ("seeds", "<i8", (rows,)),
        ("num_logprobs", "<i4", (rows,)),
        ("bias_rows", "<i4", (m,)),
        ("bias_ids", "<i4", (m,)),
        ("bias_values", "<f4", (m,)),
    ]


def _output_sections(rows: int, k: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Sections of an answer; `k` is -1 without logprobs."""
    sections: list[tuple[str, str, tuple[int, ...]]] = [("token_ids", "<i4", (rows,)), ("finite", "?", (rows,))]
    if k >= 0:
        sections += [
            ("logprobs", "<f4", (rows,)),
            ("ranks", "<i4", (rows,)),
            ("top_ids", "<i4", (rows, k)),
            ("top_logprobs", "<f4", (rows, k)),
        ]
    return sections


def _aligned(size: int) -> int:
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN


def _size(sections: list[tuple[str, str, tuple[int, ...]]]) -> int:
    total = _aligned(_HEADER_BYTES)
    for _, dtype, shape in sections:
        total += _aligned(np.dtype(dtype).itemsize * int(np.prod(shape, dtype=np.int64)))
    return total


def _views(buffer: memoryview, sections: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    views = {}
    offset = _aligned(_HEADER_BYTES)
    for name, dtype, shape in sections:
        count = int(np.prod(shape, dtype=np.int64))
        views[name] = np.frombuffer(buffer, dtype, count, offset).reshape(shape)
        offset += _aligned(np.dtype(dtype).itemsize * count)
    return views


def empty_step(step_id: int) -> StepMetadata:
    """A heartbeat: no sequence, nothing to compute."""
    sections = {name: np.zeros(shape, dtype) for name, dtype, shape in _step_sections(0, 0, 1, 0, 0)}
    return StepMetadata(step_id=step_id, **sections)


def table_width(config: WorkerConfig) -> int:
    """Most blocks one sequence can hold."""
    assert config.max_model_len is not None
    return -(-config.max_model_len // config.block_size)


def max_step_bytes(config: WorkerConfig) -> int:
    """Bytes of the largest step these limits allow: what one ring slot must hold."""
    s, t = config.max_num_seqs, config.max_num_batched_tokens
    return _size(_step_sections(s, t, table_width(config), max(s, t), s * MAX_BIAS_PER_ROW))


def max_output_bytes(config: WorkerConfig) -> int:
    """Bytes of the largest answer these limits allow."""
    return _size(_output_sections(max(config.max_num_seqs, config.max_num_batched_tokens), MAX_LOGPROBS))


def pack_step(step: StepMetadata, buffer: memoryview) -> int:
    """Write `step` into `buffer` and return the bytes used."""
    width = step.block_tables.shape[1]
    rows, m = len(step.logits_indices), len(step.bias_rows)
    sections = _step_sections(step.num_seqs, step.num_tokens, width, rows, m)
    size = _size(sections)
    if size > len(buffer):
        raise ProtocolError(f"step {step.step_id} needs {size} bytes, the slot holds {len(buffer)}")
    for name, view in _views(buffer, sections).items():
        view[...] = getattr(step, name)
    _write_header(buffer, step.step_id, step.num_seqs, step.num_tokens, width, rows, m, -1)
    return size


def unpack_step(buffer: memoryview) -> StepMetadata:
    """Views of the step in `buffer`: valid until the slot is written again. Raises `ProtocolError` on foreign bytes."""
    step_id, s, t, width, rows, m, _ = _read_header(buffer)
    sections = _step_sections(s, t, width, rows, m)
    if _size(sections) > len(buffer):
        raise ProtocolError("the header announces more than the buffer holds")
    return StepMetadata(step_id=step_id, **_views(buffer, sections))


def pack_output(output: StepOutput, buffer: memoryview) -> int:
    """Write `output` into `buffer` and return the bytes used."""
    k = -1 if output.top_ids is None else output.top_ids.shape[1]
    rows = len(output.token_ids)
    sections = _output_sections(rows, k)
    size = _size(sections)
    if size > len(buffer):
        raise ProtocolError(f"the answer to step {output.step_id} needs {size} bytes, the slot holds {len(buffer)}")
    for name, view in _views(buffer, sections).items():
        view[...] = getattr(output, name)
    _write_header(buffer, output.step_id, 0, 0, 0, rows, 0, k)
    return size


def unpack_output(buffer: memoryview) -> StepOutput:
    """A copy of the answer in `buffer`. Raises `ProtocolError` on foreign bytes."""
    step_id, _, _, _, rows, _, k = _read_header(buffer)
    sections = _output_sections(rows, k)
    if _size(sections) > len(buffer):
        raise ProtocolError("the header announces more than the buffer holds")
    views = {name: view.copy() for name, view in _views(buffer, sections).items()}
    return StepOutput(step_id=step_id, **views)


def _write_header(
    buffer: memoryview, step_id: int, num_seqs: int, num_tokens: int, width: int, rows: int, num_bias: int, k: int
) -> None:
    _HEADER.pack_into(buffer, 0, _MAGIC, step_id, num_seqs, num_tokens, width, rows, num_bias, k)
    _CHECKSUM.pack_into(buffer, _HEADER.size, zlib.crc32(buffer[: _HEADER.size]))


def _read_header(buffer: memoryview) -> tuple[int, int, int, int, int, int, int]:
    """The header's numbers, once the checksum has shown that it is one: they decide every offset."""
    if len(buffer) < _HEADER_BYTES:
        raise ProtocolError(f"{len(buffer)} bytes cannot hold a header")
    (checksum,) = _CHECKSUM.unpack_from(buffer, _HEADER.size)
    magic, step_id, s, t, width, rows, m, k = _HEADER.unpack_from(buffer, 0)
    if magic != _MAGIC or checksum != zlib.crc32(buffer[: _HEADER.size]):
        raise ProtocolError("not a step of this layout: wrong magic or checksum")
    return step_id, s, t, width, rows, m, k
