"""Stats are plain data: they can be sent, and add up."""

from oarlock.engine.ipc.frames import FrameReader
from oarlock.engine.ipc.messages import Stats, encode, read_from_engine
from oarlock.engine.stats import Histogram
from oarlock.engine.types import FinishReason
from tests.unit.engine.engine_fakes import Driver, make_config, make_request


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1] and histogram.count == 4 and histogram.sum == 12.0


def test_stats_that_were_sent_are_immutable() -> None:
    driver = Driver(make_config())
    driver.add(make_request(1, range(9), max_tokens=5))
    driver.run()
    stats = driver.scheduler.refresh_gauges()
    (payload,) = FrameReader().feed(encode(Stats(1, stats)))
    message = read_from_engine(payload)
    assert isinstance(message, Stats) and (copy := message.stats) == stats
    driver.add(make_request(2, range(9), max_tokens=5))
    driver.run()
    assert copy != driver.scheduler.refresh_gauges()


def test_gauges_and_counters_of_a_run() -> None:
    driver = Driver(make_config(max_num_seqs=2))
    for number in (1, 2, 3):
        driver.add(make_request(number, range(number * 10, number * 10 + 6), max_tokens=4))
    driver.step()
    gauges = driver.scheduler.refresh_gauges()
    assert (gauges.num_requests_running, gauges.num_requests_waiting) == (2, 1)
    assert gauges.num_blocks_held == 4 and gauges.num_blocks_total == 32
    assert gauges.kv_cache_usage == 4 / 32
    driver.run()
    stats = driver.scheduler.refresh_gauges()
    assert stats.prompt_tokens == 18 and stats.generation_tokens == 12
    assert stats.finished[FinishReason.LENGTH] == stats.num_accepted == 3
    assert stats.time_to_first_token_s.count == stats.e2e_latency_s.count == stats.queue_time_s.count == 3
    assert stats.prefill_time_s.count == stats.decode_time_s.count == stats.time_per_output_token_s.count == 3
    assert stats.inter_token_latency_s.count == 9
    assert abs(stats.inter_token_latency_s.sum - 9 * 0.01) < 1e-9
    assert stats.request_prompt_tokens.sum == 18 and stats.request_generation_tokens.sum == 12
    assert stats.iteration_tokens.sum == 18 + 9
    assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
