"""KV blocks beyond the pool, with real ranks: loaded blocks give the same bits as computed ones."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.checks.devices import this_cpu
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor, start_executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
PROMPT = tuple(1000 + 7 * number % 500 for number in range(100))  # 6 full blocks and a bit
OTHERS = [tuple(2000 + (number * 131 + place) % 900 for place in range(200)) for number in range(2)]  # 12 each
CONFIG = WorkerConfig(
    str(DEMO),
    device="cpu",
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=128,
    block_size=16,
    num_kv_blocks=17,
    num_threads=1,
    kv_offload_bytes=4 << 20,
)
ALIKE = [pytest.mark.soak, pytest.mark.every]  # each of the two stands in another row of the longer run
WAYS = [  # number type, of the KV memory, ranks of a stage, whether they are processes
    pytest.param("float32", "auto", 2, True, id="processes", marks=pytest.mark.soak),
    pytest.param("float32", "int8", 2, False, id="int8"),
    pytest.param("float32", "fp8", 1, False, id="fp8", marks=pytest.mark.soak),
    pytest.param("float32", "auto", 1, False, id="float32", marks=ALIKE),
    pytest.param("bfloat16", "auto", 1, False, id="bfloat16", marks=pytest.mark.soak),
    pytest.param("bfloat16", "auto", 2, True, id="bfloat16 processes", marks=pytest.mark.soak),
    pytest.param("bfloat16", "int8", 1, False, id="bfloat16 int8", marks=ALIKE),
]


@contextmanager
def started(config: WorkerConfig, *, in_processes: bool = False) -> Iterator[Executor]:
    executor = start_executor(config, lambda *_: None) if in_processes else ThreadExecutor(config)
    # Without the times of steps, which a busy machine measures too short or too long, loading always pays.
    assert executor.info.kv_offload is not None
    executor.info = replace(executor.info, step_cost=None)
    try:
        yield executor
    finally:
        executor.close()


def ask(engine: DirectEngine) -> list[Answer]:
    """Greedily and at random, one after the other and side by side with others."""
    greedy, sampled = SamplingParams(max_tokens=8, logprobs=3), SamplingParams(8, temperature=1.0, seed=5, logprobs=3)
    alone = engine.run([Request(1, PROMPT, greedy)])
    together = engine.run([Request(number, PROMPT[: 90 + number], sampled) for number in (2, 3)])
    return [alone[1], together[2], together[3]]


def push_out(engine: DirectEngine) -> None:
    """Run other prompts that take all blocks of the pool."""
    for number, prompt in enumerate(OTHERS, 10):
        engine.run([Request(number, prompt, SamplingParams(max_tokens=2))])


@pytest.mark.parametrize(("dtype", "cache", "size", "in_processes"), WAYS)
def test_answers_have_the_same_bits(dtype: str, cache: str, size: int, *, in_processes: bool, tmp_path: Path) -> None:
    """From host memory, and after a restart from files."""
    if dtype == "bfloat16" and not this_cpu().multiplies("bfloat16"):
        pytest.skip("bfloat16 is emulated here")
    config = CONFIG.with_(dtype=dtype, kv_cache_dtype=cache, tensor_parallel_size=size, kv_offload_path=str(tmp_path))
    check(config, tmp_path, in_processes=in_processes)


def test_layers_with_windows_have_the_same_bits(tmp_path: Path) -> None:
    """With KV offload, layers with windows keep all blocks; without it, only the blocks of the window."""
    model, path = make_tiny(tmp_path, "gemma3_text", vocab_size=3000), tmp_path / "blocks"
    config = CONFIG.with_(model_path=str(model))
    answers = check(config.with_(kv_offload_path=str(path)), path)
    executor = ThreadExecutor(config.with_(kv_offload_bytes=None))
    assert len(executor.info.groups) == 2
    assert ask(DirectEngine(executor, enable_prefix_caching=True)) == answers
    executor.close()


@pytest.mark.soak
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_rows_of_latent_attention_have_the_same_bits(cache: str, tmp_path: Path) -> None:
    """Each rank keeps the rows of all heads, and no values besides."""
    sizes = {"vocab_size": 3000, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
    model, path = make_tiny(tmp_path, "youtu", **sizes), tmp_path / "blocks"
    config = CONFIG.with_(
        model_path=str(model), dtype="bfloat16", kv_cache_dtype=cache, tensor_parallel_size=2, kv_offload_path=str(path)
    )
    check(config, path)


@pytest.mark.soak
@pytest.mark.parametrize(("stages", "size"), [(3, 1), (2, 2)])
def test_stages_have_the_same_bits(stages: int, size: int, tmp_path: Path) -> None:
    """Stages of different sizes: blocks of theirs take more or less memory, and one slot more or less fits."""
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": size}
    answers = check(CONFIG.with_(**sizes, kv_offload_path=str(tmp_path / "stages")), tmp_path / "stages")
    with started(CONFIG) as executor:
        assert ask(DirectEngine(executor, enable_prefix_caching=True)) == answers


def check(config: WorkerConfig, path: Path, *, in_processes: bool = False) -> list[Answer]:
    """Ask, ask again when host memory alone has it, and after a restart. Returns the answers."""
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    with started(config, in_processes=in_processes) as executor:
        engine = DirectEngine(executor, enable_prefix_caching=True)
        stats = engine.scheduler.stats
        computed = ask(engine)
        push_out(engine)
        engine.run_until(lambda: stats.kv_offload_written_blocks >= 6)
        assert stats.kv_offload_loaded_blocks == 0
        assert ask(engine) == computed
        assert stats.kv_offload_loaded_blocks == 6
    with started(config, in_processes=in_processes) as executor:
        engine = DirectEngine(executor, enable_prefix_caching=True)
        stats = engine.scheduler.stats
        engine.run_until(lambda: len(engine.scheduler.kv_offload._on_disk) >= 6)
        loaded = ask(engine)
        assert (stats.kv_offload_read_blocks, stats.kv_offload_loaded_blocks) == (6, 6)
        assert loaded == computed
        assert engine.num_cached_tokens >= 96
        # Files that one rank lacks, or that are damaged, are computed.
        engine.scheduler.memory.reset_prefix_cache()
        for number, file in enumerate(sorted(path.glob(f"oarlock-*/{num_ranks - 1}/*/*.kv"))):
            if number % 2:
                file.unlink()
            else:
                os.truncate(file, file.stat().st_size - 1)
        assert ask(engine) == computed
        assert stats.kv_offload_failed_blocks > 0
    return computed


def test_memory_alone_needs_no_files() -> None:
    with started(CONFIG) as executor:
        engine = DirectEngine(executor, enable_prefix_caching=True, pipeline_depth=2)
        computed = ask(engine)
        push_out(engine)
        assert ask(engine) == computed
        assert engine.scheduler.stats.kv_offload_loaded_blocks == 6
        assert not engine.scheduler.kv_offload.has_disk


@pytest.mark.soak
def test_other_weights_and_formats_have_files_of_their_own(tmp_path: Path) -> None:
    keys = set()
    for changes in ({}, {"block_size": 32}, {"kv_cache_dtype": "fp8"}, {"load_format": "dummy"}):
        config = CONFIG.with_(kv_offload_path=str(tmp_path), **changes)
        with started(config):
            keys.add(frozenset(path.name for path in tmp_path.iterdir() if path.is_dir()))
    assert sorted(map(len, keys)) == [1, 2, 3, 4]


def test_too_little_memory_is_refused_with_the_size_of_a_block() -> None:
    with pytest.raises(StartupError, match="a block of this model takes") as caught:
        ThreadExecutor(CONFIG.with_(kv_offload_bytes=1 << 10))
    assert "Raise --kv-offload-memory" in caught.value.fix
