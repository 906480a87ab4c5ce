"""The tokens of running sequences that get one each: most rows of most steps, so this is the loop that counts."""

from collections.abc import Callable

from engine.scheduler.output import ScheduledTokens, SchedulerOutput
from engine.scheduler.sequence import Sequence, Status


def schedule_decodes(
    running: list[Sequence],
    output: SchedulerOutput,
    block_size: int,
    allocate_next_block: Callable[[Sequence, SchedulerOutput], bool],
    fail: Callable[[Sequence], None],
) -> list[Sequence]:
    """One token for each running sequence that is at most one behind; those that are more behind are returned.

    `allocate_next_block` may preempt, and says whether its sequence got one. `fail` is called from an `except` block.
    """
    behind = []
    scheduled, is_running = output.scheduled, Status.RUNNING
    for seq in list(running):
        if seq.status is not is_running:
            continue  # preempted earlier in this loop
        start = seq.num_computed_tokens
        if len(seq.token_ids) > start + 1:
            behind.append(seq)
            continue
        if start >= seq.num_to_compute:
            continue  # it ends with the answer to the step before
        try:
            if start < len(seq.block_ids) * block_size or allocate_next_block(seq, output):
                scheduled.append(ScheduledTokens(seq, start, 1, seq.samples))
                seq.num_computed_tokens = start + 1
        except Exception:
            fail(seq)
    if output.num_preempted:
        output.scheduled = [item for item in scheduled if item.seq.status is is_running]
    return [seq for seq in behind if seq.status is is_running]
