"""Requests with LoRA adapters: loading, slots, fairness between adapters, unloading, and prefixes of equal prompts."""

from itertools import pairwise

import pytest

from oarlock.engine.errors import QueueFullError, RequestError, StalledAdapterError
from oarlock.engine.lora.registry import FAILED, IN_USE, UNKNOWN, UNLOADED, AdapterRegistry, AdapterState
from oarlock.engine.stats import MAX_ADAPTER_LABELS, OTHER_ADAPTERS
from oarlock.engine.types import FinishReason, Request
from oarlock.workers.adapters import AdapterReport, CommandKind
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.pooling_fakes import make_pooling_request


def digest(number: int) -> str:
    return number.to_bytes(16, "big").hex()


class AdapterDriver(Driver):
    """A driver with adapters `a`, `b`, ... in directories of their names, whose digests are their numbers from 1 on."""

    def __init__(self, names: str = "", *, num_blocks: int = 65, faults: Faults | None = None, **config) -> None:
        super().__init__(make_config(**{"max_loras": 2, **config}), num_blocks, faults)
        assert self.scheduler.adapters is not None
        self.adapters = self.scheduler.adapters
        for number, name in enumerate(names, 1):
            self.load(name, number)

    def load(self, name: str, number: int, directory: str | None = None) -> None:
        self.adapters.add(name, digest(number), directory or f"/{name}", self.now)
        self.scheduler.audit()

    def ask(self, request_id: int, adapter: str | None = None, prompt=(1, 2, 3), **params) -> Request:
        request = make_request(request_id, prompt, adapter=adapter, **params)
        self.add(request)
        self.scheduler.audit()
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def slots(self) -> dict[str, int]:
        """Slots by name, of adapters that are in one."""
        return {name: adapter.slot for name, adapter in self.adapters.registry.by_name.items() if adapter.slot}

    def reason(self, request_id: int) -> FinishReason | None:
        return self.ends[request_id].finish_reason


@pytest.fixture(params=[1, 2])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def test_rows_of_several_adapters_and_none_share_a_step(depth: int) -> None:
    driver = AdapterDriver("ab", pipeline_depth=depth)
    for number, adapter in enumerate(["a", None, "b", "a", None], 1):
        driver.ask(number, adapter, max_tokens=20)
    driver.steps(12)
    step = driver.executor._steps[-1] if driver.executor._steps else None
    assert driver.scheduler.num_running == 5 and sorted(driver.slots.values()) == [1, 2]
    assert step is None or len(step.adapter_slots) == 5
    driver.run()
    driver.check_outputs()
    driver.check_idle()


def test_a_row_forgets_the_adapter_of_the_request_before(depth: int) -> None:
    driver = AdapterDriver("a", max_num_seqs=2, pipeline_depth=depth)
    driver.steps(9)
    driver.ask(1, "a", max_tokens=3)
    driver.ask(2, "a", max_tokens=40)
    driver.ask(3, max_tokens=9)  # gets the row of the first, and runs beside the second
    driver.run()
    driver.check_outputs()


def test_a_report_of_an_earlier_load_does_not_count() -> None:
    registry = AdapterRegistry(2)
    registry.load(registry.add("a", digest(1), "/a"))
    assert [command.kind for command in registry.take_commands(1, 1.0)] == [CommandKind.PREPARE, CommandKind.REPORT]
    registry.remove("a")
    registry.load(registry.add("a", digest(1), "/a"))
    assert [command.kind for command in registry.take_commands(3, 2.0)][:2] == [CommandKind.DROP, CommandKind.PREPARE]
    report = [AdapterReport(digest(1), None)]
    assert registry.report(report, 2) == [] and registry.num_loading == 1
    assert registry.report(report, 3) == [(registry.by_name["a"], None)] and registry.num_ready == 1
    registry.audit()


def test_a_load_that_never_ends_is_asked_for_ever_less_often() -> None:
    """And a load that begins meanwhile is asked for as often as any other one at first."""
    registry, times = AdapterRegistry(2), list[float]()
    registry.load(registry.add("a", digest(1), "/a"))
    for tick in range(20_000):
        if tick == 15_000:
            registry.load(registry.add("b", digest(2), "/b"))
        if registry.take_commands(tick, 0.005 * tick):
            times.append(0.005 * tick)
    assert times[:3] == [0.0, 0.005, 0.015] and len(times) < 600
    gaps = [(earlier, later - earlier) for earlier, later in pairwise(times)]
    assert all(gap <= 0.01 + 0.06 * at for at, gap in gaps if at < 70.0)
    assert max(gap for _, gap in gaps) <= 0.51 and min(gap for at, gap in gaps if at >= 75.0) < 0.01


