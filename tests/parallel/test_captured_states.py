"""Recurrent state in captured steps on made-up CUDA devices, against steps without graphs and the reference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.runner.cuda_graphs import CudaGraphs
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step
from tests.golden.tiny_models import make_tiny
from tests.parallel import made_up_cuda
from tests.parallel.made_up_cuda import MadeUpCuda
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_made_up_cuda import DeviceRunner, config_of, named, requests_of, run
from tests.parallel.test_pipeline_depth import answers

cuda = made_up_cuda.cuda  # the fixture
NUM_BLOCKS, NUM_SLOTS = 4, 8
# Few layers and heads, since kernels are interpreted. Mamba 2 has no attention.
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {**_HEADS, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        **_HEADS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    },
    "falcon_h1": {**_HEADS, "num_hidden_layers": 1},
    "mamba2": {"num_hidden_layers": 1},
    "kimi_linear": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4), "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 2,
    },
}  # fmt: skip

ALIKE = ("lfm2", "falcon_h1")  # a convolution precedes the other recurrences as well


def steps_of(memory: TrialMemory) -> list[StepMetadata]:
    """Return the steps of two sequences, the first of which is saved within its prompt; a third starts from there."""

    def chunk(
        tokens: list[int], start: int, block: int, read: int, write: int, *saves: tuple[int, int]
    ) -> SequenceChunk:
        return SequenceChunk(tokens, start, [block], read_slot=read, write_slot=write, saves=saves)

    made = [
        ([chunk([5, 6, 7, 8], 0, 1, 0, 1, (3, 7)), chunk([8, 9], 0, 2, 0, 3)], [3, 5]),
        ([chunk([-1], 4, 1, 1, 2), chunk([10, 11, 12, 13, 14], 2, 2, 3, 4)], [0, 5]),
        ([chunk([-1], 5, 1, 2, 1), chunk([-2], 7, 2, 4, 3, (1, 6))], [0, 1]),
        ([chunk([-1], 6, 1, 1, 2)], [0]),
        ([chunk([3, 4], 3, 1, 7, 5)], [1]),
    ]
    return [greedy_step(chunks, 16, rows, step_id=1 + n, memory=memory) for n, (chunks, rows) in enumerate(made)]


def runner_of(path: Path, device: str) -> ModelRunner:
    """Return a runner with memory that has captured nothing."""
    config = config_of(path, block_size=16, device=device, attention_backend="reference" if device == "cpu" else "auto")
    runner = ModelRunner(preflight(config), TensorParallel.solo())
    with torch.inference_mode():
        runner.load(lambda share: None)
        model = runner.steps.model
        counts = [NUM_BLOCKS if isinstance(group.memory, PagesSpec) else NUM_SLOTS for group in model.groups]
        runner.steps.memory = allocate_memory(model, runner.backends, counts)
    return runner


def outputs(runner: ModelRunner) -> tuple[list[list[int]], list[Tensor]]:
    """Return the tokens of all steps, then the states of all layers, without the sink."""
    parts = [part for one in runner.steps.memory if one.states for part in one.states.parts]
    for part in parts:
        part[1:].fill_(3.0)  # no sequence may read a slot before it is written
    found: list[list[int]] = []
    for step in steps_of(TrialMemory.of(runner.steps.model.spec)):
        if runner.config.device == "cpu":  # it takes no references to tokens of the previous step
            step.token_ids[:] = [token if token >= 0 else found[-1][-1 - token] for token in step.token_ids]
        answer = runner.execute(step)
        assert answer is not None
        found.append(answer.token_ids.tolist())
    return found, [part[:-1].cpu() for part in parts]


@pytest.mark.soak
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.every) if name in ALIKE else name for name in FAMILIES]
)
def test_graphs_keep_the_states_of_steps_without_them(family: str, tmp_path: Path, cuda: MadeUpCuda) -> None:
    """Padding sequences and padding saves change no slot that a sequence may read."""
    path = make_tiny(tmp_path, family, **FAMILIES[family])
    runner = runner_of(path, "cuda")
    assert isinstance(runner.steps, DeviceSteps)
    runner.steps.capture(CudaGraphs(), [2], [8])
    tokens, states = outputs(runner)
    # A prompt, a decode, and greedy sampling after it.
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) == 3
    wanted_tokens, wanted_states = outputs(runner_of(path, "cpu"))
    assert tokens == wanted_tokens and len({tuple(found) for found in tokens}) > 3
    for found, wanted in zip(states, wanted_states, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
        assert not found[0].any()


@pytest.mark.soak
@pytest.mark.parametrize(
    "family", [name if name == "qwen3_5_text" else pytest.param(name, marks=pytest.mark.every) for name in FAMILIES]
)
def test_captured_steps_of_the_engine_match_the_host(family: str, tmp_path: Path, cuda: MadeUpCuda) -> None:
    """Two sequences with slots that swap, and checkpoints at the ends of blocks. No kernel is compiled late."""
    path = make_tiny(tmp_path, family, **FAMILIES[family])
    config, requests = config_of(path), requests_of(({"temperature": 0.0},), 2, 12)
    executor = ThreadExecutor(config, DeviceRunner)
    known = set(cuda.variants)
    got, _ = answers(executor, requests, 2, 20)
    executor.close()
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) > 1 and named(cuda.variants - known, known) == []
    judge = run(ThreadExecutor(config.with_(device="cpu", attention_backend="reference")), requests, 1)
    assert [got[number].token_ids for number in judge] == [answer.token_ids for answer in judge.values()]
