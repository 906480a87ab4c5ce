"""KV blocks beyond the pool: texts do not depend on kept blocks, failures or interruptions, and no slot is lost."""

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.kv_cache.block_events import BlockEventLog, salt_with_adapter
from oarlock.engine.kv_cache.offload import LOAD_TIMEOUT_S, STEP_LOAD_BYTES, Flush, HostTier, KVOffload
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.adapters import AdapterReport
from oarlock.workers.config import StepCost, WorkerInfo
from oarlock.workers.kv_offload import Copy, KVOffloadInfo, KVReport, KVReportKind
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.engine_fakes import make_config, make_info
from tests.unit.engine.kv_cache.chained_ranks import ChainedRanks, Files
from tests.unit.engine.kv_cache.replayed_blocks import ReplayedBlocks

BLOCK = 4
CONFIG = make_config(max_num_seqs=4, max_num_batched_tokens=16, block_size=BLOCK).worker
FAST, SLOW = 1e12, 1.0  # bytes read per second


def info_of(tiers: KVOffloadInfo | None, num_blocks: int) -> WorkerInfo:
    cost = StepCost(fixed_s=0.0, token_s=1e-3, context_s=0.0, logits_s=0.0)
    return replace(make_info(make_config(), num_blocks), vocab_size=50, kv_offload=tiers, step_cost=cost)


