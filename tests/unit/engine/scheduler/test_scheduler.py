"""The policy, case by case. The fake ranks check every step; `Driver` checks every token."""

import pytest

from oarlock.engine.errors import NOT_FINITE, QueueFullError
from oarlock.engine.scheduler.policy import MAX_PASSED
from oarlock.engine.scheduler.scheduler import PRIORITY_STEP_S
from oarlock.engine.types import FinishReason, Request
from tests.unit.engine.engine_fakes import EOS, Driver, Faults, expected_tokens, make_config, make_request


def step(driver: Driver) -> dict[int, int]:
    """Run a step; return how many tokens each request has in it."""
    assert driver.step() is not None
    return {item.seq.request_id: item.num_tokens for item in driver.items}


def request_with_stop(request_id: int, prompt, at: int, **params) -> Request:
    """A request whose `at`-th token (from 1) is a stop token that did not occur before."""
    free = expected_tokens(make_request(request_id, prompt, max_tokens=at + 5))
    stop = free[at - 1]
    assert stop not in free[: at - 1]
    return make_request(request_id, prompt, max_tokens=at + 5, **{"eos_token_ids": (stop,), **params})


# -- budget


def test_a_long_prompt_is_cut_into_chunks() -> None:
    driver = Driver(make_config(max_num_batched_tokens=10))
    driver.add(make_request(1, range(25), max_tokens=2))
    seen = [step(driver)[1] for _ in range(4)]
    assert seen == [10, 10, 5, 1]
    driver.check_outputs()


def test_decodes_come_before_prefills_and_the_budget_holds() -> None:
    driver = Driver(make_config(max_num_batched_tokens=8))
    for number in (1, 2, 3):
        driver.add(make_request(number, [number], max_tokens=20))
    driver.step()
    driver.add(make_request(4, range(20), max_tokens=2))
    for expected in (5, 5, 5):
        assert step(driver) == {1: 1, 2: 1, 3: 1, 4: expected}
    driver.run().check_outputs()


def test_a_decode_is_not_starved_by_a_more_urgent_prefill() -> None:
    driver = Driver(make_config(max_num_batched_tokens=4))
    driver.add(make_request(1, [5], max_tokens=12))
    driver.step()
    driver.add(make_request(2, range(40), max_tokens=2, priority=-9))
    assert [step(driver) for _ in range(11)] == [{1: 1, 2: 3}] * 11
    driver.run().check_outputs()


def test_never_more_rows_than_tokens() -> None:
    driver = Driver(make_config(max_num_seqs=8, max_num_batched_tokens=3))
    assert driver.scheduler.max_num_seqs == 3
    for number in range(1, 7):
        driver.add(make_request(number, [number, 2], max_tokens=5))
    driver.run().check_outputs()


def test_requests_join_and_leave_at_every_step() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2, 3], max_tokens=3))
    driver.step()
    driver.add(make_request(2, [4, 5], max_tokens=3))
    assert step(driver) == {1: 1, 2: 2}
    assert step(driver) == {1: 1, 2: 1}
    assert 1 in driver.ends and step(driver) == {2: 1}
    driver.check_outputs()
    assert driver.step() is None and not driver.scheduler.has_work


def test_steps_are_numbered_without_gaps() -> None:
    driver = Driver(make_config())
    assert driver.begin() is None
    driver.add(make_request(1, [1], max_tokens=3))
    assert [driver.step().step_id for _ in range(3)] == [1, 2, 3]


def test_the_same_calls_give_the_same_steps() -> None:
    def play() -> list:
        driver = Driver(make_config(max_num_batched_tokens=9), num_blocks=17)
        for number in range(1, 12):
            driver.add(make_request(number, range(number), max_tokens=12, priority=number % 3))
        steps = []
        while driver.scheduler.has_work:
            driver.step()
            steps.append([(item.seq.request_id, item.start, item.num_tokens, item.seq.row) for item in driver.items])
        return steps

    assert play() == play()


# -- ends


def test_a_stop_token_ends_it_and_is_reported() -> None:
    request = request_with_stop(1, [1, 2, 3], at=3)
    driver = Driver(make_config())
    driver.add(request)
    driver.run().check_outputs()
    end = driver.ends[1]
    assert end.finish_reason is FinishReason.STOP
    assert end.stop_token_id == end.token_ids[-1] == request.params.eos_token_ids[0]


def test_a_callers_stop_token_ends_it_too() -> None:
    request = request_with_stop(1, [1, 2, 3], at=2)
    (stop,) = request.params.eos_token_ids
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2, 3], max_tokens=9, stop_token_ids=(stop,)))
    driver.run().check_outputs()
    assert driver.ends[1].finish_reason is FinishReason.STOP and len(driver.tokens[1]) == 2


