"""Models with sliding and full attention in virtual time: what a second memory group costs, and what it saves."""

from dataclasses import replace

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.workers.config import GroupInfo, WorkerConfig
from tests.sim.simulator import Arrival, SimulationConfig, make_trace, simulate

BLOCK, SPAN, STEP = 32, 256, 512
IN_STEP = (SPAN + STEP) // BLOCK + 1  # blocks that one sequence holds at most in the group with a window


def config(*groups: GroupInfo, num_blocks: int = 1024, seqs: int = 16) -> SimulationConfig:
    worker = WorkerConfig("none", max_model_len=4096, max_num_seqs=seqs, max_num_batched_tokens=STEP, block_size=BLOCK)
    engine = EngineConfig(worker, max_waiting_requests=500, max_waiting_tokens=10**7)
    return SimulationConfig(engine, num_blocks=num_blocks, groups=groups)


def trace(**changes) -> list[Arrival]:
    settings = {
        "num_requests": 60,
        "requests_per_s": 20.0,
        "mean_prompt_tokens": 900,
        "mean_output_tokens": 60,
        "max_prompt_tokens": 3000,
        "shared_prefix_tokens": 320,
        "seed": 5,
    }
    return make_trace(**{**settings, **changes})


def test_a_window_that_never_lacks_blocks_changes_no_time() -> None:
    """With blocks for everything, a model with two groups is served as one without windows."""
    one = simulate(trace(), config())
    two = simulate(trace(), config(GroupInfo(1024, 0), GroupInfo(1024, 0, span=SPAN)))
    assert replace(one, peak_kv_cache_usage=0.0) == replace(two, peak_kv_cache_usage=0.0)
    assert one.num_finished == 60 and one.prefix_cache_hit_rate > 0.2


@pytest.mark.slow
def test_a_pool_for_windows_of_an_eighth_serves_as_many_sequences() -> None:
    """Sixteen contexts of up to 3,000 tokens, of which the group with a window keeps what its tokens read."""
    small = config(GroupInfo(1600, 0), GroupInfo(16 * IN_STEP // 2 + 1, 0, span=SPAN))
    report = simulate(trace(), small)
    whole = simulate(trace(), config(GroupInfo(1600, 0), GroupInfo(1600, 0, span=SPAN)))
    assert report.num_finished == 60 and report.num_errors == 0
    assert report.max_running == whole.max_running == 16
    assert report.duration_s < 1.05 * whole.duration_s
    assert simulate(trace(), small) == report


@pytest.mark.slow
@pytest.mark.parametrize("scarce", ["full", "window"])
def test_whichever_group_is_scarce_everyone_is_served(scarce: str) -> None:
    groups = [GroupInfo(1024, 0), GroupInfo(1024, 0, span=SPAN)]
    number = ["full", "window"].index(scarce)
    groups[number] = replace(groups[number], num_blocks=(140, 2 * IN_STEP)[number])
    crowd = trace(requests_per_s=100.0, mean_output_tokens=200)
    report = simulate(crowd, config(*groups))
    assert report.num_finished == 60 and report.num_errors == 0
    assert report.max_preemptions_of_one <= 3 and report.peak_kv_cache_usage > 0.8
