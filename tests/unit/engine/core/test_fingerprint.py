"""Digest of everything that decides a number: equal at every start, another one when any of it differs."""

import json
from dataclasses import replace

import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.core import process
from oarlock.engine.core.process import engine_info
from oarlock.workers.config import WorkerConfig
from oarlock.workers.fingerprint import kv_key, model_sums
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor


@pytest.fixture
def checkpoint(tmp_path):
    return make_tiny(tmp_path / "model", "qwen2")


def started(checkpoint, **changes):
    """(the resolved configuration, what the ranks report) of a executor that was started and ended."""
    config = WorkerConfig(
        str(checkpoint), device="cpu", dtype="float32", max_model_len=64, max_num_batched_tokens=64, num_threads=1
    )
    executor = ThreadExecutor(config.with_(**changes))
    digest = engine_info(EngineConfig(executor.config), executor).numbers_digest
    assert digest == process.numbers_digest(executor.config, executor.info)
    executor.close()
    return digest, executor.config, executor.info


@pytest.mark.slow
def test_it_is_the_same_at_every_start_and_another_for_another_type(checkpoint):
    first, _, _ = started(checkpoint)
    assert started(checkpoint)[0] == first
    assert started(checkpoint, dtype="bfloat16")[0] != first
    assert started(checkpoint, attention_backend="reference")[0] != first
    assert started(checkpoint, load_format="dummy")[0] != first
    assert started(checkpoint, load_format="dummy", seed=1)[0] != started(checkpoint, load_format="dummy")[0]


def test_each_thing_that_decides_a_number_changes_it(checkpoint, monkeypatch):
    _, config, info = started(checkpoint)
    assert info.kernels
    base = process.numbers_digest(config, info)
    assert process.numbers_digest(config, replace(info, served_by="transformers")) != base
    for change in ({"num_threads": 2}, {"block_size": 16}, {"max_model_len": 32}, {"kv_cache_dtype": "int8"}):
        assert process.numbers_digest(config.with_(**change), info) != base
    for change in (
        {"tensor_parallel_size": 2},
        {"device": "cuda"},
        {"kernels": "other"},
        {"served_by": "transformers"},
    ):
        assert process.numbers_digest(config, replace(info, **change)) != base
    versions = process.versions()
    for package in ("oarlock", "torch"):
        monkeypatch.setattr(process, "versions", lambda package=package: versions | {package: "0"})
        assert process.numbers_digest(config, info) != base
    monkeypatch.undo()
    file = checkpoint / "config.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | {"rms_norm_eps": 1e-3}))
    assert process.numbers_digest(config, info) != base
    file.write_text(text)
    assert process.numbers_digest(config, info) == base
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")  # another training: same names, same shapes
    assert process.numbers_digest(config, info) != base


def test_code_of_a_checkpoint_changes_it_if_it_computes_the_model(checkpoint):
    _, described, info = started(checkpoint)
    own = described.with_(served_class="{}", trust_remote_code=True)
    ours, theirs = [], []
    for value in (1, 2):
        (checkpoint / "modeling_own.py").write_text(f"VALUE = {value}")
        ours.append((process.numbers_digest(described, info), kv_key(described)))
        theirs.append((process.numbers_digest(own, replace(info, served_by="checkpoint")), kv_key(own)))
    assert ours[0] == ours[1]
    assert all(len(set(keys)) == 3 for keys in zip(*ours[:1], *theirs, strict=True))


def test_a_gguf_file_has_a_sum_of_its_own(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.gguf"
    weights.write_bytes(bytes(1 << 20))
    first = model_sums(tmp_path)
    assert first.keys() == {"config.json", "model.gguf"}
    weights.write_bytes(bytes((1 << 20) - 1) + b"x")
    assert model_sums(tmp_path)["model.gguf"] != first["model.gguf"]
