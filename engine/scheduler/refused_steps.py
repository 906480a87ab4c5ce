"""Undoes steps that the ranks refuse for lack of memory, and makes the next ones smaller.

Each refusal halves the most tokens of a step; steps that run double it again. Steps that were sent ahead of the answer
are refused with it, and undone as well. Knows counts, positions and blocks; does not know why memory ran out.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Outputs

from oarlock.engine.scheduler.columns import RunningColumns
from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.output import NO_DECODES, ScheduledTokens, SchedulerOutput
from oarlock.engine.scheduler.preemption import choose_victim
from oarlock.engine.scheduler.sequence import Sequence, Status

GROWS_AFTER = 32  # steps that ran
FEWEST_TRIES = 3  # refusals in a row before a step of a single token is given up
MOST_REFUSALS = 16  # of steps with the same newest sequence, which then fails; enough from 65,536 tokens down to one


class RefusedSteps:
    """Limits the tokens of steps after refusals, and keeps the table entries that the next step must repeat."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._largest = max_num_batched_tokens
        self.most_tokens: int | None = None  # of a step, while memory is short
        self._table_entries: list[tuple[int, int, int]] = []
        self._num_ran = 0  # since `most_tokens` changed
        self._in_a_row = 0  # refusals since a step ran
        self._refusals: dict[int, int] = {}  # by request id

    def shrink(
        self, outputs: Outputs[SchedulerOutput], in_first: list[Sequence], running: list[Sequence]
    ) -> Sequence | None:
        """Halve the most tokens of a step after the first of `outputs`, and so those sent ahead of its answer, were
        refused. `in_first`: its `running` sequences. Returns the sequence that must fail, if any: the newest of all
        where no smaller step is left to try, the newest of this step after too many refusals."""
        first = outputs[0]
        num_tokens = len(first.decodes.rows) + sum(item.num_tokens for item in first.scheduled)
        self.most_tokens = max(1, num_tokens // 2)
        self._num_ran, self._in_a_row = 0, self._in_a_row + 1
        for output in outputs:
            self._table_entries += output.new_blocks
        if not in_first:
            return None
        newest = choose_victim(in_first)
        count = self._refusals[newest.request_id] = self._refusals.get(newest.request_id, 0) + 1
        if num_tokens == 1 and self._in_a_row >= FEWEST_TRIES:
            return choose_victim(running)
        return newest if count > MOST_REFUSALS else None

    def begin(self, output: SchedulerOutput) -> None:
        """Put the table entries that the ranks may lack first in `output`: later ones may change them."""
        output.new_blocks, self._table_entries = self._table_entries + output.new_blocks, []

    def drop(self, output: SchedulerOutput) -> None:
        """Keep the table entries of `output`, which is not sent after all."""
        self._table_entries += output.new_blocks

    def ran(self, output: SchedulerOutput) -> None:
        """Record that the ranks have run `output`, and let steps grow again after enough such."""
        if self.most_tokens is None:
            return
        for item in output.items():
            self._refusals.pop(item.seq.request_id, None)
        self._num_ran, self._in_a_row = self._num_ran + 1, 0
        if self._num_ran >= GROWS_AFTER:
            self._num_ran, self.most_tokens = 0, 2 * self.most_tokens
        if self.most_tokens >= self._largest:
            self.most_tokens = None
            self._refusals.clear()


def undo(
    outputs: Outputs[SchedulerOutput], columns: RunningColumns, manager: KVCacheManager
) -> tuple[list[Sequence], list[Sequence]]:
    """Take the running sequences of `outputs` back to where they were before, and blocks that were not computed out of
    the prefix cache. Returns those of the first output, and those that must give up their blocks: they were admitted,
    and may share blocks that are not computed, or freed blocks that they would read again."""
    for output in outputs:
        for item in output.scheduled:
            manager.uncache(item.seq, item.start, item.start + item.num_tokens)
    starts: dict[Sequence, int] = {}
    for output in reversed(outputs):
        starts.update(_running(output, columns))
    give_up = [seq for output in outputs for seq in output.new_rows if seq.status is Status.RUNNING]
    for seq, start in starts.items():
        seq.num_computed_tokens = start
        columns.refresh(seq)
        if seq not in give_up and not manager.holds_window(seq):
            give_up.append(seq)
    return [seq for seq, _ in _running(outputs[0], columns)], give_up


def withdraw(
    output: SchedulerOutput, unfit: list[ScheduledTokens], manager: KVCacheManager
) -> tuple[list[Sequence], list[Sequence]]:
    """Take `unfit` out of a step that was not submitted, and the blocks they were to compute out of the prefix cache.
    Returns the sequences of `unfit`, and those that share such blocks in this step and leave it as well."""
    kept: list[ScheduledTokens] = []
    failed: list[Sequence] = []
    again: list[Sequence] = []
    missing: set[int] = set()  # block ids
    for item in output.items():
        seq, column = item.seq, item.start // manager.block_size
        is_unfit = item in unfit
        if not is_unfit and missing.isdisjoint(seq.block_ids[:column]):
            kept.append(item)
            continue
        missing.update(seq.block_ids[column:])
        manager.evict_blocks(seq, column)
        (failed if is_unfit else again).append(seq)
    output.scheduled, output.decodes = kept, NO_DECODES
    return failed, again


def _running(output: SchedulerOutput, columns: RunningColumns) -> Iterator[tuple[Sequence, int]]:
    """The sequences of `output` that still run, each with the position at which it began there."""
    decodes = output.decodes
    runs = columns.still_run(decodes.rows, decodes.num_released)
    for row, start in zip(decodes.rows[runs].tolist(), decodes.positions[runs].tolist(), strict=True):
        seq = columns.seqs[row]
        assert seq is not None
        yield seq, start
    for item in output.scheduled:
        if item.seq.status is Status.RUNNING:
            yield item.seq, item.start
