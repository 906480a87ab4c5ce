"""Places of ranks: every rank is in one place, and neighbours are those that share a node and a stage."""

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.topology import Topology


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (2, 1, 2), (4, 1, 2), (2, 2, 2), (1, 2, 2), (2, 2, 1), (8, 2, 4), (1, 4, 2)]
)
def test_every_rank_has_one_place(sizes: tuple[int, int, int]) -> None:
    where = Topology(*sizes)
    where.check()
    dealt = [rank for node in range(where.nnodes) for rank in where.ranks_of(node)]
    staged = [rank for stage in range(where.pipeline_parallel_size) for rank in where.stage_ranks(stage)]
    assert dealt == staged == list(range(where.world_size))
    for rank in dealt:
        assert where.ranks_of(where.node_of(rank))[where.local_rank(rank)] == rank
        assert where.stage_ranks(where.stage_of(rank))[where.tensor_rank(rank)] == rank
        same = [
            other
            for other in dealt
            if where.node_of(other) == where.node_of(rank) and where.stage_of(other) == where.stage_of(rank)
        ]
        assert list(where.neighbours_on_node(rank)) == same
    assert where.stage_of(where.output_rank) == where.pipeline_parallel_size - 1
    assert where.tensor_rank(where.output_rank) == 0


def test_layers_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(StartupError, match=r"--nnodes 2: 3 tensor-parallel ranks x 1 pipeline stages cannot be"):
        Topology(3, 1, 2).check()
    with pytest.raises(StartupError, match="3 ranks would belong to two stages"):
        Topology(2, 3, 2).check()
