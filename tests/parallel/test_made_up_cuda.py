"""Ranks on made-up CUDA devices: the real graphs, staging, sampling, offload and sums, and a fault of each kind.

Kernels run in Triton's interpreter. Judges: the same without graphs, bit by bit, and torch's sampler with the reference
attention on the CPU, token by token.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import step_arithmetic
from oarlock.base.errors import StartupError
from oarlock.engine.types import Grammar, Request, SamplingParams
from oarlock.workers.attention import triton_tiles
from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed import all_reduce, parallel_state, rank_groups
from oarlock.workers.distributed.all_reduce import AllReduce, DeviceAllReduce
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.topology import RendezvousInfo
from oarlock.workers.kv_tiers.rank_offload import make_slots
from oarlock.workers.layers.experts import Experts
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec, SharedSpec
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.quantization.expert_matmul import TorchExpertMatmul
from oarlock.workers.quantization.expert_weights import ExpertsShape, ExpertWeights
from oarlock.workers.quantization.fixed_order import FIXED_ORDER, FixedOrderMatmul
from oarlock.workers.quantization.method import DenseWeight
from oarlock.workers.quantization.registry import NONE, Quantization
from oarlock.workers.quantization.triton_experts import GROUPED, TILES, TritonExpertMatmul
from oarlock.workers.ranks.spawn_ranks import RankArguments
from oarlock.workers.runner import expert_kernel_selection, worker_process
from oarlock.workers.runner.cuda_graphs import CudaGraph, CudaGraphs
from oarlock.workers.runner.device import use_device
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.layer_memory import allocate_memory
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.pending_output import AnsweringThread, wait_for
from oarlock.workers.runner.step_inputs import StagingBuffer
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.weights.source import DummyWeights
from tests.golden.paged_run import RankThreads, ThreadRank, on_ranks
from tests.golden.tiny_models import make_tiny
from tests.interpreted_products import multiply_row_by_row
from tests.parallel import made_up_cuda
from tests.parallel.made_up_cuda import MadeUpCuda
from tests.parallel.made_up_memory import Fault, Stream, of_thread
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_pipeline_depth import answers
from tests.unit.workers.weights_in_memory import MemoryWeights

cuda = made_up_cuda.cuda  # the fixture
DEVICE = torch.device("cuda", 0)


# Faults: each is planted, and found.


def test_captured_work_whose_memory_is_not_kept(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def captured() -> Any:
        scratch, out = torch.full((3,), 7.0, device=DEVICE), torch.zeros(3, device=DEVICE)
        return CudaGraphs().capture(partial(out.copy_, scratch)), out

    graph, out = captured()
    graph.replay()
    assert out.tolist() == [7.0, 7.0, 7.0]
    monkeypatch.setattr(CudaGraph, "__init__", lambda self, graph, work: setattr(self, "_graph", graph))
    graph, _ = captured()
    with pytest.raises(Fault, match="names memory that was freed"):
        graph.replay()


def test_results_that_stay_in_the_pool_of_a_graph(cuda: MadeUpCuda) -> None:
    x, made, kept = torch.ones(3, device=DEVICE), [], torch.zeros(3, device=DEVICE)
    CudaGraphs().capture(lambda: made.append(x + 1.0))
    CudaGraphs().capture(lambda: kept.copy_(x + 1.0))
    assert kept.tolist() == [2.0, 2.0, 2.0]
    for use in (made[1].tolist, lambda: made[1] * 2.0, lambda: CudaGraphs().capture(lambda: kept.copy_(made[1]))):
        with pytest.raises(Fault, match="a graph's pool from outside"):
            use()


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0.0],
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.Event().record().synchronize(),
        lambda x: torch.empty(3, pin_memory=True),
        lambda x: torch.from_numpy(np.ones(3, np.float32)).to(DEVICE),
        lambda x: torch.cuda.empty_cache(),
        lambda x: torch.where(x > 0.0, x, 0.0),
    ],
)
def test_a_host_that_waits_or_allocates_while_it_captures(cuda: MadeUpCuda, work: Callable[[Tensor], object]) -> None:
    x, is_warm = torch.ones(3, device=DEVICE), []

    def captured() -> None:
        if is_warm:
            work(x)
        is_warm.append(True)

    with pytest.raises(Fault, match=r"while a graph is captured|from the host"):
        CudaGraphs().capture(captured)


def test_a_buffer_that_is_written_before_its_copy_is_over(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def send_three(buffer: StagingBuffer) -> list[int]:
        for number in (1, 2, 3):
            buffer.turn()
            buffer.on_host[:4] = number
            buffer.to_device(4)
        return buffer.on_device[:4].tolist()

    assert send_three(StagingBuffer(8, DEVICE)) == [3, 3, 3, 3]
    copied = StagingBuffer(8, DEVICE).to_host(4)
    assert copied()[:4].tolist() == [0, 0, 0, 0]
    buffer = StagingBuffer(8, DEVICE)
    buffer.to_host(4)
    assert buffer.on_host[0] == made_up_cuda._GARBAGE  # nothing has arrived
    monkeypatch.setattr(StagingBuffer, "turn", lambda self: setattr(self, "_current", 1 - self._current))
    with pytest.raises(Fault, match="written before its copy was over"):
        send_three(StagingBuffer(8, DEVICE))
    cuda._copies.clear()


def test_a_thread_on_another_device(cuda: MadeUpCuda) -> None:
    on_second = torch.ones(3, device=torch.device("cuda", 0))
    cuda.set_device(1)
    with pytest.raises(Fault, match="on device 0, while device 1 is the thread's own"):
        on_second + 1.0
    with pytest.raises(Fault, match=r"tensors of devices \[0, 1\]"):
        torch.ones(3, device=torch.device("cuda", 1)) + on_second
    with pytest.raises(Fault, match="tensors of a device and of the host"):
        torch.ones(3, device=torch.device("cuda", 1)) + torch.ones(3)
    event = torch.cuda.Event(blocking=True)
    event.record()
    failures = []
    for begin in (lambda: cuda.set_device(1), lambda: None):
        thread = AnsweringThread(lambda output: None, lambda step, error: failures.append(str(error)), begin)
        thread.add(1, SimpleNamespace(wait=lambda: event.synchronize() or StepOutput(1, np.empty(0), np.empty(0))))
        thread.close(10.0)
    assert len(failures) == 1 and "device 0 is the thread's own" in failures[0]


def test_a_capture_that_does_not_wait_for_what_came_before(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, device=DEVICE)
    CudaGraphs().capture(lambda: x.add_(1.0))
    x.add_(1.0)
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: None)
    with pytest.raises(Fault, match="memory of another stream without waiting"):
        CudaGraphs().capture(lambda: x.add_(1.0))


@pytest.fixture
def thread_ranks(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> MadeUpCuda:
    """`TensorParallel` over NCCL and symmetric memory, both of which are made up of threads."""
    ranks = RankThreads(2)

    def parts(x: Tensor) -> list[Tensor]:
        return ThreadRank(of_thread.device, ranks)._exchange(x)

    def gathered(into: list[Tensor], x: Tensor, group: object) -> None:
        for there, part in zip(into, parts(x), strict=True):
            there.copy_(part)

    stand_in = SimpleNamespace(
        all_reduce=lambda x, group: x.copy_(sum(parts(x))),
        all_gather=gathered,
        group=SimpleNamespace(WORLD=SimpleNamespace(group_name="ranks")),
    )
    monkeypatch.setattr(parallel_state, "dist", stand_in)
    for module in (all_reduce, parallel_state):  # megabytes would be added on the host
        monkeypatch.setattr(module, "SIZES", all_reduce.SIZES[:2])
    from torch.distributed import _symmetric_memory

    handle = SimpleNamespace(multicast_ptr=0)
    monkeypatch.setattr(_symmetric_memory, "empty", torch.empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", lambda memory, group: handle)
    kernels = torch.ops.symm_mem
    monkeypatch.setattr(kernels, "one_shot_all_reduce", lambda x, kind, group: sum(parts(x)), raising=False)
    monkeypatch.setattr(kernels, "two_shot_all_reduce_", lambda x, kind, group: x.copy_(sum(parts(x))), raising=False)
    return cuda


def test_sums_of_two_devices_are_captured_whatever_way_they_take(thread_ranks: MadeUpCuda) -> None:
    def sums(tp: TensorParallel) -> list[list[float]]:
        thread_ranks.set_device(tp.rank)
        device = torch.device("cuda", tp.rank)
        real = TensorParallel(tp.rank, 2)
        real.choose_all_reduce(device, torch.float16)
        assert "no multimem: the devices have no multicast" in real.all_reduce_method
        assert "one-shot" in real.all_reduce_method and "two-shot" in real.all_reduce_method
        found = []
        chosen = real._device_all_reduce
        assert isinstance(chosen, DeviceAllReduce) and set(chosen._algorithms) == {"NCCL", "one-shot", "two-shot"}
        for algorithm in chosen._algorithms:
            chosen._fastest = [algorithm]
            x, out = torch.zeros(64, device=device).half(), torch.zeros(64, device=device).half()
            graph = CudaGraphs().capture(lambda x=x, out=out: out.copy_(real.all_reduce(x.clone())))
            x.fill_(float(tp.rank + 1))
            graph.replay()
            found.append(out[-1:].tolist())
        return found

    assert on_ranks(2, sums) == [[[3.0]] * 3] * 2


def test_sums_in_the_models_type_lose_no_more_than_one_ranks_rounding(cuda: MadeUpCuda) -> None:
    draw = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(64, 256, generator=draw).bfloat16() for _ in range(2))

    def product(tp: TensorParallel) -> Tensor:
        cuda.set_device(tp.rank)
        device = torch.device("cuda", tp.rank)
        linear = RowParallelLinear("down", 256, 64, False, Placement(tp, torch.bfloat16, device))
        linear.load(MemoryWeights({"down.weight": weight}))
        sent = linear.unrounded(x.chunk(2, 1)[tp.rank].contiguous().to(device))
        assert sent.dtype == torch.bfloat16
        return sent.cpu()

    first, second = on_ranks(2, product)
    assert torch.equal(first, second)
    exact = x.double() @ weight.double().T
    ours, alone = ((found.double() - exact).square().mean().sqrt() for found in (first, x @ weight.T))
    assert ours < 2.0 * alone


@pytest.mark.parametrize("forms", [NONE, FIXED_ORDER], ids=["by libraries", "in a fixed order"])
def test_sums_of_experts_are_exchanged_as_others_are(cuda: MadeUpCuda, forms: Quantization) -> None:
    """Sums of the routed and of the shared ones, rounded once on each rank, or not where batches must not differ."""
    spec = ExpertsSpec(3, 8, RouterSpec(2), shared=SharedSpec(8, gate="scale"))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(3))

    def sums(tp: TensorParallel, device: str, dtype: torch.dtype) -> Tensor:
        if device == "cuda":
            cuda.set_device(tp.rank)
        where = torch.device(device, tp.rank) if device == "cuda" else torch.device("cpu")
        place = Placement(tp, dtype, where, forms if device == "cuda" else NONE)
        experts = Experts("model.layers.0.mlp", spec, 0, 16, place)
        for part in experts.parts:
            part.load(DummyWeights(3))
        if device == "cuda":
            assert isinstance(experts.router.matmul, FixedOrderMatmul) == (forms is FIXED_ORDER)
        routed, shared = experts.sums((x * 30).to(dtype).to(where))
        is_rounded = device == "cuda" and forms is NONE
        assert shared is not None and routed.dtype == shared.dtype == (dtype if is_rounded else torch.float32)
        return torch.cat((routed, shared)).float().cpu()

    (exact,) = on_ranks(1, lambda tp: sums(tp, "cpu", torch.float32))
    first, second = on_ranks(2, lambda tp: sums(tp, "cuda", torch.float16))
    assert torch.equal(first, second) and (first - exact).norm() <= 2e-3 * exact.norm()


def test_every_kernel_of_experts_is_captured_and_compiled_when_it_is_timed(
    cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply_row_by_row(monkeypatch)
    draw = torch.Generator().manual_seed(1)
    weights = [[torch.randn(size, generator=draw).div_(5).bfloat16() for size in ((32, 32), (32, 16))] for _ in "1234"]
    shape = ExpertsShape(0, 4, 32, 16, torch.bfloat16)
    product = TritonExpertMatmul(shape, [ExpertWeights(*(DenseWeight(w.to(DEVICE)) for w in one)) for one in weights])
    judge = TorchExpertMatmul(shape, [ExpertWeights(*map(DenseWeight, one)) for one in weights])
    timed = []

    def seconds(work: AllReduce, x: Tensor) -> float:
        timed.append(product.chosen[0])
        work(x)
        return float(len(timed))

    product.chosen, line = expert_kernel_selection.fastest_kernels(product, 2, 16, seconds)
    assert [kernel for _, kernel in timed] == [*TILES, GROUPED] * 2 and "no grouped_mm" not in line
    known = set(cuda.variants)
    for kernel in (*TILES, GROUPED):
        product.chosen = [(1, kernel)]
        x, out = torch.zeros(9, 32, device=DEVICE).bfloat16(), torch.zeros(9, 32, device=DEVICE)
        ids, shares = torch.zeros((9, 2), dtype=torch.int32, device=DEVICE), torch.zeros((9, 2), device=DEVICE)
        graph = CudaGraphs().capture(partial(lambda into, *inputs: into.copy_(product(*inputs)), out, x, ids, shares))
        rows = torch.randn(9, 32, generator=draw).bfloat16()
        chosen = torch.rand(9, 4, generator=draw).topk(2).indices.sort(1).values.int()
        for into, numbers in ((x, rows), (ids, chosen), (shares, torch.full((9, 2), 0.5))):
            into.copy_(numbers)
        graph.replay()
        wanted = judge(rows, chosen, torch.full((9, 2), 0.5))
        assert (out.cpu() - wanted).norm() <= 1e-2 * wanted.norm(), kernel
    assert cuda.variants == known


def test_a_rank_joins_the_others_on_its_own_device(cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def joined(info: object, device: torch.device, dtype: torch.dtype, **_: bool) -> Any:
        return device.index, torch.cuda.current_device(), dtype

    monkeypatch.setattr(rank_groups, "join_groups", joined)
    for rank, options in ((0, {}), (1, {}), (0, {"data_parallel_size": 2, "data_parallel_rank": 1})):
        config = WorkerConfig("", device="cuda", dtype="float16", cpu_affinity="none", num_threads=1).with_(**options)
        config = config.with_(tensor_parallel_size=1 if options else 2)
        own = 1 if options else rank
        arguments = RankArguments(RendezvousInfo(rank, 2, -1, 4096, timeout_s=60.0, shares_cores=True), config)
        assert worker_process.join(arguments) == (own, own, torch.float16)


def test_devices_without_peer_access_are_named_and_wrong_sums_are_refused(
    thread_ranks: MadeUpCuda, caplog: pytest.LogCaptureFixture
) -> None:
    def chosen(tp: TensorParallel) -> None:
        thread_ranks.set_device(tp.rank)
        TensorParallel(tp.rank, 2).choose_all_reduce(torch.device("cuda", tp.rank), torch.float16)

    thread_ranks.has_peers = False
    on_ranks(2, chosen)
    lines = [record.getMessage() for record in caplog.records if "no_peer_access" in record.getMessage()]
    assert len(lines) == 2 and all("NCCL_P2P_DISABLE=1" in line for line in lines)
    parallel_state.dist.all_reduce = lambda x, group: x.mul_(3.0)
    with pytest.raises(StartupError, match=r"all-reduce over 2 devices returns wrong values.*NCCL_P2P_DISABLE=1"):
        on_ranks(2, chosen)


def test_ranks_that_capture_collectives_in_another_order(thread_ranks: MadeUpCuda) -> None:
    def captured(tp: TensorParallel) -> None:
        thread_ranks.set_device(tp.rank)
        real, x = TensorParallel(tp.rank, 2), torch.ones(4, device=torch.device("cuda", tp.rank))
        sizes = (4, 2) if tp.rank else (2, 4)
        for size in sizes:
            CudaGraphs().capture(lambda size=size: real.all_reduce(x[:size].clone()))

    with pytest.raises(Fault, match="ranks do not meet in collective 0"):
        on_ranks(2, captured)


def test_blocks_go_to_the_host_and_back(cuda: MadeUpCuda) -> None:
    pages = [LayerKV(*(torch.randn(6, 2, 8, device=DEVICE) for _ in range(2))) for _ in range(2)]
    before = pages[1].v.clone()
    slots = make_slots(pages, 4)
    slots.save([1, 3], [0, 2])
    pages[1].v.zero_()
    slots.load([2, 0], [3, 5])
    assert torch.equal(pages[1].v[3], before[3]) and torch.equal(pages[1].v[5], before[1])
    assert not (slots.memory[2] == made_up_cuda._GARBAGE).all()  # it was waited for


# The real runner.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}  # each is a program of the interpreter, for each row
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2", num_hidden_layers=1, **heads)


KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.9, "logit_bias": ((7, -100.0), (9, 2.0))},
    {"temperature": 1.1},
    {"temperature": 0.0, "grammar": Grammar("lark", "even, then odd")},
)


class DeviceRunner(ModelRunner):
    """A rank whose steps may come on any thread of the executor."""

    def launch(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> Any:
        use_device(self.config, self.tp.rank)
        return super().launch(step, await_masks)


def config_of(model: Path, **options: Any) -> WorkerConfig:
    config = WorkerConfig(
        str(model), device="cuda", dtype="float32", max_model_len=32, block_size=8, max_num_seqs=2, num_threads=1,
        max_num_batched_tokens=8, num_kv_blocks=20,
    )  # fmt: skip
    return config.with_(**options)


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


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 2])
def test_captured_steps_match_the_host(
    size: int, model: Path, cuda: MadeUpCuda, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "oarlock.runner")
    config = config_of(model, tensor_parallel_size=size)
    requests = requests_of(KINDS, len(KINDS), 3)
    executor = ThreadExecutor(config, DeviceRunner)
    prompts = next(graph for graph in cuda.graphs if not graph.is_reset)  # the first, of 8 tokens
    lines = [record.getMessage() for record in caplog.records if "event=device" in record.getMessage()]
    graphs = 13 if size == 1 else 15  # ranks sample changed rows from their shards by a graph more for each size
    assert len(lines) == size and all(f"attention=triton graphs={graphs}" in line for line in lines)
    got, _ = answers(executor, requests, 2, 20)
    if size == 1:
        steps_in_flight_do_not_touch_each_others_buffers(executor.ranks[0])
    executor.close()
    assert prompts.num_replays > 3
    assert sum(graph.num_replays > 0 for graph in cuda.graphs) > 3 * size
    eager = run(ThreadExecutor(config.with_(enforce_eager=True), DeviceRunner), requests, 1)
    judge = run(ThreadExecutor(config.with_(device="cpu", attention_backend="reference")), requests, 1)
    for number, answer in judge.items():
        assert got[number] == eager[number]
        assert got[number].token_ids == answer.token_ids
        for ours, wanted in zip(got[number].logprobs, answer.logprobs, strict=True):
            assert ours.logprob == pytest.approx(wanted.logprob, abs=1e-4)


def steps_in_flight_do_not_touch_each_others_buffers(runner: ModelRunner) -> None:
    """Three decodes that follow from the one before, the next always launched before the output is awaited."""

    def steps() -> list[StepMetadata]:
        prompt = [SequenceChunk([5, 6, 7], 0, [1]), SequenceChunk([8, 9], 0, [2])]
        after = [[SequenceChunk([-1 - row], 3 - row + n, [1 + row]) for row in range(2)] for n in range(3)]
        made = [greedy_step(prompt, 8, [2, 4], step_id=1)]
        return made + [greedy_step(chunks, 8, range(2), step_id=2 + n) for n, chunks in enumerate(after)]

    one_by_one = [wait_for(runner.launch(step)) for step in steps()]
    ahead, pending = [], None
    for step in steps():
        following = runner.launch(step)
        ahead += [] if pending is None else [wait_for(pending)]
        pending = following
    ahead.append(wait_for(pending))
    assert [out.token_ids.tolist() for out in ahead] == [out.token_ids.tolist() for out in one_by_one]
    assert len({tuple(out.token_ids.tolist()) for out in ahead}) > 1


@pytest.mark.soak
def test_no_kernel_is_compiled_while_requests_wait(model: Path, cuda: MadeUpCuda) -> None:
    """Prompts in one piece and in chunks, beside decodes and alone, of each kind of sampling."""
    config = config_of(model, max_num_seqs=3, max_num_batched_tokens=24, num_kv_blocks=30)
    executor = ThreadExecutor(config, DeviceRunner)
    known = set(cuda.variants)
    draw = np.random.default_rng(5)
    prompts = [tuple(draw.integers(2, 90, length).tolist()) for length in (1, 26, 3, 16, 9, 20, 2)]
    requests = [
        Request(number, prompt, SamplingParams(max_tokens=3, seed=number, **KINDS[number % len(KINDS)]))
        for number, prompt in enumerate(prompts)
    ]
    run(executor, requests, 2)
    assert named(cuda.variants - known, known) == []


def named(late: set[tuple[Any, ...]], known: set[tuple[Any, ...]]) -> list[str]:
    """Kernels of `late`, and how each differs from the nearest one that is known."""
    found = []
    for kernel, *arguments in sorted(late, key=str):
        same = [set(other) for name, *other in known if name == kernel]
        missing = min((set(arguments) - other for other in same), key=len, default=set(arguments))
        found.append(f"{kernel}: {sorted(missing)}")
    return found


def runner_of(model: Path, tp: TensorParallel | None = None, **options: Any) -> tuple[ModelRunner, DeviceSteps]:
    """Return a runner that has captured nothing, and its steps."""
    runner = ModelRunner(preflight(config_of(model, **options)), tp or TensorParallel.solo())
    with torch.inference_mode():
        runner.load(lambda share: None)
    assert isinstance(runner.steps, DeviceSteps)
    runner.steps.memory = allocate_memory(runner.model, runner.backends, [4] * len(runner.model.groups))
    return runner, runner.steps


@pytest.mark.slow
def test_a_step_with_prompts_is_one_launch_up_to_its_hidden_states(
    model: Path, cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts, then decodes beside parts of prompts, in one graph: the tokens of steps without graphs. Wrong
    tiles are found, with prompts whose numbers no memory holds any more."""
    runner, steps = runner_of(model, max_num_batched_tokens=16)

    def outputs(first: int = 0) -> list[list[int]]:
        a, b, c, d = ([first + token for token in tokens] for tokens in ([5, 6, 7], [8, 9], range(11), [11] * 3))
        made = [
            greedy_step([SequenceChunk(a, 0, [1]), SequenceChunk(b, 0, [2])], 8, [2, 4], step_id=1),
            greedy_step([SequenceChunk([-1], 3, [1]), SequenceChunk(c, 2, [2, 3])], 8, [0, 11], step_id=2),
            greedy_step([SequenceChunk([-2], 13, [2, 3]), SequenceChunk(d, 4, [1])], 8, [0, 3], step_id=3),
        ]
        before, answered = cuda.launches, [runner.execute(step) for step in made]
        counts.append((cuda.launches - before) / len(made))
        return [answer.token_ids.tolist() for answer in answered if answer is not None]

    counts: list[float] = []
    others, expected = outputs(40), outputs()
    assert len({tuple(tokens) for tokens in expected}) == 3
    steps.capture(CudaGraphs(), [], [16])
    assert outputs() == expected
    assert counts[2] <= step_arithmetic.FROM_HOST + step_arithmetic.OF_SAMPLING < counts[1], counts
    steps.release()
    find = triton_tiles._find

    def find_one(batch: ForwardBatch, tiles: triton_tiles.Tiles, tokens: int) -> None:
        if of_thread.graph is None:
            find(batch, tiles, tokens)
        else:
            tiles.seqs.zero_()
            tiles.first_rows.zero_()

    monkeypatch.setattr(triton_tiles, "_find", find_one)
    steps.capture(CudaGraphs(), [], [16])
    assert outputs(40) != others
    steps.release()
    monkeypatch.undo()


