"""Random operation sequences against the invariants: every book balances after each, every token is right."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oarlock.engine.errors import QueueFullError, RequestError
from oarlock.engine.kv_cache.block_events import BlockEventLog
from oarlock.engine.types import KINDS, FinishReason
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import EOS, Driver, make_config, make_request
from tests.unit.engine.kv_cache.replayed_blocks import ReplayedBlocks
from tests.unit.engine.pooling_fakes import make_pooling_request

# Few distinct prompts, many shared prefixes.
_PROMPTS = st.builds(
    lambda prefix, tail: [1, 2, 3, 4] * prefix + tail,
    st.integers(0, 6),
    st.lists(st.integers(0, 3), min_size=0, max_size=9),
).filter(bool)

_IDS = st.integers(0, 63)
# Never so many bans that no token is left.
_CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([0.0, 0.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.25]),
        "repetition_penalty": st.sampled_from([1.0, 1.5]),
        "logit_bias": st.dictionaries(_IDS, st.sampled_from([-100.0, -1.5, 0.5]), max_size=3).map(
            lambda bias: tuple(bias.items())
        ),
        "allowed_token_ids": st.sets(_IDS, min_size=20).map(lambda ids: tuple(sorted(ids))),
        "bad_words": st.lists(st.lists(_IDS, min_size=1, max_size=2).map(tuple), max_size=5).map(tuple),
    },
)


class EngineMachine(RuleBasedStateMachine):
    """Arrivals, steps, aborts and cache resets before, during and after a step, on pools small enough to preempt."""

    @initialize(
        num_blocks=st.integers(8, 30),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 24),
        block_size=st.integers(1, 5),
        caching=st.booleans(),
        window=st.sampled_from([None, None, 2, 5, 9, 30]),
        num_in_window=st.none() | st.integers(0, 20),
        depth=st.sampled_from([1, 2]),
        num_slots=st.sampled_from([None, 3, 4, 9, 30]),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        block_size: int,
        caching: bool,
        window: int | None,
        num_in_window: int | None,
        depth: int,
        num_slots: int | None,
    ) -> None:
        """`num_in_window`: spare blocks of a second memory group, with a window; None: there is one group."""
        config = make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            block_size=block_size,
            max_model_len=48,
            max_waiting_requests=6,
            max_waiting_tokens=100,
            enable_prefix_caching=caching,
            pipeline_depth=depth,
        )
        groups: tuple[GroupInfo, ...] = ()
        if num_in_window is not None:
            least = -(-((window or 2) + budget) // block_size) + 2
            groups = (GroupInfo(num_blocks, 0), GroupInfo(least + num_in_window, 0, span=window or 2))
        if num_slots is not None:
            groups = groups or (GroupInfo(num_blocks, 0, span=window),)
            groups += (GroupInfo(num_slots, 0, is_recurrent=True),)
        self.driver = Driver(config, num_blocks, sliding_window=window, groups=groups)
        self.log = self.driver.scheduler.memory.leader.pool.event_log = BlockEventLog()
        self.replayed = ReplayedBlocks(block_size)
        self.next_id = 1
        self.num_withdrawn = 0

    @rule(
        prompt=_PROMPTS,
        max_tokens=st.integers(0, 25),
        min_tokens=st.integers(0, 5),
        stops=st.lists(st.integers(0, 63), max_size=6),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, None, 0, 3]),
        priority=st.integers(-1, 2),
        salt=st.sampled_from([b"", b"tenant"]),
        client=st.sampled_from(["", "a", "b"]),
        low_priority=st.booleans(),
        choices=st.just({}) | _CHOICES,
    )
    def arrive(
        self,
        prompt,
        max_tokens,
        min_tokens,
        stops,
        logprobs,
        prompt_logprobs,
        priority,
        salt,
        client,
        low_priority,
        choices,
    ) -> None:
        request = make_request(
            self.next_id,
            prompt,
            priority=priority,
            cache_salt=salt,
            client=client,
            is_low_priority=low_priority,
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            eos_token_ids=(EOS,),
            stop_token_ids=tuple(stops),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **choices,
        )
        self._add(request)

    @rule(
        prompt=_PROMPTS,
        kind=st.sampled_from(KINDS),
        priority=st.integers(-1, 2),
        salt=st.sampled_from([b"", b"tenant"]),
    )
    def arrive_for_vectors(self, prompt, kind, priority, salt) -> None:
        request = make_pooling_request(self.next_id, prompt, kind, priority=priority, cache_salt=salt)
        self._add(request)

    def _add(self, request) -> None:
        self.next_id += 1
        rejected = self.driver.scheduler.stats.num_rejected
        try:
            self.driver.add(request)
        except (QueueFullError, RequestError):
            assert self.driver.scheduler.stats.num_rejected == rejected + 1

    @precondition(lambda self: self.driver.may_begin)
    @rule(num_withdrawn=st.sampled_from([0, 0, 0, 1, 2]))
    def begin(self, num_withdrawn: int) -> None:
        errors = self.driver.scheduler.stats.num_errors
        output = self.driver.begin(num_withdrawn)
        self.num_withdrawn += min(num_withdrawn, self.driver.scheduler.stats.num_errors - errors)
        idle = not self.driver.scheduler.has_work
        assert output is not None or num_withdrawn or idle or self.driver.in_flight

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def finish(self) -> None:
        self.driver.finish()

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(data=st.data())
    def abort(self, data) -> None:
        open_ids = [i for i in self.driver.requests if i not in self.driver.ends]
        if open_ids:
            self.driver.abort(data.draw(st.sampled_from(open_ids)))

    @rule()
    def reset_cache(self) -> None:
        self.driver.scheduler.memory.reset_prefix_cache()
        assert self.driver.scheduler.memory.num_cached == 0

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.audit()
            self.replayed.replay(self.log.take())
            self.replayed.check(self.driver.scheduler.memory)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        self.driver.check_outputs()
        self.driver.check_idle()
        stats = self.driver.scheduler.refresh_gauges()
        assert stats.num_accepted == sum(stats.finished.values()) == len(self.driver.requests)
        assert stats.finished[FinishReason.ERROR] == stats.num_errors == self.num_withdrawn


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngineMachine = pytest.mark.slow(EngineMachine.TestCase)
