"""Random scenes with LoRA adapters: whatever is loaded, unloaded, aborted or preempted, every book balances."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oarlock.engine.errors import QueueFullError, RequestError
from oarlock.engine.types import FinishReason
from tests.unit.engine.engine_fakes import EOS, Driver, Faults, make_config, make_request
from tests.unit.engine.pooling_fakes import make_pooling_request

_NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])
_PROMPTS = st.builds(
    lambda prefix, tail: [1, 2, 3, 4] * prefix + tail,
    st.integers(0, 4),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)


class AdapterMachine(RuleBasedStateMachine):
    """Adapters that come, go and change their content while requests for them wait, run and are preempted."""

    @initialize(
        num_blocks=st.integers(8, 30),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(2, 24),
        depth=st.sampled_from([1, 2]),
        max_loras=st.integers(1, 4),
        spare=st.integers(0, 3),
        refused=st.sampled_from([0, 0, 7]),
    )
    def start(self, num_blocks, max_num_seqs, budget, depth, max_loras, spare, refused) -> None:
        """`spare`: adapters in host memory beyond those in slots. `refused`: each step of this multiple; 0: none."""
        config = make_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_model_len=32,
            max_waiting_requests=8,
            pipeline_depth=depth,
            max_loras=max_loras,
            max_cpu_loras=max_loras + spare,
        )
        faults = Faults(refuses=lambda step: step.num_seqs > 0 and refused > 0 and step.step_id % refused == 0)
        self.driver = Driver(config, num_blocks, faults)
        assert self.driver.scheduler.adapters is not None
        self.adapters = self.driver.scheduler.adapters
        self.next_id = 1
        self.num_errors = 0

    @rule(name=_NAMES, number=st.integers(1, 9), broken=st.sampled_from([False, False, False, True]))
    def load(self, name, number, broken) -> None:
        digest = (number + 100 * broken).to_bytes(16, "big").hex()
        before = self.adapters.registry.by_name.get(name)
        try:
            self.adapters.add(name, digest, f"/{'broken' if broken else 'fine'}{number}", self.driver.now)
            assert before is None or before.digest == digest
        except RequestError:
            assert before is not None and before.digest != digest

    @rule(name=_NAMES)
    def unload(self, name) -> None:
        if name in self.adapters.registry.by_name:
            self.driver.remove_adapter(name)
        else:
            with pytest.raises(RequestError):
                self.driver.remove_adapter(name)

    @rule(
        prompt=_PROMPTS,
        name=st.none() | _NAMES,
        max_tokens=st.integers(0, 12),
        priority=st.integers(-1, 2),
        client=st.sampled_from(["", "a", "b"]),
        low_priority=st.booleans(),
        vectors=st.sampled_from([False, False, True]),
    )
    def arrive(self, prompt, name, max_tokens, priority, client, low_priority, vectors) -> None:
        if vectors:
            request = make_pooling_request(self.next_id, prompt, "mean", priority=priority, adapter=name)
        else:
            request = make_request(
                self.next_id,
                prompt,
                priority=priority,
                client=client,
                is_low_priority=low_priority,
                max_tokens=max_tokens,
                eos_token_ids=(EOS,),
                adapter=name,
            )
        self.next_id += 1
        try:
            self.driver.add(request)
            assert name is None or name in self.adapters.registry.by_name
        except (QueueFullError, RequestError):
            pass

    @precondition(lambda self: self.driver.may_begin)
    @rule(num_withdrawn=st.sampled_from([0, 0, 0, 1]))
    def begin(self, num_withdrawn) -> None:
        self.driver.begin(num_withdrawn)

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def finish(self) -> None:
        self.driver.finish()

    @rule(count=st.integers(1, 12))
    def steps(self, count) -> None:
        for _ in range(count):
            self.driver.step()

    @rule(data=st.data())
    def abort(self, data) -> None:
        open_ids = [i for i in self.driver.requests if i not in self.driver.ends]
        if open_ids:
            self.driver.abort(data.draw(st.sampled_from(open_ids)))

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "driver"):
            self.driver.scheduler.audit()

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        driver, registry = self.driver, self.adapters.registry
        driver.run()
        driver.check_outputs()
        driver.check_idle()
        for name in list(registry.by_name):
            driver.remove_adapter(name)
        for number in range(4):  # steps with the commands that are left
            driver.add(make_request(10**6 + number, [1], max_tokens=2))
            driver.run()
        assert not registry.by_name and not registry._by_digest and not registry.commands
        assert not driver.executor.adapters.loaded and not self.adapters._wanted
        stats = driver.scheduler.refresh_gauges()
        assert stats.num_accepted == sum(stats.finished.values()) == len(driver.requests)
        assert stats.finished[FinishReason.LENGTH] >= 4
        assert stats.num_adapters == stats.num_adapters_loaded == stats.num_adapters_in_slots == 0


AdapterMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestAdapterMachine = pytest.mark.slow(AdapterMachine.TestCase)
