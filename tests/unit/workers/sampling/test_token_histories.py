"""Histories that ranks keep and add to give the logits that all tokens give, counted anew for each row."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.sampling.logits_processors import apply_logits_processors
from oarlock.workers.sampling.sampler import Sampler, num_accepted
from oarlock.workers.sampling.token_histories import Histories
from tests.unit.workers.kernel_levels import NO_KERNELS
from tests.unit.workers.sampling_cases import dense, sparse

ROWS, VOCAB = 4, 61
PENALTIES = ((1.3, 0.0, 0.0), (1.0, 0.7, -0.4), (0.8, -1.9, 2.0), (1.0, 0.0, 0.0))  # the last row has none


class Scene:
    """Sequences in rows, which come and go; each step some of them sample, with drafts or without."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.prompts: list[list[int]] = [[] for _ in range(ROWS)]
        self.generated: list[list[int]] = [[] for _ in range(ROWS)]
        self.is_new = [True] * ROWS

    def ids(self, most: int) -> list[int]:
        return self.draw.integers(0, VOCAB, int(self.draw.integers(1, most))).tolist()

    def step(self) -> tuple[StepMetadata, list[list[int]]]:
        """A step, and the drafts of each of its sequences."""
        for row in range(ROWS):
            if self.is_new[row] or self.draw.random() < 0.1:
                self.prompts[row], self.generated[row], self.is_new[row] = self.ids(30), self.ids(20)[1:], True
        rows = self.draw.permutation(ROWS)[: int(self.draw.integers(1, ROWS + 1))].tolist()
        drafts = [self.ids(5)[1:] if self.draw.random() < 0.5 else [] for _ in rows]
        chunks = [SequenceChunk([0, *some], 0, [0], len(some)) for some in drafts]
        step = greedy_step(chunks, 16, range(sum(len(chunk.token_ids) for chunk in chunks)))
        step.rows = np.array(rows, np.int32)
        owners = np.repeat(rows, [len(chunk.token_ids) for chunk in chunks])
        penalised = np.flatnonzero(owners != ROWS - 1)
        step.penalty_rows = penalised.astype(np.int32)
        step.repetition, step.frequency, step.presence = (
            np.array([PENALTIES[owner][kind] for owner in owners[penalised]], np.float32) for kind in range(3)
        )
        histories = [(row, list(self.counts(row).items())) for row in rows if row < ROWS - 1 and self.is_new[row]]
        step.history_rows = np.array([row for row, _ in histories], np.int32)
        step.history_starts = np.cumsum([0, *(len(entries) for _, entries in histories)]).astype(np.int32)
        step.history_ids = np.array([token for _, entries in histories for token, _ in entries], np.int32)
        step.history_counts = np.array([count for _, entries in histories for _, count in entries], np.int32)
        for row in rows:
            self.is_new[row] = False
        return step, drafts

    def counts(self, row: int, drafts: list[int] | None = None) -> dict[int, int]:
        return dict.fromkeys(self.prompts[row], 0) | Counter(self.generated[row] + (drafts or []))

    def adjusted(self, logits: Tensor, step: StepMetadata, drafts: list[list[int]]) -> Tensor:
        """The penalties of every row from all tokens before it, one id at a time."""
        result, place = logits.clone(), 0
        for row, some in zip(step.rows.tolist(), drafts, strict=True):
            repetition, frequency, presence = np.float32(PENALTIES[row]).tolist()
            for known in range(len(some) + 1):
                for token, count in self.counts(row, some[:known]).items():
                    value = float(logits[place, token])
                    value = value / repetition if value > 0 else value * repetition
                    result[place, token] = value - frequency * count - (presence if count else 0.0)
                place += 1
        return result

    def take(self, step: StepMetadata, drafts: list[list[int]], sampled: list[int]) -> None:
        """Keep the sampled tokens up to the first wrong draft."""
        place = 0
        for row, some in zip(step.rows.tolist(), drafts, strict=True):
            kept = next((n for n, draft in enumerate(some) if sampled[place + n] != draft), len(some))
            self.generated[row] += sampled[place : place + kept + 1]
            place += len(some) + 1


def tokens_for(scene: Scene, step: StepMetadata, drafts: list[list[int]]) -> list[int]:
    """Sampled tokens, by which about half of the drafts are right."""
    wanted = [token for some in drafts for token in [*some, -1]]
    return [
        token if token >= 0 and scene.draw.random() < 0.7 else int(scene.draw.integers(0, VOCAB)) for token in wanted
    ]


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("make", [sparse, dense])
@pytest.mark.slow
def test_kept_histories_match_fresh_counts(make: Callable[..., Histories], shards: int) -> None:
    scene, width = Scene(0), -(-VOCAB // shards)
    kept = [make(ROWS, first, width) for first in range(0, width * shards, width)]
    for _ in range(150):
        step, drafts = scene.step()
        logits = torch.randn(len(step.logits_indices), width * shards)
        expected = scene.adjusted(logits, step, drafts)
        for shard, histories in enumerate(kept):
            histories.write(step)
            here = slice(shard * width, (shard + 1) * width)
            x = logits[:, here].contiguous()
            reporting = np.arange(len(x)) % 2 == 0
            done = apply_logits_processors(x, step, histories, shard * width, reporting)
            assert torch.equal(x, expected[:, here])
            if done is not None:
                done.undo(x)
            assert torch.equal(x[reporting], logits[:, here][reporting])
        sampled = tokens_for(scene, step, drafts)
        chosen = torch.tensor(sampled)
        accepted = num_accepted(step, chosen) if len(step.num_drafts) else None
        for histories in kept:
            if len(step.penalty_rows):
                histories.add(step, chosen, accepted)
        scene.take(step, drafts, sampled)


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_kernels_read_kept_histories() -> None:
    """Greedy, so that the token tells the largest adjusted logit."""
    scene, histories = Scene(1), sparse(ROWS, 0, VOCAB)
    sampler = Sampler(TensorParallel.solo(), 0, VOCAB, VOCAB, histories)
    for _ in range(100):
        step, drafts = scene.step()
        logits = torch.randn(len(step.logits_indices), VOCAB)
        histories.write(step)
        tokens, _ = sampler.sample(logits.clone(), step)
        assert tokens.tolist() == scene.adjusted(logits, step, drafts).argmax(1).tolist()
        accepted = num_accepted(step, tokens) if len(step.num_drafts) else None
        if len(step.penalty_rows):
            histories.add(step, tokens, accepted)
        scene.take(step, drafts, tokens.tolist())
