"""Known text as the engine would feed it: all prompts in one step, then one token of each sequence per step.

Knows the layout of a step. Block ids are dealt in a shuffled order: nothing may rely on pages lying side by side.
"""

import random
from collections.abc import Iterator

import numpy as np

from workers.protocol import StepMetadata
from workers.verify.request import Text


def steps_of(text: Text, block_size: int) -> Iterator[tuple[StepMetadata, list[tuple[int, int]]]]:
    """Each step, every row of which asks for logits, with the (sequence, position) of its rows."""
    sequences = text.fed()
    tables = _block_tables([len(sequence) for sequence in sequences], block_size)
    known = [0] * len(sequences)
    ends = [len(prompt) for prompt in text.prompts]
    number = 0
    while any(start < end for start, end in zip(known, ends, strict=True)):
        number += 1
        rows = [(seq, position) for seq in range(len(ends)) for position in range(known[seq], ends[seq])]
        yield _step(number, rows, sequences, tables, block_size), rows
        known = ends
        ends = [min(end + 1, len(sequence)) for end, sequence in zip(ends, sequences, strict=True)]


def blocks_needed(text: Text, block_size: int) -> int:
    """The null block included."""
    return 1 + sum(-(-len(sequence) // block_size) for sequence in text.fed())


def _block_tables(lengths: list[int], block_size: int) -> list[list[int]]:
    counts = [-(-length // block_size) for length in lengths]
    ids = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(ids)
    return [[ids.pop() for _ in range(count)] for count in counts]


def _step(
    number: int, rows: list[tuple[int, int]], sequences: list[list[int]], tables: list[list[int]], block_size: int
) -> StepMetadata:
    present = sorted({seq for seq, _ in rows})
    counts = [sum(row[0] == seq for row in rows) for seq in present]
    width = max(len(tables[seq]) for seq in present)
    positions = np.array([position for _, position in rows], np.int32)
    slots = [tables[seq][position // block_size] * block_size + position % block_size for seq, position in rows]
    total = len(rows)
    return StepMetadata(
        step_id=number,
        token_ids=np.array([sequences[seq][position] for seq, position in rows], np.int32),
        positions=positions,
        slot_mapping=np.array(slots, np.int64),
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([max(p for s, p in rows if s == seq) + 1 for seq in present], np.int32),
        block_tables=np.array([tables[seq] + [0] * (width - len(tables[seq])) for seq in present], np.int32),
        logits_indices=np.arange(total, dtype=np.int32),
        target_ids=np.full(total, -1, np.int32),
        sample_positions=positions + 1,
        temperature=np.zeros(total, np.float32),
        top_p=np.ones(total, np.float32),
        top_k=np.zeros(total, np.int32),
        min_p=np.zeros(total, np.float32),
        seeds=np.zeros(total, np.int64),
        num_logprobs=np.full(total, -1, np.int32),
        bias_rows=np.zeros(0, np.int32),
        bias_ids=np.zeros(0, np.int32),
        bias_values=np.zeros(0, np.float32),
    )
