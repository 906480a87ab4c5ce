"""KV memory is the memory that a measured step leaves, on a made-up device; a step that cannot fit is known before."""

import mmap
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.attention.backend import LayerMemory
from oarlock.workers.attention.forward_batch import BlockTables
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.shm_layout import Votes, total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata, StepOutput, empty_step, table_width
from oarlock.workers.runner.buckets import prompt_sizes
from oarlock.workers.runner.cuda_graphs import Calls, GraphMaker
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.graph_capture import graph_bytes
from oarlock.workers.runner.memory_needs import out_of_memory as told
from oarlock.workers.runner.memory_needs import sampling_bytes
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.pending_output import Launched, wait_for
from oarlock.workers.runner.step_building import device_steps
from oarlock.workers.runner.step_guard import StepGuard
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step, largest_step
from oarlock.workers.sampling.token_histories import DenseHistories
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.made_up_device import CountedTensors, MadeUpDevice

CPU = torch.device("cpu")
TOTAL = 64 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


def runner_on(checkpoint: Path, device: MadeUpDevice, **changes) -> ModelRunner:
    config = WorkerConfig(
        str(checkpoint), device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=300,
        block_size=16, attention_backend="torch", num_threads=1,
    )  # fmt: skip
    runner = ModelRunner(preflight(config.with_(**changes)), TensorParallel.solo(), device)
    runner.load(lambda fraction: None)
    return runner


