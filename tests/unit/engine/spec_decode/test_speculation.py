"""Drafts, right or wrong, change no request's answer, and steps stay within all limits.

The random scenes of `test_pipeline_depth.py` run again with drafts that are right, wrong, or right at first, at both
pipeline depths, and once with the real drafter. The fake ranks read the whole history back through the block tables.
"""

import random

import pytest

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.scheduler.sequence import SchedulerOutput
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.engine.spec_decode.drafter import Candidate, Drafter
from oarlock.engine.types import FinishReason, Grammar, Request
from tests.unit.engine.engine_fakes import EOS, Driver, Faults, make_config, make_request
from tests.unit.engine.sampling_fakes import VOCAB
from tests.unit.engine.scheduler.test_pipeline_depth import KINDS, Scene, answer, make_scene, run_scene

CONFIG = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1)


class Guesses(Drafter):
    """Drafts the text that a request got without drafts, with mistakes."""

    def __init__(self, texts: list[list[int]], seed: int = 0, mistakes: float = 0.3) -> None:
        super().__init__(CONFIG, StepCosts(None))
        self._texts = texts  # whole: prompt and answer
        self._seed = seed
        self._mistakes = mistakes

    def may_pay(self, num_seqs: int) -> bool:
        return True

    def choose(self, candidates, num_seqs: int, most: int) -> list[list[int]]:
        drafts = []
        for one in candidates:
            drafts.append(self._guess(one)[: max(0, most)])
            most -= len(drafts[-1])
        return drafts

    def _guess(self, one: Candidate) -> list[int]:
        known = len(one.token_ids)
        draw = random.Random(hash((self._seed, known, one.token_ids[-1])))
        texts = [text for text in self._texts if text[:known] == one.token_ids]
        guess = (draw.choice(texts) if texts else [])[known : known + draw.randint(0, min(one.room, 5))]
        return [draw.randrange(VOCAB) if draw.random() < self._mistakes else token for token in guess]


def with_drafter(scene: Scene, depth: int, drafter: Drafter) -> Driver:
    return run_scene(scene, depth, lambda *arguments: use(Driver(*arguments), drafter))


def use(driver: Driver, drafter: Drafter) -> Driver:
    driver.scheduler.drafter = drafter
    return driver


def seen(driver: Driver, number: int) -> tuple:
    """Answer that the caller of a request sees, except how its tokens are divided among events."""
    return answer(driver, number)[:4]


def texts_of(driver: Driver) -> list[list[int]]:
    return [[*request.prompt_token_ids, *driver.tokens[number]] for number, request in driver.requests.items()]


