"""Pipeline stages in virtual time: how busy they are, and the effect of a slower one."""

from dataclasses import replace

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.simulated_ranks import CostModel
from oarlock.workers.config import WorkerConfig
from tests.sim.simulator import Arrival, Report, SimulationConfig, make_trace, simulate

WHOLE = CostModel()  # of a model that is one stage


def part(share: float) -> CostModel:
    """Stage with this share of the model."""
    return CostModel(WHOLE.step_s * share, WHOLE.token_s * share, WHOLE.context_token_s * share)


def run(
    trace: list[Arrival], stages: tuple[CostModel, ...], *, num_blocks: int = 1200, depth: int | None = None
) -> Report:
    worker = WorkerConfig(
        "none", max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=512, pipeline_parallel_size=len(stages)
    )
    engine = EngineConfig(worker, max_waiting_requests=5000, max_waiting_tokens=10**7, pipeline_depth=depth)
    return simulate(trace, SimulationConfig(engine, num_blocks=num_blocks, stages=stages))


def answers(count: int, length: int = 400) -> list[Arrival]:
    """Short prompts and long answers, all at once."""
    return [Arrival(0.0, tuple(range(number, number + 8)), length) for number in range(count)]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.6, 0.4), (0.3, 0.7), (0.25, 0.25, 0.3, 0.2)])
@pytest.mark.slow
def test_steps_leave_at_the_rate_of_the_slowest_stage(shares: tuple[float, ...]) -> None:
    report = run(answers(64), tuple(map(part, shares)))
    slowest = shares.index(max(shares))
    assert report.busy[slowest] > 0.95
    for share, busy in zip(shares, report.busy, strict=True):
        assert busy == pytest.approx(share / max(shares), abs=0.05)
    step_s = part(max(shares)).step_s + part(max(shares)).token_s * 64 / len(shares)
    assert report.duration_s / report.num_steps == pytest.approx(step_s, rel=0.15)  # contexts and prompts in addition


@pytest.mark.slow
def test_dealing_sequences_to_steps_costs_nothing_where_reading_weights_decides() -> None:
    weights = CostModel(step_s=0.02, token_s=1e-6, context_token_s=0.0)
    half = replace(weights, step_s=0.01)
    one, two, turns = (
        run(answers(32), stages, depth=depth)
        for stages, depth in (((weights,), 1), ((half, half), None), ((half, half), 1))
    )
    assert two.num_finished == one.num_finished == 32
    # Each sequence has its token after both stages, as before: no faster and no slower.
    assert two.duration_s == pytest.approx(one.duration_s, rel=0.02)
    assert turns.duration_s == pytest.approx(one.duration_s, rel=0.02)
    assert two.busy == pytest.approx((1.0, 1.0), abs=0.02) and turns.busy == pytest.approx((0.5, 0.5), abs=0.02)


def test_one_sequence_is_in_one_stage_at_a_time() -> None:
    report = run(answers(1), (part(0.5), part(0.5)))
    assert report.busy == pytest.approx((0.5, 0.5), abs=0.01)


def test_a_long_prompt_keeps_all_stages_busy() -> None:
    prompt = [Arrival(0.0, tuple(range(1900)), 1)]
    one, two = run(prompt, (WHOLE,)), run(prompt, (part(0.5), part(0.5)))
    # four chunks through two stages take five times as long as half a chunk
    assert two.time_to_first_token_s.max == pytest.approx(one.time_to_first_token_s.max * 5 / 8, rel=0.05)


@pytest.mark.slow
def test_traffic_with_preemptions_is_served_as_with_one_stage() -> None:
    crowd = make_trace(
        num_requests=80,
        requests_per_s=50.0,
        mean_prompt_tokens=120,
        mean_output_tokens=200,
        max_prompt_tokens=1000,
        shared_prefix_tokens=64,
        seed=7,
    )
    one, two = run(crowd, (WHOLE,), num_blocks=140), run(crowd, (part(0.5), part(0.5)), num_blocks=140)
    assert two.num_finished == 80 and two.num_preemptions > 0 and two.max_preemptions_of_one <= 3
    assert min(two.busy) > 0.85
    assert two.output_tokens_per_s > 1.1 * one.output_tokens_per_s  # weights are read twice as often