def test_min_tokens_holds_every_stop_back() -> None:
    request = request_with_stop(1, [1, 2, 3], at=2, min_tokens=5)
    driver = Driver(make_config())
    driver.add(request)
    driver.run().check_outputs()
    assert len(driver.tokens[1]) >= 5
    assert request.params.eos_token_ids[0] not in driver.tokens[1][:5]


def test_max_tokens_and_the_context_end_with_length() -> None:
    driver = Driver(make_config(max_model_len=20))
    driver.add(make_request(1, range(5), max_tokens=3))
    driver.add(make_request(2, range(15), max_tokens=100))
    driver.run().check_outputs()
    assert len(driver.tokens[1]) == 3 and len(driver.tokens[2]) == 5
    assert {end.finish_reason for end in driver.ends.values()} == {FinishReason.LENGTH}


def test_the_pool_bounds_the_context_when_it_is_smaller() -> None:
    driver = Driver(make_config(max_model_len=64), num_blocks=6)
    assert driver.scheduler.limits.max_len == 20
    driver.add(make_request(1, range(8), max_tokens=100))
    driver.run().check_outputs()
    assert len(driver.tokens[1]) == 12


def test_max_tokens_zero_only_scores() -> None:
    driver = Driver(make_config(max_num_batched_tokens=4))
    driver.add(make_request(1, range(10), max_tokens=0, prompt_logprobs=2))
    driver.add(make_request(2, range(3), max_tokens=0))
    driver.run().check_outputs()
    assert driver.tokens == {1: [], 2: []}
    assert len(driver.prompt_logprobs[1]) == 9 and len(driver.prompt_logprobs[1][0].top) == 2
    assert {end.finish_reason for end in driver.ends.values()} == {FinishReason.LENGTH}
    driver.check_idle()


@pytest.mark.parametrize("scores", [None, 0])
def test_a_prefill_only_request_takes_one_step_and_samples_nothing(scores: int | None) -> None:
    driver = Driver(make_config())
    for number in (1, 2):  # the second finds the prompt cached
        driver.add(make_request(number, range(10), max_tokens=0, prompt_logprobs=scores))
        output = driver.begin()
        assert output is not None and [item.num_scored for item in driver.items] == [0 if scores is None else 9]
        assert (driver.executor._steps[0].target_ids >= 0).all()
        (event,) = driver.finish(output)
        assert event.finish_reason is FinishReason.LENGTH and event.token_ids == ()
        assert not driver.scheduler.has_work
    assert driver.scheduler.stats.generation_tokens == 0
    driver.check_outputs()


# -- logprobs


def test_prompt_logprobs_leave_with_the_step_that_computed_them() -> None:
    driver = Driver(make_config(max_num_batched_tokens=7))
    driver.add(make_request(1, range(20), max_tokens=3, prompt_logprobs=0, logprobs=2))
    driver.run().check_outputs()
    assert [len(event.prompt_logprobs) for event in driver.events] == [7, 7, 5, 0, 0]
    assert [len(event.token_ids) for event in driver.events] == [0, 0, 1, 1, 1]
    assert driver.prompt_logprobs[1][0].top == ()
    generated = [entry for event in driver.events for entry in event.logprobs]
    assert [len(entry.top) for entry in generated] == [2, 2, 2]


def test_scoring_takes_no_more_steps_than_computing() -> None:
    steps = []
    for scores in (None, 1):
        driver = Driver(make_config(max_num_batched_tokens=320, max_model_len=1024), num_blocks=300)
        driver.add(make_request(1, [5] * 900, max_tokens=1, prompt_logprobs=scores))
        driver.run().check_outputs()
        steps.append(driver.executor.num_steps)
    assert steps == [3, 3]


def test_a_scored_prompt_does_not_skip_cached_tokens() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, range(20), max_tokens=1))
    driver.run()
    driver.add(make_request(2, range(20), max_tokens=1, prompt_logprobs=0))
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 0


# -- preemption


def oversubscribed(num_blocks: int, **params) -> Driver:
    driver = Driver(make_config(max_num_batched_tokens=16), num_blocks=num_blocks)
    for number in range(1, 9):
        driver.add(make_request(number, [number, 2, 3], max_tokens=30, **params))
    return driver


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 1, "logprobs": 1}])
def test_preemption_recomputes_the_same_tokens(params) -> None:
    driver = oversubscribed(17, **params).run()
    driver.check_outputs()
    driver.check_idle()
    assert driver.scheduler.stats.num_preemptions > 0


