"""Steps as on a CUDA device, in Triton's interpreter: graphs repeat what was recorded, and nothing is read on the way.

The kernels of attention and of sampling are the device's. Judges: the same without graphs, bit by bit, and torch's
sampler with the reference attention, token by token.
"""

import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from oarlock.engine.sampling_params import Grammar, SamplingParams
from oarlock.engine.types import Request
from oarlock.workers.config import WorkerConfig
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.triton import availability
from oarlock.workers.quantization import matmul
from oarlock.workers.runner.cuda_graphs import CudaGraphs
from oarlock.workers.runner.device_steps import capture, device_steps
from oarlock.workers.runner.invariance import InvarianceResult, RankInvariance
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.recorded_graphs import intercept
from tests.parallel.test_pipeline_depth import answers

pytestmark = pytest.mark.slow

KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.9, "logit_bias": ((7, -100.0), (9, 2.0))},
    {"temperature": 1.1},
    {"temperature": 0.0, "grammar": Grammar("lark", "even, then odd")},
)


class DeviceRunner(ModelRunner):
    """A rank of the CPU that runs steps as one on a device does, without what is measured at a start."""

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks, self.kv = num_blocks, self.backend.allocate(num_blocks)
        self.invariance = InvarianceResult(True, "not measured")
        self.rank_invariance = RankInvariance(True, "not measured")
        self._device_steps = device_steps(self.config, self.model, self.backend, self.tp, self._tables, self.pooler)
        self._device_steps.kv = self.kv
        maker = CudaGraphs()
        for _ in range(2):  # a start measures what graphs take, and captures them when memory has been divided
            self._device_steps.release()
            capture(self._device_steps, maker, self.config, self.backend)


def requests_of(kinds: tuple[dict, ...], count: int, tokens: int) -> list[Request]:
    draw = np.random.default_rng(3)
    made = []
    for number in range(count):
        params = SamplingParams(max_tokens=tokens - number % 3, seed=number, **kinds[number % len(kinds)])
        made.append(Request(number, tuple(draw.integers(2, 90, 2 + number % 4).tolist()), params))
    return made


def run(executor: ThreadExecutor, requests: list[Request], depth: int) -> dict:
    found, _ = answers(executor, requests, depth, 20)
    executor.close()
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_recorded_steps_are_those_of_the_host(
    size: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = intercept(monkeypatch)
    monkeypatch.setattr(library, "why_not", lambda *_: "operations of torch can be recorded")
    monkeypatch.setattr(matmul, "can_pack", lambda *_: False)
    model = make_tiny(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=1)
    config = WorkerConfig(
        str(model), device="cpu", dtype="float32", tensor_parallel_size=size, max_model_len=32, block_size=8,
        max_num_seqs=2, max_num_batched_tokens=8, num_kv_blocks=20, num_threads=1, attention_backend="triton",
    )  # fmt: skip
    requests = requests_of(KINDS, len(KINDS), 4)

    graphs = ThreadExecutor(config, DeviceRunner)
    got = run(graphs, requests, 2)
    eager = run(ThreadExecutor(config.with_(enforce_eager=True), DeviceRunner), requests, 1)
    judge = run(ThreadExecutor(config.with_(attention_backend="reference")), requests, 1)
    for number, answer in judge.items():
        assert got[number] == eager[number]
        assert got[number].token_ids == answer.token_ids
        for ours, wanted in zip(got[number].logprobs, answer.logprobs, strict=True):
            assert ours.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) > 3 * size


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_padding_changes_no_bit_where_batches_must_not(
    cache: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--batch-invariant`: three requests in graphs of four rows, and each alone in one of one row, step by step."""
    cuda = intercept(monkeypatch)
    monkeypatch.setattr(library, "why_not", lambda *_: "operations of torch can be recorded")
    monkeypatch.setattr(matmul, "can_pack", lambda *_: False)
    monkeypatch.setattr(availability, "can_serve", lambda _: True)
    model = make_tiny(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=1)
    config = WorkerConfig(
        str(model), device="cpu", dtype="float32", max_model_len=32, block_size=8, max_num_seqs=4, num_threads=1,
        max_num_batched_tokens=8, num_kv_blocks=20, attention_backend="triton", batch_invariant=True,
        kv_cache_dtype=cache,
    )  # fmt: skip
    requests = requests_of(({"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "logprobs": 2}), 3, 5)
    graphs = ThreadExecutor(config, DeviceRunner)
    (rank,) = graphs.ranks
    assert isinstance(rank, DeviceRunner) and rank.kv_spec.fixed_span is not None
    padded = next(graph for graph in cuda.graphs if not graph.is_reset)  # the model's, of four rows
    got = run(graphs, requests, 2)
    assert padded.num_replays > 0
    for request in requests:
        alone = run(ThreadExecutor(config.with_(enforce_eager=True), DeviceRunner), [request], 1)
        assert got[request.request_id] == alone[request.request_id]
