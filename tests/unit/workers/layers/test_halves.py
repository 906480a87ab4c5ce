"""One call per half of a layer gives the bits of its separate operations, and notices when a part is replaced."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.distributed.all_reduce import NodeAllReduce, SharedMemoryGroup
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.build import ISALevel
from oarlock.workers.layers.gated_norm import GatedNorm
from oarlock.workers.layers.norm import RMSNorm, RowNorm
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.method import Empty, LinearWeight, WeightShard
from oarlock.workers.quantization.registry import QUANTIZATIONS, Quantization
from oarlock.workers.weights.source import WeightSource
from tests.golden import paged_run
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import FAMILIES, MIXTURES, make_tiny
from tests.unit.workers.gloo_groups import gloo_groups
from tests.unit.workers.kernel_levels import NO_KERNELS, PARAMETERS, threads

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

BUFFER_BYTES = 8192  # small, so that the sum over a prompt goes through in pieces
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Families whose heads divide the hidden size.
WHOLE_HEADS = ("biogpt", "cohere", "cohere2", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "phi", "phi3")
# Heads that the kernel supports, and what the families do not have by default.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 32} for family in FAMILIES if family not in WHOLE_HEADS},
    **{family: {"hidden_size": 256} for family in WHOLE_HEADS},
    "cohere2": {"hidden_size": 256, "num_key_value_heads": 2},
    "phi3": {"hidden_size": 128, "partial_rotary_factor": 0.5},
    **{family: {"num_attention_heads": 4, "num_key_value_heads": 2} for family in MIXTURES},
    **{family: {"head_dim": 32} for family in ("cohere2_moe", "kolibri1", "minimax_m2")},
    **{family: {"num_attention_heads": 4, "num_key_value_heads": 2} for family in ("granitemoe_swa", "phimoe")},
    "exaone4": {"hidden_size": 256},
    "glm4": {"head_dim": 32},
    "granite_swa": {"hidden_size": 256},
    "hyperclovax": {"head_dim": 32},
    "stablelm": {"hidden_size": 256},
    **{family: {"head_dim": 32} for family in ("glm4_moe", "gpt_oss", "qwen3_moe", "afmoe", "hunyuan_v1_moe")},
    "llama4_text": {"head_dim": 32},
    "qwen3_next": {"head_dim": 32},
    "bamba": {"head_dim": 32, "mamba_n_groups": 1},
    "granitemoehybrid": {"hidden_size": 256, "mamba_n_groups": 2},
    "lfm2_moe": {"hidden_size": 256},
    # Beside layers that read other layers' pages: experts whose result is added to an MLP's before its norm.
    "gemma4_text": {"head_dim": 32, "global_head_dim": 64, "enable_moe_block": True, "num_experts": 8,
                    "top_k_experts": 2, "moe_intermediate_size": 32},
    "gemma4_unified_text": {"head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": False},
    "laguna": {"head_dim": 32},
    "mimo_v2_flash": {"head_dim": 48, "v_head_dim": 32, "swa_head_dim": 48, "swa_v_head_dim": 32},
    "llama": {"head_dim": 48, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    # Latent attention, with and without a latent of queries.
    "deepseek_v2": {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "q_lora_rank": None},
    "deepseek_v3": {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 16, "rope_interleave": False,
                    "attention_bias": True},
    # Experts whose result the next layer adds, some of them without matrices.
    "longcat_flash": {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "head_dim": 16},
}  # fmt: skip


NORMS_OF_RANKS = ("bamba", "minimax_m2", "olmo2", "olmoe")  # a norm needs the heads of all ranks


class SeparateOperations(CppBackend):
    """A backend that layers are not prepared for."""


@pytest.fixture(autouse=True)
def pages_that_the_kernel_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_run, "BLOCK_SIZE", 16)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: make_tiny(folder, family, **changes) for family, changes in CHECKPOINTS.items()}


def run(decoder: Decoder, backend: type[CppBackend], *works: dict[int, list[int]]) -> Tensor:
    """The logits of all tokens of the steps `works`, and the pages and states they leave, in one row of numbers."""
    steps = PagedRun(decoder, backend)
    logits = [rows for work in works for rows in steps.step(work).values()]
    pages = [part.flatten().float() for layer in steps.memory if layer.kv for part in (layer.kv.k, layer.kv.v)]
    states = [part.flatten().float() for layer in steps.memory if layer.states for part in layer.states.parts]
    expected = None if backend is CppBackend else "attention is computed by SeparateOperations"
    assert decoder.why_not_prepared == expected
    return torch.cat([*(rows.flatten() for rows in logits), *pages, *states])


def both_forms(decoder: Decoder, *works: dict[int, list[int]]) -> list[Tensor]:
    return [run(decoder, backend, *works) for backend in (SeparateOperations, CppBackend)]


def check_equal(path: Path, size: int, dtype: torch.dtype, quantization: str = "none") -> None:
    """Prompts, a chunk beside tokens that are decoded, and one token alone."""
    works = {0: list(range(3, 40)), 1: [5]}, {0: [7], 1: [8, 9, 10], 2: list(range(20))}, {2: [4]}

    def work(tp: TensorParallel) -> list[Tensor]:
        return both_forms(load_decoder(path, tp, dtype, quantization=quantization), *works)

    for separate, prepared in on_ranks(size, work):
        assert torch.equal(separate, prepared) and separate.isfinite().all()


def test_keys_that_are_values_run_as_separate_operations(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "gemma4_unified_text", head_dim=32, global_head_dim=64)

    def reason(tp: TensorParallel) -> str | None:
        decoder = load_decoder(path, tp, torch.float32)
        PagedRun(decoder, CppBackend).step({0: [3, 4, 5]})
        return decoder.why_not_prepared

    assert on_ranks(1, reason) == ["keys are copied to values by torch"]


@pytest.mark.parametrize("level", PARAMETERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", CHECKPOINTS)
@pytest.mark.slow
def test_both_forms_give_the_same_bits(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype, level: ISALevel
) -> None:
    with library.using(level):
        check_equal(checkpoints[family], 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [family for family in CHECKPOINTS if family not in NORMS_OF_RANKS])
@pytest.mark.slow
def test_both_forms_give_the_same_bits_on_two_ranks(
    checkpoints: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    """The other sum of the families left out is inside the kernels, or the layers are not prepared."""
    check_equal(checkpoints[family], 2, dtype)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "nemotron", "starcoder2", "olmo"])
@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name != "none"])
def test_both_forms_give_the_same_bits_with_rounded_weights(
    tmp_path: Path, family: str, dtype: torch.dtype, size: int, quantization: str
) -> None:
    path = make_tiny(
        tmp_path, family, **{**CHECKPOINTS[family], "intermediate_size": 128}
    )  # every rank has whole groups of inputs
    check_equal(path, size, dtype, quantization)


@pytest.mark.parametrize("family", ["afmoe", "deepseek_v3", "hunyuan_v1_moe", "llama4_text", "ministral3"])
@pytest.mark.parametrize("quantization", [name for name in QUANTIZATIONS if name != "none"])
@pytest.mark.slow
def test_both_forms_give_the_same_bits_with_rounded_weights_of_new_families(
    tmp_path: Path, family: str, quantization: str
) -> None:
    widths = {"intermediate_size": 128, **({"intermediate_size_mlp": 128} if family == "llama4_text" else {})}
    path = make_tiny(tmp_path, family, **{**CHECKPOINTS[family], **widths})
    for size in (1, 2):
        check_equal(path, size, torch.bfloat16, quantization)


def as_stored_in_fp8(weight: Tensor) -> LinearWeight:
    values = (weight.float() * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Fp8Weight(values, torch.full((len(weight), -(-weight.shape[1] // 32)), 1 / 64), 32, weight.dtype)


def as_stored_in_groups(weight: Tensor) -> LinearWeight:
    """With zero points, and inputs in another order."""
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    values = (weight[:, order].float() * 200 - 3).round().clamp(-128, 127).to(torch.int8)
    scales = torch.full((len(weight), -(-inputs // 16)), 1 / 200)
    return GroupedWeight(values, scales, 16, weight.dtype, offsets=scales * 3, bits=8, order=order)


@dataclass(frozen=True)
class Changed:
    """A `LinearMethod` that makes weights of another form from dense ones."""

    change: Callable[[Tensor], LinearWeight]

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> LinearWeight:
        return self.change(shard.take(weights, empty))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", [as_stored_in_fp8, as_stored_in_groups])
def test_both_forms_give_the_same_bits_with_weights_of_checkpoints(
    checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    size: int,
    change: Callable[[Tensor], LinearWeight],
) -> None:
    monkeypatch.setitem(QUANTIZATIONS, "changed", Quantization(lambda: Changed(change)))
    check_equal(checkpoints["gemma3_text"], size, dtype, "changed")


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "cohere2", "olmo2", "bamba"])
def test_sums_over_ranks_in_shared_memory_stay_in_the_kernels(checkpoints: dict[str, Path], family: str) -> None:
    """Two threads on the memory of two ranks: Python then only sums the embeddings, once in each step."""
    memory = anonymous_memory(total_bytes(2, BUFFER_BYTES))
    sums: list[tuple[int, int]] = []  # (rank, rows) of each in Python

    class CountedGroup(SharedMemoryGroup):
        def all_reduce(self, x: Tensor) -> Tensor:
            sums.append((self.rank, len(x)))
            return super().all_reduce(x)

    def work(rank: int) -> list[Tensor]:
        tp = TensorParallel(rank, 2, CountedGroup(memory, rank, 2, BUFFER_BYTES, timeout_s=60))
        with torch.inference_mode():
            decoder = load_decoder(checkpoints[family], tp, torch.bfloat16)
            separate = run(decoder, SeparateOperations, *works)
            before = sums.count((rank, 3))
            prepared = run(decoder, CppBackend, *works)
        branches = [branch for layer in decoder.layers for branch in layer.branches]
        norms = [one for one in branches if isinstance(getattr(one.sublayer, "norm", None), RowNorm | GatedNorm)]
        assert before == 1 + len(branches) + len(norms) and sums.count((rank, 3)) == before + 1
        return [separate, prepared]

    works = {0: list(range(3, 40)), 1: [5]}, {0: [7], 1: [8, 9]}
    with ThreadPoolExecutor(2) as threads:
        for separate, prepared in threads.map(work, range(2)):
            assert torch.equal(separate, prepared) and separate.isfinite().all()


@pytest.mark.parametrize("ranks_of_host", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_two_hosts_lie_between_the_halves_and_give_the_bits_of_one(
    checkpoints: dict[str, Path], dtype: torch.dtype, ranks_of_host: int
) -> None:
    size = 2 * ranks_of_host
    memories = [anonymous_memory(total_bytes(ranks_of_host, BUFFER_BYTES)) for _ in range(2)]
    first_ranks = gloo_groups(2)

    def work(rank: int) -> Tensor:
        host, local = divmod(rank, ranks_of_host)
        group = SharedMemoryGroup(memories[host], local, ranks_of_host, BUFFER_BYTES, timeout_s=60, shares_cores=True)
        sums = NodeAllReduce(group, 2, first_ranks[host] if local == 0 else None)
        with torch.inference_mode():
            return run(load_decoder(checkpoints["qwen2"], TensorParallel(rank, size, sums), dtype), CppBackend, *works)

    works = {0: list(range(3, 40)), 1: [5]}, {0: [7], 1: [8, 9]}
    one_host = on_ranks(size, lambda tp: run(load_decoder(checkpoints["qwen2"], tp, dtype), CppBackend, *works))
    with ThreadPoolExecutor(size) as threads:
        for found, expected in zip(threads.map(work, range(size)), one_host, strict=True):
            assert torch.equal(found, expected) and found.isfinite().all()


def decoded(decoder: Decoder, backend: type[CppBackend], cache_dtype: str) -> tuple[Tensor, Tensor]:
    """The logits of tokens that one or two sequences decode, across the ends of pages and of a long context, and the
    bytes of all pages, which held NaN before."""
    steps = PagedRun(decoder, lambda spec: backend(replace(spec, cache_dtype=cache_dtype)))
    parts = [part.view(torch.uint8) for layer in steps.memory if layer.kv for part in (layer.kv.k, layer.kv.v)]
    for part in parts:
        part.fill_(0xFF)
    steps.step({0: list(range(3, 33)), 1: list(range(13))})
    works = [{0: [token]} for token in range(4)] + [{0: [token], 1: [token + 5]} for token in range(5)]
    logits = [rows for work in works for rows in steps.step(work).values()]
    steps.step({2: [token % 50 for token in range(700)]})
    logits += [steps.step({2: [token]})[2] for token in range(6)]
    return torch.cat(logits), torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gemma4_text", "mimo_v2_flash", "deepseek_v2"])
@pytest.mark.parametrize("cache_dtype", ["auto", "int8", "fp8"])
def test_a_token_alone_is_stored_by_the_thread_that_reads_it(
    checkpoints: dict[str, Path], family: str, cache_dtype: str, num_threads: int
) -> None:
    """In a prepared step; by separate operations all tokens are stored before any is read."""
    with threads(num_threads), torch.inference_mode():
        decoder = load_decoder(checkpoints[family], TensorParallel.solo(), torch.bfloat16)
        logits, pages = decoded(decoder, SeparateOperations, cache_dtype)
        found, stored = decoded(decoder, CppBackend, cache_dtype)
        assert decoder.why_not_prepared is None
    assert torch.equal(found, logits) and found.isfinite().all() and torch.equal(stored, pages)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_page_is_shared_in_the_step_that_fills_it(checkpoints: dict[str, Path], family: str) -> None:
    """The last token of one prompt, and the only new token of another prompt that begins with the first."""

    def logits(decoder: Decoder, backend: type[CppBackend]) -> Tensor:
        steps = PagedRun(decoder, backend)
        steps.step({0: list(range(3, 34))})
        steps.blocks[1], steps.lengths[1] = list(steps.blocks[0]), 32
        return torch.cat(list(steps.step({1: [9], 0: [7]}).values()))

    with threads(1), torch.inference_mode():
        decoder = load_decoder(checkpoints[family], TensorParallel.solo(), torch.bfloat16)
        assert torch.equal(logits(decoder, CppBackend), logits(decoder, SeparateOperations))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_more_rows_than_an_mlp_takes_at_once(checkpoints: dict[str, Path], family: str, size: int) -> None:
    long = {seq: [(seq + 7 * token) % 320 for token in range(500)] for seq in range(2)}

    def work(tp: TensorParallel) -> list[Tensor]:
        return both_forms(load_decoder(checkpoints[family], tp, torch.bfloat16), long)

    for separate, prepared in on_ranks(size, work):
        assert torch.equal(separate, prepared)


def broken_product(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *arguments: real(*arguments).roll(1, -1)


def broken_norm(real: RMSNorm) -> RMSNorm:
    norm = RMSNorm(real.name, real.size, real.eps, real.placement)
    norm.weight = real.weight * 2
    return norm


@pytest.mark.parametrize("part", ["attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"])
def test_a_replaced_product_is_used(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    half, name = part.split(".")
    check_replacing(checkpoints, monkeypatch, lambda block: getattr(getattr(block, half), name), "matmul", False)


@pytest.mark.parametrize(("branch", "part"), [(0, "norm"), (1, "post_norm")])
def test_a_replaced_norm_is_used(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, branch: int, part: str
) -> None:
    check_replacing(checkpoints, monkeypatch, lambda layer: layer.branches[branch], part, True)


def test_a_replaced_last_norm_is_used(checkpoints: dict[str, Path]) -> None:
    """By kernels if it is another norm, else by itself after the layers, as one that records its result."""
    with torch.inference_mode():
        decoder = load_decoder(checkpoints["gemma2"], TensorParallel.solo(), torch.bfloat16)
        steps, real, seen = PagedRun(decoder, CppBackend), decoder.norm, []
        assert isinstance(real, RMSNorm)
        first = steps.step({0: [3, 4]})[0]
        decoder.norm = broken_norm(real)
        broken = steps.step({1: [3, 4]})[1]
        decoder.norm = lambda x: seen.append(real(x)) or seen[-1]  # ty: ignore[invalid-assignment]
        again = steps.step({2: [3, 4]})[2]
        assert decoder.why_not_prepared is None and len(seen) == 1
    assert torch.equal(first, again) and not torch.equal(first, broken)


def check_replacing(
    checkpoints: dict[str, Path], patch: pytest.MonkeyPatch, owner_of: Any, name: str, is_prepared: bool
) -> None:
    """A part of a layer that has run is replaced, and put back. `is_prepared`: whether kernels serve the new part."""
    with torch.inference_mode():
        decoder = load_decoder(checkpoints["gemma2"], TensorParallel.solo(), torch.bfloat16)
        steps = PagedRun(decoder, CppBackend)
        owner = owner_of(decoder.layers[1])
        replace = broken_norm if is_prepared else broken_product
        first = steps.step({0: [3, 4]})[0]
        with patch.context() as inner:
            inner.setattr(owner, name, replace(getattr(owner, name)))
            decoder.parts_were_replaced()
            broken = steps.step({1: [3, 4]})[1]
            assert (decoder.why_not_prepared is None) == is_prepared
        decoder.parts_were_replaced()
        again = steps.step({2: [3, 4]})[2]
        assert decoder.why_not_prepared is None
    assert torch.equal(first, again) and not torch.equal(first, broken)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_layers_call_no_operation_of_torch(tmp_path: Path) -> None:
    """Layers therefore allocate no tensor: a step makes as many operations whatever the number of layers."""
    counts = []
    with torch.inference_mode():
        for layers in (1, 3):
            path = make_tiny(tmp_path, "qwen3", head_dim=32, num_hidden_layers=layers)
            steps = PagedRun(load_decoder(path, TensorParallel.solo(), torch.bfloat16), CppBackend)
            steps.step({0: [3, 4]})
            with _Counting() as counting:
                steps.step({0: [5]})
            counts.append(counting.count)
    assert counts[0] == counts[1] > 0