def test_a_request_waits_for_a_load_and_delays_nobody() -> None:
    driver = AdapterDriver("a", max_num_seqs=2)
    driver.ask(1, "a")
    driver.ask(2)
    driver.ask(3)
    driver.steps(1)
    assert driver.scheduler.num_running == 2 and driver.adapters.num_parked == 1
    assert driver.scheduler.refresh_gauges().num_requests_waiting_for_adapter == 1
    driver.run()
    driver.check_outputs()
    assert [event.request_id for event in driver.events if event.finish_reason] == [2, 3, 1]


def test_equal_prompts_of_other_contents_share_no_blocks() -> None:
    """Also after another content was loaded under the same name, and again when the first one comes back."""
    driver = AdapterDriver("a")
    prompt = list(range(16))

    def cached(request_id: int, adapter: str | None) -> int:
        driver.ask(request_id, adapter, prompt)
        driver.run()
        return driver.ends[request_id].num_cached_tokens

    assert [cached(1, "a"), cached(2, "a"), cached(3, None), cached(4, None)] == [0, 12, 0, 12]
    driver.remove_adapter("a")
    driver.load("a", 2)
    assert [cached(5, "a"), cached(6, "a")] == [0, 12]
    driver.remove_adapter("a")
    driver.load("a", 1)
    driver.load("another name", 1)
    assert [cached(7, "a"), cached(8, "another name")] == [12, 12]
    driver.check_outputs()


@pytest.mark.parametrize("reason", ["broken", "stalled"])
def test_a_failed_load_ends_its_requests_and_frees_the_name(reason: str) -> None:
    """Not only if the adapter is at fault, but also if its disk is, which is the server's fault."""
    driver = AdapterDriver()
    driver.load("a", 1, f"/{reason}")
    driver.ask(1, "a")
    driver.ask(2)
    driver.run()
    end = driver.ends[1]
    assert end.finish_reason is FinishReason.ERROR
    ((name, error),) = driver.adapters.registry.take_outcomes()
    assert name == "a" and error is not None and end.error == error.message and end.error_code == error.code
    if reason == "broken":
        assert "it is broken" in error.message and isinstance(error, RequestError)
        assert (error.param, error.code, end.error_param) == ("lora_path", FAILED, "model")
        assert driver.scheduler.stats.num_errors == 0
    else:
        assert all(part in error.message for part in ("'a'", "/stalled", "Check its disk"))
        assert isinstance(error, StalledAdapterError) and (error.code, end.error_param) == ("adapter_stalled", None)
    with pytest.raises(RequestError, match="no adapter 'a'"):
        driver.ask(3, "a")
    driver.load("a", 2)
    driver.ask(4, "a")
    driver.run()
    assert driver.reason(2) is driver.reason(4) is FinishReason.LENGTH


def test_an_adapter_that_cannot_be_read_again_keeps_its_name() -> None:
    driver = AdapterDriver("abc", max_loras=1, max_cpu_loras=1)
    driver.steps(20)
    registry = driver.adapters.registry
    adapter, _ = registry.by_name["a"], registry.take_outcomes()
    assert adapter.state is AdapterState.ON_DISK, "it was loaded, and had to leave"
    driver.load("never loaded", 1, "/broken")
    driver.ask(1, "a")
    driver.run()
    assert driver.ends[1].error_code == FAILED
    assert [name for name, error in registry.take_outcomes() if error is not None] == ["a", "never loaded"]
    assert [*registry.by_name] == ["a", "b", "c"]
    driver.ask(2, "a")
    driver.run()
    assert driver.reason(2) is FinishReason.LENGTH
    driver.check_outputs()


