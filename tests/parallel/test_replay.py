"""A recorded run gives the same answers again on the same ranks, and reports where other ranks or weights differ."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from oarlock.engine.replay.__main__ import main
from oarlock.engine.replay.recording import Recording, RecordingExecutor, RecordingWriter
from oarlock.engine.types import KINDS as ALL_KINDS
from oarlock.engine.types import POOLS, PoolingParams, Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import start_executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.unit.workers.kernel_levels import NO_KERNELS

KINDS = tuple(kind for kind in ALL_KINDS if kind != "labels")  # those are of encoders


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module", params=[1, 2])
def recorded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Chunked prompts, prefix hits, preemption, seeds, penalties and logprobs, all in one file; at both depths."""
    path = tmp_path_factory.mktemp("recording") / "steps.rec"
    config = WorkerConfig(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        block_size=4,
        kv_cache_bytes=1 << 20,
        num_threads=1,
    )
    depth = request.param
    executor = ThreadExecutor(config) if depth == 1 else start_executor(config, lambda phase, fraction: None)
    recording = RecordingExecutor(executor, RecordingWriter(str(path)), None)
    engine = DirectEngine(recording, num_blocks=30, enable_prefix_caching=True, pipeline_depth=depth)
    draw = np.random.default_rng(0)
    begin = tuple(draw.integers(2, 300, 12).tolist())
    engine.run(
        Request(
            number,
            begin + tuple(draw.integers(2, 300, 3 + number).tolist()),
            SamplingParams(
                max_tokens=24,
                temperature=0.0 if number % 2 else 1.1,
                top_p=0.9,
                seed=number,
                logprobs=2 if number % 3 else None,
                presence_penalty=0.3 if number % 4 == 0 else 0.0,
                logit_bias=((5, -100.0),) if number == 3 else (),
            ),
        )
        for number in range(8)
    )
    pooled = [PoolingParams(kind, (5, 7) if kind == "logits" else ()) for kind in KINDS]
    engine.run(Request(100 + n, begin * (n + 1), POOLS, pooling=params) for n, params in enumerate(pooled))
    assert engine.scheduler.stats.num_preemptions and engine.num_cached_tokens
    assert (engine.num_ahead > 10) == (depth == 2)
    recording.close()
    return path


@pytest.fixture(autouse=True)
def ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a replay's ranks are threads of this process; in `tests/e2e/test_record_replay.py` they are processes."""
    monkeypatch.setattr(
        "oarlock.engine.replay.__main__.start_executor", lambda config, on_progress: ThreadExecutor(config)
    )