def test_kv_memory_is_what_the_largest_step_leaves(checkpoint: Path) -> None:
    device = MadeUpDevice(TOTAL, TOTAL // 2)
    runner = runner_on(checkpoint, device)
    (num_blocks,) = runner.num_blocks_that_fit()
    (peak,) = device.peaks
    assert peak > 300 * 2 * 4 * runner.spec.layers[0].mlp.intermediate_size, "the largest step has run"
    assert runner.memory.step.largest >= peak
    left = int(0.9 * TOTAL) - TOTAL // 2 - runner.memory.step.largest
    assert num_blocks == min(left // runner.backends[0].spec.bytes_per_block - 1, 4 * 8 + 1)
    smaller = runner_on(checkpoint, MadeUpDevice(TOTAL, TOTAL // 2), max_num_batched_tokens=100)
    smaller.num_blocks_that_fit()
    assert smaller.memory.step.largest < runner.memory.step.largest


@pytest.mark.slow
def test_no_step_takes_more_than_is_said_before(checkpoint: Path) -> None:
    """On the device that was measured; so a rank that reserves so much gets to the end of its step."""
    runner = runner_on(checkpoint, MadeUpDevice(TOTAL, TOTAL))
    runner.allocate(runner.num_blocks_that_fit())
    draw = random.Random(0)
    for _ in range(20):
        chunks, left = [], 300
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(100)
            count = draw.randint(1, min(left, 128 - start))
            left -= count
            chunks.append(SequenceChunk([1] * count, start, [NULL_BLOCK] * 8))
            if not left:
                break
        step = greedy_step(chunks, 16, range(draw.randint(1, min(4, 300 - left))))
        with CountedTensors(TOTAL) as counted:
            runner.execute(step)
        assert 0 < counted.peak <= runner.memory.step.of(step), [(len(c.token_ids), c.start) for c in chunks]
    assert runner.memory.step.of(empty_step(1)) == 0


def test_the_largest_step_has_as_many_tokens_as_the_limits_allow(checkpoint: Path) -> None:
    config = WorkerConfig("", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=300, block_size=16)
    step = largest_step(config)
    assert step.num_tokens == 300 and step.seq_lens.tolist() == [128, 128, 128] and len(step.logits_indices) == 128
    step = largest_step(config.with_(max_num_seqs=2))
    assert step.num_tokens == 256


def test_too_little_memory_is_reported_with_the_measured_values(checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="Out of memory while trying the largest step: each rank needs") as refused:
        runner_on(checkpoint, MadeUpDevice(TOTAL, 100_000)).num_blocks_that_fit()
    assert refused.value.exit_code == 4 and "--max-num-batched-tokens" in refused.value.fix
    device = MadeUpDevice(TOTAL, TOTAL)
    runner = runner_on(checkpoint, device, num_kv_blocks=10)
    assert runner.num_blocks_that_fit() == [10]
    device._free = 100_000  # as after KV memory of the operator's own size
    with pytest.raises(StartupError, match="Out of memory while leaving room for a step") as refused:
        runner.allocate([10])
    for size in (runner.memory.step.largest, 10 * runner.backends[0].spec.bytes_per_block, 100_000):
        assert human_bytes(size) in refused.value.cause
    assert "--kv-cache-memory" in refused.value.fix


# -- graphs

GRAPHS, EACH, KEPT = 300_000, 5_000, 7_000  # bytes: of the pool, of each size, of libraries after their first use


class MadeUpGraphs(DeviceSteps):
    """Steps of a made-up device whose graphs take memory."""

    def __init__(self, device: MadeUpDevice) -> None:
        self._memory: list[LayerMemory] = []
        self.sizes: list[int] = []
        self._device, self._before = device, device.free_bytes() - KEPT

    def with_layers(self, model: Decoder, memory: list[LayerMemory]) -> "MadeUpGraphs":
        return self

    def forward(self, step: StepMetadata) -> tuple[Any, Tensor]:
        return None, torch.empty(0)

    def sample(self, *_: object) -> Launched:
        return RAN

    def capture(self, maker: GraphMaker, sizes: Sequence[int], prompts: Sequence[int] = ()) -> int:
        self.sizes += [*prompts, *sizes]
        self._device._free = self._before - GRAPHS - EACH * len(self.sizes)
        return len(self.sizes)

    def release(self) -> None:
        self.sizes.clear()
        self._device._free = self._before


@pytest.mark.parametrize("counts", [(0, 1), (1, 2), (9, 5)])
def test_the_memory_of_all_graphs_follows_from_two_of_each_kind(counts: tuple[int, int]) -> None:
    device = MadeUpDevice(TOTAL, TOTAL)
    steps, tried = MadeUpGraphs(device), []

    def capture(kind: int, size: int) -> None:
        tried.append((kind, size))
        steps.capture(Calls(), [size])

    kinds = [[partial(capture, kind, size) for size in range(count, 0, -1)] for kind, count in enumerate(counts)]
    assert graph_bytes(kinds, steps.release, device) == GRAPHS + sum(counts) * EACH
    assert tried == [(kind, size) for kind, count in enumerate(counts) for size in range(count, max(0, count - 2), -1)]
    assert device.free_bytes() == TOTAL - KEPT


@pytest.mark.parametrize("eager", [False, True])
def test_kv_memory_leaves_room_for_graphs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, eager: bool) -> None:
    """Whose sizes are 1, 2 and 4 sequences, and of tokens as `prompt_sizes` has them; a step takes nothing, so that
    its estimate holds."""
    device = MadeUpDevice(TOTAL, TOTAL)
    runner = runner_on(checkpoint, device, enforce_eager=eager)
    for name in ("prepare_decode", "prepare_prompts"):
        monkeypatch.setattr(runner.backends[0], name, lambda *_: None, raising=False)
    count = 3 + len(prompt_sizes(runner.config))
    graphs, block = 0 if eager else GRAPHS + count * EACH, runner.backends[0].spec.bytes_per_block
    kept = 0 if eager else KEPT
    device._free = TOTAL - int(0.9 * TOTAL) + runner.memory.step.largest + graphs + kept + 21 * block
    monkeypatch.setattr(runner, "steps", MadeUpGraphs(device))
    assert runner.num_blocks_that_fit() == [20], "and one that the backend keeps"
    device._free = runner.memory.step.largest + GRAPHS
    if not eager:
        with pytest.raises(StartupError, match="while leaving room for a step and graphs") as refused:
            runner.allocate([10])
        assert f"{human_bytes(graphs)} for graphs" in refused.value.cause


def test_memory_to_sample_from_is_counted(checkpoint: Path) -> None:
    runner = runner_on(checkpoint, MadeUpDevice(TOTAL, TOTAL))
    tables = BlockTables(runner.config.max_num_seqs, table_width(runner.config), runner.config.block_size, CPU)
    steps = device_steps(runner.config, runner.model, runner.backends, tables)
    held = steps._logits.nbytes + DenseHistories(4, 0, runner.spec.vocab_size, CPU).seen.nbytes
    held += steps._sampling._sampler._scratch.adjusted.nbytes
    assert held == sampling_bytes(runner.config, runner.spec)
    on_cuda = runner.config.with_(device="cuda")
    error = told(on_cuda, runner.spec, 1 << 20, "trying", None, 0)
    assert f"{human_bytes(held)} of logits and histories to sample from" in error.cause


# -- refusing steps


def step(step_id: int, *, is_ahead: bool = False) -> StepMetadata:
    made = greedy_step([SequenceChunk([1], 0, [1])], 16, [0], step_id=step_id)
    made.is_ahead = is_ahead
    return made


def out_of_memory() -> Launched:
    raise torch.OutOfMemoryError("CUDA out of memory.")


HUGE = 1 << 60
RAN = StepOutput(0, np.empty(0, np.int32), np.empty(0, np.uint8))


def ran() -> Launched:
    return RAN


def test_a_step_sent_behind_a_refused_one_is_refused_untried() -> None:
    sizes = {2: HUGE}
    guard = StepGuard(lambda step: sizes.get(step.step_id, 1), CPU, None)
    runs = [guard.run(step(number, is_ahead=number in (2, 3)), ran) is RAN for number in range(1, 6)]
    assert runs == [True, False, False, True, True]


def test_one_rank_alone_refuses_a_step_that_fails_in_its_middle() -> None:
    guard = StepGuard(lambda step: 1, CPU, None)
    refused = wait_for(guard.run(step(1), out_of_memory))
    assert refused is not None and refused.out_of_memory and refused.step_id == 1
    assert guard.run(step(2, is_ahead=True), ran) is not RAN
    assert guard.run(step(3), ran) is RAN
    with pytest.raises(ZeroDivisionError):
        guard.run(step(4), lambda: 1 // 0)  # ty: ignore[invalid-argument-type]


@pytest.fixture
def votes(request: pytest.FixtureRequest) -> list[Votes]:
    fd = anonymous_memory(total_bytes(3, mmap.PAGESIZE))
    made = [Votes(fd, rank, 3, 10.0) for rank in range(3)]
    request.addfinalizer(lambda: [vote.close() for vote in made])
    return made


@pytest.mark.slow
def test_all_ranks_refuse_the_same_steps(votes: list[Votes]) -> None:
    draw = random.Random(1)
    lacks = [{draw.randrange(300) for _ in range(20)} for _ in range(3)]  # by rank: steps

    def serve(rank: int) -> list[int]:
        guard = StepGuard(lambda step: HUGE if step.step_id in lacks[rank] else 1, CPU, votes[rank])
        return [n for n in range(300) if guard.run(step(n, is_ahead=n % 3 == 0), ran) is not RAN]

    with ThreadPoolExecutor(3) as threads:
        first, second, third = threads.map(serve, range(3))
    assert first == second == third
    refused = set(first)
    for number in range(300):
        behind = number % 3 == 0 and number - 1 in refused
        assert (number in refused) == (behind or any(number in some for some in lacks))


def test_a_rank_that_does_not_vote_is_named(votes: list[Votes]) -> None:
    votes[0]._timeout_s = 0.05
    with pytest.raises(TimeoutError, match=r"rank 1 did not cast vote 1 within 0\.05 s"):
        votes[0].all_agree(True)


def test_several_ranks_do_not_leave_a_step_in_its_middle(votes: list[Votes]) -> None:
    """The others would wait in a collective: this ends the engine, which is started again."""
    with ThreadPoolExecutor(3) as threads:
        guards = [StepGuard(lambda step: 1, CPU, vote) for vote in votes]
        runs = [threads.submit(guard.run, step(1), out_of_memory) for guard in guards]
        for run in runs:
            with pytest.raises(torch.OutOfMemoryError):
                run.result()
