"""Known text as the engine would feed it: all prompts in one step, then one token of each sequence per step.

Knows the layout of a step. Block ids are dealt in a shuffled order: nothing may rely on pages lying side by side.
"""

import random
from collections.abc import Iterator

from workers.protocol import StepMetadata
from workers.verify.request import Text
from workers.worker.greedy_step import SequenceChunk, greedy_step


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
        chunks = [
            SequenceChunk(sequence[start:end], start, table)
            for sequence, table, start, end in zip(sequences, tables, known, ends, strict=True)
            if start < end
        ]
        yield greedy_step(chunks, block_size, range(len(rows)), step_id=number), rows
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