def test_preemptions_of_one_request_are_bounded() -> None:
    worst = 0
    driver = oversubscribed(13)
    while driver.scheduler.has_work:
        driver.step()
        worst = max(worst, *(item.seq.num_preemptions for item in driver.items))
    driver.check_outputs()
    assert 0 < worst <= 3  # the pool has twelve blocks: 2 ** 4 would be more


def test_a_preempted_sequence_is_passed_by_a_few_only() -> None:
    """It needs a larger reserve than the pool has while others run; sequences behind it would keep the pool busy."""
    driver = Driver(make_config(max_num_seqs=3))
    driver.add(make_request(1, [1, 2], max_tokens=6))
    driver.step()
    driver.add(make_request(2, [3, 4], max_tokens=6))
    driver.scheduler.requests.by_id[2].num_preemptions = 6
    for number in range(3, 30):
        driver.add(make_request(number, [number, 5], max_tokens=9 if number % 2 else 4))
    entered = []
    while 2 not in entered:
        entered += [seq.request_id for seq in driver.step().new_rows]
    assert entered[: MAX_PASSED + 1] == [*range(3, 3 + MAX_PASSED), 2]
    driver.run().check_outputs()


def test_an_admission_leaves_blocks_for_running_sequences_to_grow() -> None:
    driver = Driver(make_config(), num_blocks=5)
    driver.add(make_request(1, range(4), max_tokens=4))  # grows to a second block in its second step
    driver.add(make_request(2, range(10, 22), max_tokens=1))  # three blocks: exactly what is left
    assert step(driver) == {1: 4}
    driver.run().check_outputs()
    assert driver.scheduler.stats.num_preemptions == 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_preempted_while_it_is_scored_is_scored_once(caching: bool) -> None:
    driver = Driver(make_config(max_num_batched_tokens=2, enable_prefix_caching=caching), num_blocks=9)
    driver.add(make_request(1, range(3), max_tokens=24))
    driver.step()
    driver.add(make_request(2, range(10, 30), max_tokens=2, prompt_logprobs=0))
    while not driver.scheduler.stats.num_preemptions:
        driver.step()
    assert 0 < len(driver.prompt_logprobs[2]) < 19, "it was preempted too late for this test, or too early"
    driver.run().check_outputs()
    assert len(driver.prompt_logprobs[2]) == 19


def test_the_youngest_is_preempted() -> None:
    driver = Driver(make_config(), num_blocks=5)
    driver.add(make_request(1, range(4), max_tokens=12))
    driver.add(make_request(2, range(10, 14), max_tokens=12))
    while not driver.scheduler.stats.num_preemptions:
        driver.step()
    assert [item.seq.request_id for item in driver.items] == [1]
    driver.run().check_outputs()
    assert list(driver.ends) == [1, 2]


def test_the_less_urgent_is_preempted_even_if_older() -> None:
    driver = Driver(make_config(), num_blocks=5)
    driver.add(make_request(1, range(4), max_tokens=12, priority=1))
    driver.step()
    driver.add(make_request(2, range(10, 14), max_tokens=12, priority=0))
    driver.run().check_outputs()
    assert list(driver.ends) == [2, 1]


# -- order


def test_first_come_first_served_and_priority() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    for number, priority in ((1, 0), (2, 1), (3, -1), (4, 0)):
        driver.add(make_request(number, [1], max_tokens=1, priority=priority))
    driver.run()
    assert list(driver.ends) == [3, 1, 4, 2]


def test_waiting_time_outweighs_priority_in_the_end() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    driver.add(make_request(1, [1], max_tokens=1, priority=2))
    driver.now = 2 * PRIORITY_STEP_S + 1
    driver.add(make_request(2, [1], max_tokens=1, priority=0))
    driver.run()
    assert list(driver.ends) == [1, 2]


# -- aborts


def test_an_abort_while_a_step_is_in_flight() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2, 3], max_tokens=9))
    driver.add(make_request(2, [4, 5, 6], max_tokens=9))
    driver.step()
    output = driver.begin()
    driver.abort(1)
    assert [event.request_id for event in driver.finish(output)] == [2]
    assert driver.ends[1].finish_reason is FinishReason.ABORT
    driver.run().check_outputs()
    driver.check_idle()


def test_an_id_may_be_used_again_at_once() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1, 2, 3], max_tokens=9))
    output = driver.begin()
    driver.abort(1)
    driver.ends.clear()
    driver.add(make_request(1, [9, 9], max_tokens=2))
    assert driver.finish(output) == []
    driver.run().check_outputs()