def compare(scene: Scene, expected: Driver, got: Driver) -> None:
    for number, request in expected.requests.items():
        one, other = seen(expected, number), seen(got, number)
        if FinishReason.ABORT in (one[3][0], other[3][0]):
            assert number in scene.aborts
            shorter, longer = sorted((one[0], other[0]), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert other == one, f"request {number}: {request.params}"


@pytest.mark.parametrize(
    "seeds", [range(30, 42), pytest.param(range(42, 70), marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.slow
def test_every_answer_is_that_without_drafts(depth: int, seeds: range) -> None:
    preemptions, accepted, drafted, saved, ahead = 0, 0, 0, 0, 0
    for seed in seeds:
        scene = make_scene(seed)
        expected = run_scene(scene, 1)
        got = with_drafter(scene, depth, Guesses(texts_of(expected), seed))
        compare(scene, expected, got)
        stats = got.scheduler.stats
        preemptions, ahead = preemptions + stats.num_preemptions, ahead + got.num_ahead
        accepted, drafted = accepted + stats.num_accepted_draft_tokens, drafted + stats.num_draft_tokens
        saved += expected.executor.num_steps - got.executor.num_steps
        assert stats.num_drafts <= stats.num_draft_tokens and stats.generation_tokens == sum(
            len(tokens) for tokens in got.tokens.values()
        )
    assert 0.3 < accepted / drafted < 0.9 and accepted > 200 and saved > 60
    assert preemptions > 0 and (ahead > 0) == (depth == 2)


def test_the_real_drafter_is_as_exact_and_loops_take_fewer_steps() -> None:
    """Few ids are allowed, so that runs come again."""
    requests = [
        make_request(number, [1, 2, 3, 1, 2, 3], max_tokens=40, temperature=0.0, allowed_token_ids=(number,), **params)
        for number, params in enumerate([{}, {"logprobs": 1}, {"min_tokens": 9, "eos_token_ids": (EOS,)}], 1)
    ]
    plain, drafted = Driver(make_config()), Driver(make_config(speculative=CONFIG))
    for driver in (plain, drafted):
        for request in requests:
            driver.add(request)
        driver.run().check_outputs()
        driver.check_idle()
    assert [seen(plain, number) for number in plain.requests] == [seen(drafted, n) for n in drafted.requests]
    assert plain.executor.num_steps >= 40 and drafted.executor.num_steps < 20


def steps_of(driver: Driver, drafter: Drafter, *requests: Request) -> list[SchedulerOutput]:
    use(driver, drafter)
    for request in requests:
        driver.add(request)
    outputs = []
    while driver.scheduler.has_work or driver.in_flight:
        output = driver.step()
        assert output is not None
        if not outputs or output is not outputs[-1]:
            outputs.append(output)
    driver.check_idle()
    return outputs


def answered(request: Request, **config) -> tuple[Driver, list[int]]:
    """The request alone, without drafts, and its whole text."""
    driver = Driver(make_config(**config))
    driver.add(request)
    driver.run()
    return driver, texts_of(driver)[0]


def test_right_drafts_end_with_the_length_and_never_lie_beyond_it() -> None:
    request = make_request(1, [1, 2, 3], max_tokens=8)
    expected, text = answered(request)
    driver = Driver(make_config())
    outputs = steps_of(driver, Always(text), request)
    assert seen(driver, 1) == seen(expected, 1)
    assert [item.num_tokens for output in outputs for item in output.scheduled if item.drafts] == [6, 1][:1]
    assert len(outputs) == 3 and driver.scheduler.stats.num_accepted_draft_tokens == 5


class Always(Guesses):
    """Drafts the text itself."""

    def __init__(self, *texts: list[int]) -> None:
        super().__init__(list(texts), mistakes=0.0)

    def _guess(self, one: Candidate) -> list[int]:
        known = len(one.token_ids)
        text = next(text for text in self._texts if text[:known] == one.token_ids)
        return text[known : known + min(one.room, CONFIG.num_speculative_tokens)]


@pytest.mark.parametrize("stop_at", range(1, 8))
def test_nothing_follows_a_stop_token_among_the_accepted(stop_at: int) -> None:
    whole = make_request(1, [1, 2, 3], max_tokens=12, logprobs=1)
    _, text = answered(whole)
    stop = text[3 + stop_at]
    request = make_request(1, [1, 2, 3], max_tokens=12, logprobs=1, stop_token_ids=(stop,))
    expected, _ = answered(request)
    driver = Driver(make_config(block_size=2))
    steps_of(driver, Always(text), request)
    assert seen(driver, 1) == seen(expected, 1)
    assert driver.ends[1].stop_token_id == stop


def test_a_grammar_that_is_complete_ends_its_sequence_among_the_accepted() -> None:
    for length in range(1, 9):
        request = make_request(1, [1, 2, 3], max_tokens=20, grammar=Grammar("lark", str(length)))
        expected, text = answered(request)
        driver = Driver(make_config())
        steps_of(driver, Always([*text, *range(20)]), request)
        assert seen(driver, 1) == seen(expected, 1)
        assert driver.ends[1].finish_reason is FinishReason.STOP


@pytest.mark.parametrize("num_blocks", range(14, 30, 2))
def test_nothing_is_preempted_for_drafts(num_blocks: int) -> None:
    requests = [make_request(number, [number] * 5, max_tokens=12) for number in (1, 2, 3)]
    texts = [answered(request)[1] for request in requests]
    driver = Driver(make_config(block_size=1, enable_prefix_caching=False), num_blocks=num_blocks)
    outputs = steps_of(driver, Always(*texts), *requests)
    driver.check_outputs()
    assert any(output.num_drafts for output in outputs)
    assert not any(output.num_drafts and output.num_preempted for output in outputs)
    assert driver.scheduler.stats.num_preemptions > 0 or num_blocks >= 28


def test_drafts_share_the_budget_of_a_step_with_prompts() -> None:
    first = make_request(1, [1, 2, 3], max_tokens=20)
    _, text = answered(first)
    driver = Driver(make_config(max_num_seqs=2, max_num_batched_tokens=6))
    outputs = steps_of(driver, Always(text), first, make_request(2, range(30), max_tokens=1))
    assert max(output.num_decodes + output.num_drafts + output.num_prompt_tokens for output in outputs) == 6
    driver.check_outputs()


@pytest.mark.parametrize("poisoned_from", range(4, 12))
def test_logits_that_are_not_finite_behind_an_accepted_draft_end_the_request_where_they_would(poisoned_from: int):
    request = make_request(666, [1, 2, 3], max_tokens=12)
    _, text = answered(request)
    results = []
    for drafter in (None, Always(text)):
        faults = Faults(poisoned_seeds=(666,), poisoned_from=poisoned_from)
        driver = Driver(make_config(), faults=faults)
        if drafter is not None:
            use(driver, drafter)
        driver.add(request)
        driver.run()
        driver.check_idle()
        results.append(seen(driver, 666))
        assert driver.scheduler.memory.num_cached == 0  # what was computed may not be finite either
    assert results[0] == results[1]


def test_a_step_ahead_waits_only_where_something_would_be_drafted() -> None:
    request = make_request(1, [1, 2, 3], max_tokens=12)
    _, text = answered(request)

    class Late(Always):
        def _guess(self, one: Candidate) -> list[int]:
            return super()._guess(one) if len(one.token_ids) > 8 else []

    driver = Driver(make_config(pipeline_depth=2))
    outputs = steps_of(driver, Late(text), request)
    assert [output.num_drafts > 0 for output in outputs].count(True) == 1
    assert driver.num_ahead == 6
    driver.check_outputs()


@pytest.mark.parametrize("kind", KINDS)
def test_several_tokens_come_in_one_event_with_all_that_belongs_to_them(kind: str) -> None:
    request = make_request(1, [1, 2, 3, 4], **{"max_tokens": 12, **KINDS[kind]})
    expected, text = answered(request)
    driver = Driver(make_config())
    steps_of(driver, Always([*text, *([0] * 9)]), request)
    assert seen(driver, 1) == seen(expected, 1)
    for event in driver.events:
        assert not event.logprobs or len(event.logprobs) == len(event.token_ids)
    stats = driver.scheduler.stats
    assert stats.inter_token_latency_s.count == max(0, len(driver.tokens[1]) - 1)
