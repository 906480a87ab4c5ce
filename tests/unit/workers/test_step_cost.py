"""The limits of a step follow from the cost of steps on this machine; those set by operators stay, with a warning."""

import random
from collections.abc import Iterator

import pytest

from oarlock.workers.config import TARGET_S, StepCost, WorkerConfig
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.ranks.multiproc_executor import FEWEST_TOKENS, PATIENCE, adapted
from oarlock.workers.runner import step_timing
from oarlock.workers.runner.step_timing import time_steps

FAST = StepCost(fixed_s=0.01, token_s=0.0005, context_s=1e-8, logits_s=1e-4)
SLOW = StepCost(fixed_s=0.2, token_s=0.01, context_s=1e-6, logits_s=1e-3)
HOPELESS = StepCost(fixed_s=0.0, token_s=0.1, context_s=2e-5, logits_s=0.02)
MIXTURE = StepCost(0.02, 0.001, 1e-7, 1e-4, experts_s=0.4, expert_share=1 / 16)


def config(**changes: object) -> WorkerConfig:
    base = WorkerConfig("none", max_model_len=4096, lower_step_size=True, raise_step_timeout=True)
    return base.with_(**changes)


def test_a_fast_machine_keeps_the_usual_limits() -> None:
    found = adapted(config(), FAST)
    assert (found.max_num_batched_tokens, found.step_timeout_s) == (2048, 120.0)


@pytest.mark.parametrize("cost", [SLOW, HOPELESS])
def test_a_slow_machine_takes_smaller_steps_and_more_time(cost: StepCost) -> None:
    found = adapted(config(), cost)
    tokens = found.max_num_batched_tokens
    assert FEWEST_TOKENS <= tokens < 2048 and tokens & (tokens - 1) == 0
    assert tokens == FEWEST_TOKENS or cost.seconds(tokens, context=tokens // 2) <= TARGET_S
    assert cost.seconds(2 * tokens, context=tokens) > TARGET_S
    assert found.step_timeout_s >= max(120.0, PATIENCE * cost.worst_step_s(tokens, 4096))


def test_every_running_sequence_gets_a_token() -> None:
    assert adapted(config(max_num_seqs=256), HOPELESS).max_num_batched_tokens == 256


def test_a_timeout_of_the_operator_stays_with_a_warning_where_it_is_too_short(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="oarlock.executor")
    own = config(lower_step_size=False, raise_step_timeout=False, step_timeout_s=20.0)
    assert adapted(own, SLOW) == own
    assert "event=step_timeout_too_short step_timeout_s=20 worst_step_s=" in caplog.text
    caplog.clear()
    assert adapted(own, FAST) == own and not caplog.messages
    limited = adapted(own.with_(lower_step_size=True, step_timeout_s=30.0), SLOW)
    assert limited.max_num_batched_tokens < 2048 and limited.step_timeout_s == 30.0 and not caplog.messages


def test_derived_limits_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    adapted(config(), HOPELESS)
    line = next(line for line in caplog.messages if line.startswith("event=step_limits"))
    assert "max_num_batched_tokens=64 (measured)" in line and "step_timeout_s=" in line


SHARE = 1 / 24  # of the layers


class Clock:
    """A clock on which steps take a known time, and steps of some layers less."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 0.0
        self.steps: list[StepMetadata] = []

    def execute(self, step: StepMetadata, share: float = 1.0) -> None:
        self.steps.append(step)
        rows, tokens, context = len(step.logits_indices), step.num_tokens, int(step.seq_lens[0])
        layers = share * self.cost.seconds(tokens, context=context, rows=0)
        self.now += layers + rows * self.cost.logits_s

    def execute_part(self, step: StepMetadata) -> None:
        self.execute(step, SHARE)


@pytest.fixture(params=[FAST, SLOW, HOPELESS, MIXTURE], ids=["fast", "slow", "hopeless", "mixture"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(request.param)
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: clock.now)
    yield clock


def test_the_cost_is_found_from_a_few_small_steps(clock: Clock) -> None:
    agreed: list[float] = []

    def agree(number: float) -> float:
        agreed.append(number)
        return number

    limits = {"max_tokens": 2048, "max_model_len": 4096, "block_size": 16, "vocab_size": 1000}
    share = clock.cost.expert_share
    found = time_steps(clock.execute, clock.execute_part, SHARE, agree, expert_share=share, **limits)
    assert found.experts_s == pytest.approx(clock.cost.experts_s, rel=0.05) and found.expert_share == share
    for tokens, context, rows in ((64, 32, 1), (2048, 1024, 1), (2048, 4096, 2048)):
        wanted = clock.cost.seconds(tokens, context=context, rows=rows)
        assert found.seconds(tokens, context=context, rows=rows) == pytest.approx(wanted, rel=0.35)
    assert (
        clock.now < 15 and len(agreed) == len(clock.steps) // step_timing._TRIES
    )  # ranks agree on every number they go by
    assert all(set(step.table_blocks) == {0} for step in clock.steps)
    assert all(len(set(step.token_ids)) == step.num_tokens and max(step.token_ids) < 1000 for step in clock.steps)


def test_more_tokens_read_more_experts_until_all_are_read() -> None:
    """Beside 32 experts of which each token draws 2 at random."""
    cost, draw = StepCost(0.0, 0.0, 0.0, 0.0, 32.0, 2 / 32), random.Random(0)
    for tokens in (1, 4, 16, 64):
        read = [len({e for _ in range(tokens) for e in draw.sample(range(32), 2)}) for _ in range(400)]
        assert cost.seconds(tokens, context=0) == pytest.approx(sum(read) / len(read), rel=0.03)


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(16, 4096), (2048, 20), (16, 2), (1, 1)])
def test_small_limits_are_timed_within_them(clock: Clock, max_tokens: int, max_model_len: int) -> None:
    limits = {"max_tokens": max_tokens, "max_model_len": max_model_len, "block_size": 16}
    time_steps(clock.execute, clock.execute_part, SHARE, lambda x: x, **limits)
    assert all(step.num_tokens <= max_tokens and step.seq_lens[0] <= max_model_len for step in clock.steps)
