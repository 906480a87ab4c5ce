"""Drafts and prompts share a step in virtual time: neither takes the tokens of the other."""

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.simulated_ranks import CostModel, SimulatedExecutor, VirtualClock, replica_info
from oarlock.engine.spec_decode.drafter import Drafter
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import StepMetadata, StepOutput

NUM_DRAFTS, SEQS, OUTPUT = 8, 15, 1000
DRAFTS = SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS, prompt_lookup_max=3, prompt_lookup_min=1)


class AcceptingRanks(SimulatedExecutor):
    """Ranks that find every draft right."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.drafts: list[np.ndarray] = []

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        super().submit(step, masks_follow=masks_follow)
        self.drafts.append(step.num_drafts.copy())

    def collect(self) -> StepOutput:
        output, drafts = super().collect(), self.drafts.pop(0)
        output.num_accepted = drafts if len(drafts) else None
        return output


class Eager(Drafter):
    """A drafter of as many tokens as it may, for the first of the sequences first."""

    def may_pay(self, num_seqs: int) -> bool:
        return True

    def choose(self, candidates, num_seqs: int, most: int) -> list[list[int]]:
        drafts = []
        for one in candidates:
            drafts.append([1] * min(one.room, NUM_DRAFTS, max(0, most)))
            most -= len(drafts[-1])
        return drafts


def first_token_s(budget: int, drafter: type[Drafter] | None, prompt: int = 100) -> float:
    """Virtual seconds until the first token of a prompt that comes while `SEQS` long answers are written."""
    sizes = {"max_num_seqs": SEQS + 1, "max_num_batched_tokens": budget, "block_size": 32, "max_model_len": 4096}
    worker = WorkerConfig("none", **sizes, num_speculative_tokens=NUM_DRAFTS)
    config, clock = EngineConfig(worker, speculative=None if drafter is None else DRAFTS), VirtualClock()
    info = replica_info(worker, 4096, 32_000)
    ranks = AcceptingRanks(worker, info, (CostModel(),), clock, np.full(SEQS + 2, 10**6))
    core = EngineCore(config, ranks, clock)
    if drafter is not None:
        core.scheduler.drafter = drafter(DRAFTS, core.scheduler.step_costs)
    for number in range(SEQS):
        core.scheduler.add(Request(number, (1, 2, number), SamplingParams(max_tokens=OUTPUT, seed=number)), 0.0)
    while core.scheduler.stats.generation_tokens < 40 * SEQS:
        core.begin(), core.finish()
    begun_s = clock.now_s
    core.scheduler.add(Request(SEQS, tuple(range(prompt)), SamplingParams(max_tokens=4, seed=SEQS)), begun_s)
    while SEQS not in {event.request_id for event in (core.begin(), core.finish())[1]}:
        pass
    return clock.now_s - begun_s


@pytest.mark.parametrize("budget", [20, 128])
def test_a_prompt_need_not_wait_until_drafts_leave_it_tokens(budget: int) -> None:
    """It has half of what the answers leave of a step, so it waits about twice as long as without drafts."""
    assert first_token_s(budget, Eager) < 3.5 * first_token_s(budget, None)
