"""The number of drafts depends on the cost of rows, on how often drafts were right, and on how many sequences run."""

import itertools
import random

import pytest

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.engine.spec_decode import drafter as module
from oarlock.engine.spec_decode.drafter import Candidate, Drafter, DraftState
from oarlock.workers.config import StepCost

CONFIG = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_max=3, prompt_lookup_min=1)
CHEAP_ROWS = StepCost(fixed_s=0.03, token_s=0.0005, context_s=0.0, logits_s=0.0)
LOOP = [1, 2, 3, 1, 2, 3]


def state_of(rate: float) -> DraftState:
    state = DraftState(CONFIG)
    state.rate = rate
    return state


def one(drafter: Drafter, state: DraftState, length: int = 30, *, room: int = 99, num_seqs: int = 1) -> list[int]:
    return drafter.choose([Candidate(state, (LOOP * length)[:length], room)], num_seqs, 99)[0]


def test_drafts_grow_while_they_are_right_and_end_when_they_are_not():
    drafter, state = Drafter(CONFIG, StepCosts(CHEAP_ROWS)), DraftState(CONFIG)
    first = one(drafter, state)
    assert 3 <= len(first) <= 5
    for _ in range(3):
        state.record(30, 4, 4)
    assert len(one(drafter, state)) == CONFIG.num_speculative_tokens
    lengths = []
    while drafts := one(drafter, state):
        lengths.append(len(drafts))
        state.record(30, len(drafts), 0)
    assert lengths == sorted(lengths, reverse=True) and len(lengths) < 20


def test_a_sequence_is_tried_again_later_and_believed_only_if_a_draft_is_right():
    drafter, state = Drafter(CONFIG, StepCosts(CHEAP_ROWS)), state_of(0.01)
    state.record(100, 1, 0)
    assert one(drafter, state, 227) == []
    drafts = one(drafter, state, 228)
    assert drafts
    state.record(228, len(drafts), 0)
    assert one(drafter, state, 229) == []
    state.record(400, len(drafts), len(drafts))
    assert one(drafter, state, 401)


def test_with_many_sequences_or_dear_rows_there_are_no_drafts():
    sure = state_of(1.0)
    assert one(Drafter(CONFIG, StepCosts(CHEAP_ROWS)), sure) and one(Drafter(CONFIG, StepCosts(None)), sure)
    costs = StepCosts(None)
    dear = Drafter(CONFIG, costs)
    for rows in [1, 2, 5] * 10:
        costs.observe(rows, 0, rows * 0.01)
    assert not dear.may_pay(1) and not one(dear, sure)
    drafter = Drafter(CONFIG, StepCosts(CHEAP_ROWS))
    assert [drafter.may_pay(count) for count in (1, 16, 64, 256)] == [True, True, True, False]
    assert not one(drafter, sure, num_seqs=256)
    assert not one(drafter, state_of(0.6), num_seqs=64) and one(drafter, state_of(0.6), num_seqs=16)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_there_are_no_more_drafts_than_there_is_room_for(room: int):
    assert len(one(Drafter(CONFIG, StepCosts(CHEAP_ROWS)), state_of(1.0), room=room)) == room


def test_the_choice_is_the_best_of_all():
    """Among all numbers of drafts of each sequence: the most tokens that can be expected for the time of the step."""
    draw = random.Random(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MARGIN", 1.0)
        for _ in range(100):
            num_seqs, most = draw.randint(3, 9), draw.randint(1, 4)
            cost = StepCost(draw.uniform(0.3, 1), draw.choice([0.01, 0.02, 0.04]), 0.0, 0.0)
            rates = [draw.random() for _ in range(3)]
            drafter = Drafter(SpeculativeConfig(most, 3, 1), StepCosts(cost))

            def speed(counts, rates=rates, num_seqs=num_seqs, cost=cost):
                right = sum(
                    rate ** (place + 1) for rate, count in zip(rates, counts, strict=True) for place in range(count)
                )
                rows = num_seqs + sum(counts)
                return (num_seqs + right) / cost.seconds(rows, context=0, rows=rows)

            chosen = [
                len(some) for some in drafter.choose([Candidate(state_of(r), LOOP, 99) for r in rates], num_seqs, 99)
            ]
            best = max(map(speed, itertools.product(range(most + 1), repeat=3)))
            assert speed(chosen) == pytest.approx(best, rel=1e-12)


def test_a_limit_for_all_leaves_the_drafts_that_are_worth_most():
    drafter = Drafter(CONFIG, StepCosts(CHEAP_ROWS))
    candidates = [Candidate(state_of(rate), LOOP, 99) for rate in (0.5, 0.9)]
    assert [len(some) for some in drafter.choose(candidates, 2, 3)] == [0, 3]
    assert drafter.choose(candidates, 2, 0) == [[], []]
