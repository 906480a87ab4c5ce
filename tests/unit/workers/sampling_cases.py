"""A simple reference sampler that sorts everything in float64, and ranks as threads to run the real one."""

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata, StepOutput
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.token_histories import DenseHistories, Histories, TokenHistories

MASK = 0xFFFFFFFF


class ThreadRanks:
    """Ranks as threads: `all_gather` through a shared list and a barrier. Unequal calls break the barrier."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.calls = [0] * size

    def member(self, rank: int) -> TensorParallel:
        ranks = self

        class Member(TensorParallel):
            def all_gather(self, x: Tensor) -> Tensor:
                ranks.calls[rank] += 1
                ranks.slots[rank] = x.clone()
                ranks.barrier.wait()
                out = torch.stack(ranks.slots)
                ranks.barrier.wait()
                return out

        member = Member()
        member.rank, member.size = rank, self.size
        return member


def sparse(num_rows: int, first_id: int, width: int) -> Histories:
    return TokenHistories(num_rows, 1 << 11)


def dense(num_rows: int, first_id: int, width: int) -> Histories:
    return DenseHistories(num_rows, first_id, width, torch.device("cpu"))


def sample_with(
    logits: Tensor, step: StepMetadata, size: int = 1, make_histories: Callable[[int, int, int], Histories] = sparse
) -> StepOutput:
    """The output of `size` ranks, each given its shard (padded to equal widths with -inf)."""
    vocab = logits.shape[1]
    width = -(-vocab // size)
    padded = torch.nn.functional.pad(logits, (0, width * size - vocab), value=float("-inf"))
    before = padded.clone()
    ranks = ThreadRanks(size)
    answers: list[StepOutput | None] = [None] * size
    tokens: list[Tensor] = [torch.empty(0)] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            tp = TensorParallel.solo() if size == 1 else ranks.member(rank)
            shard = padded[:, rank * width : (rank + 1) * width].contiguous()
            histories = make_histories(step.num_seqs, rank * width, width)
            histories.write(step)
            tokens[rank], answers[rank] = Sampler(tp, rank * width, width, vocab, histories).sample(shard, step)
            reporting = torch.from_numpy((step.num_logprobs >= 0) | (step.target_ids >= 0))
            raw = before[:, rank * width : (rank + 1) * width]
            torch.testing.assert_close(shard[reporting], raw[reporting], rtol=0, atol=0, equal_nan=True)
        except BaseException as error:
            ranks.barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert len(set(ranks.calls)) == 1, "every rank makes the same collective calls"
    assert all(answer is None for answer in answers[1:])
    assert answers[0] is not None
    assert all((on_rank.numpy() == answers[0].token_ids).all() for on_rank in tokens), "every rank has the tokens"
    return answers[0]


@dataclass(frozen=True)
class Penalties:
    """Penalties of one row."""

    counts: dict[int, int]  # id -> how often it was generated; 0: in the prompt only
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def mask_of(ids: Iterable[int], vocab: int) -> np.ndarray:
    """uint32 [ceil(vocab / 32)], one id at a time."""
    words = np.zeros(-(-vocab // 32), np.uint32)
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words


def step_of(
    rows: int,
    bias: list[tuple[int, int, float]] | None = None,
    *,
    penalties: dict[int, Penalties] | None = None,
    masks: dict[int, np.ndarray] | None = None,
    **columns,
) -> StepMetadata:
    """A step with `rows` logits rows; columns are scalars or lists, penalties and masks are by row."""

    def column(name: str, default, dtype) -> np.ndarray:
        return np.broadcast_to(np.asarray(columns.pop(name, default), dtype), (rows,)).copy()

    bias = sorted(bias or [])
    step = greedy_step([SequenceChunk([0], 0, [NULL_BLOCK])] * rows, 1, range(rows), step_id=7)
    step = replace(
        step,
        target_ids=column("target_ids", -1, np.int32),
        sample_positions=column("sample_positions", np.arange(rows) + 10, np.int32),
        temperature=column("temperature", 1.0, np.float32),
        top_p=column("top_p", 1.0, np.float32),
        top_k=column("top_k", 0, np.int32),
        min_p=column("min_p", 0.0, np.float32),
        top_n_sigma=column("top_n_sigma", 0.0, np.float32),
        seeds=column("seeds", np.arange(rows) * 77 + 5, np.int64),
        num_logprobs=column("num_logprobs", -1, np.int32),
        bias_rows=np.array([row for row, _, _ in bias], np.int32),
        bias_ids=np.array([token for _, token, _ in bias], np.int32),
        bias_values=np.array([value for _, _, value in bias], np.float32),
    )
    if penalties:
        lists = [list(penalties[row].counts.items()) for row in sorted(penalties)]
        step.penalty_rows = np.array(sorted(penalties), np.int32)
        for name in ("repetition", "frequency", "presence"):
            values = [getattr(penalties[row], name) for row in sorted(penalties)]
            setattr(step, name, np.array(values, np.float32))
        step.history_rows = step.penalty_rows
        step.history_starts = np.cumsum([0, *map(len, lists)]).astype(np.int32)
        step.history_ids = np.array([token for entries in lists for token, _ in entries], np.int32)
        step.history_counts = np.array([count for entries in lists for _, count in entries], np.int32)
    if masks:
        step.mask_rows = np.array(sorted(masks), np.int32)
        step.mask_bits = np.array([masks[row] for row in sorted(masks)], np.uint32)
    assert not columns, f"unknown columns {sorted(columns)}"
    return step


def naive_noise(seed: int, position: int, token: int) -> float:
    """The noise of one token, in Python integers, from the definition."""

    def mixed64(word: int) -> int:
        word = (word + 0x9E3779B97F4A7C15) % 2**64
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
        return word ^ (word >> 31)

    key = mixed64((mixed64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    word = token
    word = (word ^ (word >> 16)) * 0x7FEB352D & MASK
    word = (word ^ (word >> 15)) * 0x846CA68B & MASK
    word ^= word >> 16
    word = (word ^ (key & MASK)) * ((key >> 32) | 1) & MASK
    word = (word ^ (word >> 16)) * 0x7FEB352D & MASK
    word = (word ^ (word >> 15)) * 0x846CA68B & MASK
    word = word ^ 0x80000000  # signed order
    uniform = (word + 0.5) / 2**32
    return -math.log(-math.log(uniform))


def naive_kept(row: Tensor, step: StepMetadata, i: int) -> list[int]:
    """Ids that the filters keep in an adjusted row, likeliest first."""
    x = row.double()
    ids = sorted(range(len(row)), key=lambda token: (-float(x[token]), token))
    temperature = float(step.temperature[i])
    peak = float(x.max())
    if step.min_p[i] > 0:
        lowest = peak + temperature * math.log(float(step.min_p[i]))
        ids = [token for token in ids if float(x[token]) >= lowest]
    if step.top_n_sigma[i] > 0:
        finite = [float(value) for value in x if value > -math.inf]
        mean = math.fsum(finite) / len(finite)
        deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / len(finite))
        lowest = peak - float(step.top_n_sigma[i]) * deviation
        ids = [token for token in ids if float(x[token]) >= lowest]
    if step.top_k[i] > 0:
        ids = ids[: int(step.top_k[i])]
    if step.top_p[i] < 1:
        masses = [math.exp((float(x[token]) - peak) / temperature) for token in ids]
        target = float(step.top_p[i]) * math.fsum(masses)
        kept, total = [], 0.0
        for token, mass in zip(ids, masses, strict=True):
            if kept and total >= target:
                break
            kept.append(token)
            total += mass
        ids = kept
    return ids


def naive_adjusted(logits: Tensor, step: StepMetadata) -> Tensor:
    """Bias, penalties and masks, one id at a time, in Python floats; rounded to float32 after each of the first two."""
    adjusted = logits.clone()
    for row, token, value in zip(step.bias_rows, step.bias_ids, step.bias_values, strict=True):
        adjusted[row, token] += float(value)
    for i, row in enumerate(step.penalty_rows.tolist()):
        for entry in range(step.history_starts[i], step.history_starts[i + 1]):
            token, count = int(step.history_ids[entry]), int(step.history_counts[entry])
            value, factor = float(adjusted[row, token]), float(step.repetition[i])
            value = value / factor if value > 0 else value * factor
            value -= float(step.frequency[i]) * count
            if count > 0:
                value -= float(step.presence[i])
            adjusted[row, token] = value
    for row, words in zip(step.mask_rows.tolist(), step.mask_bits, strict=True):
        for token in range(adjusted.shape[1]):
            if not int(words[token // 32]) >> token % 32 & 1:
                adjusted[row, token] = -math.inf
    return adjusted


def naive_tokens(logits: Tensor, step: StepMetadata) -> list[int]:
    """The whole procedure by sorting and Python floats."""
    tokens = []
    for i, row in enumerate(naive_adjusted(logits, step)):
        if step.target_ids[i] >= 0:
            tokens.append(int(step.target_ids[i]))
        elif step.temperature[i] == 0:
            tokens.append(min(range(len(row)), key=lambda token: (-float(row[token]), token)))
        else:
            seed, position = int(step.seeds[i]), int(step.sample_positions[i])
            temperature = float(step.temperature[i])
            kept = naive_kept(row, step, i)
            scores = {
                token: float(row[token]) / temperature + naive_noise(seed, position, token)
                for token in kept
                if row[token] > -math.inf
            }
            tokens.append(max(scores, key=lambda token: scores[token]))
    return tokens
