"""How many prompt tokens fit beside running answers, from what steps have taken."""

from engine.core.step_times import FEWEST_TOKENS, RATIO, StepTimes
from workers.step_cost import StepCost

COST = StepCost(fixed_s=0.02, token_s=0.001, context_s=0.0, logits_s=0.0)


def test_without_answers_a_step_may_be_of_any_size() -> None:
    assert StepTimes(COST, 0.001).most_prompt_tokens(0, 2048) == 2048


def test_before_any_step_the_measured_cost_decides() -> None:
    decodes_s = COST.seconds(8, context=0)
    assert StepTimes(COST, None).most_prompt_tokens(8, 2048) == int((RATIO - 1) * decodes_s / COST.token_s)
    assert StepTimes(COST, 0.128).most_prompt_tokens(8, 2048) == 100
    assert StepTimes(COST, 0.128).most_prompt_tokens(8, 50) == 50


def test_without_any_measurement_there_is_no_limit() -> None:
    times = StepTimes(None, None)
    assert times.most_prompt_tokens(8, 2048) == 2048
    times.observe(8, 0, 0.02)
    assert times.most_prompt_tokens(8, 2048) == 2048  # what a prompt's token takes is not known
    times.observe(8, 1000, 1.02)
    assert times.most_prompt_tokens(8, 2048) == int((RATIO - 1) * 0.02 / 0.001)


def test_steps_that_ran_count_more_than_the_start() -> None:
    times = StepTimes(COST, 0.25)
    for _ in range(20):
        times.observe(4, 0, 0.05)
        times.observe(4, 100, 0.25)
    assert times.most_prompt_tokens(4, 2048) == 100
    assert times.most_prompt_tokens(64, 2048) == 100  # nothing nearer was measured


def test_one_slow_step_changes_little() -> None:
    times = StepTimes(None, 0.1)
    for _ in range(9):
        times.observe(4, 0, 0.02)
        times.observe(4, 80, 0.1)
    times.observe(4, 0, 3.0)
    times.observe(4, 80, 5.0)
    assert times.most_prompt_tokens(4, 2048) == 80


def test_prompts_always_go_on() -> None:
    assert StepTimes(COST, 0.0001).most_prompt_tokens(8, 2048) == FEWEST_TOKENS
    assert StepTimes(COST, 0.0001).most_prompt_tokens(8, 3) == 3
