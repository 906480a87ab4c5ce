"""The division of a step among drafts and prompts, and the cost of steps, learnt from those that ran."""

import random
from types import SimpleNamespace
from typing import cast

import pytest

from oarlock.engine.scheduler.policy import MAX_STEP_RATIO, MIN_CHUNK_TOKENS, StepBudget, num_upcoming
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.workers.config import StepCost

COST = StepCost(fixed_s=0.02, token_s=0.001, context_s=0.0, logits_s=0.0)
MEASURED = StepCost(fixed_s=0.03, token_s=0.0008, context_s=1.0, logits_s=0.0002)


def budget_of(cost: StepCost | None, max_step_s: float | None, num_stages: int = 1) -> StepBudget:
    return StepBudget(StepCosts(cost), max_step_s, num_stages)


def test_without_answers_a_step_may_be_of_any_size() -> None:
    assert budget_of(COST, 0.001).prompt_tokens(0, 2048, 10_000) == 2048


def test_before_any_step_the_measured_cost_decides() -> None:
    decodes_s = COST.seconds(8, context=0)
    assert budget_of(COST, None).prompt_tokens(8, 2048, 10_000) == int((MAX_STEP_RATIO - 1) * decodes_s / COST.token_s)
    assert budget_of(COST, 0.128).prompt_tokens(8, 2048, 10_000) == 100
    assert budget_of(COST, 0.128).prompt_tokens(8, 50, 10_000) == 50


MIXTURE = StepCost(0.02, 0.001, 0.0, 0.0, experts_s=0.2, expert_share=1 / 16)


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize("ran", [False, True])
def test_experts_that_prompts_bring_along_are_part_of_the_time(rows: int, ran: bool) -> None:
    costs = StepCosts(MIXTURE)
    if ran:  # steps as long as was measured
        for _ in range(20):
            costs.observe(rows, 0, MIXTURE.seconds(rows, context=0))
            costs.observe(rows, 150, MIXTURE.seconds(rows + 150, context=0))
    tokens = StepBudget(costs, 0.35, 1).prompt_tokens(rows, 2048, 10_000)
    assert MIXTURE.seconds(rows + tokens, context=0) <= 0.35 < MIXTURE.seconds(rows + tokens + 2, context=0)
    assert StepBudget(costs, 0.05, 1).prompt_tokens(rows, 2048, 10_000) == MIN_CHUNK_TOKENS


def test_without_any_measurement_there_is_no_limit() -> None:
    costs = StepCosts(None)
    budget = StepBudget(costs, None, 1)
    assert budget.prompt_tokens(8, 2048, 10_000) == 2048
    costs.observe(8, 0, 0.02)
    assert budget.prompt_tokens(8, 2048, 10_000) == 2048  # what a prompt's token takes is not known
    costs.observe(8, 1000, 1.02)
    assert budget.prompt_tokens(8, 2048, 10_000) == int((MAX_STEP_RATIO * 0.02 - 0.02) / 0.001)


def test_steps_that_ran_count_more_than_the_start() -> None:
    costs = StepCosts(COST)
    budget = StepBudget(costs, 0.25, 1)
    for _ in range(20):
        costs.observe(4, 0, 0.05)
        costs.observe(4, 100, 0.25)
    assert budget.prompt_tokens(4, 2048, 10_000) == 100
    assert MIN_CHUNK_TOKENS < budget.prompt_tokens(64, 2048, 10_000) < 100, "more rows take longer"


def test_one_slow_step_changes_little() -> None:
    costs = StepCosts(None)
    budget = StepBudget(costs, 0.1, 1)
    for _ in range(9):
        costs.observe(4, 0, 0.02)
        costs.observe(4, 80, 0.1)
    costs.observe(4, 0, 3.0)
    costs.observe(4, 80, 5.0)
    assert budget.prompt_tokens(4, 2048, 10_000) == 80


@pytest.mark.parametrize("token_s", [0.002, 0.1, 1.0])
def test_in_a_crowd_prompts_get_the_time_of_the_rows_that_they_become(token_s: float) -> None:
    """Whatever a token is believed to cost, it costs no more than a row: the batch grows until all rows run."""
    costs = StepCosts(StepCost(fixed_s=0.1, token_s=0.002, context_s=0.0, logits_s=0.0))
    budget = StepBudget(costs, None, 1)
    for _ in range(20):
        costs.observe(16, 0, 0.132)
        costs.observe(16, 100, 0.132 + 100 * token_s)
    alone, crowd = (budget.prompt_tokens(16, 2048, 10_000, num_upcoming) for num_upcoming in (0, 48))
    assert alone >= 16 * (MAX_STEP_RATIO - 1) and crowd >= 64 * MAX_STEP_RATIO - 16
    assert crowd >= alone + 48 * MAX_STEP_RATIO
    assert StepBudget(costs, 0.133, 1).prompt_tokens(16, 2048, 10_000, 48) == MIN_CHUNK_TOKENS, "a given limit is kept"


