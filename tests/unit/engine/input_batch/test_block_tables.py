"""The tables that ranks keep hold the blocks of every sequence of every step, as the scheduler knows them."""

import pytest
import torch

from oarlock.engine.scheduler.sequence import SchedulerOutput, Status
from oarlock.workers.attention.forward_batch import BlockTables
from tests.unit.engine.engine_fakes import Driver
from tests.unit.engine.scheduler.test_pipeline_depth import make_scene, run_scene, run_withdrawing


class ComparingDriver(Driver):
    """Feeds each step to a rank's tables, and compares them with the blocks that the scheduler knows."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        rows, width = self.executor._tables[0].shape
        self.kept = BlockTables(rows, width, self.executor.info.block_size, torch.device("cpu"))
        self.num_entries = 0
        self.num_compared = 0

    def begin(self, num_withdrawn: int = 0) -> SchedulerOutput | None:
        output = super().begin(num_withdrawn)
        if output is None:
            return None
        step = self.executor._steps[-1]
        self.kept.write(step)
        self.num_entries += len(step.table_blocks)
        for item, row, length in zip(self.items, step.rows.tolist(), step.seq_lens.tolist(), strict=True):
            if item.seq.status is Status.FINISHED:
                continue  # with the mask of its next token
            blocks = item.seq.block_ids[: -(-length // self.info.block_size)]
            assert item.seq.row == row
            assert self.kept.of_group[0][row, : len(blocks)].tolist() == blocks
            self.num_compared += len(blocks)
        return output


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.slow
def test_tables_of_random_scenes(depth: int) -> None:
    preemptions, reused, compared, entries = 0, 0, 0, 0
    for seed in range(100, 115):
        driver = run_scene(make_scene(seed), depth, ComparingDriver)
        preemptions += driver.scheduler.stats.num_preemptions
        reused += max(0, len(driver.requests) - driver.scheduler.max_num_seqs)
        compared, entries = compared + driver.num_compared, entries + driver.num_entries
    assert preemptions > 0 and reused > 50
    assert entries < compared / 3


def test_withdrawn_sequences_leave_block_tables_complete() -> None:
    assert run_withdrawing(make_scene(104), ComparingDriver).num_compared > 50
