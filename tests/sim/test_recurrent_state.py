"""Hundreds of requests to a model with recurrent layers: every step reads the right states, and prefixes are reused."""

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.kv_cache.sequence_memory import num_state_slots
from oarlock.engine.simulated_ranks import END_TOKEN, SimulatedExecutor
from oarlock.workers.config import GroupInfo, WorkerConfig
from oarlock.workers.protocol import StepMetadata, StepOutput
from tests.sim.simulator import Arrival, Report, SimulationConfig, make_trace, simulate
from tests.unit.engine.pooling_fakes import ROOT, chain
from tests.unit.engine.state_fakes import FakeStates

VOCAB = 32_000


class RecurrentRanks(SimulatedExecutor):
    """Ranks that keep the history of tokens in each slot, and note the history that each token was sampled after."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        num_slots = num_state_slots(self.info)
        assert num_slots is not None
        self.states = FakeStates(num_slots)
        self.sampled_after: dict[tuple[int, int], int] = {}  # (seed, position of the sampled token) -> history
        self._queue: deque[StepMetadata] = deque()
        self._sampled = np.zeros(0, np.int32)  # by the step before

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        super().submit(step, masks_follow=masks_follow)
        self.states.check(step)
        self._queue.append(step)

    def collect(self) -> StepOutput:
        step, output = self._queue.popleft(), super().collect()
        unknown = step.token_ids < 0
        tokens = step.token_ids.copy()
        tokens[unknown] = self._sampled[-1 - tokens[unknown]]
        histories = self.states.run(replace(step, token_ids=tokens))
        places = zip(step.seeds.tolist(), step.sample_positions.tolist(), strict=True)
        for place, index in zip(places, step.logits_indices.tolist(), strict=True):
            assert self.sampled_after.setdefault(place, histories[index]) == histories[index], "another history"
        self._sampled = output.token_ids
        return output


def run(
    trace: list[Arrival], *, num_slots: int, num_blocks: int = 1200, stages: int = 1, depth: int | None = 2
) -> tuple[Report, RecurrentRanks]:
    worker = WorkerConfig(
        "none",
        max_model_len=2048,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        block_size=32,
        pipeline_parallel_size=stages,
    )
    engine = EngineConfig(worker, max_waiting_requests=5000, max_waiting_tokens=10**7, pipeline_depth=depth)
    groups = GroupInfo(num_blocks, 0), GroupInfo(num_slots, 0, is_recurrent=True)
    started: list[RecurrentRanks] = []

    def start(*arguments) -> RecurrentRanks:
        started.append(RecurrentRanks(*arguments))
        return started[0]

    report = simulate(
        trace, SimulationConfig(engine, num_blocks=num_blocks, vocab_size=VOCAB, groups=groups, ranks=start)
    )
    check_histories(trace, started[0])
    return report, started[0]


def check_histories(trace: list[Arrival], ranks: RecurrentRanks) -> None:
    """Every token was sampled after the history of its own request."""
    for seed, arrival in enumerate(trace, 1):
        history, length = ROOT, len(arrival.prompt_token_ids)
        tokens = list(arrival.prompt_token_ids)
        tokens += [
            1 + (seed * 1_000_003 + at * 7919) % (VOCAB - 1) for at in range(length, length + arrival.num_output_tokens)
        ]
        tokens[-1] = END_TOKEN
        for position, token in enumerate(tokens):
            if position >= length:
                assert ranks.sampled_after.pop((seed, position)) == history
            history = chain(history, token, position)


def crowd(**changes) -> list[Arrival]:
    settings: dict[str, Any] = {
        "num_requests": 40,
        "requests_per_s": 20.0,
        "mean_prompt_tokens": 120,
        "mean_output_tokens": 60,
        "max_prompt_tokens": 1000,
        "shared_prefix_tokens": 256,
        "seed": 7,
    }
    return make_trace(**{**settings, **changes})


@pytest.mark.parametrize(
    ("stages", "depth"),
    [(1, 2), pytest.param(1, 1, marks=pytest.mark.soak), pytest.param(3, None, marks=pytest.mark.soak)],
)
@pytest.mark.slow
def test_every_token_follows_the_state_of_its_own_sequence(stages: int, depth: int | None) -> None:
    report, ranks = run(
        crowd(requests_per_s=60.0, mean_output_tokens=120), num_slots=100, num_blocks=60, stages=stages, depth=depth
    )
    assert report.num_finished == 40 and report.num_errors == 0 and report.num_preemptions > 0
    assert report.prefix_cache_hit_rate > 0.4 and ranks.states.num_resumed > 30


@pytest.mark.slow
def test_scarce_slots_bound_the_batch_and_nothing_else() -> None:
    report, _ = run(crowd(requests_per_s=100.0), num_slots=12)
    assert report.num_finished == 40 and report.num_errors == 0
    assert report.max_running == 5
