"""Bans, penalties, masks and grammars through scheduler and input batch: every token against its definition."""

import pytest

from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.errors import INTERNAL, NO_TOKEN, NOT_FINITE
from oarlock.engine.types import FinishReason, Grammar
from tests.unit.engine.engine_fakes import (
    Driver,
    FakeExecutor,
    Faults,
    expected_tokens,
    make_config,
    make_info,
    make_request,
)
from tests.unit.engine.sampling_fakes import VOCAB, CountingGrammar, FakeHistories, choices_of

CHOICES = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((1, 5.0), (2, -100.0), (3, 0.0)), "bad_words": ((9,), (4, 5), (5, 4, 4))},
    {"logit_bias": ((1, 100.0), (2, 100.0), (40, 3.0)), "bad_words": ((1,),)},
    {"allowed_token_ids": tuple(range(5, 30)), "bad_words": tuple((a, a) for a in range(64))},
    {"grammar": Grammar("lark", "17"), "repetition_penalty": 0.7, "allowed_token_ids": tuple(range(3, 50))},
    {"min_tokens": 20, "eos_token_ids": tuple(range(20)), "presence_penalty": 1.0},
]


@pytest.mark.parametrize("params", CHOICES, ids=lambda params: ",".join(params))
def test_choices_are_the_same_alone_in_a_batch_and_after_preemption(params) -> None:
    driver = Driver(make_config(max_num_batched_tokens=16), num_blocks=17)
    for number in range(1, 9):
        driver.add(make_request(number, [number, 2, 3], max_tokens=30, **params))
    driver.add(make_request(9, [1, 2, 3], max_tokens=5))
    driver.run().check_outputs()
    driver.check_idle()
    assert driver.scheduler.stats.num_preemptions > 0
    assert {end.finish_reason for end in driver.ends.values()} <= {FinishReason.LENGTH, FinishReason.STOP}


def test_bad_words_match_the_output_alone() -> None:
    driver = Driver(make_config())
    first = expected_tokens(make_request(1, [1, 2], max_tokens=1))[0]
    driver.add(make_request(1, [1, 2], max_tokens=1, bad_words=((2, first),)))
    driver.run().check_outputs()
    assert driver.tokens[1] == [first], "its beginning is in the prompt: nothing is completed"


def test_a_complete_grammar_ends_the_sequence() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2], max_tokens=5, grammar=Grammar("lark", "3")))
    driver.add(make_request(2, [1, 2], max_tokens=3, grammar=Grammar("lark", "3")))
    driver.add(make_request(3, [1, 2], max_tokens=2, grammar=Grammar("lark", "3")))
    driver.run().check_outputs()
    assert [len(driver.tokens[number]) for number in (1, 2, 3)] == [3, 3, 2]
    reasons = [driver.ends[number].finish_reason for number in (1, 2, 3)]
    assert reasons == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert driver.ends[1].stop_token_id is None


def test_a_request_without_a_possible_token_fails_alone_and_names_the_field() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2], max_tokens=5, allowed_token_ids=(4,), bad_words=((4, 4),)))
    driver.add(make_request(2, [1, 2], max_tokens=5))
    driver.run().check_outputs()
    assert driver.tokens[1] == [4] and driver.ends[1].error == NO_TOKEN
    assert driver.ends[1].error_param == "allowed_token_ids", "the caller can correct it"
    assert driver.ends[2].finish_reason is FinishReason.LENGTH
    assert driver.scheduler.stats.num_nonfinite == 0, "the model's numbers were fine"
    assert driver.scheduler.stats.num_errors == 0, "and so was the engine"


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((1, 5.0),)},
        {"bad_words": ((9,),)},
        {"allowed_token_ids": (3, 4)},
        {"grammar": Grammar("lark", "9")},
        {"grammar": Grammar("lark", "9"), "allowed_token_ids": (1,)},  # which bans every token, too
        {"logit_bias": ((1, 5.0),), "prompt_logprobs": 1},
    ],
    ids=str,
)
def test_a_broken_model_is_not_the_fault_of_a_request_with_constraints(params) -> None:
    driver = Driver(make_config(), faults=Faults(poisoned_seeds=(1,)))
    driver.add(make_request(1, range(20), max_tokens=5, **params))
    driver.run()
    assert driver.ends[1].error == NOT_FINITE and driver.ends[1].error_param is None
    assert driver.scheduler.stats.num_nonfinite == driver.scheduler.stats.num_errors == 1
    driver.add(make_request(2, range(20), max_tokens=5))
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 0, "its KV may not be finite"


@pytest.mark.parametrize("method", ["accept", "fill_masks"])
def test_a_grammar_that_raises_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def broken(*_):
        raise RuntimeError("no such rule")

    config = make_config()
    executor = FakeExecutor(config, make_info(config))
    engine_core = EngineCore(config, executor, lambda: 0.0)
    state = CountingGrammar(Grammar("lark", "9"))
    monkeypatch.setattr(state, method, broken, raising=True)
    engine_core.scheduler.add(make_request(1, [1, 2], grammar=Grammar("lark", "9")), 0.0, state)
    engine_core.scheduler.add(make_request(2, [1, 2]), 0.0)
    ends = {}
    while engine_core.scheduler.has_work:
        begun = engine_core.begin() is not None
        events = [*engine_core.take_events(), *(engine_core.finish() if begun else [])]
        ends |= {event.request_id: event for event in events if event.finish_reason}
    assert ends[1].error == INTERNAL and ends[2].finish_reason is FinishReason.LENGTH


def test_a_mask_that_fails_does_not_affect_the_step_or_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_config())
    grammar = Grammar("lark", "9")
    for number in (1, 2, 3):
        driver.add(make_request(number, [1, number], max_tokens=4, grammar=grammar))
    output = driver.scheduler.schedule(0.0)
    assert output is not None
    broken = output.items()[1].seq
    monkeypatch.setattr(broken.grammar_matcher, "fill_masks", lambda drafts, into: 1 / 0)
    step, masks = driver.input_batch.build(output)
    assert masks is not None and step.mask_rows.tolist() == [0, 1, 2]
    step.mask_bits = masks.compute()
    assert list(masks.failed) == [broken]
    banned, _ = choices_of(step, FakeHistories())
    bound = set(range(VOCAB)) - CountingGrammar.next_ids(0)
    assert banned == [bound, set(), bound]


def test_masks_that_need_no_grammar_are_there_at_once() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2], allowed_token_ids=(3, 4)))
    output = driver.scheduler.schedule(0.0)
    assert output is not None
    step, masks = driver.input_batch.build(output)
    assert masks is None and choices_of(step, FakeHistories())[0] == [set(range(VOCAB)) - {3, 4}]


def test_a_grammar_without_its_matcher_cannot_be_added() -> None:
    driver = Driver(make_config())
    with pytest.raises(AssertionError, match="come together"):
        driver.scheduler.add(make_request(1, [1], grammar=Grammar("lark", "3")), 0.0)
