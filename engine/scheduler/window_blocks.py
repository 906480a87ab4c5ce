"""Blocks of a sequence where all layers have a sliding window: freed behind the window, allocated as it moves on."""

from oarlock.engine.scheduler.kv_cache_manager import NULL_BLOCK, KVCacheManager
from oarlock.engine.scheduler.output import SchedulerOutput
from oarlock.engine.scheduler.sequence import Sequence


def free_out_of_window(manager: KVCacheManager, seq: Sequence, output: SchedulerOutput) -> None:
    """Free the blocks that no later token of `seq` reads."""
    columns = manager.free_out_of_window(seq)
    output.new_blocks += [(seq.row, column, NULL_BLOCK) for column in columns]


def allocate_within_window(
    manager: KVCacheManager, seq: Sequence, num_tokens: int, num_running: int, output: SchedulerOutput
) -> int:
    """Allocate blocks for the next `num_tokens` tokens, or for as many as there is room for; return that number.

    Leaves a block for each of the other running sequences; `num_running` counts `seq` as well.
    """
    free_out_of_window(manager, seq, output)
    start, column = seq.num_computed_tokens, len(seq.block_ids)
    room = max(0, manager.num_available - (num_running - 1))
    num_tokens = min(num_tokens, (column + room) * manager.block_size - start)
    manager.allocate_slots(seq, start + num_tokens)
    output.add_blocks(seq, column)
    return num_tokens