def replayed(capsys: pytest.CaptureFixture, *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_same_ranks_give_the_same_bits(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = replayed(capsys, recorded)
    assert status == 0, out
    assert "result: the same outputs" in out and "first difference" not in out
    assert "192" in out  # tokens compared: 8 requests of 24
    assert re.search(r"vectors +\d\d\d\d", out)


def test_two_ranks_give_the_same_tokens(recorded: Path, capsys: pytest.CaptureFixture) -> None:
    status, out, _ = replayed(capsys, recorded, "--tensor-parallel-size=2")
    assert status == 0, out
    assert "logprobs are not checked" in out
    status, out, _ = replayed(capsys, recorded, "--tensor-parallel-size=2", "--tolerance=1e-4")
    assert status == 0, out


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
@pytest.mark.parametrize(("recorded_with", "quantization"), [(1, "none"), (2, "int8")])
def test_other_ranks_give_the_same_bits(tmp_path: Path, capsys, recorded_with: int, quantization: str) -> None:
    """Recorded with one rank or with two and replayed with the other number, in bfloat16: with the kernels alone."""
    path, model = tmp_path / "steps.rec", make_tiny(tmp_path, "qwen2", head_dim=32)
    config = WorkerConfig(
        str(model),
        device="cpu",
        dtype="bfloat16",
        quantization=quantization,
        tensor_parallel_size=recorded_with,
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        block_size=16,
        kv_cache_bytes=1 << 20,
        num_threads=1,
    )
    executor = ThreadExecutor(config)
    recording = RecordingExecutor(executor, RecordingWriter(str(path)), None)
    params = SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, seed=3, logprobs=2)
    DirectEngine(recording).run(Request(number, tuple(range(2, 9 + number)), params) for number in range(8))
    recording.close()
    status, out, _ = replayed(capsys, path, f"--tensor-parallel-size={3 - recorded_with}")
    assert status == 0 and "logprobs are compared bit by bit" in out and "first difference" not in out, out


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
@pytest.mark.parametrize("recorded_with", [1, 3])
def test_other_stages_give_the_same_bits(tmp_path: Path, capsys, recorded_with: int) -> None:
    """Recorded with a step in flight in each of three stages, and replayed on one rank; and the other way round."""
    path, model = tmp_path / "steps.rec", make_tiny(tmp_path, "qwen2", head_dim=32)
    config = WorkerConfig(
        str(model),
        device="cpu",
        dtype="bfloat16",
        pipeline_parallel_size=recorded_with,
        nnodes=recorded_with,  # on as many hosts, of which none is needed
        max_model_len=64,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        block_size=16,
        kv_cache_bytes=1 << 20,
        num_threads=1,
    )
    executor = ThreadExecutor(config)
    recording = RecordingExecutor(executor, RecordingWriter(str(path)), None)
    params = SamplingParams(max_tokens=12, temperature=1.1, top_p=0.9, seed=3, logprobs=2, frequency_penalty=0.4)
    engine = DirectEngine(recording, pipeline_depth=None)
    engine.run(Request(number, tuple(range(2, 9 + number)), params) for number in range(8))
    assert (engine.num_ahead > 10) == (recorded_with > 1)
    recording.close()
    status, out, _ = replayed(capsys, path, f"--pipeline-parallel-size={4 - recorded_with}")
    assert status == 0 and "logprobs are compared bit by bit" in out and "first difference" not in out, out
    assert "in each of 3 stages" in out and "96" in out  # tokens: 8 requests of 12


def test_other_weights_are_found_out(recorded: Path, checkpoint: Path, tmp_path: Path, capsys) -> None:
    """The planted fault: one weight of the last layer, which no header shows."""
    other = shutil.copytree(checkpoint, tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"][3, 5] += 4.0
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    status, out, _ = replayed(capsys, recorded, "--model", other)
    assert status == 1
    assert "first difference: step " in out and "expected" in out and "result: NOT the same" in out


def test_a_torn_recording_is_replayed_as_far_as_it_is_whole(recorded: Path, tmp_path: Path, capsys) -> None:
    torn = tmp_path / "torn.rec"
    torn.write_bytes(recorded.read_bytes()[:-200])
    status, out, _ = replayed(capsys, torn)
    assert status == 0, out
    assert "note" in out and "incomplete" in out


def failed(capsys, *arguments: str | Path) -> str:
    """The one line of cause of a replay that cannot start."""
    status, _, err = replayed(capsys, *arguments)
    lines = err.strip().splitlines()
    assert status == 3 and len(lines) == 2, err
    assert lines[0].startswith("error: ") and lines[1].startswith("fix: ")
    return lines[0]


def test_refused_replays_name_the_reason(recorded: Path, checkpoint: Path, tmp_path: Path, capsys) -> None:
    assert "config.json" in failed(capsys, checkpoint / "config.json")
    assert "No such file" in failed(capsys, tmp_path / "nothing")
    assert "does not exist" in failed(capsys, recorded, "--model", tmp_path / "gone")
    assert "3" in failed(capsys, recorded, "--tensor-parallel-size=3")
    assert "--tolerance" in failed(capsys, recorded, "--tolerance=-1")
    other = shutil.copytree(checkpoint, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text() + "\n")
    assert "not the model of this recording: config.json" in failed(capsys, recorded, "--model", other)
    empty = tmp_path / "empty.rec"
    writer = RecordingWriter(str(empty))
    writer.write_header(Recording(str(recorded)).header)
    writer.close()
    assert "no steps" in failed(capsys, empty)
    late = tmp_path / "late.rec"
    writer = RecordingWriter(str(late))
    writer.write_header(Recording(str(recorded)).header)
    for record in list(Recording(str(recorded)).records())[2:]:
        writer.write(record.kind, record.content)
    writer.close()
    assert "does not begin with the first step" in failed(capsys, late)


def test_a_recording_of_another_layout_is_refused(recorded: Path, tmp_path: Path, capsys) -> None:
    header = replace(Recording(str(recorded)).header, layout="another", versions={"oarlock": "9.9"})
    writer = RecordingWriter(str(tmp_path / "r"))
    writer.write_header(header)
    writer.close()
    assert "9.9" in failed(capsys, tmp_path / "r")
