"""Vectors that the fake ranks return for pooled sequences, made of the histories of their tokens."""

import numpy as np

from oarlock.engine.types import KINDS, POOLS, PoolingParams, Request
from oarlock.workers.protocol import CLS, MEAN, NOT_POOLED, TOKEN, StepMetadata

ROOT = 12345


def chain(history: int, token: int, position: int) -> int:
    return hash((history, token, position))


def score(history: int, token: int) -> float:
    return float(np.float32(-(hash((history, token)) % 1000) / 100))


def vector(history: int) -> list[float]:
    """The hidden state of a token: as many numbers as `HIDDEN_SIZE`."""
    return [float(history % 1009), float(history % 2003)]


def pooled_of(pooling: PoolingParams, states: list[int]) -> list[float]:
    """Numbers that a sequence with these histories returns in the end."""
    vectors = [vector(history) for history in states]
    if pooling.kind == "token":
        return [number for one in vectors for number in one]
    if pooling.kind == "logits":
        return [score(states[-1], token) for token in pooling.token_ids]
    if pooling.kind == "mean":
        return [float(np.float32(sum(column) / len(vectors))) for column in zip(*vectors, strict=True)]
    return vectors[0 if pooling.kind == "cls" else -1]


def expected_vectors(request: Request, root: int = ROOT) -> list[float]:
    history, states = root, []
    for position, token in enumerate(request.prompt_token_ids):
        history = chain(history, token, position)
        states.append(history)
    assert request.pooling is not None
    return pooled_of(request.pooling, states)


def make_pooling_request(request_id: int, prompt, kind: str, **fields) -> Request:
    pooling = PoolingParams(kind, (3, 5) if kind == "logits" else ())
    return Request(request_id, tuple(prompt), POOLS, pooling=pooling, **fields)


class FakePooler:
    """Keeps what a mean needs from chunk to chunk, by row."""

    def __init__(self, poisoned_ids: frozenset[int]) -> None:
        """Vectors that are made in a step with one of these tokens of theirs are not finite."""
        self._poisoned_ids = poisoned_ids
        self._states: dict[int, list[int]] = {}

    def spoil(self, row: int) -> None:
        """Add a wrong token to a row, as if its step had failed after that."""
        if row in self._states:
            self._states[row].append(0)

    def pool(self, step: StepMetadata, histories: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """`pooled_lens` and `pooled` of a step whose tokens have these histories."""
        lens: list[int] = []
        values: list[float] = []
        starts, ids = step.query_start_loc.tolist(), step.pool_ids.tolist()
        columns = (step.pool_seqs, step.pool_kinds, step.pool_lens, step.pool_num_ids)
        for seq, kind, length, num_ids in zip(*(column.tolist() for column in columns), strict=True):
            named, ids = ids[:num_ids], ids[num_ids:]
            here = slice(starts[seq], starts[seq + 1])
            states, row = histories[here], int(step.rows[seq])
            position, ends = int(step.seq_lens[seq]) - len(states), bool(step.seq_lens[seq] == length)
            if kind == MEAN:
                earlier = self._states[row] if position else []
                assert len(earlier) >= position, "a mean over tokens that were not computed"
                states = self._states[row] = earlier[:position] + states
            is_due = {CLS: position == 0, TOKEN: True}.get(kind, ends)
            found = pooled_of(PoolingParams(KINDS[kind], tuple(named)), states) if is_due else []
            is_poisoned = bool(found) and not self._poisoned_ids.isdisjoint(step.token_ids[here].tolist())
            lens.append(NOT_POOLED if is_poisoned else len(found))
            values += [] if is_poisoned else found
        return np.array(lens, np.int32), np.array(values, np.float32)
