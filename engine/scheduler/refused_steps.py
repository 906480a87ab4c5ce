"""Steps that do not run as scheduled: refused by the ranks for lack of memory, or withdrawn before they were sent.

Each refusal halves the maximum tokens of a step; steps that run double it again. Steps that were sent ahead of the
result are refused with it, and undone as well.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Outputs

from oarlock.engine.kv_cache.manager import TableEntry
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.decode_state import DecodeState
from oarlock.engine.scheduler.policy import choose_victim
from oarlock.engine.scheduler.sequence import NO_DECODES, ScheduledTokens, SchedulerOutput, Sequence, Status
from oarlock.engine.scheduler.state_steps import StateRows

GROW_AFTER_STEPS = 32  # steps that ran before the limit doubles
MIN_TRIES = 3  # refusals in a row before a step of a single token is aborted
MAX_REFUSALS = 16  # refused steps with the same newest sequence before it fails; enough to halve 65,536 tokens to 1


class RefusedSteps:
    """Limit on the tokens of steps after refusals, and the table entries that the next step must repeat."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._largest = max_num_batched_tokens
        self.max_tokens: int | None = None  # maximum tokens of a step while memory is short
        self._table_entries: list[TableEntry] = []
        self._num_ran = 0  # steps that ran since `max_tokens` changed
        self._in_a_row = 0  # refusals since a step ran
        self._refusals: dict[int, int] = {}  # request id -> refusals

    def shrink(
        self, outputs: Outputs[SchedulerOutput], in_first: list[Sequence], running: list[Sequence]
    ) -> Sequence | None:
        """Halve the maximum tokens of a step after the first of `outputs`, and so all steps sent ahead, were refused.

        `in_first`: running sequences of the first step. Return the sequence that must fail, if any: the newest of all
        `running` sequences if no smaller step is left to try, or the newest of this step after too many refusals.
        """
        first = outputs[0]
        num_tokens = len(first.decodes.rows) + sum(item.num_tokens for item in first.scheduled)
        self.max_tokens = max(1, num_tokens // 2)
        self._num_ran, self._in_a_row = 0, self._in_a_row + 1
        for output in outputs:
            self._table_entries += output.new_blocks
        if not in_first:
            return None
        newest = choose_victim(in_first)
        count = self._refusals[newest.request_id] = self._refusals.get(newest.request_id, 0) + 1
        if num_tokens == 1 and self._in_a_row >= MIN_TRIES:
            return choose_victim(running)
        return newest if count > MAX_REFUSALS else None

    @property
    def is_over(self) -> bool:
        """True if steps have their full size again, and no table entry waits for the next step."""
        return self.max_tokens is None and not self._table_entries

    def begin(self, output: SchedulerOutput) -> None:
        """Put the table entries that the ranks may lack first in `output`, because later entries may change them."""
        output.new_blocks, self._table_entries = self._table_entries + output.new_blocks, []

    def drop(self, output: SchedulerOutput) -> None:
        """Keep the table entries of `output`, which is not sent."""
        self._table_entries += output.new_blocks

    def ran(self, output: SchedulerOutput) -> None:
        """Record that the ranks have run `output`, and raise the limit after enough steps that ran."""
        if self.max_tokens is None:
            return
        for item in output.items():
            self._refusals.pop(item.seq.request_id, None)
        self._num_ran, self._in_a_row = self._num_ran + 1, 0
        if self._num_ran >= GROW_AFTER_STEPS:
            self._num_ran, self.max_tokens = 0, 2 * self.max_tokens
        if self.max_tokens >= self._largest:
            self.max_tokens = None
            self._refusals.clear()


def undo(
    outputs: Outputs[SchedulerOutput], state: DecodeState, memory: SequenceMemory, states: StateRows | None
) -> tuple[list[Sequence], list[Sequence]]:
    """Return the running sequences of `outputs` to their positions before, and remove uncomputed blocks from the prefix
    cache.

    Return the sequences of the first output, and the sequences that must give up their blocks: they were admitted, and
    may share blocks that are not computed, or they freed blocks or a checkpoint that they would read again.
    """
    for output in outputs:
        for item in output.scheduled:
            memory.uncache(item.seq, item.start, item.start + item.num_tokens)
    starts: dict[Sequence, int] = {}
    for output in reversed(outputs):
        starts.update(_running(output, state))
    to_preempt = [seq for output in outputs for seq in output.new_rows if seq.status is Status.RUNNING]
    if states is not None:
        to_preempt += [seq for seq in states.undo(outputs, state) if seq not in to_preempt]
    for seq, start in starts.items():
        seq.num_computed_tokens = start
        state.refresh(seq)
        if seq not in to_preempt and not memory.holds_context(seq):
            to_preempt.append(seq)
    return [seq for seq, _ in _running(outputs[0], state)], to_preempt


def withdraw(
    output: SchedulerOutput, unfit: list[ScheduledTokens], memory: SequenceMemory
) -> tuple[list[Sequence], list[Sequence], list[int]]:
    """Remove `unfit` from a step that was not submitted, and the blocks that they would compute from the prefix cache.

    Return the sequences of `unfit`, the sequences that share such blocks in this step and leave it as well, and the
    indices in the step of those that stay.
    """
    remaining: list[ScheduledTokens] = []
    kept: list[int] = []
    failed: list[Sequence] = []
    requeued: list[Sequence] = []
    missing: list[set[int]] = [set() for _ in memory.managers]  # block ids in each group
    for index, item in enumerate(output.items()):
        seq, column = item.seq, item.start // memory.block_size
        is_unfit = item in unfit
        shares = any(
            lost.intersection(table.block_ids[:column]) for lost, table in zip(missing, seq.tables, strict=True)
        )
        if not is_unfit and not shares:
            remaining.append(item)
            kept.append(index)
            continue
        for lost, table in zip(missing, seq.tables, strict=True):
            lost.update(table.block_ids[column:])
        memory.evict_blocks(seq, column)
        (failed if is_unfit else requeued).append(seq)
    output.scheduled, output.decodes = remaining, NO_DECODES
    return failed, requeued, kept


def _running(output: SchedulerOutput, state: DecodeState) -> Iterator[tuple[Sequence, int]]:
    """Yield the sequences of `output` that still run, each with its start position in that step."""
    decodes = output.decodes
    runs = state.still_run(decodes.rows, decodes.num_released)
    for row, start in zip(decodes.rows[runs].tolist(), decodes.positions[runs].tolist(), strict=True):
        seq = state.seqs[row]
        assert seq is not None
        yield seq, start
    for item in output.scheduled:
        if item.seq.status is Status.RUNNING:
            yield item.seq, item.start