def test_the_directory_of_a_name_that_is_gone_is_not_read_again() -> None:
    """Neither of a name that was removed, nor a directory from which the same content has moved."""
    driver = AdapterDriver("abc", max_loras=1, max_cpu_loras=1)
    registry = driver.adapters.registry
    driver.load("copy", 1)
    driver.remove_adapter("a")
    assert registry.by_name["copy"].directory == "/copy"
    driver.load("copy", 1, "/moved")
    driver.steps(20)
    assert [(one.name, one.directory) for one in driver.adapters.infos(())] == [
        ("b", "/b"),
        ("c", "/c"),
        ("copy", "/moved"),
    ]
    registry.take_outcomes()
    driver.load("other copy", 1, "/other")
    driver.remove_adapter("copy")
    assert registry.by_name["other copy"].directory == "/other"
    driver.ask(1, "other copy")
    driver.run()
    driver.check_outputs()


def test_unloading_ends_requests_in_order_wherever_they_are(depth: int) -> None:
    driver = AdapterDriver("ab", max_num_seqs=2, pipeline_depth=depth, max_loras=1)
    for number, adapter in enumerate(["a", "a", "a", "b", None], 1):
        driver.ask(number, adapter, max_tokens=30)
    driver.steps(9)
    assert driver.scheduler.num_running == 2 and driver.adapters.num_parked
    driver.remove_adapter("a")
    ended = [event for event in driver.events if event.finish_reason]
    assert [event.request_id for event in ended] == [1, 2, 3]
    assert all(event.error_code == UNLOADED and event.error_param == "model" for event in ended)
    driver.run()
    driver.remove_adapter("b")
    driver.check_outputs()
    driver.check_idle()
    assert driver.reason(4) is driver.reason(5) is FinishReason.LENGTH
    assert not driver.adapters.registry.by_name
    driver.ask(6)
    driver.run()  # with the commands that drop the adapters
    assert not driver.executor.adapters.loaded


def test_a_name_of_two_keeps_the_content() -> None:
    driver = AdapterDriver("a")
    driver.load("b", 1)
    driver.ask(1, "a", max_tokens=9)
    driver.ask(2, "b", max_tokens=9)
    driver.steps(6)
    assert driver.slots == {"a": 1, "b": 1}
    driver.remove_adapter("a")
    driver.run()
    assert [driver.reason(1), driver.reason(2)] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert driver.slots == {"b": 1}


def test_names_have_one_content_at_a_time() -> None:
    driver = AdapterDriver("a")
    driver.load("a", 1)  # no effect
    for change, code in ((lambda: driver.load("a", 2), IN_USE), (lambda: driver.remove_adapter("b"), UNKNOWN)):
        with pytest.raises(RequestError) as caught:
            change()
        assert caught.value.code == code
    for name in ("", "x" * 300, "a\0b"):
        with pytest.raises(RequestError, match="bytes"):
            driver.load(name, 3)
    none = Driver(make_config())
    with pytest.raises(RequestError, match="no LoRA adapters"):
        none.add(make_request(1, [1], adapter="a"))
    assert none.scheduler.stats.num_rejected == 1


def test_more_adapters_than_slots_take_turns(depth: int) -> None:
    """A steady flow for two adapters in two slots does not starve a third, nor does the third keep its slot."""
    driver = AdapterDriver("abc", max_num_seqs=4, pipeline_depth=depth)
    number = 0
    for turn in range(60):
        for name in "ab" + "c" * (turn % 10 == 5):
            number += 1
            driver.ask(number, name, [number % 60, 1], max_tokens=8)
        driver.steps(6)
    driver.run()
    driver.check_outputs()
    driver.check_idle()
    ended, waits_s = driver.scheduler.requests.log.ended, dict[str, list[float]]()
    for one, request in driver.requests.items():
        assert driver.reason(one) is FinishReason.LENGTH
        waits_s.setdefault(str(request.adapter), []).append(ended[one].first_token_s - ended[one].arrival_s)
    assert len(waits_s["c"]) == 6 and max(waits_s["c"]) <= 0.3
    assert max(waits_s["a"] + waits_s["b"]) <= 0.8


def test_requests_that_came_before_begin_first() -> None:
    """The slot of `a` closes for `b`, but its earlier requests begin before that, and its later one after `b`."""
    driver = AdapterDriver("ab", max_num_seqs=2, max_loras=1)
    driver.steps(9)
    for number in (1, 2, 3):
        driver.ask(number, "a", max_tokens=6)
    driver.steps(1)
    driver.ask(4, "b", max_tokens=6)
    driver.ask(5, "a", max_tokens=6)
    driver.run()
    firsts = list(dict.fromkeys(event.request_id for event in driver.events))
    assert firsts == [1, 2, 3, 4, 5]
    driver.check_outputs()


