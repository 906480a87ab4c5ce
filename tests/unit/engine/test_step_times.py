"""How many prompt tokens fit beside running answers, from what steps have taken."""

import pytest

from engine.core.step_times import FEWEST_TOKENS, RATIO, StepTimes
from workers.step_cost import StepCost

COST = StepCost(fixed_s=0.02, token_s=0.001, context_s=0.0, logits_s=0.0)


def test_without_answers_a_step_may_be_of_any_size() -> None:
    assert StepTimes(COST, 0.001).most_prompt_tokens(0, 2048, 10_000) == 2048


def test_before_any_step_the_measured_cost_decides() -> None:
    decodes_s = COST.seconds(8, context=0)
    assert StepTimes(COST, None).most_prompt_tokens(8, 2048, 10_000) == int((RATIO - 1) * decodes_s / COST.token_s)
    assert StepTimes(COST, 0.128).most_prompt_tokens(8, 2048, 10_000) == 100
    assert StepTimes(COST, 0.128).most_prompt_tokens(8, 50, 10_000) == 50


def test_without_any_measurement_there_is_no_limit() -> None:
    times = StepTimes(None, None)
    assert times.most_prompt_tokens(8, 2048, 10_000) == 2048
    times.observe(8, 0, 0.02)
    assert times.most_prompt_tokens(8, 2048, 10_000) == 2048  # what a prompt's token takes is not known
    times.observe(8, 1000, 1.02)
    assert times.most_prompt_tokens(8, 2048, 10_000) == int((RATIO * 0.02 - 0.02) / 0.001)


def test_steps_that_ran_count_more_than_the_start() -> None:
    times = StepTimes(COST, 0.25)
    for _ in range(20):
        times.observe(4, 0, 0.05)
        times.observe(4, 100, 0.25)
    assert times.most_prompt_tokens(4, 2048, 10_000) == 100
    assert times.most_prompt_tokens(64, 2048, 10_000) == 100  # nothing nearer was measured


def test_one_slow_step_changes_little() -> None:
    times = StepTimes(None, 0.1)
    for _ in range(9):
        times.observe(4, 0, 0.02)
        times.observe(4, 80, 0.1)
    times.observe(4, 0, 3.0)
    times.observe(4, 80, 5.0)
    assert times.most_prompt_tokens(4, 2048, 10_000) == 80


def test_prompts_always_go_on() -> None:
    assert StepTimes(COST, 0.0001).most_prompt_tokens(8, 2048, 10_000) == FEWEST_TOKENS
    assert StepTimes(COST, 0.0001).most_prompt_tokens(8, 3, 10_000) == 3


def through_stages(parts: list[int], num_stages: int, cost: StepCost) -> float:
    """Seconds until the last of these steps has left the last of equal stages, by going through them one by one."""
    free_s = [0.0] * num_stages
    for tokens in parts:
        ready_s = 0.0
        for stage in range(num_stages):
            ready_s = free_s[stage] = max(ready_s, free_s[stage]) + (cost.fixed_s + cost.token_s * tokens) / num_stages
    return free_s[-1]


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 128, 500, 1024, 5000])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("token_s", [1e-5, 1e-3, 4e-3])
def test_a_prompt_is_divided_so_that_all_stages_compute(num_tokens: int, num_stages: int, token_s: float) -> None:
    """As well as by the best number of equal parts, which is tried."""
    cost = StepCost(fixed_s=0.04, token_s=token_s, context_s=0.0, logits_s=0.0)
    times = StepTimes(cost, None, num_stages)
    parts, left = [], num_tokens
    while left:
        parts.append(min(left, times.most_prompt_tokens(0, 2048, left)))
        left -= parts[-1]
    tried = [
        [num_tokens * (part + 1) // count - num_tokens * part // count for part in range(count)]
        for count in range(-(-num_tokens // 2048), max(1, num_tokens // FEWEST_TOKENS) + 1)
    ]
    best_s = min(through_stages(some, num_stages, cost) for some in tried)
    assert through_stages(parts, num_stages, cost) <= 1.06 * best_s
    assert len(parts) == len(tried[0]) or num_stages > 1, "one stage gains nothing"


def test_behind_many_prompts_parts_are_larger() -> None:
    """Each step reads all weights: they are divided as one."""
    times = StepTimes(COST, None, 2)
    assert times.most_prompt_tokens(0, 2048, 128) < times.most_prompt_tokens(0, 2048, 2000) / 2
