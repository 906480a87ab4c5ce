"""Steps without an engine, for warm-up, self-tests, timing and `verify`.

Each step writes the whole block tables of its sequences, so that it needs no earlier step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.recurrent.states import NULL_SLOT
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS
from oarlock.workers.sampling_parameters import columns_off


class TrialMemory(NamedTuple):
    """Memory that the sequences of a trial have. They have blocks of the same numbers in every group of pages."""

    pages_groups: tuple[int, ...] = (0,)  # numbers of the groups of pages
    has_states: bool = False  # whether there are slots

    @staticmethod
    def of(spec: DecoderSpec) -> "TrialMemory":
        """Return the memory that sequences of a model have."""
        kinds = [type(group.memory) for group in spec.groups]
        return TrialMemory(tuple(i for i, kind in enumerate(kinds) if kind is PagesSpec), SlotsSpec in kinds)


ONE_GROUP = TrialMemory()


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence that a step computes. The last `num_drafts` of them are drafts."""

    token_ids: Sequence[int]
    start: int  # position of its first token
    blocks: Sequence[int]  # the sequence's KV block ids, at least up to its last token
    num_drafts: int = 0
    read_slot: int = NULL_SLOT  # slot of the recurrent state before the tokens, and of the state after them
    write_slot: int = NULL_SLOT + 1
    saves: Sequence[tuple[int, int]] = ()  # numbers of tokens after which the state is saved, and the slots


def greedy_step(
    chunks: Sequence[SequenceChunk],
    block_size: int,
    logits_indices: Sequence[int] = (),
    *,
    step_id: int = 0,
    memory: TrialMemory = ONE_GROUP,
) -> StepMetadata:
    """Return one step that computes `chunks`, in their order, in the first rows of the block tables.

    `logits_indices`: indices of the tokens, counted over all chunks, whose logits are computed. Each gets the most
    likely next token (temperature 0), without logprobs, bias, penalties or masks. `memory`: see `TrialMemory`.
    """
    counts = [len(chunk.token_ids) for chunk in chunks]
    positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks])  # [T]
    seq_lens = np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int32)  # [S]
    tables = np.full((len(chunks), -(-int(seq_lens.max()) // block_size)), NULL_BLOCK, np.int32)  # [S, B]
    for row, (chunk, width) in enumerate(zip(chunks, -(-seq_lens // block_size), strict=True)):
        tables[row, :width] = chunk.blocks[:width]
    table_rows, table_columns = np.divmod(np.arange(tables.size, dtype=np.int32), np.int32(tables.shape[1]))
    drafts = np.array([chunk.num_drafts for chunk in chunks], np.int32)
    indices = np.array(logits_indices, np.int32)
    rows = len(indices)
    return StepMetadata(
        step_id=step_id,
        token_ids=np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
        positions=positions.astype(np.int32),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=seq_lens,
        rows=np.arange(len(chunks), dtype=np.int32),
        logits_indices=indices,
        target_ids=np.full(rows, -1, np.int32),
        sample_positions=(positions[indices] + 1).astype(np.int32),
        **columns_off(rows),
        seeds=np.zeros(rows, np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
        bias_rows=np.empty(0, np.int32),
        bias_ids=np.empty(0, np.int32),
        bias_values=np.empty(0, np.float32),
        table_groups=np.repeat(np.array(memory.pages_groups, np.uint8), tables.size),
        table_rows=np.tile(table_rows, len(memory.pages_groups)),
        table_columns=np.tile(table_columns, len(memory.pages_groups)),
        table_blocks=np.tile(tables.ravel(), len(memory.pages_groups)),
        num_drafts=drafts if drafts.any() else np.empty(0, np.int32),
        **(_states(chunks) if memory.has_states else {}),
    )


def _states(chunks: Sequence[SequenceChunk]) -> dict[str, np.ndarray]:
    """Return the slots of `chunks` as arrays of a step."""
    saves = [(seq, count, slot) for seq, chunk in enumerate(chunks) for count, slot in chunk.saves]
    return {
        "state_reads": np.array([chunk.read_slot for chunk in chunks], np.int32),
        "state_writes": np.array([chunk.write_slot for chunk in chunks], np.int32),
        "state_saves": np.array(saves, np.int32).reshape(-1, 3),
    }


def with_adapters(step: StepMetadata) -> StepMetadata:
    """Return `step` with all its sequences in slot 1, which holds no adapter yet: kernels that add an update run, and
    change nothing."""
    return replace(step, adapter_slots=np.ones(step.num_seqs, np.int32))


_STRIDE = 7919  # difference between the ids of consecutive tokens: a prime, which spreads them over the vocabulary


def null_step(
    tokens: int, context: int, rows: int, block_size: int, vocab_size: int = 1, memory: TrialMemory = ONE_GROUP
) -> StepMetadata:
    """Return a step of the last `tokens` of `context` tokens, all in the null block; the last `rows` tokens get logits.

    Tokens differ as far as there are ids below `vocab_size`. Recurrent state goes to slot 1.
    """
    ids = [_STRIDE * number % vocab_size for number in range(tokens)]
    chunk = SequenceChunk(ids, context - tokens, [NULL_BLOCK] * -(-context // block_size))
    return greedy_step([chunk], block_size, range(tokens - rows, tokens), memory=memory)


def largest_step(config: WorkerConfig, memory: TrialMemory = ONE_GROUP) -> StepMetadata:
    """Return a step of `max_num_batched_tokens` tokens in the null block.

    It has as few sequences as possible, at the ends of full contexts, and the most rows of logits that are computed at
    once. If adapters are served, all sequences have one.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    length, left = config.max_model_len, config.max_num_batched_tokens
    blocks = [NULL_BLOCK] * -(-length // config.block_size)
    chunks = []
    while left and len(chunks) < config.max_num_seqs:
        count = min(left, length)
        chunks.append(SequenceChunk([0] * count, length - count, blocks))
        left -= count
    num_tokens = config.max_num_batched_tokens - left
    rows = range(max(0, num_tokens - MAX_LOGITS_ROWS), num_tokens)
    step = greedy_step(chunks, config.block_size, rows, memory=memory)
    return with_adapters(step) if config.max_loras else step
