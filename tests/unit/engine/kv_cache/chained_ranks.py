"""Ranks without a model whose answers follow from what their pages hold: a wrong page changes the text.

The page of a token holds a number made of the one before it and the token; the next token is made of that number.
Blocks beyond the pool are kept as the engine orders. Files are read and written at random times, or fail.
"""

from random import Random

import numpy as np

from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.kv_offload import DIGEST_BYTES, Copy, KVReport, KVReportKind
from oarlock.workers.protocol import StepMetadata, StepOutput, pack_step, refusal, step_bytes, unpack_step

Files = dict[bytes, np.ndarray]  # by digest: the numbers of a block


class ChainedRanks:
    """Executor of `info.kv_offload.num_ranks` ranks that hold the same pages."""

    rank_pids = step_times_ns = ()

    def __init__(
        self,
        config: WorkerConfig,
        info: WorkerInfo,
        random: Random,
        *,
        depth: int = 1,
        files: Files | None = None,
        fails: float = 0.0,  # share of reads and writes
        refuses: float = 0.0,  # share of steps
    ) -> None:
        self.config, self.info, self.max_in_flight, self.best_in_flight = config, info, 2, depth
        self.files: Files = {} if files is None else files
        self._random, self._fails, self._refuses = random, fails, refuses
        self._tables = np.zeros((config.max_num_seqs, 64), np.int64)
        self._pages = np.zeros(info.num_blocks * info.block_size, np.int64)
        num_slots = 0 if info.kv_offload is None else info.kv_offload.num_slots
        self._slots = np.zeros((num_slots, info.block_size), np.int64)
        self._pending: list[tuple[Copy, int, bytes, int]] = []  # (kind, slot, digest, rank)
        self._outputs: list[StepOutput] = []
        self._sampled: list[int] = []
        self._has_refused = False
        self.num_tokens = 0  # computed

    # -- steps

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        buffer = memoryview(bytearray(step_bytes(step)))
        pack_step(step, buffer)
        step = unpack_step(buffer)
        self._copy(step)
        if not (step.is_ahead and self._has_refused):
            # Not twice in a row: a request that is refused too often fails.
            self._has_refused = step.num_seqs > 0 and not self._has_refused and self._random.random() < self._refuses
        self._outputs.append(refusal(step.step_id) if self._has_refused else self._run(step))

    def _run(self, step: StepMetadata) -> StepOutput:
        size, tables = self.info.block_size, self._tables
        tables[step.table_rows, step.table_columns] = step.table_blocks
        tokens = [token if token >= 0 else self._sampled[-1 - token] for token in step.token_ids.tolist()]
        numbers = []
        for place, row in enumerate(step.rows.tolist()):
            for index in range(step.query_start_loc[place], step.query_start_loc[place + 1]):
                position, before = int(step.positions[index]), 1
                if position:
                    before = int(self._pages[tables[row, (position - 1) // size] * size + (position - 1) % size])
                number = (before * 1_000_003 + tokens[index] + 17) % (2**31 - 1)
                self._pages[tables[row, position // size] * size + position % size] = number
                numbers.append(number)
        self.num_tokens += len(numbers)
        self._sampled = [1 + numbers[index] % (self.info.vocab_size - 1) for index in step.logits_indices]
        return StepOutput(step.step_id, np.array(self._sampled, np.int32), np.ones(len(self._sampled), np.uint8))

    def _copy(self, step: StepMetadata) -> None:
        pages = self._pages.reshape(-1, self.info.block_size)
        for (kind, block, slot), digest in zip(step.kv_copies.tolist(), step.kv_digests, strict=True):
            if kind == Copy.SAVE:
                self._slots[slot] = pages[block]
            elif kind == Copy.LOAD:
                pages[block] = self._slots[slot]
            else:
                assert self.info.kv_offload is not None and len(digest) == DIGEST_BYTES
                ranks = range(self.info.kv_offload.num_ranks)
                self._pending += [(Copy(kind), slot, digest.tobytes(), rank) for rank in ranks]
                if kind == Copy.READ:
                    self._slots[slot] = -1  # until it is read

    def send_masks(self, bits: np.ndarray) -> None:
        raise AssertionError("no request has a grammar")

    def collect(self) -> StepOutput:
        return self._outputs.pop(0)

    # -- files

    @property
    def kv_reports(self) -> "ChainedRanks":
        return self

    def receive(self) -> list[KVReport]:
        """Reports of some transfers, which end now."""
        done = [job for job in self._pending if self._random.random() < 0.3]
        self._pending = [job for job in self._pending if job not in done]
        return [self._end(*job) for job in done]

    def fileno(self) -> int:
        raise AssertionError("nobody waits for it")

    def close(self, failure: Exception | None = None) -> None:
        """Nothing to close."""

    def _end(self, kind: Copy, slot: int, digest: bytes, rank: int) -> KVReport:
        succeeds = self._random.random() >= self._fails
        if kind is Copy.WRITE:
            if rank == 0 and succeeds:
                self.files[digest] = self._slots[slot].copy()
            return KVReport(KVReportKind.WRITTEN, rank, results=[(slot, succeeds)])
        if rank == 0 and digest in self.files:
            self._slots[slot] = self.files[digest]
        return KVReport(KVReportKind.READ, rank, results=[(slot, succeeds and digest in self.files)])

    def ping(self) -> None:
        """All ranks answer."""

    def fileno_for_death(self) -> list[int]:
        return []