def test_requests_for_an_adapter_begin_together(depth: int) -> None:
    """Although another adapter waits, whose first request came before their last: there are rows for all of them."""
    driver = AdapterDriver("abc", max_loras=1, max_cpu_loras=3, pipeline_depth=depth)
    driver.steps(20)
    driver.ask(1, "c", max_tokens=9)
    driver.steps(3)
    for number, name in enumerate("ababa", 2):
        driver.ask(number, name, max_tokens=5)
    driver.run()
    firsts = list(dict.fromkeys(event.request_id for event in driver.events))
    assert firsts == [1, 2, 4, 6, 3, 5] and driver.adapters.registry.num_puts == 3
    driver.check_outputs()


def test_low_priority_yields_its_slot(depth: int) -> None:
    driver = AdapterDriver("ab", max_loras=1, max_cpu_loras=2, pipeline_depth=depth)
    driver.ask(1, "a", max_tokens=40, is_low_priority=True)
    driver.steps(10)
    assert driver.slots == {"a": 1} and driver.scheduler.refresh_gauges().running_adapters == ["a"]
    driver.ask(2, "b", max_tokens=4)
    driver.steps(3)
    assert driver.slots == {"b": 1} and driver.scheduler.refresh_gauges().waiting_adapters == ["a"]
    driver.run()
    driver.check_outputs()
    ends = [event.request_id for event in driver.events if event.finish_reason]
    assert ends == [2, 1] and driver.scheduler.stats.num_preemptions == 1


def test_a_wait_of_low_priority_does_not_prolong_another(depth: int) -> None:
    """The slot of `a` closes for a request of low priority; one of normal priority gets the slot of `b` at once."""
    driver = AdapterDriver("abcd", max_loras=2, max_cpu_loras=4, pipeline_depth=depth)
    driver.steps(20)
    driver.ask(1, "a", max_tokens=30)
    driver.ask(2, "b", max_tokens=40, is_low_priority=True)
    driver.steps(6)
    driver.ask(3, "c", is_low_priority=True)
    driver.steps(2)
    driver.ask(4, "d")
    driver.run()
    driver.check_outputs()
    ends = [event.request_id for event in driver.events if event.finish_reason]
    assert ends[:2] == [4, 1] and driver.scheduler.stats.num_preemptions == 1


def test_the_least_recently_used_leaves_first() -> None:
    driver = AdapterDriver("abcd", max_loras=2, max_cpu_loras=2)
    registry = driver.adapters.registry
    driver.steps(20)
    assert registry.num_ready == 3 and registry.num_evictions == 1, "each was loaded when it was added"
    for number, name in enumerate("abcab", 1):
        driver.ask(number, name)
        driver.run()
    kept = {name for name, one in registry.by_name.items() if one.state is AdapterState.READY}
    assert set(driver.slots) == {"a", "b"} and kept == {"a", "b", "c"}
    driver.ask(6, "d")
    driver.run()
    assert set(driver.slots) == {"b", "d"} and registry.by_name["c"].state is AdapterState.ON_DISK
    driver.check_outputs()


def test_a_preempted_request_comes_back_with_its_adapter(depth: int) -> None:
    driver = AdapterDriver("abc", num_blocks=12, pipeline_depth=depth)
    for number in range(1, 10):
        driver.ask(number, "abc"[number % 3], [number, 2, 3, 4, 5], max_tokens=12)
    driver.run()
    assert driver.scheduler.stats.num_preemptions > 0
    driver.check_outputs()
    driver.check_idle()


def test_a_refused_step_has_run_its_commands(depth: int) -> None:
    refused: list[int] = []

    def refuses(step) -> bool:
        if not step.num_seqs or CommandKind.PUT not in step.adapter_commands[:, 0].tolist():
            return False
        refused.append(step.step_id)
        return True

    driver = AdapterDriver("abcd", faults=Faults(refuses=refuses), pipeline_depth=depth)
    for number in range(1, 13):
        driver.ask(number, "abcd"[number % 4], max_tokens=5)
        driver.steps(3)
    driver.run()
    driver.check_outputs()
    assert refused