def test_sequences_that_yield_lengthen_no_step_of_others() -> None:
    urgent, yielding = (SimpleNamespace(request=SimpleNamespace(is_low_priority=is_low)) for is_low in (False, True))
    waiting = cast(RequestQueue, SimpleNamespace(lines={(True, "a"): [yielding] * 5, (False, "b"): [urgent] * 3}))

    def joining(running: list[SimpleNamespace], under_way: list[SimpleNamespace], num_free_rows: int) -> int:
        return num_upcoming(cast(list[Sequence], running), cast(list[Sequence], under_way), waiting, num_free_rows)

    assert joining([urgent, yielding], [yielding], 64) == 3
    assert joining([yielding, yielding], [yielding], 64) == 5 + 3 + 1
    assert joining([urgent, yielding], [urgent], 2) == 2 + 1


def test_a_prompt_alone_teaches_the_cost_of_its_tokens_without_that_of_the_step() -> None:
    costs = StepCosts(StepCost(fixed_s=0.1, token_s=0.002, context_s=0.0, logits_s=0.0))
    for _ in range(20):
        costs.observe(0, 50, 0.2)
    assert costs.prompt_token_s == pytest.approx(0.002)


def test_prompts_always_go_on() -> None:
    assert budget_of(COST, 0.0001).prompt_tokens(8, 2048, 10_000) == MIN_CHUNK_TOKENS
    assert budget_of(COST, 0.0001).prompt_tokens(8, 3, 10_000) == 3


def test_drafts_leave_half_of_the_tokens_and_of_a_limited_time_to_prompts() -> None:
    budget = budget_of(COST, None)
    assert budget.drafts(15, 113, beside_prompts=False) == 113
    assert budget.drafts(15, 113, beside_prompts=True) == 56
    assert budget.drafts(15, 1, beside_prompts=True) == 0
    limited = budget_of(COST, 0.1351)  # 0.1 more than a step of 15 rows
    assert limited.drafts(15, 1000, beside_prompts=True) == 50
    assert limited.prompt_tokens(15 + 50, 1000, 10_000) == 50
    assert budget_of(COST, 0.001).drafts(15, 1000, beside_prompts=True) == 0


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
    budget = budget_of(cost, None, num_stages)
    parts, left = [], num_tokens
    while left:
        parts.append(min(left, budget.prompt_tokens(0, 2048, left)))
        left -= parts[-1]
    tried = [
        [num_tokens * (part + 1) // count - num_tokens * part // count for part in range(count)]
        for count in range(-(-num_tokens // 2048), max(1, num_tokens // MIN_CHUNK_TOKENS) + 1)
    ]
    best_s = min(through_stages(some, num_stages, cost) for some in tried)
    assert through_stages(parts, num_stages, cost) <= 1.06 * best_s
    assert len(parts) == len(tried[0]) or num_stages > 1, "one stage gains nothing"


def test_behind_many_prompts_parts_are_larger() -> None:
    """Each step reads all weights: they are divided as one."""
    budget = budget_of(COST, None, 2)
    assert budget.prompt_tokens(0, 2048, 128) < budget.prompt_tokens(0, 2048, 2000) / 2


def test_before_any_step_the_measured_cost_of_a_row_decides():
    step_s, row_s = StepCosts(MEASURED).step_and_row_s(4)
    assert (step_s, row_s) == pytest.approx((0.034, 0.001))


def test_a_cost_that_was_measured_too_high_is_not_believed():
    """On a busy machine a step of 16 tokens may take as long as 16 steps."""
    step_s, row_s = StepCosts(StepCost(fixed_s=0.0, token_s=0.026, context_s=0.0, logits_s=0.0)).step_and_row_s(1)
    assert row_s <= step_s / 8


@pytest.mark.parametrize("measured", [None, MEASURED])
@pytest.mark.parametrize("true_row_s", [0.0001, 0.001, 0.01])
def test_steps_that_ran_decide(measured: StepCost | None, true_row_s: float):
    costs, draw = StepCosts(measured), random.Random(3)
    for number in range(40):
        rows = 2 + draw.choice([0, 0, 3, 5])
        slow = 3.0 if number % 9 == 0 else 1.0  # something else ran on the machine
        costs.observe(rows, 0, slow * (0.02 + rows * true_row_s))
    step_s, row_s = costs.step_and_row_s(2)
    assert step_s == pytest.approx(0.02 + 2 * true_row_s, rel=0.15)
    assert row_s == pytest.approx(max(true_row_s, step_s / 128), rel=0.15)


def test_steps_of_other_sizes_are_remembered_beside_the_last_ones():
    """A batch that shrinks and grows again takes what it took."""
    costs = StepCosts(None)
    for rows in [*[100] * 20, *[2] * 40]:
        costs.observe(rows, 0, 0.02 + rows * 0.001)
    assert costs.seconds(100) == pytest.approx(0.12) and costs.seconds(2) == pytest.approx(0.022)
    assert costs.seconds(90) == pytest.approx(0.11)


def test_learnt_costs_fade_slowly_without_other_steps():
    costs = StepCosts(None)
    for rows in [1, 6] * 10:
        costs.observe(rows, 0, rows * 0.01)
    for _ in range(400):
        costs.observe(1, 0, 0.01)
    assert costs.step_and_row_s(1)[1] == pytest.approx(0.01)
    for _ in range(400):
        costs.observe(1, 0, 0.01)
    assert costs.step_and_row_s(1)[1] < 0.002


def test_the_first_steps_tell_how_long_a_step_is():
    costs = StepCosts(MEASURED)
    costs.observe(4, 0, 0.34)
    assert costs.step_and_row_s(4) == pytest.approx((0.34, 0.01))
