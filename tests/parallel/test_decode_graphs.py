"""Steps in graphs give the bits of steps that run operation by operation, over whole scenes of the engine."""

from pathlib import Path

import pytest

from oarlock.workers.config import WorkerConfig
from oarlock.workers.runner.device_steps import DeviceSteps
from tests.parallel.graph_ranks import GraphRunner
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_pipeline_depth import KINDS, LATE_KINDS, answers, checkpoint, requests_of

__all__ = ["checkpoint"]  # a fixture


def config_of(path: Path, size: int, **changes: object) -> WorkerConfig:
    config = WorkerConfig(
        str(path), device="cpu", dtype="bfloat16", tensor_parallel_size=size, max_model_len=128, block_size=16,
        max_num_seqs=6, max_num_batched_tokens=48, kv_cache_bytes=16 << 20, num_threads=1, check_weights=False,
    )  # fmt: skip
    return config.with_(**changes)


@pytest.mark.parametrize(("size", "num_blocks", "depth"), [(1, 100, 1), (1, 6, 2), (2, 100, 2)])
def test_every_answer_has_the_bits_of_eager_steps(checkpoint: Path, size: int, num_blocks: int, depth: int) -> None:
    config = config_of(checkpoint, size)
    eager, graphs = ThreadExecutor(config), ThreadExecutor(config, GraphRunner)
    if not eager.info.batch_invariant:
        pytest.skip(f"padding changes bits here: {eager.info.batch_invariant_reason}")
    requests = requests_of((*KINDS, *LATE_KINDS), 40 if num_blocks == 6 else 16)  # so that some are preempted
    expected, _ = answers(eager, requests, 1, num_blocks)
    got, engine = answers(graphs, requests, depth, num_blocks)
    assert engine.num_ahead > 0 or depth == 1
    assert engine.scheduler.stats.num_preemptions > 0 or num_blocks == 100
    assert {number for number in expected if got[number] != expected[number]} == set()
    for rank in graphs.ranks:
        assert isinstance(rank, GraphRunner)
        prompts = len(rank.prompt_sizes)
        for captured in (rank.maker.captured[:prompts], rank.maker.captured[prompts:]):
            assert sum(graph.num_replays > 0 for graph in captured) >= 2  # several buckets of each kind
        assert (None, None) not in rank.inputs.staged[prompts + len(rank.sizes) :]  # no step is launched otherwise
    eager.close()
    graphs.close()


def test_every_rank_captures_from_the_largest_to_the_smallest(
    checkpoint: Path,
) -> None:
    """In one order on all ranks, since collectives are captured with the rest; and no graph outlives `release`."""
    executor = ThreadExecutor(config_of(checkpoint, 2), GraphRunner)
    for rank in executor.ranks:
        assert isinstance(rank, GraphRunner) and isinstance(rank.steps, DeviceSteps)
        assert rank.inputs.staged == ((None, 48), (None, 32), (None, 16), (6, None), (4, None), (2, None), (1, None))
        captured = list(rank.maker.captured)
        assert len(captured) == 3 + 8  # the layers; the model and sampling
        rank.steps.release()
        assert all(graph.is_released for graph in captured)
    executor.close()


def test_graphs_can_be_captured_again(checkpoint: Path) -> None:
    """Without any, steps run operation by operation; those that come after a release are launched, and no others."""
    executor = ThreadExecutor(config_of(checkpoint, 1), GraphRunner)
    (rank,) = executor.ranks
    assert isinstance(rank, GraphRunner) and isinstance(rank.steps, DeviceSteps)

    def found() -> dict:
        return answers(executor, requests_of(KINDS, 10), 2, 100)[0]

    expected = found()
    rank.steps.release()
    rank.inputs.staged = ()
    eager = found()
    assert set(rank.inputs.staged) == {(None, None)}
    assert rank.steps.capture(rank.maker, rank.sizes, rank.prompt_sizes) == 11
    assert found() == expected and (eager == expected or not executor.info.batch_invariant)
    assert sum(graph.num_replays > 0 for graph in rank.maker.captured) > 2
    executor.close()
