"""Requests that arrive one by one are completed as fast as requests that arrive together, however many there are."""

import math
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.simulated_ranks import CostModel
from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import StepMetadata
from tests.sim.simulator import Arrival, SimulationConfig, Watch, simulate

ROWS, PROMPT, OUTPUT = 64, 64, 64
TOKEN_S = 0.0005
SLOWER_AFTER, SLOWER, SPREAD = 100, 5.0, 0.5  # steps, ratio, standard deviation of the logarithm


@dataclass(frozen=True, slots=True)
class BusyMachine(CostModel):
    """Cost of steps on a machine whose other programs delay each step by chance, and slow all steps after a while."""

    draw: random.Random = field(default_factory=lambda: random.Random(1), compare=False)
    steps: list[int] = field(default_factory=list, compare=False)

    def seconds(self, step: StepMetadata) -> float:
        self.steps.append(step.num_tokens)
        ratio = SLOWER if len(self.steps) > SLOWER_AFTER else 1.0
        return CostModel.seconds(self, step) * ratio * self.draw.lognormvariate(0.0, SPREAD)


def arrivals(count: int, per_s: float) -> list[Arrival]:
    """Poisson arrivals of different prompts."""
    draw, now, trace = random.Random(3), 0.0, []
    for number in range(count):
        now += draw.expovariate(per_s)
        trace.append(Arrival(now, tuple(range(number, number + PROMPT)), OUTPUT))
    return trace


def completed_per_s(per_s: float, cost: CostModel) -> float:
    """Requests per second between the end of the first fifth of them and that of the fourth."""
    sizes = {"max_model_len": 256, "max_num_seqs": ROWS, "max_num_batched_tokens": 2048, "block_size": 32}
    settings = SimulationConfig(EngineConfig(WorkerConfig("none", **sizes)), num_blocks=512, cost=cost)
    watch = Watch()
    assert simulate(arrivals(300, per_s), settings, watch).num_finished == 300
    ends_s = np.sort([*watch.last_s.values()])
    return 180 / float(ends_s[239] - ends_s[59])


@pytest.mark.parametrize("load", [1.2, 2.0, 5.0])
@pytest.mark.parametrize("step_s", [0.05, 0.2])
@pytest.mark.slow
def test_an_overloaded_server_completes_what_its_rows_allow(step_s: float, load: float) -> None:
    """An estimate that delays made too high must not keep the batch small, which would keep the estimate too high."""
    tokens_per_step = ROWS + ROWS * PROMPT / OUTPUT
    full_step_s = (step_s + tokens_per_step * TOKEN_S) * SLOWER * math.exp(SPREAD**2 / 2)
    capacity = ROWS / OUTPUT / full_step_s
    cost = BusyMachine(step_s=step_s, token_s=TOKEN_S, context_token_s=0.0)
    assert completed_per_s(load * capacity, cost) >= 0.8 * capacity
