"""Decode steps captured on a made-up device: memory that their launches name is alive whenever they are replayed."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.triton_backend import TritonBackend, TritonPlan
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu import library
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.quantization import matmul
from oarlock.workers.runner.cuda_graphs import CudaGraphs
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.pooler import Pooler
from oarlock.workers.runner.step_inputs import InputPlace, Shape, StepInputs
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from tests.golden.paged_run import load_decoder
from tests.golden.tiny_models import make_tiny
from tests.parallel.made_up_cuda import MadeUpCuda
from tests.parallel.recorded_graphs import intercept

CPU = torch.device("cpu")
LONGEST = 2048  # tokens: so many that several programs share a sequence's keys
SIZES = (1, 2)


class NoSampling:
    """`StepSampling` that keeps logits."""

    variants = ()

    def __init__(self) -> None:
        self.sampled, self.logits = torch.zeros(4, dtype=torch.int64), torch.empty(0)

    def begin(self, step: StepMetadata) -> None:
        """Do nothing: no memory depends on the step."""

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: object) -> None:
        self.logits = logits.clone()

    def finish(self, step: StepMetadata, place: InputPlace) -> None:
        return None


class PlannedBackend(TritonBackend):
    """Keeps a weak reference to the memory of each plan for graphs."""

    def prepare_decode(self, batch: ForwardBatch) -> TritonPlan:
        self.plans = [*getattr(self, "plans", []), super().prepare_decode(batch)]
        return self.plans[-1]

    def memory_of_plans(self) -> list[StorageWeakRef]:
        """Weak references to the tiles and scratch of all plans, which are then forgotten."""
        tensors = [t for plan in self.plans for pair in plan.scratch.values() for t in pair]
        tensors += [t for plan in self.plans for tiles in plan.tiles for t in (tiles.seqs, tiles.first_rows)]
        self.plans.clear()
        return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    monkeypatch.setattr(library, "why_not", lambda *_: "operations of torch can be recorded")
    monkeypatch.setattr(matmul, "can_pack", lambda *_: False)
    return intercept(monkeypatch)


def device_steps(model_path: Path) -> tuple[DeviceSteps, PlannedBackend, NoSampling]:
    model = load_decoder(model_path, TensorParallel.solo(), max_model_len=LONGEST)
    backend = PlannedBackend(model.kv_spec(16, CPU))
    backend.processors = 8
    tables, sampling = BlockTables(2, LONGEST // 16, CPU), NoSampling()
    inputs = StepInputs(tables, Shape(4, 2, 4, 2 * LONGEST // 16), 2, model.spec.vocab_size)
    steps = DeviceSteps(
        model, backend, TensorParallel.solo(), inputs, sampling, Pooler(TensorParallel.solo(), 0, answers=True),
        rows_at_once=4, max_model_len=LONGEST,
    )  # fmt: skip
    steps.kv = backend.allocate(8)
    return steps, backend, sampling


def test_tiles_and_scratch_of_a_captured_decode_live_as_long_as_its_graph(tmp_path: Path, cuda: MadeUpCuda) -> None:
    steps, backend, _ = device_steps(make_tiny(tmp_path, "qwen2", num_hidden_layers=1, max_position_embeddings=LONGEST))
    assert steps.capture(CudaGraphs(), SIZES) == len(SIZES)
    memory = backend.memory_of_plans()
    assert len(memory) == len(SIZES) * 4 and not any(place.expired() for place in memory)
    for count in (1, 2):
        chunks = [SequenceChunk([5 + seq], 20, [1 + 2 * seq, 2 + 2 * seq]) for seq in range(count)]
        steps.launch(greedy_step(chunks, 16, range(count), step_id=1))
    assert [graph.num_replays for graph in cuda.graphs] == [1, 1]
    steps.release()
    gc.collect()  # the interpreter leaves cycles
    assert all(place.expired() for place in memory)