def test_a_withdrawn_step_sends_its_commands_with_the_next() -> None:
    driver = AdapterDriver("a")
    driver.ask(1, "a")
    while 1 not in driver.ends:
        driver.begin(num_withdrawn=1)
        if driver.in_flight:
            driver.finish()
    assert driver.reason(1) is FinishReason.ERROR and driver.slots == {"a": 1}
    driver.ask(2, "a")
    driver.run()
    driver.check_outputs()


def test_commands_that_are_not_sent_stay_within_their_bound() -> None:
    """The fake ranks check the bound of a step's commands."""
    driver = AdapterDriver("ab", max_loras=1)
    driver.steps(9)
    for number in range(1, 21):
        driver.ask(number, "ab"[number % 2])
    while len(driver.ends) < 20:
        driver.begin(num_withdrawn=1)
        if driver.in_flight:
            driver.finish()
    driver.ask(21, "a")
    driver.run()
    assert driver.reason(21) is FinishReason.LENGTH


@pytest.mark.parametrize("max_cpu_loras", [2, 40])
def test_the_work_of_a_step_grows_with_adapters_not_with_requests(max_cpu_loras: int) -> None:
    """Of 1,000 requests for 100 adapters; `max_cpu_loras`: most of them are on disk, or many in host memory."""
    names = [f"a{number}" for number in range(100)]
    driver = AdapterDriver(max_cpu_loras=max_cpu_loras, max_num_seqs=4, max_waiting_requests=1000)
    for number, name in enumerate(names, 1):
        driver.adapters.add(name, digest(number), f"/{name}", 0.0)
    for number in range(1, 1001):
        driver.add(make_request(number, (1, 2, 3), adapter=names[number % 100], max_tokens=30))
    driver.steps(60)
    assert driver.adapters.num_parked > 900
    asked: list[str] = []
    time_of = driver.adapters._waiting.time_of
    driver.adapters._waiting.time_of = lambda client: asked.append(client) or time_of(client)
    driver.adapters.may_assign = True
    driver.adapters.assign(driver.now)
    assert 90 < len(asked) < 300


def test_vectors_come_from_adapters_too() -> None:
    driver = AdapterDriver("a")
    for number, kind in enumerate(("last", "mean", "token"), 1):
        driver.add(make_pooling_request(number, [1, 2, 3, 4, 5], kind, adapter="a"))
    driver.run()
    driver.check_outputs()


def test_parked_requests_count_in_the_queue() -> None:
    driver = AdapterDriver("a", max_num_seqs=1, max_waiting_requests=2)
    driver.ask(7)
    driver.run()
    driver.now += 20  # so that a request is admitted every twenty seconds
    for number in (1, 2, 3):
        driver.ask(number, "a")
    with pytest.raises(QueueFullError) as refused:
        driver.ask(4)
    assert 30 <= refused.value.retry_after_s < 40
    stats = driver.scheduler.refresh_gauges()
    assert stats.num_requests_waiting == 3 and stats.num_waiting_tokens == 9
    driver.abort(1)
    driver.ask(5)
    driver.run()
    driver.check_outputs()


def test_labels_are_bounded() -> None:
    """And a name that was unloaded leaves its label to another one."""
    driver = AdapterDriver()
    for number in range(1, MAX_ADAPTER_LABELS + 10):
        driver.load(f"name {number}", number)
        driver.ask(number, f"name {number}", max_tokens=2)
        driver.run()
    counts = driver.scheduler.stats.by_adapter
    assert len(counts) == MAX_ADAPTER_LABELS + 1
    assert counts["name 1"] == [1, 3, 2] and counts[OTHER_ADAPTERS] == [9, 27, 18]
    driver.remove_adapter("name 1")
    driver.ask(999, f"name {MAX_ADAPTER_LABELS + 1}", max_tokens=2)
    driver.run()
    assert "name 1" not in counts and counts[OTHER_ADAPTERS] == [9, 27, 18]
    assert counts[f"name {MAX_ADAPTER_LABELS + 1}"] == [1, 3, 2]
    assert len(counts) == MAX_ADAPTER_LABELS + 1
