"""Requests for vectors in the scheduler: what is refused, what is taken from the cache, how each ends."""

import numpy as np
import pytest

from oarlock.engine.errors import NOT_FINITE, RequestError
from oarlock.engine.scheduler.admission import MAX_POOLED_VALUES, Limits, check
from oarlock.engine.types import KINDS as ALL_KINDS
from oarlock.engine.types import POOLS, FinishReason, PoolingParams, Request, SamplingParams
from oarlock.workers.config import MAX_POOLED_IDS
from tests.unit.engine.engine_fakes import VOCAB, Driver, Faults, make_config, make_info, make_request
from tests.unit.engine.pooling_fakes import expected_vectors, make_pooling_request

KINDS = tuple(kind for kind in ALL_KINDS if kind != "labels")  # those are of encoders
PROMPT = tuple(range(1, 30))
LIMITS = Limits(VOCAB, 64, 8)


@pytest.mark.parametrize(
    ("pooling", "field", "words"),
    [
        (PoolingParams("max"), "pooling", "last, mean, cls, token, logits"),
        (PoolingParams("mean", (1,)), "token_ids", "other kinds must have none"),
        (PoolingParams("logits"), "token_ids", "requires token_ids"),
        (PoolingParams("logits", (VOCAB,)), "token_ids", f"from 0 to {VOCAB - 1}"),
        (PoolingParams("logits", (-1,)), "token_ids", "-1"),
        (PoolingParams("logits", (1,) * (MAX_POOLED_IDS + 1)), "token_ids", f"at most {MAX_POOLED_IDS}"),
    ],
)
def test_invalid_pooling_requests_are_refused_by_name(pooling: PoolingParams, field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check(Request(1, PROMPT, POOLS, pooling=pooling), LIMITS)
    assert caught.value.param == field


def test_a_request_for_vectors_chooses_no_tokens() -> None:
    with pytest.raises(RequestError, match="does not sample"):
        check(Request(1, PROMPT, SamplingParams(max_tokens=1), pooling=PoolingParams("last")), LIMITS)


def test_as_many_vectors_as_fit_are_returned() -> None:
    wide = Limits(VOCAB, 64, MAX_POOLED_VALUES // 20)
    check(make_pooling_request(1, PROMPT[:20], "token"), wide)
    check(make_pooling_request(1, PROMPT, "mean"), wide)
    with pytest.raises(RequestError, match="at most 20 vectors"):
        check(make_pooling_request(1, PROMPT[:21], "token"), wide)


def test_a_prompt_may_fill_the_context() -> None:
    driver = Driver(make_config())
    driver.add(make_pooling_request(1, [1] * 64, "last"))
    with pytest.raises(RequestError, match="at most 64 fit"):
        driver.add(make_pooling_request(2, [1] * 65, "last"))
    driver.run().check_outputs()


@pytest.mark.parametrize("kind", KINDS)
def test_only_prefixes_without_wanted_vectors_come_from_the_cache(kind: str) -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, PROMPT))
    driver.run()
    driver.add(make_pooling_request(2, PROMPT, kind))
    driver.run().check_outputs()
    expected = 28 if kind in ("last", "logits") else 0
    assert driver.ends[2].num_cached_tokens == expected
    assert driver.ends[2].finish_reason is FinishReason.STOP and not driver.ends[2].token_ids


def test_pooling_requests_fill_the_prefix_cache() -> None:
    driver = Driver(make_config())
    driver.add(make_pooling_request(1, PROMPT, "mean"))
    driver.run()
    driver.add(make_request(2, PROMPT))
    driver.run().check_outputs()
    assert driver.ends[2].num_cached_tokens == 28
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_not_finite_end_their_request_alone(kind: str) -> None:
    bad = (1, 63, *PROMPT[:5])
    driver = Driver(make_config(max_num_batched_tokens=64), faults=Faults(poisoned_ids=frozenset({63})))
    driver.add(make_pooling_request(1, PROMPT, kind))
    driver.add(make_pooling_request(2, bad, kind))
    driver.add(make_request(3, PROMPT))
    driver.run()
    assert driver.ends[2].finish_reason is FinishReason.ERROR and driver.ends[2].error == NOT_FINITE
    assert driver.pooled[1] == np.array(expected_vectors(driver.requests[1]), np.float32).tolist()
    assert driver.ends[1].finish_reason is FinishReason.STOP and driver.ends[3].finish_reason is FinishReason.LENGTH
    assert driver.scheduler.stats.num_nonfinite == 1
    driver.add(make_pooling_request(4, bad, "last"))
    driver.run()
    assert driver.ends[4].num_cached_tokens == 0, "blocks of the failed request were found"


def test_a_step_returns_no_more_vectors_of_tokens_than_its_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oarlock.engine.scheduler.scheduler.max_token_vectors", lambda hidden_size, longest: 10)
    driver = Driver(make_config())
    for number in range(1, 5):
        driver.add(make_pooling_request(number, [number, *PROMPT], "token" if number % 2 else "mean"))
    driver.add(make_request(9, PROMPT))
    most = 0
    while driver.scheduler.has_work:
        output = driver.step()
        assert output is not None
        sizes = [item.num_tokens for item in output.scheduled if item.seq.returns_token_vectors]
        assert sum(sizes) <= 10 + sizes.count(1)
        most = max(most, sum(item.num_tokens for item in output.scheduled))
    assert most > 20, "others are held up"
    driver.check_outputs()
    driver.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_ranks_refuse_change_no_vector(kind: str, depth: int) -> None:
    faults = Faults(refuses=lambda step: step.num_tokens > 5 and step.step_id % 2 == 0)
    driver = Driver(make_config(pipeline_depth=depth, max_num_batched_tokens=12), faults=faults)
    for number in range(1, 4):
        driver.add(make_pooling_request(number, [number, *PROMPT], kind))
    driver.add(make_request(9, PROMPT[:7], max_tokens=20))
    driver.run().check_outputs()
    assert driver.executor.num_refused >= 2 and driver.scheduler.stats.finished["stop"] == 3
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_an_abort_frees_everything(kind: str) -> None:
    driver = Driver(make_config(max_num_batched_tokens=8, pipeline_depth=2))
    for number in range(1, 4):
        driver.add(make_pooling_request(number, PROMPT, kind))
    for number in range(1, 4):
        driver.begin()
        driver.abort(number)
        while driver.in_flight:
            driver.finish()
    driver.run().check_outputs()
    assert {end.finish_reason for end in driver.ends.values()} == {FinishReason.ABORT}
    driver.check_idle()


def test_pipeline_stages_pool_like_one() -> None:
    driver = Driver(make_config(stages=3, max_num_batched_tokens=8, max_model_len=48))
    for number, kind in enumerate(KINDS * 2, 1):
        driver.add(make_pooling_request(number, [*PROMPT, number], kind))
        driver.add(make_request(100 + number, PROMPT[:number]))
    driver.run().check_outputs()
    assert driver.num_ahead and driver.scheduler.stats.finished["stop"] >= 2 * len(KINDS)
    driver.check_idle()


def test_the_simulated_model_has_vectors() -> None:
    assert make_info(make_config()).hidden_size == len(expected_vectors(make_pooling_request(1, PROMPT, "last")))
