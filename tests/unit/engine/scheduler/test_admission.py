"""Requests at fault are refused before they are queued, with the name of the field."""

import pytest

from oarlock.engine.errors import ContextLengthError, RequestError
from tests.unit.engine.engine_fakes import Driver, make_config, make_request


@pytest.mark.parametrize(
    "prompt, params, param, message",
    [
        ([], {}, "prompt", "empty"),
        ([1, 64], {}, "prompt", "0 to 63"),
        ([1, -1], {}, "prompt", "-1"),
        ([1], {"max_tokens": -1}, "max_tokens", "between 0"),
        ([1], {"stop_token_ids": (64,)}, "stop_token_ids", "63"),
        ([1], {"eos_token_ids": (-5,)}, "eos_token_ids", "-5"),
        ([1], {"logprobs": 21}, "logprobs", "20"),
        ([1], {"prompt_logprobs": -1}, "prompt_logprobs", "between"),
        ([1], {"seed": 2**63}, "seed", "between"),
        ([1], {"priority": 11}, "priority", "between -10 and 10"),
        ([1], {"priority": -(2**31)}, "priority", "between -10 and 10"),
        ([1], {"top_k": 2**31}, "top_k", "between"),
        ([1], {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "max_tokens"),
        ([1], {"min_tokens": 1, "stop_token_ids": tuple(range(64))}, "min_tokens", "every token"),
        ([1], {"presence_penalty": 2.1}, "presence_penalty", "between -2 and 2"),
        ([1], {"frequency_penalty": float("nan")}, "frequency_penalty", "between"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty", "above 0"),
        ([1], {"repetition_penalty": float("inf")}, "repetition_penalty", "finite"),
        ([1], {"logit_bias": ((64, 1.0),)}, "logit_bias", "id 64, but ids go from 0 to 63"),
        ([1], {"logit_bias": ((3, 100.5),)}, "logit_bias", "between -100 and 100"),
        ([1], {"logit_bias": ((3, float("nan")),)}, "logit_bias", "is nan"),
        ([1], {"logit_bias": ((3, 1.0),) * 1025}, "logit_bias", "at most 1024"),
        ([1], {"logit_bias": tuple((token, -100.0) for token in range(64))}, "logit_bias", "every token"),
        ([1], {"allowed_token_ids": (3, -1)}, "allowed_token_ids", "-1"),
        ([1], {"allowed_token_ids": ()}, "allowed_token_ids", "no token"),
        ([1], {"allowed_token_ids": (3,), "logit_bias": ((3, -100.0),)}, "allowed_token_ids", "no token"),
        ([1], {"allowed_token_ids": (3,), "min_tokens": 1, "eos_token_ids": (3,)}, "allowed_token_ids", "no token"),
        ([1], {"bad_words": ((1, 64),)}, "bad_words", "64"),
        ([1], {"bad_words": ((1,), ())}, "bad_words", "empty"),
        ([1], {"bad_words": ((1,),) * 1025}, "bad_words", "at most 1024"),
        ([1], {"bad_words": ((1,) * 257,)}, "bad_words", "at most 256"),
    ],
)
def test_requests_at_fault_are_refused_by_field(prompt, params, param, message) -> None:
    driver = Driver(make_config())
    with pytest.raises(RequestError, match=message) as refused:
        driver.add(make_request(1, prompt, **params))
    assert refused.value.param == param
    assert not driver.scheduler.has_work and driver.scheduler.stats.num_rejected == 1


def test_too_long_a_prompt_names_the_limit() -> None:
    driver = Driver(make_config(max_model_len=20))
    with pytest.raises(ContextLengthError, match="at most 19") as refused:
        driver.add(make_request(1, [1] * 20))
    assert refused.value.code == "context_length_exceeded"
    driver.add(make_request(2, [1] * 20, max_tokens=0))
    driver.add(make_request(3, [1] * 19, max_tokens=5))
    driver.run().check_outputs()


def test_an_id_in_use_is_refused() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, [1]))
    with pytest.raises(RequestError, match="in use"):
        driver.scheduler.add(make_request(1, [2]), 0.0)


def test_too_large_prompt_logprobs_are_refused() -> None:
    driver = Driver(make_config(max_model_len=200_000), num_blocks=50_001)
    with pytest.raises(RequestError, match="entries"):
        driver.add(make_request(1, [1] * 150_000, prompt_logprobs=20))
