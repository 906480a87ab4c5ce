"""A rank's memory: while loading little more than its shard, then the exact KV bytes per token.

Counted is the peak resident memory of a whole rank process (VmHWM): interpreter, torch, heap, and pages of the mapped
weight files. Nothing is subtracted.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oarlock.workers.attention.selector import BACKENDS
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.executor import start_executor
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import read_spec
from tests.golden.tiny_models import make_tiny
from tests.parallel.big_checkpoint import MIB, peak_bytes, write_big_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ALLOWED_SHARE, ALLOWED_BYTES = 1.3, 300 * MIB


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A checkpoint in four files, and its size."""
    directory = tmp_path_factory.mktemp("big") / "model"
    size = write_big_checkpoint(directory)
    yield directory, size
    for path in directory.iterdir():  # half a gigabyte need not wait for pytest's own clean-up
        path.unlink()


@pytest.mark.soak
def test_a_rank_holds_its_shard_and_little_more(big: tuple[Path, int]) -> None:
    directory, size = big
    config = WorkerConfig(
        str(directory),
        device="cpu",
        dtype="bfloat16",  # as stored, on a processor that emulates it as well
        tensor_parallel_size=2,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_bytes=24 * MIB,
        num_threads=1,
    )
    executor = start_executor(config, lambda phase, share: None)
    try:
        shard = executor.info.weight_bytes_per_rank
        peaks = [peak_bytes(pid) for pid in executor.rank_pids]
    finally:
        executor.close()
    assert size > 450 * MIB and 0.45 * size < shard < 0.55 * size
    limit = ALLOWED_SHARE * shard + ALLOWED_BYTES
    assert all(peak <= limit for peak in peaks), [f"{peak / MIB:.0f} of {limit / MIB:.0f} MiB" for peak in peaks]


@pytest.mark.soak
def test_a_loader_that_reads_everything_would_be_noticed(big: tuple[Path, int]) -> None:
    """The planted fault, measured in the same way and against the same limit."""
    found = {}
    for way in ("slices", "whole"):
        command = [sys.executable, "-m", "tests.parallel.big_checkpoint", str(big[0]), way]
        found[way] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120).stdout)
    limit = ALLOWED_SHARE * found["whole"]["shard"] + ALLOWED_BYTES
    assert found["slices"]["peak"] <= limit < found["whole"]["peak"], found


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_bytes_per_token_are_exact(shapes: dict[int, Path], kv_heads: int, size: int, dtype: torch.dtype) -> None:
    """Bytes of the tensors themselves: the cost of one more block, so that a spare page of a backend does not count."""
    spec = read_spec(str(shapes[kv_heads]))
    local = max(1, kv_heads // size)  # held once per rank; replicated only when there are more ranks than heads
    expected = 2 * spec.num_layers * local * spec.attentions[0].head_dim * dtype.itemsize
    for rank in (0, size - 1):
        decoder = Decoder(spec, TensorParallel(rank, size), dtype, torch.device("cpu"))
        (kv_spec,) = decoder.kv_specs(16)
        assert kv_spec.bytes_per_token == expected
        for backend in BACKENDS:
            if backend.why_not(kv_spec) is None:
                small, large = (
                    sum(pages.k.nbytes + pages.v.nbytes for pages in backend(kv_spec).allocate(blocks))
                    for blocks in (8, 40)
                )
                assert large - small == expected * 16 * 32, backend.name
                assert small - expected * 16 * 8 <= expected * 16, backend.name  # at most one spare page


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Tiny models with 8 query heads over 1, 2, 4 and 8 KV heads."""
    folder = tmp_path_factory.mktemp("shapes")
    return {heads: make_tiny(folder, "qwen3", num_key_value_heads=heads, head_dim=16) for heads in (1, 2, 4, 8)}
