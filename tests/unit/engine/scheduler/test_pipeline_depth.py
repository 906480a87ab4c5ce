"""Steps that are scheduled while the one before runs give every request the same answer as without that.

Random requests of every kind run at both depths on fake ranks whose tokens depend on the whole history, read back
through the block tables: arrivals and aborts at any step, small pools, chunked prompts, windows, shared beginnings.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from oarlock.engine.errors import INTERNAL, NO_TOKEN, NOT_FINITE
from oarlock.engine.types import FinishReason, Grammar, Request
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import EOS, Driver, Faults, make_config, make_request

D = TypeVar("D", bound=Driver)

POISONED_FROM = 14  # position from which on logits of poisoned seeds are not finite
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 2},
    "scored": {"prompt_logprobs": 1},
    "only scored": {"prompt_logprobs": 0, "max_tokens": 0},
    "one token": {"max_tokens": 1},
    "min_tokens": {"min_tokens": 5, "max_tokens": 12},
    "penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.5},
    "bad words": {"bad_words": ((3,), (5, 9), *(((token, other)) for token in range(20) for other in range(0, 60, 2)))},
    "short bad words": {"bad_words": ((3,), (8,))},
    "bias": {"logit_bias": ((4, -100.0), (6, 1.5))},
    "bias and min_tokens": {
        "logit_bias": ((4, -100.0),),
        "min_tokens": 4,
        "max_tokens": 12,
        "stop_token_ids": tuple(range(0, 64, 2)),
    },
    "allowed": {"allowed_token_ids": tuple(range(0, 64, 3))},
    "grammar": {"grammar": Grammar("lark", "9"), "max_tokens": 20},
    "grammar whose end shows at once": {"grammar": Grammar("lark", "8"), "max_tokens": 20, "logprobs": 1},
    "grammar as long as it may be": {"grammar": Grammar("lark", "7"), "max_tokens": 7, "eos_token_ids": ()},
    "grammar that breaks for its mask": {"grammar": Grammar("regex", "5"), "max_tokens": 20},
    "grammar that breaks for a token": {"grammar": Grammar("choice", "5"), "max_tokens": 20},
    "grammar, forced and bad words": {
        "grammar": Grammar("lark", "13"),
        "bad_words": tuple((token, token + 1) for token in range(63)),
        "logit_bias": tuple((token, 100.0) for token in range(40)),
        "min_tokens": 4,
        "max_tokens": 20,
    },
    "grammar that runs dry": {"grammar": Grammar("lark", "9"), "allowed_token_ids": (3, 6, 4), "max_tokens": 20},
    "poisoned": {"seed": 666, "max_tokens": 20, "eos_token_ids": ()},
    "poisoned grammar": {"seed": 666, "grammar": Grammar("lark", "20"), "max_tokens": 20, "eos_token_ids": ()},
}


@dataclass
class Scene:
    """Arrivals and aborts by turn of the loop; half a turn is after a step was begun and before one is finished."""

    config: dict[str, Any]
    num_blocks: int
    window: int | None
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, float]  # request id -> turn
    groups: tuple[GroupInfo, ...] = ()

    def arguments(self, depth: int | None, stages: int = 1) -> tuple[Any, ...]:
        """Arguments of a `Driver`, the groups only if there are any."""
        faults = Faults(poisoned_seeds=(666,), poisoned_from=POISONED_FROM)
        config = make_config(**self.config, pipeline_depth=depth, stages=stages)
        arguments = config, self.num_blocks, faults, self.window
        return (*arguments, self.groups) if self.groups else arguments


def make_scene(seed: int) -> Scene:
    draw = random.Random(seed)
    arrivals, aborts = [], {}
    begin = [draw.randrange(64) for _ in range(12)]
    for number in range(1, 30):
        prompt = begin[: draw.choice([0, 4, 12])] + [draw.randrange(64) for _ in range(draw.randint(1, 9))]
        params = {"max_tokens": draw.randint(1, 25), "eos_token_ids": (EOS,), "stop_token_ids": (draw.randrange(64),)}
        params |= KINDS[draw.choice(list(KINDS) if draw.random() < 0.5 else ["plain", "logprobs", "min_tokens"])]
        if number > 1 and draw.random() < 0.2:  # another choice of the request before
            prompt = list(arrivals[-1][1].prompt_token_ids)
        arrivals.append((draw.randrange(60), make_request(number, prompt, **params)))
        if draw.random() < 0.15:
            aborts[number] = arrivals[-1][0] + draw.randrange(30) / 2
    config = {
        "max_num_seqs": draw.choice([1, 3, 6]),
        "max_num_batched_tokens": draw.choice([6, 16, 40]),
        "block_size": draw.choice([1, 3, 4]),
        "max_model_len": 48,
        "max_waiting_requests": 100,
        "enable_prefix_caching": draw.random() < 0.7,
    }
    num_blocks = draw.choice([20, 40, 100]) * 4 // config["block_size"]
    return Scene(
        config, max(num_blocks // draw.choice([1, 1, 2]), 16), draw.choice([None, None, 5, 30]), arrivals, aborts
    )


def run_scene(scene: Scene, depth: int | None, make: Callable[..., D] = Driver, *, stages: int = 1) -> D:
    driver = make(*scene.arguments(depth, stages))
    coming, turn = sorted(scene.arrivals, key=lambda pair: pair[0]), 0
    while coming or driver.scheduler.has_work or driver.in_flight:
        while coming and coming[0][0] <= turn:
            driver.add(coming.pop(0)[1])
        abort(driver, scene, turn)
        begun = driver.begin() if driver.may_begin else None
        abort(driver, scene, turn + 0.5)
        if driver.in_flight and not (begun is not None and driver.may_begin):
            driver.finish()
        turn += 1
        assert turn < 5000, "no end"
    driver.check_idle()
    return driver


def run_withdrawing(scene: Scene, make: Callable[..., D]) -> D:
    """One request after the other; up to two sequences leave each step before it is sent."""
    driver = make(*scene.arguments(depth=1))
    for turn, (_, request) in enumerate(scene.arrivals):
        driver.add(request)
        if driver.begin(num_withdrawn=turn % 3) is not None:
            driver.finish()
    while driver.scheduler.has_work:
        driver.step()
    driver.check_idle()
    return driver


def abort(driver: Driver, scene: Scene, turn: float) -> None:
    for number, when in scene.aborts.items():
        if when == turn and number in driver.requests and number not in driver.ends:
            driver.abort(number)


def answer(driver: Driver, number: int) -> tuple:
    """Everything that the caller of a request sees."""
    events = [event for event in driver.events if event.request_id == number]
    end = driver.ends[number]
    logprobs = [one for event in events for one in event.logprobs]
    scored = [tuple(one) for event in events if event.prompt_logprobs for one in event.prompt_logprobs.rows()]
    stop = (end.finish_reason, end.stop_token_id, end.error, end.error_param)
    # How a prompt is cut into chunks, which decides where scores are sent, depends on the steps.
    seen = [(event.token_ids, event.finish_reason) for event in events if event.token_ids or event.finish_reason]
    return driver.tokens[number], logprobs, scored, stop, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [(*range(7), 28, 31), pytest.param((*range(7, 28), *range(32, 60)), marks=pytest.mark.soak)],  # 31 and 53 preempt
    ids=["few", "many"],
)
def test_every_answer_is_that_of_depth_1(seeds: tuple[int, ...]) -> None:
    preemptions, ahead, steps, late_masks, reasons = 0, 0, 0, 0, set()
    for seed in seeds:
        scene = make_scene(seed)
        one, two = run_scene(scene, 1), run_scene(scene, 2)
        preemptions += two.scheduler.stats.num_preemptions
        ahead, steps = ahead + two.num_ahead, steps + two.executor.num_steps
        assert one.num_late_masks == 0
        late_masks += two.num_late_masks
        for number, request in one.requests.items():
            expected, got = answer(one, number), answer(two, number)
            reasons.add((got[3][0], got[3][2]))
            if FinishReason.ABORT in (expected[3][0], got[3][0]):
                assert number in scene.aborts
                shorter, longer = sorted((expected[0], got[0]), key=len)
                assert longer[: len(shorter)] == shorter
            else:
                assert got == expected, f"seed {seed}, request {number}: {request.params}"
    assert preemptions > 3 and ahead > steps / 5
    assert {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT} < {reason for reason, _ in reasons}
    assert {error for _, error in reasons if error} == {NOT_FINITE, NO_TOKEN, INTERNAL}
    assert late_masks > 40


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_by_length_costs_no_row_and_one_by_a_stop_token_at_most_one(depth: int) -> None:
    driver = Driver(make_config(pipeline_depth=depth))
    driver.add(make_request(1, [1, 2, 3], max_tokens=8))
    driver.run()
    assert driver.ends[1].finish_reason is FinishReason.LENGTH
    assert driver.executor.num_steps == 8 and driver.num_ahead == (depth - 1) * 7
    stop = driver.tokens[1][4]
    again = Driver(make_config(pipeline_depth=depth))
    again.add(make_request(1, [1, 2, 3], max_tokens=8, stop_token_ids=(stop,)))
    again.run()
    length = driver.tokens[1].index(stop) + 1
    assert again.tokens[1] == driver.tokens[1][:length]
    assert again.executor.num_steps == length + (depth - 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_that_shows_with_the_next_mask_costs_one_row(depth: int) -> None:
    for length, found_late in ((8, 0), (9, 1)):
        driver = Driver(make_config(pipeline_depth=depth))
        driver.add(make_request(1, [1, 2, 3], max_tokens=20, logprobs=0, grammar=Grammar("lark", str(length))))
        driver.run().check_outputs()
        assert len(driver.tokens[1]) == length and driver.ends[1].finish_reason is FinishReason.STOP
        assert [len(event.token_ids) for event in driver.events] == [1] * length + [0] * found_late
        assert driver.executor.num_steps == length + max(found_late, depth - 1)
        driver.check_idle()


def test_no_step_waits_for_the_tokens_of_penalties() -> None:
    driver = Driver(make_config(pipeline_depth=2))
    driver.add(make_request(1, [1, 2, 3], max_tokens=6, presence_penalty=1.0))
    driver.add(make_request(2, [1, 2, 3], max_tokens=10))
    driver.run()
    assert driver.executor.num_steps == 10
    assert driver.num_ahead == 9
    driver.check_outputs()


def test_a_request_fails_to_be_built_while_an_answer_is_to_come() -> None:
    """The other one, which would share what it computes, is preempted, and the answer to come is not for it."""
    driver = Driver(make_config(pipeline_depth=2, block_size=2, max_num_batched_tokens=8), num_blocks=60)
    driver.add(make_request(1, range(30), max_tokens=4))
    driver.add(make_request(2, range(30), max_tokens=4))
    for _ in range(3):
        driver.begin()
        if not driver.may_begin:
            driver.finish()
    running = {item.seq.request_id for output in driver.in_flight for item in output.items()}
    assert running
    driver.begin(num_withdrawn=1)
    driver.run()
    assert [number for number, end in driver.ends.items() if end.finish_reason is FinishReason.ERROR] == [1]
    driver.check_outputs()
    driver.check_idle()
