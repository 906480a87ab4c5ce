"""Whole models with adapters: against merged weights, in any batch, and at 1, 2 and 4 ranks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.workers.attention.cpp import CppBackend
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import AdapterSlots, slot_bytes
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.runner.memory_needs import adapter_slot_bytes
from tests.golden import paged_run
from tests.golden.adapters import MergedWeights, Update, adapted_run, fastest, random_updates, write_adapter
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

RANK = 8
BUFFER_BYTES = 8192  # small, so that the sum over a prompt goes through in pieces
_SHAPE = {"vocab_size": 331, "hidden_size": 256, "head_dim": 32, "num_hidden_layers": 2, "intermediate_size": 256}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {**_SHAPE, "attention_bias": True, "mlp_bias": True},
    "qwen2": _SHAPE,  # with biases of q, k and v only
    "qwen2_moe": _SHAPE,
    "qwen3_next": {"vocab_size": 331, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "youtu": {
        "vocab_size": 331,
        "hidden_size": 128,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "tie_word_embeddings": False,
    },
    "longcat_flash": {
        "vocab_size": 331,
        "hidden_size": 128,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "head_dim": 16,
    },
}
CASES = [
    ("llama", torch.bfloat16, "none"),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen2", torch.float32, "none"),
            ("llama", torch.bfloat16, "int8"),
            ("llama", torch.bfloat16, "int4"),
            ("qwen2_moe", torch.bfloat16, "none"),
            ("qwen3_next", torch.bfloat16, "none"),
        )
    ),
    pytest.param("longcat_flash", torch.bfloat16, "none", marks=pytest.mark.soak),
]
PROMPTS = {0: [3, 4, 5, 6, 7, 8, 9], 1: [10, 11, 12], 2: [20, 21, 22, 23], 3: [5, 6]}
SLOTS = {0: 1, 1: 2, 2: 0, 3: 1}


@pytest.fixture(autouse=True)
def pages_that_the_kernel_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_run, "BLOCK_SIZE", 16)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(tmp_path_factory.mktemp(family), family, **CHECKPOINTS[family])
        return made[family]

    return path


def two_adapters(path: Path, folder: Path) -> tuple[list[list[Update]], list[Adapter]]:
    """One of every module, and one of attention and MLPs only."""
    (model,) = on_ranks(1, lambda tp: load_decoder(path, tp, torch.float32))
    every = random_updates(model, RANK, 1)
    some = random_updates(model, RANK, 2, lambda name: ".layers." in name and "expert" not in name)
    return [every, some], [write_adapter(folder / f"{n}.safetensors", one) for n, one in enumerate((every, some))]


Steps = tuple[dict[int, Tensor], dict[int, Tensor]]


def steps_of(run: PagedRun, seqs: list[int]) -> Steps:
    """Logits of the prompts, and of one more token of each."""
    return (
        run.step({seq: PROMPTS[seq] for seq in seqs}, SLOTS),
        run.step({seq: [1] for seq in seqs}, SLOTS),
    )


def same(some: Steps, others: Steps) -> bool:
    return all(torch.equal(one[seq], other[seq]) for one, other in zip(some, others, strict=True) for seq in one)


@pytest.mark.parametrize(("family", "dtype", "form"), CASES)
def test_requests_have_the_same_bits_in_any_batch_and_at_any_number_of_ranks(
    path_of: Callable[[str], Path], tmp_path: Path, family: str, dtype: torch.dtype, form: str
) -> None:
    path = path_of(family)
    _, adapters = two_adapters(path, tmp_path)

    def work(tp: TensorParallel) -> tuple[Steps, str | None]:
        model = load_decoder(path, tp, dtype, quantization=form)
        plain = PagedRun(model, fastest).step({2: PROMPTS[2]})
        together = steps_of(adapted_run(model, adapters, RANK), list(PROMPTS))
        assert torch.equal(plain[2], together[0][2]), "a request without an adapter has other bits"
        for seq in PROMPTS:
            assert same(steps_of(PagedRun(model, fastest), [seq]), together), f"request {seq} alone"
        return together, model.why_not_prepared

    found = [on_ranks(size, work) for size in (1, 2, 4)]
    assert all(reason is None for ranks in found for _, reason in ranks)
    assert same(found[1][0][0], found[0][0][0]) and same(found[2][0][0], found[0][0][0])


@pytest.mark.slow
def test_ranks_with_whole_experts_have_the_bits_of_one(path_of: Callable[[str], Path], tmp_path: Path) -> None:
    """The adapter updates one expert, which one of two ranks holds."""
    path = path_of("qwen2_moe")
    (model,) = on_ranks(1, lambda tp: load_decoder(path, tp, torch.float32))
    updates = random_updates(model, RANK, 1, lambda name: ".experts.0." in name or "self_attn" in name)
    adapters = [write_adapter(tmp_path / "one.safetensors", updates)]

    def work(tp: TensorParallel) -> dict[int, Tensor]:
        model = load_decoder(path, tp, torch.bfloat16, distributes_experts=True)
        return adapted_run(model, adapters, RANK).step(PROMPTS, {0: 1, 1: 0, 2: 1, 3: 0})

    (alone,), both = on_ranks(1, work), on_ranks(2, work)
    assert all(torch.equal(alone[seq], found[seq]) for found in both for seq in PROMPTS)


class SeparateLayers(CppBackend):
    """A backend that layers are not prepared for."""


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_layers_in_one_call_have_the_bits_of_separate_layers(
    path_of: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """On two ranks whose kernels all-reduce in shared memory, with more rows than an MLP takes at once."""
    path = path_of(family)
    _, adapters = two_adapters(path, tmp_path)
    memory = anonymous_memory(total_bytes(2, BUFFER_BYTES))
    work = {seq: [(seq + 7 * token) % 320 for token in range(500)] for seq in range(2)} | {2: [5, 6]}

    def both(rank: int) -> list[dict[int, Tensor]]:
        tp = TensorParallel(rank, 2, SharedMemoryGroup(memory, rank, 2, BUFFER_BYTES, timeout_s=60))
        found = []
        with torch.inference_mode():
            model = load_decoder(path, tp, torch.bfloat16)
            adapted_run(model, adapters, RANK)
            for backend in (SeparateLayers, CppBackend):
                found.append(PagedRun(model, backend).step(work, {0: 2, 1: 0, 2: 2}))
                assert (model.why_not_prepared is None) == (backend is CppBackend)
        return found

    with ThreadPoolExecutor(2) as threads:
        for separate, prepared in threads.map(both, range(2)):
            assert all(torch.equal(separate[seq], prepared[seq]) for seq in work)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        pytest.param("qwen2_moe", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("youtu", "longcat_flash")),
    ],
)
def test_a_merged_model_is_hardly_more_exact(path_of: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    path = path_of(family)
    updates, adapters = two_adapters(path, tmp_path)
    tokens = list(range(3, 40))

    def merged(dtype: torch.dtype, of: list[Update]) -> Tensor:
        def work(tp: TensorParallel) -> Tensor:
            model = load_decoder(path, tp, dtype, changed=lambda weights: MergedWeights(weights, of))
            return PagedRun(model, fastest).step({0: tokens})[0].double()

        return on_ranks(1, work)[0]

    def adapted(tp: TensorParallel) -> list[Tensor]:
        run = adapted_run(load_decoder(path, tp, torch.bfloat16), adapters, RANK)
        return [run.step({slot: tokens}, {slot: slot})[slot].double() for slot in (1, 2)]

    for found, of in zip(on_ranks(1, adapted)[0], updates, strict=True):
        exact = merged(torch.float32, of)  # far more exact than bfloat16
        most = 2 * (merged(torch.bfloat16, of) - exact).square().mean().sqrt()
        assert (found - exact).square().mean().sqrt() <= most


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2_moe", marks=pytest.mark.more)])
@pytest.mark.parametrize("size", [1, 4])
def test_slots_have_the_planned_bytes(path_of: Callable[[str], Path], family: str, size: int) -> None:
    path = path_of(family)
    config = WorkerConfig(
        str(path), device="cpu", dtype="bfloat16", tensor_parallel_size=size, max_loras=3, max_lora_rank=RANK
    )

    def work(tp: TensorParallel) -> None:
        model: Decoder = load_decoder(path, tp, torch.bfloat16)
        for targets in (None, ("experts", "q_proj"), ("o_proj", "embed_tokens"), ("lm_head",), ("down_proj",)):
            of_slot = slot_bytes(model, RANK, targets)
            assert adapter_slot_bytes(config.with_(lora_target_modules=targets), model.spec) == of_slot
            assert AdapterSlots(model, 3, RANK, targets).num_bytes == 3 * of_slot

    on_ranks(size, work)