class Run:
    """An engine that is driven step by step."""

    def __init__(self, ranks: ChainedRanks, *, caches: bool = True, depth: int = 1, max_loras: int = 0) -> None:
        self.ranks, self.now = ranks, 0.0
        config = make_config(
            max_num_seqs=4,
            max_num_batched_tokens=16,
            enable_prefix_caching=caches,
            pipeline_depth=depth,
            max_loras=max_loras,
        )
        self.core = EngineCore(config, ranks, lambda: self.now)
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.memory
        self.log = self.manager.leader.pool.event_log = BlockEventLog()
        self.replayed = ReplayedBlocks(BLOCK)
        self.texts: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.deleted = set[bytes]()  # files

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.texts[request.request_id] = []

    def step(self) -> None:
        self.now += 0.01
        self.core.receive_reports()
        output = self.core.begin()
        events = self.core.take_events()
        if self.core.num_in_flight and (output is None or self.core.is_full):
            events += self.core.finish()
        for event in events:
            assert event.error is None, event.error
            self.texts[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.cached[event.request_id] = event.num_cached_tokens
        self.replayed.replay(self.log.take())
        self.replayed.check(self.manager)
        self.scheduler.audit()
        if self.scheduler.kv_offload is not None:
            self.scheduler.kv_offload.audit()

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work and not self.core.num_in_flight:
                return
            self.step()
        raise AssertionError("it does not end")


def requests_of(random: Random, count: int) -> list[Request]:
    """Prompts that share beginnings of three families."""
    families = [tuple(random.randrange(1, 50) for _ in range(40)) for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = random.choice(families)[: random.randrange(1, 40)]
        prompt += tuple(random.randrange(1, 50) for _ in range(random.randrange(1, 8)))
        params = SamplingParams(max_tokens=random.randrange(1, 12))
        requests.append(Request(number, prompt, params, cache_salt=random.choice([b"", b"a tenant"])))
    return requests


def texts_without(requests: list[Request]) -> dict[int, list[int]]:
    """Texts that the ranks answer where nothing is cached anywhere."""
    run = Run(ChainedRanks(CONFIG, info_of(None, 200), Random(0)), caches=False)
    for request in requests:
        run.add(request)
        run.finish()
    return run.texts


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))])
@pytest.mark.slow
def test_text_does_not_depend_on_what_is_kept(seed: int) -> None:
    """Few blocks and slots, shared beginnings, aborts, preemptions, refused steps, files that fail, one step ahead."""
    random = Random(seed)
    requests = requests_of(random, 40)
    wanted = texts_without(requests)
    files: Files = {}
    for start in range(2):  # the second finds the files of the first
        num_slots, block_bytes = random.choice([3, 12, 40]), random.choice([64, STEP_LOAD_BYTES // 2, STEP_LOAD_BYTES])
        tiers = KVOffloadInfo(num_slots, block_bytes, FAST if random.random() < 0.8 else None, 1 + seed % 2)
        info = info_of(tiers, random.choice([18, 24, 40]))
        rates = {"fails": random.choice([0.0, 0.2]), "refuses": random.choice([0.0, 0.0, 0.05])}
        ranks = ChainedRanks(CONFIG, info, random, files=files, **rates)
        run = Run(ranks, depth=1 + seed % 2)
        run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
        aborted = set()
        for request in requests:
            run.add(request)
            for _ in range(random.randrange(4)):
                run.step()
            if random.random() < 0.1 and run.scheduler.abort(request.request_id, run.now) is not None:
                aborted.add(request.request_id)
            if random.random() < 0.05:
                run.scheduler.memory.reset_prefix_cache()
            if random.random() < 0.05 and files:
                run.deleted.add(digest := random.choice(list(files)))
                del files[digest]
        run.finish()
        for number, text in run.texts.items():
            assert text == wanted[number] or number in aborted, (start, number)
        for _ in range(200):  # what is still written comes to its end
            run.step()
        assert run.scheduler.kv_offload.host.num_pins == 0
        assert run.scheduler.stats.kv_offload_loaded_blocks or tiers.num_slots < 40
        if tiers.read_bytes_per_s is not None:
            flush(run)
            cached = {digest for _, digest in run.manager.cached_blocks()}
            assert rates["fails"] or cached <= files.keys() | run.deleted


def run_with(tiers: KVOffloadInfo, files: Files | None = None, num_blocks: int = 20) -> Run:
    return Run(ChainedRanks(CONFIG, info_of(tiers, num_blocks), Random(1), files=files))


def prompt_of(number: int, length: int = 41) -> tuple[int, ...]:
    return tuple(1 + (number * 17 + place * place) % 49 for place in range(length))


def ask(run: Run, request_id: int, prompt: tuple[int, ...], salt: bytes = b"") -> list[int]:
    run.add(Request(request_id, prompt, SamplingParams(max_tokens=3), cache_salt=salt))
    run.finish()
    return run.texts[request_id]


def settle(run: Run) -> None:
    for _ in range(300):
        run.step()


def flush(run: Run) -> None:
    """Write cached blocks to files as the engine does at its end."""
    assert not run.core.num_in_flight
    end = Flush(run.scheduler.kv_offload, run.manager.cached_blocks())
    for _ in range(20_000):
        if not end.add_copies():
            assert not end.num_left
            return
        run.step()
    raise AssertionError("it does not end")


def files_of(prompt: tuple[int, ...], salt: bytes = b"") -> Files:
    """Files that a run leaves of a prompt whose blocks others have pushed out of the pool."""
    files: Files = {}
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    ask(run, 1, prompt, salt)
    for number in (2, 3):
        ask(run, number, prompt_of(number))
    settle(run)
    assert len(files) >= 10
    return files


@pytest.mark.parametrize("speed", [None, FAST], ids=["memory", "memory and files"])
def test_evicted_blocks_are_loaded_from_host_memory(speed: float | None) -> None:
    run = run_with(KVOffloadInfo(60, 64, speed))
    first = ask(run, 1, prompt_of(1))
    for number in (2, 3):
        ask(run, number, prompt_of(number))
    computed = run.ranks.num_tokens
    assert ask(run, 4, prompt_of(1)) == first
    assert run.cached[4] == 40
    assert run.ranks.num_tokens - computed == 41 - 40 + 2
    assert run.scheduler.stats.prefix_cache_hits == 40
    assert run.scheduler.stats.kv_offload_hit_tokens == 40


def test_a_request_that_waits_for_its_adapter_finds_its_files_and_keeps_its_turn() -> None:
    """A later request does not get the only slot while the blocks of the first are read."""
    digests = [number.to_bytes(16, "big").hex() for number in (1, 2)]
    files = files_of(prompt_of(1), salt_with_adapter(b"", digests[0]))
    ranks = ChainedRanks(CONFIG, info_of(KVOffloadInfo(60, 64, FAST), 20), Random(1), files=files)
    run = Run(ranks, max_loras=1)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    adapters = run.scheduler.adapters
    for name, digest in zip("ab", digests, strict=True):
        adapters.add(name, digest, f"/{name}", run.now)
    run.step()
    adapters.report([AdapterReport(digest, None) for digest in digests], run.scheduler.stats.step_id, run.now)
    for number, name in enumerate("ab", 1):
        run.add(Request(number, prompt_of(number), SamplingParams(max_tokens=3), adapter=name))
        run.step()
    assert len(run.scheduler.requests.loading) == 1
    run.finish()
    assert list(run.cached.items()) == [(1, 40), (2, 0)], "in this order"


def test_shared_prefixes_are_written_to_files_without_eviction() -> None:
    run = run_with(KVOffloadInfo(60, 64, FAST), files := {}, num_blocks=40)
    ask(run, 1, prompt_of(1))
    settle(run)
    assert not files
    ask(run, 2, prompt_of(1, 30))
    ask(run, 3, prompt_of(1, 30))
    settle(run)
    assert len(files) == 7
    assert run.scheduler.stats.kv_offload_saved_blocks == 7


def test_another_engine_finds_the_files() -> None:
    files = files_of(prompt_of(1))
    wanted = texts_without([Request(4, prompt_of(1), SamplingParams(max_tokens=3))])[4]
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    assert ask(run, 4, prompt_of(1)) == wanted
    assert run.cached[4] == 40


@pytest.mark.parametrize("num_slots", [2, 5, 60])
def test_blocks_cached_at_shutdown_are_found_by_the_next_start(num_slots: int) -> None:
    """Asked for once and never evicted; also where slots are few, and some hold what no file has."""
    requests = [Request(number, prompt_of(number), SamplingParams(max_tokens=3)) for number in range(1, 4)]
    wanted, files = texts_without(requests), Files()
    run = run_with(KVOffloadInfo(num_slots, 64, FAST), files, num_blocks=40)
    for number in range(1, 4):
        ask(run, number, prompt_of(number))
    assert not files and run.manager.num_cached == 30
    flush(run)
    assert len(files) == 30 and run.scheduler.kv_offload.host.num_pins == 0
    written = run.scheduler.stats.kv_offload_written_blocks
    flush(run)
    assert written == run.scheduler.stats.kv_offload_written_blocks == 30, "once"
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    assert [ask(run, number, prompt_of(number)) for number in range(1, 4)] == list(wanted.values())
    assert list(run.cached.values()) == [40] * 3


def test_a_long_load_is_divided_among_steps_and_others_go_on() -> None:
    files = files_of(prompt_of(1))
    wanted = texts_without([Request(4, prompt_of(1), SamplingParams(max_tokens=3))])[4]
    run = run_with(KVOffloadInfo(60, STEP_LOAD_BYTES // 2, FAST), files, num_blocks=40)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    loads, submit = list[int](), run.ranks.submit

    def counted(step: StepMetadata, *, masks_follow: bool = False) -> None:
        loads.append(int((step.kv_copies[:, 0] == Copy.LOAD).sum()))
        submit(step, masks_follow=masks_follow)

    run.ranks.submit = counted
    run.add(Request(5, prompt_of(7), SamplingParams(max_tokens=60)))
    for _ in range(5):
        run.step()
    run.add(Request(4, prompt_of(1), SamplingParams(max_tokens=3)))
    while not run.texts[4]:
        had = len(run.texts[5])
        run.step()
        assert len(run.texts[5]) == had + 1
    assert [count for count in loads if count] == [2] * 5
    run.finish()
    assert run.texts[4] == wanted
    assert run.cached[4] == 40
    assert run.scheduler.stats.kv_offload_loaded_blocks == 10


def test_a_salt_holds_for_files() -> None:
    files = files_of(prompt_of(1), b"one tenant")
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    ask(run, 4, prompt_of(1), b"another")
    ask(run, 5, prompt_of(1))
    ask(run, 6, prompt_of(1), b"one tenant")
    assert [run.cached[number] for number in (4, 5, 6)] == [0, 0, 40]


def test_slow_files_are_not_read() -> None:
    files = files_of(prompt_of(1))
    run = run_with(KVOffloadInfo(60, 64, SLOW), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    ask(run, 4, prompt_of(1))
    assert run.cached[4] == 0
    assert run.scheduler.stats.kv_offload_read_blocks == 0


def test_missing_files_are_computed_and_written_again() -> None:
    files = files_of(prompt_of(1))
    names = list(files)
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=names))
    files.clear()
    wanted = texts_without([Request(4, prompt_of(1), SamplingParams(max_tokens=3))])[4]
    assert ask(run, 4, prompt_of(1)) == wanted
    assert run.cached[4] == 0
    assert run.scheduler.stats.kv_offload_failed_blocks == 10
    for number in (5, 6):
        ask(run, number, prompt_of(number))
    settle(run)
    assert len(set(names) & set(files)) == 10


def test_others_go_on_while_one_waits_for_files() -> None:
    files = files_of(prompt_of(1))
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.ranks.receive = list  # the disk does not answer
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    run.add(Request(4, prompt_of(1), SamplingParams(max_tokens=3)))
    run.add(Request(5, prompt_of(7), SamplingParams(max_tokens=3)))
    for _ in range(20):
        run.step()
    assert len(run.texts[5]) == 3
    assert not run.texts[4]
    assert run.scheduler.refresh_gauges().num_requests_loading == 1
    assert run.scheduler.stats.num_requests_waiting == 1
    run.now += LOAD_TIMEOUT_S  # then it is computed
    for _ in range(20):
        run.step()
    assert len(run.texts[4]) == 3
    assert run.cached[4] == 0


def test_an_aborted_load_leaves_nothing() -> None:
    files = files_of(prompt_of(1))
    run = run_with(KVOffloadInfo(60, 64, FAST), files)
    run.scheduler.kv_offload.report(KVReport(KVReportKind.APPEARED, 0, digests=list(files)))
    run.add(Request(4, prompt_of(1), SamplingParams(max_tokens=3)))
    run.step()
    assert run.scheduler.awaits_files
    assert run.scheduler.abort(4, run.now) is not None
    assert not run.scheduler.has_work
    settle(run)
    assert run.scheduler.kv_offload.host.num_pins == 0


def test_without_options_steps_carry_nothing() -> None:
    run = Run(ChainedRanks(CONFIG, info_of(None, 20), Random(1)))
    for number in (1, 2, 3, 1):
        ask(run, number, prompt_of(number))
    assert run.scheduler.kv_offload is None
    assert run.scheduler.stats.kv_offload_saved_blocks == run.scheduler.stats.kv_offload_dropped_blocks == 0


def test_slots_are_taken_from_those_used_longest_ago() -> None:
    tier = HostTier(3)
    for name in (b"a", b"b", b"c"):
        slot = tier.take()
        assert slot is not None
        tier.name(slot, name)
        tier.unpin(slot)
    kept = tier.find(b"a")
    assert kept is not None
    tier.pin(kept)
    taken = tier.take()
    assert taken is not None
    assert tier.find(b"b") is None
    tier.unpin(kept)
    tier.unpin(taken)
    tier.forget(b"c")
    tier.audit()
    assert [tier.find(name) is None for name in (b"a", b"b", b"c")] == [False, True, True]


def test_copies_of_a_step_that_was_not_sent_come_first_in_the_next() -> None:
    offload = KVOffload(KVOffloadInfo(4, 64), BLOCK, None, EngineStats())
    offload.save(7, b"x" * 32)
    copies = offload.take_copies()
    offload.save(9, b"y" * 32)
    offload.restore_copies(copies)
    assert [(kind, block) for kind, block, _, _ in offload.take_copies().commands] == [(Copy.SAVE, 7), (Copy.SAVE, 9)]


def digests_of(count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(count)]


def offload_with_files(num_slots: int, digests: list[bytes]) -> KVOffload:
    offload = KVOffload(KVOffloadInfo(num_slots, 64, FAST), BLOCK, None, EngineStats())
    offload.report(KVReport(KVReportKind.APPEARED, 0, digests=digests))
    return offload


def test_a_second_load_of_a_request_waits_for_each_of_its_reads_once() -> None:
    """The first ended while its files were still being read: it waited too long, or its sequence was preempted."""
    offload = offload_with_files(20, digests := digests_of(10))
    assert offload.begin_load(7, digests, 0, 0.0)
    copies = offload.take_copies()
    reads = [slot for _, _, slot, _ in copies.commands]
    offload.finish_copies(copies)
    offload.release(7)
    assert offload.begin_load(7, digests, 0, 1.0)
    assert not offload.has_copies, "the reads under way serve both"
    for slot in reads:
        assert not offload.take_ready(1.0)
        offload.report(KVReport(KVReportKind.READ, 0, results=[(slot, True)]))
    assert offload.take_ready(1.0) == [7]
    offload.release(7)
    offload.audit()
    assert offload.host.num_pins == 0


def seconds_to_load(num_blocks: int) -> float:
    """Processor time that one load from files takes from the loop, without the work of ranks."""
    offload = offload_with_files(num_blocks, digests := digests_of(num_blocks))
    begun = time.thread_time()
    assert offload.begin_load(1, digests, 0, 0.0)
    copies = offload.take_copies()
    offload.finish_copies(copies)
    for _, _, slot, _ in copies.commands:
        offload.report(KVReport(KVReportKind.READ, 0, results=[(slot, True)]))
    assert offload.take_ready(0.0) == [1]
    offload.release(1)
    return time.thread_time() - begun


def seconds_to_keep(num_blocks: int) -> float:
    """Processor time that the engine's end takes for `num_blocks` blocks of the pool, without the work of ranks."""
    offload = offload_with_files(2 * num_blocks + 2, [])
    begun = time.thread_time()
    assert all(offload.write_to_file(block, digest) for block, digest in enumerate(digests_of(num_blocks), 1))
    return time.thread_time() - begun


@pytest.mark.parametrize("seconds_for", [seconds_to_load, seconds_to_keep])
def test_time_of_the_loop_grows_with_the_blocks_and_not_with_their_square(
    seconds_for: Callable[[int], float],
) -> None:
    few, many = min(seconds_for(1000) for _ in range(5)), min(seconds_for(16_000) for _ in range(2))
    assert many < 64 * few, "16 times as many blocks"
