"""LoRA adapters in captured steps on made-up CUDA devices, against the host's adapters, with torch or C++."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.engine.types import POOLS, PoolingParams, Request
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.loaded_adapters import LoadedAdapters
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.cuda_graphs import CudaGraphs
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.graph_capture import warm_up
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step
from tests.golden.adapters import random_updates, write_adapter
from tests.golden.paged_run import load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny
from tests.parallel import made_up_cuda
from tests.parallel.adapter_files import write_adapter as write_files
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.made_up_cuda import MadeUpCuda
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_made_up_cuda import DeviceRunner, config_of, named, requests_of

cuda = made_up_cuda.cuda  # the fixture
KERNELS = ("shrink_rows", "expand_rows", "take_columns")
NUM_BLOCKS, RANK = 12, 4  # blocks and slots of states; highest rank
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": _HEADS,
    "qwen3_5_text": {
        **_HEADS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    },
}  # fmt: skip


def adapters_of(path: Path, folder: Path) -> list[Adapter]:
    """Three adapters: of every module, and of some."""
    (model,) = on_ranks(1, lambda tp: load_decoder(path, tp, torch.float32))
    keeps = (lambda name: True, lambda name: "q_proj" not in name and "lm_head" not in name, lambda name: "mlp" in name)
    updates = [random_updates(model, RANK - n, n, keep) for n, keep in enumerate(keeps)]
    return [write_adapter(folder / f"{n}.safetensors", one) for n, one in enumerate(updates)]


def steps_of(memory: TrialMemory) -> list[StepMetadata]:
    """Return steps of four sequences: as graphs of tokens, of plain decodes, without adapters, and without graphs."""

    def chunk(tokens: list[int], start: int, block: int, slots: tuple[int, int] = (0, 0)) -> SequenceChunk:
        read, write = slots if any(slots) else (2 * block * (start > 0), 2 * block)
        return SequenceChunk(tokens, start, [block], read_slot=read, write_slot=write)

    made = [
        ([chunk([5, 6, 7, 8], 0, 1), chunk([8, 9], 0, 2), chunk([3, 4], 0, 3)], [0, 3, 5, 7], [1, 0, 2]),
        ([chunk([9], 4, 1, (2, 3)), chunk([10], 2, 2, (4, 5)), chunk([11], 2, 3, (6, 7))], [0, 1, 2], [1, 0, 2]),
        ([chunk([12], 3, 2, (5, 4))], [0], [0]),
        ([chunk([12], 3, 3, (7, 6)), chunk([2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4], 0, 4)], [0, 11], [2, 1]),
        ([chunk([13], 5, 1, (3, 2)), chunk([10], 11, 4, (8, 9))], [0, 1], [1, 1]),
    ]
    steps = [greedy_step(chunks, 16, rows, step_id=1 + n, memory=memory) for n, (chunks, rows, _) in enumerate(made)]
    slots = [np.array(slots, np.int32) if any(slots) else np.empty(0, np.int32) for _, _, slots in made]
    logprobs = [np.full(len(step.logits_indices), 3, np.int32) for step in steps]
    return [
        replace(step, adapter_slots=own, num_logprobs=each)
        for step, own, each in zip(steps, slots, logprobs, strict=True)
    ]


def runner_of(path: Path, device: str, tp: TensorParallel) -> ModelRunner:
    """Return a runner with memory and empty slots that has captured nothing."""
    backend = "reference" if device == "cpu" else "auto"
    config = config_of(
        path, block_size=16, device=device, attention_backend=backend, max_num_seqs=4, max_num_batched_tokens=16,
        max_loras=2, max_lora_rank=RANK, tensor_parallel_size=tp.size,
    )  # fmt: skip
    runner = ModelRunner(preflight(config), tp)
    with torch.inference_mode():
        runner.load(lambda share: None)
        model = runner.steps.model
        runner.steps.memory = allocate_memory(model, runner.backends, [NUM_BLOCKS] * len(model.groups))
    return runner


def outputs(runner: ModelRunner, adapters: list[Adapter]) -> list[StepOutput | None]:
    """Return the outputs of all steps. The third adapter replaces the first before the last step."""
    assert isinstance(runner.adapters, LoadedAdapters)
    slots, found = runner.adapters.slots, []
    held = [read_adapter(adapter, slots) for adapter in adapters]
    if runner.device.type == "cuda":
        held = [one.pinned() for one in held]  # as the thread does that reads adapters
    slots.put(held[0], 1)
    slots.put(held[1], 2)
    steps = steps_of(TrialMemory.of(runner.steps.model.spec))
    for step in steps:
        if step is steps[-1]:
            slots.put(held[2], 1)
        found.append(runner.execute(step))
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    ("family", "size"), [pytest.param("qwen2", 1, marks=pytest.mark.every), ("qwen2", 2), ("qwen3_5_text", 1)]
)
def test_graphs_serve_any_mixture_of_adapters(family: str, size: int, tmp_path: Path, cuda: MadeUpCuda) -> None:
    """Graphs are captured while slots are empty, and an adapter is replaced between two replays of the same graph."""
    path = make_tiny(tmp_path, family, **FAMILIES[family])
    adapters = adapters_of(path, tmp_path)

    def captured(tp: TensorParallel) -> list[StepOutput | None]:
        cuda.set_device(tp.rank)
        runner = runner_of(path, "cuda", tp)
        steps = runner.steps
        assert isinstance(steps, DeviceSteps)
        warm_up(runner.execute, runner.config, TrialMemory.of(steps.model.spec))
        known = set(cuda.variants)
        steps.capture(CudaGraphs(), [4], [8])
        found = outputs(runner, adapters)
        late = {one for one in cuda.variants - known if one[0] in KERNELS}
        assert size > 1 or named(late, known) == [], "a kernel is compiled while requests wait"
        steps.release()
        return found

    found, *_ = on_ranks(size, captured)
    # On each rank prompts and decodes with adapters, a decode without, and sampling after decodes.
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) >= 4 * size
    for got, wanted in zip(found, outputs(runner_of(path, "cpu", TensorParallel.solo()), adapters), strict=True):
        assert got is not None and wanted is not None and got.token_ids.tolist() == wanted.token_ids.tolist()
        np.testing.assert_allclose(got.logprobs, wanted.logprobs, atol=2e-5)


@pytest.mark.soak
def test_the_engine_serves_adapters_by_graphs(tmp_path: Path, cuda: MadeUpCuda) -> None:
    """Three adapters take turns in two slots, also while a step is in flight, pooled and scored requests among others.
    No kernel is compiled while requests wait."""
    path = make_tiny(tmp_path, "qwen2", **FAMILIES["qwen2"])
    adapters = [write_files(tmp_path / name, path, seed=n, rank=RANK - n) for n, name in enumerate(("a", "b", "c"))]
    kinds = ({"temperature": 0.0, "logprobs": 2}, {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 0})
    requests = [
        replace(request, adapter=name)
        for request, name in zip(requests_of(kinds, 6, 4), ("a", None, "b", "c", "a", "b"), strict=True)
    ]
    requests.append(Request(6, (5, 6, 7), POOLS, pooling=PoolingParams("logits", (5, 7, 9)), adapter="b"))
    found = {}
    for device, made in (("cuda", DeviceRunner), ("cpu", ModelRunner)):
        backend = "reference" if device == "cpu" else "auto"
        limits = {"max_loras": 2, "max_lora_rank": RANK, "attention_backend": backend, "device": device}
        executor = ThreadExecutor(config_of(path, **limits), made)
        known = set(cuda.variants)
        engine = DirectEngine(executor, pipeline_depth=2 if device == "cuda" else 1)
        for one in adapters:
            engine.scheduler.adapters.add(*one, engine.now)
        found[device] = engine.run(requests)
        assert engine.scheduler.adapters.registry.num_puts >= 3
        executor.close()
        late = {one for one in cuda.variants - known if one[0] in KERNELS}
        assert named(late, known) == []
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) >= 4
    for number, wanted in found["cpu"].items():
        got = found["cuda"][number]
        assert got.error is None and got.token_ids == wanted.token_ids, number
        assert got.pooled == pytest.approx(wanted.pooled, abs=2e-5)
