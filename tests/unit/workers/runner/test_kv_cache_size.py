"""The size of the KV cache: exact bytes per token, limits of the machine, and helpful errors."""

import dataclasses

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.selector import BACKENDS
from oarlock.workers.config import WorkerConfig
from oarlock.workers.runner import kv_room
from oarlock.workers.runner.group_sizes import RESERVED_BLOCKS, GroupSize, GroupSizes
from oarlock.workers.runner.kv_room import KVRoom, room_for_kv
from tests.unit.workers.made_up_device import MadeUpDevice

QWEN = KVSpec(24, 2, 64, 32, torch.bfloat16, torch.device("cpu"))


def room(available: int) -> KVRoom:
    return KVRoom(available, "there is")


def config(**changes) -> WorkerConfig:
    return WorkerConfig("model", max_model_len=4096, max_num_seqs=4, block_size=32).with_(**changes)


def blocks_that_fit(kv: KVSpec, changed: WorkerConfig, available: KVRoom) -> int:
    """The blocks of a model with one group of pages."""
    (blocks,) = GroupSizes(changed, [GroupSize(kv.num_layers, kv.bytes_per_block, kv.shape)]).counts_that_fit(available)
    return blocks


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_bytes_of_a_token_are_exact(backend):
    if (reason := backend.why_not(QWEN)) is not None:
        pytest.skip(reason)
    assert QWEN.bytes_per_token == 2 * 24 * 2 * 64 * 2 == 12_288
    pages = sum(t.numel() * t.itemsize for kv in backend(QWEN).allocate(9) for t in (kv.k, kv.v))
    assert 9 * QWEN.bytes_per_block <= pages <= (9 + RESERVED_BLOCKS - 1) * QWEN.bytes_per_block


def test_measured_host_memory_is_capped_by_what_sequences_can_use():
    plenty = 10**12
    assert blocks_that_fit(QWEN, config(), room(plenty)) == 4 * 128 + 1
    assert blocks_that_fit(QWEN, config(kv_cache_bytes=plenty), room(plenty)) == plenty // QWEN.bytes_per_block - 1
    cuda = config(device="cuda")
    assert blocks_that_fit(QWEN, cuda, room(plenty)) == plenty // QWEN.bytes_per_block - 1


def test_blocks_never_cost_more_than_there_is():
    for extra in range(0, 5 * QWEN.bytes_per_block, QWEN.bytes_per_block // 3):
        available = (128 + RESERVED_BLOCKS) * QWEN.bytes_per_block + extra
        blocks = blocks_that_fit(QWEN, config(), room(available))
        assert (blocks + 1) * QWEN.bytes_per_block <= available, "the backend's spare page is paid for"
        assert blocks - 1 >= 128, "one full sequence"


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({"kv_cache_bytes": 1 << 20}, "cpu", "--kv-cache-memory gives 1.0 MiB"),
        ({}, "cpu", "25% of free memory"),
        (
            {},
            "cuda",
            "0.9 of 1.0 GiB leaves, in addition to 920.6 MiB in use and 100 B for a step of 2048",
        ),
    ],
)
def test_too_little_memory_is_refused_with_arithmetic_and_a_fix_that_works(changes, device, words):
    spec, changes = QWEN, {**changes, "device": device}
    meter = MadeUpDevice(1 << 30, (1 << 30) // 10 + (1 << 20) + 100) if device == "cuda" else None
    given = room_for_kv(config(**changes), meter, 100)._replace(available=1 << 20)
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(spec, config(**changes), given)
    assert refused.value.exit_code == 4
    assert words in refused.value.cause
    assert "12288 bytes" in refused.value.cause
    assert "--max-model-len" in refused.value.fix or "smaller model" in refused.value.fix
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(spec, config(**changes), room(10 * spec.bytes_per_block))
    shorter = int(refused.value.fix.split("--max-model-len to ")[1].split()[0])
    assert blocks_that_fit(spec, config(max_model_len=shorter), room(10 * spec.bytes_per_block)) >= 2


def test_a_length_that_may_be_fitted_takes_the_available_memory():
    fitted = config(fit_model_len=True)
    blocks = blocks_that_fit(QWEN, fitted, room(10 * QWEN.bytes_per_block))
    assert blocks == 10 - RESERVED_BLOCKS + 1
    of_kv = [GroupSize(QWEN.num_layers, QWEN.bytes_per_block, QWEN.shape)]
    assert GroupSizes(fitted, of_kv).fitted_length([blocks]) == 8 * fitted.block_size
    assert GroupSizes(fitted, of_kv).fitted_length([10**6]) == 4096
    assert GroupSizes(config(), of_kv).fitted_length([blocks]) == 4096
    with pytest.raises(StartupError, match="Not enough KV memory"):
        blocks_that_fit(QWEN, fitted, room(2 * QWEN.bytes_per_block))


def test_explicit_size_wins_and_ranks_share_the_host(monkeypatch):
    def available(**changes) -> int:
        return room_for_kv(config(**changes), None, 1 << 30).available

    assert available(kv_cache_bytes=123) == 123
    assert room_for_kv(config(kv_cache_bytes=123), MadeUpDevice(1000, 700), 50).available == 123
    monkeypatch.setattr(kv_room, "free_host_bytes", lambda: 8_000)
    assert available() == 2_000
    assert available(tensor_parallel_size=4) == 500


def test_device_memory_is_utilisation_minus_what_is_used_and_a_step():
    meter = MadeUpDevice(1000, 700)
    assert room_for_kv(config(gpu_memory_utilization=0.5), meter, 0).available == 200
    assert room_for_kv(config(gpu_memory_utilization=0.5), meter, 60).available == 140
    assert room_for_kv(config(gpu_memory_utilization=0.25), meter, 0).available == 0


@pytest.mark.parametrize(("cache", "row"), [("int8", "(64 x 1 + 2)"), ("fp8", "64 x 1")])
def test_pages_in_8_bits_are_counted_to_the_byte(cache, row):
    """The scales of int8 count too; blocks take as much memory as they are said to."""
    spec = dataclasses.replace(QWEN, cache_dtype=cache)
    assert spec.bytes_per_token == 2 * 24 * 2 * {"int8": 66, "fp8": 64}[cache]
    for backend in BACKENDS:
        if backend.why_not(spec) is None:
            pages = sum(t.nbytes for kv in backend(spec).allocate(9) for t in (kv.k, kv.v))
            assert pages in (9 * spec.bytes_per_block, 10 * spec.bytes_per_block), "one spare page at most"
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(spec, config(), room(1 << 20))
    assert f"{spec.bytes_per_token} bytes = 2 x 24 layers x 2 KV heads x {row} bytes" in refused.value.cause
    with pytest.raises(StartupError, match="use --kv-cache-dtype int8, or "):
        blocks_that_fit(QWEN, config(), room(1 << 20))


@pytest.mark.parametrize(
    ("cache", "of_token", "row"), [("auto", 27 * 1152, "576 x 2"), ("int8", 27 * 580, "(576 x 1 + 4)")]
)
def test_a_key_that_contains_its_value_is_counted_once(cache, of_token, row):
    spec = KVSpec(27, 1, 576, 32, torch.bfloat16, torch.device("cpu"), cache, value_dim=512, value_in_key=True)
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(spec, config(), room(1 << 20))
    assert f"{of_token} bytes = 27 layers x {row} bytes a token" in refused.value.cause