@pytest.mark.slow
def test_two_ranks_sample_from_their_shards_what_they_do_from_whole_rows(model: Path, cuda: MadeUpCuda) -> None:
    """A greedy row, a drawn one and one with bias: launched with a prompt, and as a graph. With logprobs, which change
    no token, ranks exchange logits."""

    def sampled(tp: TensorParallel) -> list[tuple[list[list[int]], int]]:
        assert isinstance(tp, ThreadRank)
        cuda.set_device(tp.rank)
        runner, steps = runner_of(model, tp, tensor_parallel_size=2, max_num_seqs=3)
        steps.capture(CudaGraphs(), [3])
        met, found = cuda._met[id(tp._threads)][tp.rank], []
        prompts = [SequenceChunk([5, 6, 7], 0, [1]), SequenceChunk([8, 9], 0, [2]), SequenceChunk([4], 0, [3])]
        decodes = [SequenceChunk([11], 3, [1]), SequenceChunk([12], 2, [2]), SequenceChunk([13], 1, [3])]
        for logprobs in (-1, 0):
            begun, tokens = len(met), []
            for chunks, rows in ((prompts, [2, 4, 5]), (decodes, [0, 1, 2])):
                asked = {"temperature": np.array([0.0, 1.1, 0.9], np.float32), "seeds": np.array([1, 2, 3])}
                bias = {"bias_rows": [2, 2], "bias_ids": [7, 280], "bias_values": [90.0, 90.0]}
                kinds = {"bias_rows": np.int32, "bias_ids": np.int32, "bias_values": np.float32}
                asked |= {name: np.array(values, kinds[name]) for name, values in bias.items()}
                asked["num_logprobs"] = np.full(3, logprobs, np.int32)
                runner.execute(replace(greedy_step(chunks, 8, rows), **asked))
                tokens.append(steps._sampling.sampled[:3].tolist())
            exchanges = sum(f"float32 [2, 2, {steps.model.vocab_local}]" in kind for kind in met[begun:])
            found.append((tokens, exchanges))
            assert exchanges == 2 or sum("float64 [3, 4]" in kind for kind in met[begun:]) == 2
        steps.release()
        return found

    first, second = on_ranks(2, sampled)
    assert first == second
    (shards, none), (whole, exchanges) = first
    assert shards == whole and none == 0 and exchanges == 2
    assert {row[2] for row in shards} <= {7, 280} and len({tuple(row) for row in shards}) == 2


