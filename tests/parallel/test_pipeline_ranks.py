"""Pipeline stages that are processes: the same bits as one rank, several steps in flight, and the end of a stage."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import WorkerError
from oarlock.workers.executor import Executor, start_executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer
from tests.parallel.test_multiproc_executor import step_of
from tests.parallel.test_pipeline_depth import KINDS, LATE_KINDS
from tests.parallel.test_pipeline_stages import SHAPE, config_of, run
from tests.unit.workers.kernel_levels import NO_KERNELS

ALL_KINDS = (*KINDS, *LATE_KINDS)
pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2", **SHAPE | {"tie_word_embeddings": True})


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, Answer]:
    one = begin(config_of(checkpoint, "bfloat16", "none", "auto", 1, 1))
    answers, _ = run(one, ALL_KINDS, 7)
    one.close()
    return answers


def begin(config: WorkerConfig) -> Executor:
    return start_executor(config, lambda phase, fraction: None)


@pytest.fixture(
    scope="module",
    params=[(1, 2), pytest.param((2, 2), marks=pytest.mark.soak), pytest.param((1, 4), marks=pytest.mark.soak)],
    ids=["2 stages", "2 stages of 2 ranks", "4 stages"],
)
def executor(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    started = begin(config_of(checkpoint, "bfloat16", "none", "auto", *request.param))
    yield started
    started.close()


def test_every_answer_has_the_bits_of_one_rank(executor: Executor, expected: dict[int, Answer]) -> None:
    got, engine = run(executor, ALL_KINDS, 7)
    assert {number for number in expected if got[number] != expected[number]} == set()
    assert engine.num_ahead > engine.num_steps / 3 and engine.scheduler.stats.num_preemptions > 0
    assert executor.info.batch_invariant and executor.info.rank_invariant
    assert executor.info.pipeline_parallel_size == executor.config.pipeline_parallel_size
    executor.ping()


def test_as_many_steps_as_stages_are_in_flight(executor: Executor) -> None:
    stages = executor.config.pipeline_parallel_size
    assert executor.max_in_flight == executor.best_in_flight == stages
    expected = []
    for number in range(3 * stages):
        executor.submit(step_of(number + 1, [5, 9, 17 + number], 0))
        expected.append(executor.collect().token_ids.tolist())
    for first in range(0, 3 * stages, stages):
        for number in range(first, first + stages):
            executor.submit(step_of(100 + number, [5, 9, 17 + number], 0))
        for number in range(first, first + stages):
            assert executor.collect().token_ids.tolist() == expected[number]


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_that_ends_or_hangs_is_named(checkpoint: Path, victim: int) -> None:
    """Stage 0 is stopped, which only the step's time limit can tell; stage 1 is killed."""
    config = config_of(checkpoint, "bfloat16", "none", "auto", 1, 2).with_(step_timeout_s=2.0, raise_step_timeout=False)
    staged = begin(config)
    os.kill(staged.rank_pids[victim], signal.SIGKILL if victim else signal.SIGSTOP)
    with pytest.raises(WorkerError) as caught:
        staged.submit(step_of(1, [5, 9, 17], 0))
        staged.collect()
    assert caught.value.rank == victim and caught.value.hung == (victim == 0)
    if not victim:
        os.kill(staged.rank_pids[victim], signal.SIGCONT)
    staged.close()


@pytest.mark.soak
def test_every_tensor_of_every_stage_is_that_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = [
        f"--output={report}",
        "--pipeline-parallel-size=2",
        "--dtype=float32",
        "--device=cpu",
        "--",
        str(checkpoint),
    ]
    subprocess.run([sys.executable, "-m", "oarlock.workers.verify", *words], check=True, timeout=300)
    found = json.loads(report.read_text())
    assert found["ok"] and found["pipeline_parallel_size"] == 2
    assert found["halves"]["compared"] == 2 * SHAPE["num_hidden_layers"]