def test_an_abort_while_waiting_and_of_an_unknown_id() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    for number in (1, 2, 3):
        driver.add(make_request(number, [1], max_tokens=3))
    driver.step()
    driver.abort(2)
    assert driver.scheduler.abort(77, driver.now) is None
    driver.run().check_outputs()
    assert list(driver.ends) == [2, 1, 3]


# -- the queue


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    driver = Driver(make_config(max_num_seqs=1, max_waiting_requests=2))
    for number in (1, 2, 3):  # one may run at once, two may wait
        driver.add(make_request(number, [1], max_tokens=5))
    with pytest.raises(QueueFullError, match="at most 2") as refused:
        driver.add(make_request(4, [1]))
    assert refused.value.retry_after_s == 1.0
    driver.run().check_outputs()
    assert driver.scheduler.stats.num_rejected == 1


def test_the_time_to_retry_follows_the_drain_rate() -> None:
    driver = Driver(make_config(max_num_seqs=1, max_waiting_requests=10, max_model_len=1000), num_blocks=300)
    for number in range(1, 12):
        driver.add(make_request(number, [1], max_tokens=1))
    for _ in range(5):
        driver.now += 3.99  # a request every four seconds
        driver.step()
    for number in range(12, 17):
        driver.add(make_request(number, [1], max_tokens=1))
    with pytest.raises(QueueFullError) as refused:
        driver.add(make_request(99, [1]))
    assert 14 < refused.value.retry_after_s < 22  # eleven wait: half of them leave in about 18 s


def test_waiting_prompt_tokens_are_bounded_but_an_empty_queue_takes_any_prompt() -> None:
    driver = Driver(make_config(max_num_seqs=1, max_waiting_tokens=10))
    driver.add(make_request(1, range(30)))
    with pytest.raises(QueueFullError, match="30 prompt tokens"):
        driver.add(make_request(2, [1]))
    driver.step()
    driver.add(make_request(2, range(8)))
    with pytest.raises(QueueFullError):
        driver.add(make_request(3, range(3)))
    driver.run().check_outputs()


# -- faults


def test_logits_that_are_not_finite_fail_one_request_and_stay_out_of_the_cache() -> None:
    driver = Driver(make_config(max_num_batched_tokens=16), faults=Faults(poisoned_seeds=(2,)))
    driver.add(make_request(1, range(10), max_tokens=6))
    driver.add(make_request(2, range(20, 30), max_tokens=6))
    driver.run().check_outputs()
    assert driver.ends[2].finish_reason is FinishReason.ERROR and driver.ends[2].error == NOT_FINITE
    assert driver.ends[1].finish_reason is FinishReason.LENGTH
    assert driver.scheduler.stats.num_nonfinite == driver.scheduler.stats.num_errors == 1
    driver.add(make_request(3, range(20, 30), max_tokens=6))
    driver.run().check_outputs()
    assert driver.ends[3].num_cached_tokens == 0
    driver.check_idle()


@pytest.mark.parametrize("method", ["allocate", "all_entries", "cache_blocks"])
def test_an_exception_with_one_sequence_fails_that_one(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    driver = Driver(make_config())
    real = getattr(driver.scheduler.memory, method)

    def broken(seq, *rest):
        if seq.request_id == 2:
            raise RuntimeError("injected")
        return real(seq, *rest)

    monkeypatch.setattr(driver.scheduler.memory, method, broken)
    for number in (1, 2, 3):
        driver.add(make_request(number, range(number, number + 9), max_tokens=8, eos_token_ids=(EOS,)))
    driver.run().check_outputs()
    assert [number for number, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR] == [2]
    driver.check_idle()


def test_an_exception_while_a_decode_gets_blocks_fails_that_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(make_config())
    for number in (1, 2):
        driver.add(make_request(number, range(number, number + 3), max_tokens=8))
    driver.step()
    real = driver.scheduler.memory.grow_by_one

    def broken(seq, entries):
        if seq.request_id == 2:
            raise RuntimeError("injected")
        return real(seq, entries)

    monkeypatch.setattr(driver.scheduler.memory, "grow_by_one", broken)
    driver.run().check_outputs()
    assert driver.ends[2].finish_reason is FinishReason.ERROR
    assert driver.ends[1].finish_reason is FinishReason.LENGTH


def test_failing_all_leaves_nothing_behind() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for number in range(1, 6):
        driver.add(make_request(number, [1, 2], max_tokens=5))
    driver.step()
    driver.see(driver.scheduler.fail_all("gone", driver.now))
    assert driver.ends.keys() == {1, 2, 3, 4, 5}
    assert all(end.error == "gone" for end in driver.ends.values())
    driver.check_idle()
