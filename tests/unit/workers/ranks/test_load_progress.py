"""Which rank is behind: from counters in shared memory, and from messages while loading."""

import os

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.shm_layout import Flags, data_offset, last_of
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.ranks.multiproc_executor import LoadProgress


@pytest.mark.parametrize(
    ("finished", "collectives", "behind"),
    [
        ([7, 7], [120, 119], 1),  # one waits in a collective for the other
        ([7, 7], [119, 120], 0),
        ([8, 7], [120, 120], 1),  # stopped after the last collective of a step
        ([7, 8, 8], [118, 120, 120], 0),
        ([7, 7], [120, 120], None),  # both compute
        ([7, 7, 7], [119, 119, 120], None),
        ([3], [0], 0),
    ],
)
def test_the_rank_that_all_others_wait_for(finished: list[int], collectives: list[int], behind: int | None) -> None:
    assert last_of(finished, collectives) == behind


def test_flags_of_one_process_are_read_in_another() -> None:
    memory = anonymous_memory(data_offset(3))
    ours, theirs = Flags(memory, 3), Flags(memory, 3)
    os.close(memory)
    theirs[0], theirs[2] = 2**40, 5
    assert ours.read() == [2**40, 0, 5]
    ours.close()
    theirs.close()


def test_silence_while_loading_names_the_rank_and_what_it_was_doing() -> None:
    loading = LoadProgress(2)

    def cause(collectives: list[int]) -> str:
        return loading.no_progress_error(collectives, 9).cause

    assert "rank 0 has made no progress for 9 s while importing its libraries; other" in cause([0, 0])
    for rank in range(2):
        loading.handle(rank, {"kind": "phase", "name": "loading"})
    loading.handle(1, {"kind": "progress", "fraction": 0.25})
    loading.handle(0, {"kind": "loaded", "num_blocks": [8, 3]})
    assert loading.num_blocks is None
    assert "rank 1 has made no progress for 9 s while reading the weights (25% read)." in cause([0, 0])
    loading.handle(1, {"kind": "loaded", "num_blocks": [7, 4]})
    assert loading.num_blocks == [7, 3]
    for rank in range(2):
        loading.handle(rank, {"kind": "phase", "name": "allocating"})
    assert "rank 0 has made no progress" in cause([3, 4])  # the other waits in collective 4


def test_a_rank_that_fails_while_loading_ends_it() -> None:
    with pytest.raises(StartupError, match="The cause") as failure:
        LoadProgress(2).handle(1, {"kind": "failed", "cause": "The cause.", "fix": "The fix.", "exit_code": 4})
    assert failure.value.exit_code == 4
