"""Real ranks that run out of memory in steps: they are rolled back and made smaller, and responses keep their bits."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oarlock.engine.errors import OUT_OF_MEMORY
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.executor import Executor
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.faulty_rank import TRIGGER
from tests.parallel.test_multiproc_executor import start
from tests.parallel.test_pipeline_depth import DEMO, KINDS, LATE_KINDS, Alternating, requests_of


@pytest.fixture(scope="module")
def trigger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a file; memory is short while it exists."""
    return tmp_path_factory.mktemp("memory") / "is_short"


@pytest.fixture(scope="module")
def executor(trigger: Path) -> Iterator[Executor]:
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "kv_cache_bytes": 16 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TRIGGER, str(trigger))
        patch.setattr("oarlock.workers.ranks.host_ranks.SERVES", "tests.parallel.faulty_rank")
        started = start(DEMO, 2, dtype="bfloat16", **limits)
    yield started
    started.close()


def test_every_answer_has_the_bits_of_enough_memory(
    executor: Executor, trigger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not executor.info.batch_invariant:
        pytest.skip(f"steps are put together otherwise, which shows here: {executor.info.batch_invariant_reason}")
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.GROW_AFTER_STEPS", 4)
    requests = [request for request in requests_of((*KINDS, *LATE_KINDS), 26) if max(request.prompt_token_ids) < 4000]
    found, engines = [], []
    for is_short, depth in ((False, 2), (True, 1), (True, 2)):
        if is_short:
            trigger.touch()
        engine = DirectEngine(executor, num_blocks=24, enable_prefix_caching=True, pipeline_depth=depth)
        matchers = {request.request_id: Alternating() for request in requests if request.params.grammar is not None}
        found.append(engine.run(requests, arrives_at=lambda number: number // 2, matchers=matchers))
        engines.append(engine)
        trigger.unlink(missing_ok=True)
        engine.scheduler.audit()
        assert engine.scheduler.memory.num_held == 0
    expected, *others = found
    for got in others:
        assert {number for number in expected if got[number] != expected[number]} == set()
    assert all(answer.error is None for answer in expected.values())
    assert engines[0].num_refused == 0 and all(engine.num_refused > 5 for engine in engines[1:])
    assert engines[2].num_ahead > 0


def test_a_request_fails_alone_where_nothing_smaller_is_left(
    executor: Executor, trigger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose steps the engine blames often enough; the two older requests are answered."""
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.MAX_REFUSALS", 0)
    engine = DirectEngine(executor, num_blocks=24, pipeline_depth=2)
    params = SamplingParams(max_tokens=20)
    requests = [Request(number, tuple(range(3, 12 + number)), params) for number in range(3)]
    trigger.touch()
    answers = engine.run(requests, arrives_at=lambda number: 10 if number == 2 else 0)
    trigger.unlink()
    failed = {number for number, answer in answers.items() if answer.error is not None}
    assert failed and all(answers[number].error == OUT_OF_MEMORY for number in failed)
    plenty = DirectEngine(executor, num_blocks=24, pipeline_depth=2).run(requests)
    for number, answer in answers.items():
        tokens = plenty[number].token_ids
        assert answer.token_ids == (tokens[: len(answer.token_ids)] if number in failed else tokens)
    assert engine.scheduler.memory.num_held == 0 and not engine.scheduler.has_work
