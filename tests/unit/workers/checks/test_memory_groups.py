"""Refusals of options that a model's memory groups do not support, and limits that preflight lowers."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers import preflight as preflight_module
from oarlock.workers.checks.limits import check_drafts, check_parallel, with_kv_offload
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.memory_spec import PagesSpec
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.protocol import max_step_bytes
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.runner.kv_room import KVRoom
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.layers.test_memory_groups import FULL, MLP, MODELS, layer, model

RECURRENT = MODELS["pages and states"]


def test_blocks_outside_the_pool_need_one_group_of_pages() -> None:
    config = WorkerConfig("model", kv_offload_bytes=1 << 20)
    for name, words in (("heads and widths differ", "has 2 memory groups"), ("no attention", "has recurrent layers")):
        with pytest.raises(StartupError, match=f"^--kv-offload-memory and .* Tiny {words}") as refused:
            with_kv_offload(config, MODELS[name])
        assert refused.value.fix == "Leave them out."


def test_blocks_outside_the_pool_hold_the_pages_of_layers_with_windows() -> None:
    spec = model(layer(FULL, MLP), layer(replace(FULL, window=8), MLP), layer(replace(FULL, chunk=16), MLP))
    assert len(spec.groups) == 3
    config = WorkerConfig("model", kv_offload_bytes=1 << 20)
    kept = spec.with_whole_blocks()
    assert [group.layers for group in kept.groups] == [(0, 1, 2)] and with_kv_offload(config, kept).offloads_kv
    assert [one.window for one in kept.attentions] == [None, 8, None], "queries see what they saw"
    windows = model(layer(replace(FULL, window=8), MLP))
    with pytest.raises(StartupError, match=r"^Every layer of this model has a sliding window"):
        with_kv_offload(config, windows.with_whole_blocks())


def test_blocks_outside_the_pool_need_attention_in_every_stage() -> None:
    spec = model(layer(FULL, MLP), layer(FULL), layer(MLP))
    config = WorkerConfig("model", kv_offload_bytes=1 << 20)
    assert with_kv_offload(config, spec).offloads_kv
    with pytest.raises(StartupError, match="need attention in every pipeline stage, and layers 2 to 2 have none"):
        with_kv_offload(config.with_(pipeline_parallel_size=2), spec)


def test_a_layer_must_be_in_the_stage_of_the_pages_that_it_reads() -> None:
    spec = MODELS["a layer reads another's pages"]
    check_parallel(WorkerConfig("model"), spec)
    with pytest.raises(StartupError, match="layer 2 reads the keys and values of layer 0, which is in another stage"):
        check_parallel(WorkerConfig("model", pipeline_parallel_size=2), spec)


def test_block_tables_of_each_group_fit_a_step(tmp_path: Path) -> None:
    config = WorkerConfig(str(make_tiny(tmp_path, "gemma3_text")), device="cpu", max_model_len=256)
    resolved = preflight(config)
    assert resolved.pages_groups == 2
    entries = resolved.max_num_seqs * -(-256 // resolved.block_size)
    more = max_step_bytes(resolved) - max_step_bytes(resolved.with_(pages_groups=1))
    assert abs(more - entries * (1 + 3 * 4)) < 4 * 64


def fewer(spec: DecoderSpec, **changes) -> WorkerConfig:
    config = WorkerConfig("model", device="cpu", dtype="float32", max_model_len=128, max_num_seqs=64)
    return preflight_module._with_fewer_sequences(config.with_(**changes), spec, NONE)


def test_fewer_sequences_than_were_asked_for_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    slot = 2 * 48 * 4
    with caplog.at_level(logging.WARNING, "oarlock.preflight"):
        lowered = fewer(RECURRENT, kv_cache_bytes=2 * slot * (4 * 10 + 2))
    assert lowered.max_num_seqs == 10 and "event=max_num_seqs_lowered from=64 to=10" in caplog.text
    assert fewer(RECURRENT).max_num_seqs == fewer(MODELS["heads and widths differ"]).max_num_seqs == 64


def test_a_format_of_keys_needs_attention(tmp_path: Path) -> None:
    config = WorkerConfig(str(make_tiny(tmp_path, "mamba2")), device="cpu", kv_cache_dtype="int8", max_model_len=256)
    for check in (check_without_weights, preflight):
        with pytest.raises(StartupError, match=r"^--kv-cache-dtype int8 is .* Mamba2ForCausalLM has no attention"):
            check(config)
    assert preflight(config.with_(kv_cache_dtype="auto")).pages_groups == 0


def test_hosts_that_measure_do_not_lower_the_sequences_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They might disagree, and their settings must be the same."""
    slot = 2 * (48 // 2) * 4
    room = KVRoom(2 * slot * (4 * 10 + 2), "there is")
    monkeypatch.setattr(preflight_module, "_estimated_room", lambda *_: room)
    sizes = {"nnodes": 2, "tensor_parallel_size": 2}
    with pytest.raises(StartupError, match="on this host for the recurrent state of 64 sequences") as refused:
        fewer(RECURRENT, **sizes)
    assert refused.value.fix == "Use --max-num-seqs 10 or less on every host."
    assert fewer(RECURRENT, **sizes, max_num_seqs=10).max_num_seqs == 10
    assert fewer(RECURRENT, **sizes, kv_cache_bytes=room.available).max_num_seqs == 10


def test_a_size_that_serves_fewer_sequences_passes_before_the_weights_are_there(tmp_path: Path) -> None:
    model = str(make_tiny(tmp_path, "qwen3_5_text"))
    config = WorkerConfig(model, device="cpu", dtype="float32", max_model_len=256, kv_cache_bytes=1 << 20)
    check_without_weights(config)
    assert preflight(config).max_num_seqs < config.max_num_seqs


@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_refused_by_name(name: str) -> None:
    spec, config = MODELS[name], WorkerConfig("none", num_speculative_tokens=2)
    check_drafts(WorkerConfig("none"), spec)
    if all(isinstance(group.memory, PagesSpec) for group in spec.groups):
        check_drafts(config, spec)
        return
    with pytest.raises(StartupError, match="--speculative-config does not support models with recurrent layers"):
        check_drafts(config, spec)