@pytest.mark.slow
def test_launches_of_a_graph_match_the_arithmetic(model: Path, cuda: MadeUpCuda) -> None:
    (_, steps), before = runner_of(model, max_num_seqs=1), len(cuda.graphs)
    steps.capture(CudaGraphs(), [1])
    nothing = ("empty", "fill_")  # memory, and rows of padding, of which there are none
    names = [name for name in cuda.graphs[before].launches if not any(word in name for word in nothing)]
    spans = 2  # launches that plan and merge them, where contexts are long enough to be split
    assert abs(len(names) - step_arithmetic.OF_STEP - step_arithmetic.OF_LAYER) <= spans, names


@pytest.mark.soak
@pytest.mark.timeout(900)  # minutes, in the interpreter
def test_padding_changes_no_bit_where_batches_must_not(
    model: Path, cuda: MadeUpCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--batch-invariant`: three requests in graphs of four rows, and each alone in one of one row, step by step."""
    multiply_row_by_row(monkeypatch)
    config = config_of(model, max_num_seqs=4, batch_invariant=True)
    requests = requests_of(({"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "logprobs": 2}), 3, 5)
    executor = ThreadExecutor(config, DeviceRunner)
    padded = next(graph for graph in cuda.graphs if not graph.is_reset)  # the model's, of four rows
    got = run(executor, requests, 2)
    assert padded.num_replays > 0
    for request in requests:
        alone = run(ThreadExecutor(config.with_(enforce_eager=True), DeviceRunner), [request], 1)
        assert got[request.request_id] == alone[request.request_id]
