"""The real scheduler and a real rank with recurrent layers, in one process: bits do not depend on a text's way.

Alone, in a batch, cut into chunks, from a checkpoint, after a preemption, after refused steps, and one step ahead.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from oarlock.engine.simulated_ranks import replica_info
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.attention.forward_batch import BlockTables
from oarlock.workers.config import GroupInfo, WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.models import decoder as decoder_module
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.protocol import StepMetadata, StepOutput, refusal, table_width
from oarlock.workers.runner.decoder_loading import attention_backends
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.step_building import eager_steps
from oarlock.workers.runner.trial_steps import TrialMemory
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.unit.workers.kernel_levels import threads
from tests.unit.workers.layers.test_memory_groups import MODELS, RunningMean, RunningMeanSpec, loaded

BLOCK = 8
NAMES = ["pages and states", "no attention"]


class LocalRank:
    """Executor of one rank in this process, which refuses every `refuses`-th step."""

    rank_pids: tuple[int, ...] = ()
    step_times_ns: tuple[int, ...] = ()
    max_in_flight, best_in_flight, kv_reports = 2, 1, None

    def __init__(self, model: Decoder, *, budget: int, num_blocks: int, num_slots: int, refuses: int = 0) -> None:
        self.config = config = WorkerConfig(
            "none",
            device="cpu",
            dtype="bfloat16",
            attention_backend="torch",
            max_model_len=120,
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            block_size=BLOCK,
        )
        groups = tuple(
            GroupInfo(num_blocks, 0, span=group.memory.span)
            if isinstance(group.memory, PagesSpec)
            else GroupInfo(num_slots, 0, is_recurrent=True)
            for group in model.spec.groups
        )
        self.info = replica_info(config, num_blocks, model.spec.vocab_size, groups=groups)
        backends = attention_backends(model, config, fixes_order=True)
        pages = TrialMemory.of(model.spec).pages_groups
        tables = BlockTables(config.max_num_seqs, table_width(config), BLOCK, torch.device("cpu"), pages)
        self._steps = eager_steps(config, model, backends, tables, PipelineStage.solo(), answers=True)
        self._steps.memory = allocate_memory(model, backends, [group.num_blocks for group in groups])
        self._outputs: list[StepOutput] = []
        self._refuses, self._num_steps, self._has_refused = refuses, 0, False

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        self._num_steps += 1
        is_refused = bool(self._refuses) and self._num_steps % self._refuses == 0
        self._has_refused = (step.is_ahead and self._has_refused) or is_refused
        if is_refused and not step.is_ahead:
            self._steps.forward(step)  # it fails late: everything that it writes is written
        if self._has_refused:
            self._outputs.append(refusal(step.step_id))
            return
        output = self._steps.sample(step, *self._steps.forward(step), None)
        assert output is not None
        self._outputs.append(output)

    def collect(self) -> StepOutput:
        return self._outputs.pop(0)

    def send_masks(self, bits: np.ndarray) -> None:
        raise AssertionError("no request has a grammar")

    def ping(self) -> None:
        """It is alive."""

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        """Nothing to close."""


def requests(first: int = 1) -> list[Request]:
    """Six requests, of which three and three share the first 30 tokens, and the first three yield to the others."""
    found = []
    for number in range(6):
        shared = [(7 * at + number // 3) % 50 for at in range(30)]
        own = [(11 * at + number) % 50 for at in range(3 + 5 * number)]
        params = SamplingParams(max_tokens=10 + number, temperature=0.8, seed=number, logprobs=2)
        found.append(Request(first + number, (*shared, *own), params, is_low_priority=number < 3))
    return found


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small shapes: a second thread only waits for the first."""
    with threads(1):
        yield


@pytest.fixture(scope="module", params=[NAMES[0], pytest.param(NAMES[1], marks=pytest.mark.soak)])
def model(request: pytest.FixtureRequest) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decoder_module._SUBLAYERS, RunningMeanSpec, RunningMean)
        return loaded(MODELS[request.param], TensorParallel.solo(), torch.bfloat16)


@pytest.fixture(scope="module")
def alone(model: Decoder) -> list[Answer]:
    """The answers of requests that run one after the other, each prompt in one step, without a prefix cache."""
    found: list[Answer] = []
    with torch.inference_mode():
        for request in requests():
            rank = LocalRank(model, budget=120, num_blocks=40, num_slots=5)
            found += DirectEngine(rank).run([request]).values()
    assert len({tuple(answer.token_ids) for answer in found}) == 6
    return found


WAYS = {
    "in a batch, in chunks": {"budget": 13},
    "one step ahead": {"budget": 29, "pipeline_depth": 2},
    "preempted": {"budget": 29, "max_num_seqs": 2},
    "refused": {"budget": 29, "refuses": 6},
    "refused, one step ahead": {"budget": 29, "refuses": 6, "pipeline_depth": 2},
    "with few slots": {"budget": 29, "num_slots": 9},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_bits_do_not_depend_on_how_a_text_was_computed(
    monkeypatch: pytest.MonkeyPatch, model: Decoder, alone: list[Answer], way: str
) -> None:
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.GROW_AFTER_STEPS", 2)
    settings: dict[str, Any] = {"num_blocks": 100, "num_slots": 40, "pipeline_depth": 1, **WAYS[way]}
    depth, rows = settings.pop("pipeline_depth"), settings.pop("max_num_seqs", None)
    with torch.inference_mode():
        rank = LocalRank(model, **settings)
        engine = DirectEngine(rank, max_num_seqs=rows, enable_prefix_caching=True, pipeline_depth=depth)
        first = engine.run(requests(), arrives_at=lambda number: 3 * number)
        again = engine.run(requests(100))  # from checkpoints
    for answers in (first, again):
        for answer, expected in zip(answers.values(), alone, strict=True):
            assert answer == expected
    engine.scheduler.audit()
    assert engine.num_cached_tokens >= (24 if way == "with few slots" else 96)
    assert (engine.num_refused > 3) == ("refused" in way)
    assert engine.scheduler.stats.num_preemptions > 0 or way != "preempted"
