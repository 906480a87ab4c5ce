"""Measures how near the device's limits the parts of a step come: attention, products, sampling, decode and prefill.

Weights are dummies. Products with weights of 4 and 8 bits stand beside those in bfloat16, sampling by the kernels that
ranks launch beside sampling by torch's operations.

Each figure stands beside what was measured of the device in the same part. The floor of a step is the longer of two
times: of its bytes at the best measured bandwidth, and of its operations at the best measured rate of products.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check import models
from benchmarks.gpu_check.device import Ceilings, measure_ceilings, product_rate, seconds_of
from benchmarks.gpu_check.part import NotHere, Row, Where
from oarlock.workers.attention.backend import AttentionBackend, AttentionSpec, CapturableBackend, KVSpec
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch
from oarlock.workers.attention.selector import choose
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.triton import availability
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.int4 import rounded
from oarlock.workers.quantization.int8 import Int8Weight, round_rows
from oarlock.workers.quantization.method import DenseWeight, LinearWeight
from oarlock.workers.runner.cuda_graphs import Calls, CudaGraphs, GraphMaker
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.pending_output import wait_for
from oarlock.workers.runner.trial_steps import SequenceChunk, TrialMemory, greedy_step
from oarlock.workers.sampling.columns import SamplingColumns, Variant
from oarlock.workers.sampling.device_sampler import DeviceOutputs, DeviceSampler
from oarlock.workers.sampling.sampler import Sampler
from oarlock.workers.sampling.token_histories import DenseHistories, TokenHistories

BATCHES = (1, 32, 256)
CONTEXT = 512  # tokens of each sequence in a decode step
STEPS = 20


def ceilings(where: Where) -> Iterator[Row]:
    """Ceilings of the device, and the rates that its products reach for the rows of a decode step."""
    found = measure_ceilings(where)
    memory = {"read GB/s": found.read_bytes_s / 1e9, "copy GB/s": found.copy_bytes_s / 1e9}
    yield Row("memory", memory)
    yield Row("products, bfloat16", {"TFLOP/s": found.product_flop_s / 1e12})
    yield Row("launch of one operation", {"us": found.launch_s * 1e6})
    outputs, inputs = (64, 64) if where.is_tiny else (14336, 4096)
    for rows in (1, 8) if where.is_tiny else (1, 8, 32, 128, 256, 2048):
        rate = product_rate(where, rows, outputs, inputs)
        took = 2.0 * rows * outputs * inputs / rate
        shares = {"share of bandwidth": 2.0 * outputs * inputs / took / found.bytes_s}
        shares |= {"share of products": rate / found.product_flop_s}
        yield Row(f"{rows} rows, {outputs} x {inputs}", {"us": took * 1e6, "TFLOP/s": rate / 1e12} | shares)


def attention(where: Where) -> Iterator[Row]:
    """Decode attention alone, on pages of several layers, so that no cache holds what is read."""
    limits = measure_ceilings(where)
    heads, group, width = (2, 2, 64) if where.is_tiny else (8, 4, 128)
    cases = [(1, 64), (3, 32)] if where.is_tiny else [(1, 32768), (8, 8192), (32, 2048), (128, 1024), (256, 1024)]
    for batch, context in cases:
        of_a_layer = batch * context * 2 * heads * width * 2
        layers = 2 if where.is_tiny else max(2, -(-(1 << 30) // of_a_layer))
        spec = KVSpec(layers, heads, width, 32, torch.bfloat16, torch.device(where.device))
        backend = choose(spec, "auto", lambda line: None)
        rate = of_a_layer * layers / attend_seconds(where, backend, spec, batch, context, group)
        figures = {"GB/s": rate / 1e9, "share of bandwidth": rate / limits.bytes_s}
        yield Row(f"{backend.name}: {batch} x {context} tokens", figures)


def attend_seconds(
    where: Where, backend: AttentionBackend, spec: KVSpec, batch: int, context: int, group: int
) -> float:
    """Seconds of the attention of all layers of `spec`, for one query token of each of `batch` sequences.

    It runs as a graph where the backend's decode steps do: the host launches more slowly than a device computes.
    """
    heads, width = spec.num_kv_heads, spec.head_dim
    pages = backend.allocate(batch * -(-context // spec.block_size) + 2)
    q = torch.randn(batch, heads * group, width, device=where.device).bfloat16()
    layer = AttentionSpec(0, heads * group, heads, width, width**-0.5)
    decodes = _decode_batch(batch, context, spec)
    maker: GraphMaker = Calls()
    if isinstance(backend, CapturableBackend):
        plan = backend.prepare_decode(decodes)
        maker = CudaGraphs() if where.device == "cuda" else maker
    else:
        plan = backend.prepare(decodes)

    def every_layer() -> None:
        for kv in pages:
            backend.attend(q, kv, plan, layer)

    return seconds_of(where, maker.capture(every_layer).replay)


def _decode_batch(batch: int, context: int, spec: KVSpec) -> ForwardBatch:
    width = -(-context // spec.block_size)
    chunks = [SequenceChunk([0], context - 1, range(1 + n * width, 1 + (n + 1) * width)) for n in range(batch)]
    step = greedy_step(chunks, spec.block_size, range(batch), step_id=1)
    return ForwardBatch.from_step(step, BlockTables.of_step(step, spec.block_size, spec.device))


def decode(shape: str, where: Where, **options: bool) -> Iterator[Row]:
    """Steps of one token for each sequence, as the ranks run them, sampling included. `options`: of the ranks."""
    limits = measure_ceilings(where)
    context = 40 if where.is_tiny else CONTEXT
    batches = (1, 3) if where.is_tiny else models.that_fit(shape, where, BATCHES, context + 1)
    runner = models.runner_of(shape, where, sequences=max(batches), tokens=context + 1, **options)
    yield Row(f"attention by {runner.attention_names}")
    for batch in batches:
        step = decode_step(runner, batch, context)
        waiting, ahead = step_seconds(runner, step, where)
        floor = _floor(runner, limits, batch, batch * context)
        figures = {"ms": waiting * 1e3, "ms one ahead": ahead * 1e3, "floor ms": floor * 1e3}
        figures |= {"share of floor": floor / ahead, "tokens/s": batch / ahead}
        yield Row(f"{shape}, {batch} sequences", figures)


def decode_step(runner: ModelRunner, batch: int, context: int) -> StepMetadata:
    """One token for each of `batch` sequences with `context` tokens. Every sequence has blocks and slots of its own."""
    size = runner.config.block_size
    width = -(-context // size)
    chunks = [
        SequenceChunk(
            [7],
            context - 1,
            range(1 + n * width, 1 + (n + 1) * width),
            read_slot=1 + 2 * n,
            write_slot=2 + 2 * n,
        )
        for n in range(batch)
    ]
    return greedy_step(chunks, size, range(batch), step_id=1, memory=TrialMemory.of(runner.spec))


def step_seconds(runner: ModelRunner, step: StepMetadata, where: Where) -> tuple[float, float]:
    """Seconds of a step from its arrays to its output: with each awaited, and with the next one launched before that.

    Block tables are sent once.
    """
    runner.execute(step)
    empty = step.table_rows[:0]
    again = models.replaced(
        step, table_groups=empty.astype(np.uint8), table_rows=empty, table_columns=empty, table_blocks=empty
    )
    runner.execute(again)
    count = 2 if where.is_tiny else STEPS
    waiting, ahead = [], []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(count):
            runner.execute(again)
        waiting.append((time.perf_counter() - started) / count)
        started = time.perf_counter()
        pending = runner.launch(again)
        for _ in range(count - 1):
            following = runner.launch(again)
            wait_for(pending)
            pending = following
        wait_for(pending)
        ahead.append((time.perf_counter() - started) / count)
    return statistics.median(waiting), statistics.median(ahead)


def prefill(shape: str, where: Where) -> Iterator[Row]:
    """Steps of prompts alone, one sequence each."""
    limits = measure_ceilings(where)
    lengths = (16,) if where.is_tiny else (512, 2048, 8192)
    models.that_fit(shape, where, [1], max(lengths))
    runner = models.runner_of(shape, where, sequences=1, tokens=max(lengths), prompt=max(lengths))
    spec = runner.spec
    for length in lengths:
        blocks = range(1, 2 + length // runner.config.block_size)
        chunk, memory = SequenceChunk([7] * length, 0, blocks), TrialMemory.of(spec)
        step = greedy_step([chunk], runner.config.block_size, [length - 1], step_id=1, memory=memory)
        took, _ = step_seconds(runner, step, where)
        pair_ops = sum(branch.sublayer.pair_ops for layer in spec.layers for branch in layer.branches)
        of_attention = length * length * pair_ops / 2  # half of it is masked
        operations = 2.0 * models.inner_parameters(spec) * length + of_attention
        rate = operations / took
        figures = {"ms": took * 1e3, "TFLOP/s": rate / 1e12, "share of products": rate / limits.product_flop_s}
        yield Row(f"{shape}, prompt of {length}", figures | {"tokens/s": length / took})


def _floor(runner: ModelRunner, limits: Ceilings, rows: int, cached: int) -> float:
    """Seconds that a decode step of `rows` tokens takes at least, over `cached` tokens of KV memory."""
    weights = models.streamed_bytes(runner)
    read = weights + cached * runner.memory.groups.bytes_per_token
    read += 2 * rows * models.slot_bytes(runner.spec)  # states are read and written
    return max(read / limits.bytes_s, weights * rows / limits.product_flop_s)  # 2 bytes of a weight, 2 operations


ROWS = (1, 8, 16, 32, 64, 128, 512, 2048)  # of products
_IN_ALL = 1 << 30  # bytes of weights in bfloat16 that follow one another: several times what a cache holds


def _float8(weight: Tensor) -> LinearWeight:
    scales = weight.float().abs().amax(1, keepdim=True) / 448.0
    values = (weight.float() / scales).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales, weight.shape[1], weight.dtype, rounds_rows=True)


# name -> (what makes it of a weight in 16 bits, bits of a weight with what lies beside it)
FORMS: dict[str, tuple[Callable[[Tensor], LinearWeight], float]] = {
    "bfloat16": (DenseWeight, 16.0),
    "int8": (lambda weight: Int8Weight(*round_rows(weight), weight.dtype), 8.0),
    "float8": (_float8, 8.0),
    "int4": (rounded, 4.5),
}


def products(where: Where) -> Iterator[Row]:
    """Products with weights that no cache holds, at the rows of decode steps and of prompts."""
    device = torch.device(where.device, 0) if where.device == "cuda" else torch.device("cpu")
    missing = availability.why_not(device)
    if missing is not None:
        raise NotHere(f"no kernels in Triton: {missing}")
    limits = measure_ceilings(where)
    outputs, inputs = (64, 128) if where.is_tiny else (14336, 4096)
    copies = 2 if where.is_tiny else _IN_ALL // (outputs * inputs * 2)
    # The interpreter, which runs tiny shapes, has no products of bfloat16.
    dtype = torch.float16 if where.is_tiny else torch.bfloat16
    took: dict[int, float] = {}
    for name, (form, bits) in FORMS.items():
        weights = [form(torch.randn(outputs, inputs, device=device, dtype=dtype)).on(device) for _ in range(copies)]
        each = [weight.matmul() for weight in weights]
        for rows in (1, 70) if where.is_tiny else ROWS:
            x = torch.randn(rows, inputs, device=device, dtype=dtype)
            seconds = seconds_of(where, lambda x=x, each=each: [product(x) for product in each]) / copies
            took.setdefault(rows, seconds)
            figures = {
                "us": seconds * 1e6,
                "share of bandwidth": outputs * inputs * bits / 8 / seconds / limits.bytes_s,
            }
            rate = 2.0 * rows * outputs * inputs / seconds
            figures |= {"share of products": rate / limits.product_flop_s, "times bfloat16": took[rows] / seconds}
            yield Row(f"{name}: {rows} rows, {outputs} x {inputs}", figures)
        del weights, each


# Kind of rows -> the standard deviation of their logits, and columns of the step.
KINDS: dict[str, tuple[float, dict[str, float]]] = {
    "greedy": (3.0, {}),
    "temperature": (3.0, {"temperature": 0.8}),
    "top-p": (3.0, {"temperature": 0.8, "top_p": 0.95}),
    "top-k and top-p": (3.0, {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    "top-p, flat": (1.0, {"temperature": 1.0, "top_p": 0.95}),  # kept are tens of thousands of ids
    "top-k of 1000": (3.0, {"temperature": 1.0, "top_k": 1000}),
    "penalties": (3.0, {"temperature": 0.8, "frequency": 0.5}),
    "logprobs": (3.0, {"num_logprobs": 5}),
}


def sampling(where: Where) -> Iterator[Row]:
    """Times of sampling in microseconds, beside one pass over the logits at the best bandwidth."""
    device = torch.device(where.device)
    if reason := availability.why_not(device):
        raise NotHere(reason)
    limits = measure_ceilings(where)
    vocab, batches = (600, (2,)) if where.is_tiny else (151_936, (1, 32, 256))
    for batch in batches:
        histories = DenseHistories(batch, 0, vocab, device)
        histories.seen[:, ::64] = 3  # in the prompt, and generated once
        kernels = DeviceSampler(vocab, batch, histories, device)
        kept = TokenHistories(batch, vocab) if where.is_tiny else histories  # as ranks on the CPU have
        by_torch = Sampler(TensorParallel.solo(), 0, vocab, vocab, kept)
        noise = torch.randn(batch, vocab, device=device)
        for kind, (deviation, columns) in KINDS.items():
            step, logits = _step(batch, columns), noise * deviation
            placed, outputs = SamplingColumns.of_step(step, device), DeviceOutputs.empty(batch, device)
            variant = Variant.of(step)
            ours = seconds_of(where, partial(kernels.sample, logits, placed, outputs, variant), at_once=3)
            theirs = seconds_of(where, partial(by_torch.sample, logits, step))
            floor = logits.nbytes / limits.bytes_s
            figures = {"us": ours * 1e6, "share of bandwidth": floor / ours, "torch us": theirs * 1e6}
            yield Row(f"{kind}, {batch} rows", figures)


def _step(rows: int, columns: dict[str, float]) -> StepMetadata:
    """One token each; `columns` for all rows."""
    step = greedy_step([SequenceChunk([0], 0, [NULL_BLOCK])] * rows, 1, range(rows))
    penalised = np.arange(rows if "frequency" in columns else 0, dtype=np.int32)
    named = {"repetition": 1.0, "frequency": 0.0, "presence": 0.0} if len(penalised) else {}
    values = {name: np.full(rows, value, getattr(step, name).dtype) for name, value in (named | columns).items()}
    return dataclasses.replace(step, seeds=np.arange(rows), penalty_rows=penalised, **values)
