"""Encoders' settings and files: what they mean, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import open_checkpoint
from oarlock.workers.models.encoders.registry import ENCODERS as ARCHITECTURES
from oarlock.workers.models.encoders.registry import describe_encoder, is_encoder, read_encoder
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import check_without_weights, open_model, preflight
from oarlock.workers.runner.encoder_runner import EncoderRunner
from tests.golden.tiny_encoders import ENCODERS, make_encoder


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("encoders")
    return {name: make_encoder(folder, name) for name in ENCODERS}


def config_of(path: Path, **changes: Any) -> WorkerConfig:
    return WorkerConfig(str(path), device="cpu").with_(**changes)


def edited(path: Path, into: Path, **changes: Any) -> Path:
    into.mkdir()
    (into / "model.safetensors").symlink_to(path / "model.safetensors")
    (into / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | changes))
    return into


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.slow
def test_tensor_names_and_shapes_are_transformers_own(paths: dict[str, Path], name: str) -> None:
    checkpoint = open_checkpoint(paths[name])
    spec = read_encoder(str(paths[name]), checkpoint)
    stored = {tensor: tuple(found.entry.shape) for tensor, found in checkpoint.tensors.items()}
    unused = {"pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"}
    assert spec.tensor_shapes() == {tensor: shape for tensor, shape in stored.items() if tensor not in unused}


@pytest.mark.parametrize("name", ENCODERS)
def test_reported_weights_equal_the_weights_of_a_rank(paths: dict[str, Path], name: str) -> None:
    check_without_weights(config_of(paths[name]))
    config = preflight(config_of(paths[name], num_threads=1))
    assert config.whole_texts and config.dtype == "float32" and config.max_num_batched_tokens >= config.max_model_len
    runner = EncoderRunner(config, TensorParallel.solo())
    shares: list[float] = []
    runner.load(shares.append)
    runner.allocate(runner.num_blocks_that_fit())
    info = runner.info()
    assert shares[-1] == 1.0 and shares == sorted(shares)
    assert info.num_parameters == runner.spec.num_parameters == info.weight_bytes_per_rank // 4
    assert info.batch_invariant or "torch" in info.kernels, info.batch_invariant_reason
    assert info.rank_invariant or "torch" in info.kernels, info.rank_invariant_reason


def test_heads_that_are_not_asked_for_may_be_there(paths: dict[str, Path], tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig.from_pretrained(paths["bert"])
    BertForMaskedLM(config).save_pretrained(tmp_path)
    found = preflight(config_of(tmp_path))
    assert found.whole_texts and read_encoder(str(tmp_path), open_checkpoint(tmp_path)).prefix == "bert."


def test_old_settings_of_modernbert_mean_the_same(paths: dict[str, Path]) -> None:
    new = json.loads((paths["modernbert"] / "config.json").read_text())
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, "global_attn_every_n_layers": 3}
    assert describe_encoder(old) == describe_encoder(new)
    assert describe_encoder(new).reaches == (None, 8, 8, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor_parallel_size": 3}, "Sizes that work: 1, 2, 4, 8"),
        ({"pipeline_parallel_size": 2}, "Leave --pipeline-parallel-size out"),
        ({"quantization": "int8"}, "Leave --quantization out"),
        ({"kv_cache_dtype": "int8"}, "Leave --kv-cache-dtype out"),
        ({"kv_cache_bytes": 1 << 20}, "Leave --kv-cache-memory out"),
        ({"kv_offload_bytes": 1 << 20}, "Leave --kv-offload-memory out"),
        ({"kv_offload_path": "/tmp"}, "Leave --kv-offload-path out"),
        ({"attention_backend": "cpp"}, "Leave --attention-backend out"),
        ({"num_speculative_tokens": 2}, "Leave --speculative-config out"),
        ({"max_model_len": 257}, "Use at most 256"),
        ({"max_num_batched_tokens": 100}, "raise it to 256"),
    ],
    ids=str,
)
def test_settings_that_an_encoder_has_not_are_refused(
    paths: dict[str, Path], changes: dict[str, Any], words: str
) -> None:
    for check in (preflight, check_without_weights):
        with pytest.raises(StartupError) as caught:
            check(config_of(paths["bert"], **changes))
        assert words in f"{caught.value.cause} {caught.value.fix}"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "relu"}, "hidden_act"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"num_attention_heads": 7}, "7 attention heads"),
        ("bert", {"hidden_size": "64"}, "hidden_size"),
        ("roberta", {"max_position_embeddings": 1}, "leaves no position"),
        ("bert-score", {"id2label": None, "num_labels": 65}, "id2label"),
        ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "rope type"),
        ("modernbert", {"rope_parameters": {"full_attention": 5}}, "rope_parameters"),
        ("modernbert", {"layer_types": ["full_attention"]}, "layer_types"),
        ("modernbert-score", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("bert", {"vocab_size": 161}, "shape [160, 64]"),
        ("bert", {"num_hidden_layers": 5}, "holds no tensor 'encoder.layer.4"),
        ("bert", {"num_hidden_layers": 3}, "does not use"),
    ],
    ids=str,
)
def test_settings_that_are_not_served_are_refused_by_name(
    paths: dict[str, Path], tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(StartupError) as caught:
        preflight(config_of(edited(paths[name], tmp_path / "model", **changes)))
    assert words in f"{caught.value.cause} {caught.value.fix}"


def test_other_types_of_tensors_are_refused(paths: dict[str, Path], tmp_path: Path) -> None:
    model = edited(paths["bert"], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] = weights["embeddings.LayerNorm.bias"].to(torch.int32)
    (model / "model.safetensors").unlink()
    save_file(weights, model / "model.safetensors")
    with pytest.raises(StartupError, match="I32"):
        preflight(config_of(model))


def test_commands_for_models_that_write_texts_say_what_an_encoder_is(paths: dict[str, Path]) -> None:
    with pytest.raises(StartupError, match=r"no KV memory to plan.*its weights take"):
        open_model(config_of(paths["bert"]))
    with pytest.raises(StartupError, match="is an encoder"):
        read_spec(str(paths["bert"]))


def test_every_architecture_is_known_by_its_name() -> None:
    assert all(is_encoder({"architectures": [name]}) for name in ARCHITECTURES)
    assert not any(is_encoder(config) for config in ({}, {"architectures": []}, {"architectures": ["GPT2Model"]}))
