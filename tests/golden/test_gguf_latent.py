"""GGUF files of models with latent attention against the safetensors checkpoints that they were made from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.gguf_config import gguf_checkpoint, hf_config
from oarlock.workers.layers.decoder_spec import DecoderSpec, SublayerSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import describe, read_spec
from oarlock.workers.weights.gguf_reader import GGUFReader
from tests.golden.gguf_latent import write_latent_gguf
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.tiny_models import make_tiny

pytestmark = pytest.mark.slow

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
         "mscale": 0.707, "mscale_all_dim": 0.707}  # fmt: skip
_V2: dict[str, Any] = {"rope_parameters": _YARN}
# Name -> family, its settings, and whether the file is as newer converters write it.
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "deepseek-v2": ("deepseek_v2", _V2, True),
    "deepseek-v2-lite": ("deepseek_v2", {**_V2, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1,
                                         "topk_group": 1}, False),
    "deepseek-v3": ("deepseek_v3", {**_V2, "num_mtp_layers": 0}, True),
    "deepseek-v3-older": ("deepseek_v3", {"num_mtp_layers": 0, "n_group": 1, "topk_group": 1, "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e4}}, False),
    "deepseek-v3.2": ("deepseek_v32", _V2, True),
    "glm4-moe-lite": ("glm4_moe_lite", {}, True),
    "glm-moe-dsa": ("glm_moe_dsa", {}, True),
    "kimi-linear": ("kimi_linear", {"linear_num_heads": 8}, True),
    "minicpm3": ("minicpm3", {"scale_emb": 12, "dim_model_base": 256, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [3.0, 3.3, 3.9, 5.1], "original_max_position_embeddings": 512}}, False),
    "youtu": ("youtu", {}, True),
}  # fmt: skip
TOKENS = [(7 * index * index + 3 * index) % 317 for index in range(24)]


def as_stored(spec: DecoderSpec) -> DecoderSpec:
    """The model with the matrices of its latents, and the rates of its decays, as the other kind of file has them."""

    def changed(one: SublayerSpec) -> SublayerSpec:
        if isinstance(one, KimiDeltaSpec):
            return replace(one, axes_around_rates=(2, 1))
        return replace(one, splits_kv_b=not one.splits_kv_b) if isinstance(one, LatentAttentionSpec) else one

    return spec.with_sublayers(changed)


def logits(decoder: Decoder) -> Tensor:
    return PagedRun(decoder).step({0: TOKENS})[0]


_SHORT = ("deepseek-v2-lite", "deepseek-v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _SHORT else pytest.mark.soak) for name in MODELS]
)
def test_a_file_describes_the_same_model_and_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    family, special, splits = MODELS[name]
    directory = make_tiny(tmp_path, family, seed=5, **special)
    model = GGUFModel.open(write_latent_gguf(directory, tmp_path / "model.gguf", splits=splits))
    spec, original = describe(hf_config(model)), read_spec(str(directory))
    if family == "glm4_moe_lite":  # which computes as DeepSeek V3, whose architecture the file has
        original = replace(original, architecture=spec.architecture)
    assert replace(as_stored(spec) if splits else spec, dtype=None) == replace(original, dtype=None)

    def both(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        decoder = Decoder(spec, tp, torch.float32, torch.device("cpu"))
        with GGUFReader(gguf_checkpoint(tmp_path, model)) as reader:
            decoder.load(reader, lambda share: None)
            reader.finish(lambda tensor: spec.names.rename(tensor) is None)
        return logits(decoder), logits(load_decoder(directory, tp))

    for found, wanted in on_ranks(2, both):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("splits", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_matrices_of_latents_may_be_in_blocks(tmp_path: Path, splits: bool) -> None:
    """They are written out in the model's dtype: the error is that of the blocks."""
    special = {"kv_lora_rank": 32, "qk_nope_head_dim": 32}
    directory = make_tiny(tmp_path, "youtu", seed=5, **special)
    model = GGUFModel.open(write_latent_gguf(directory, tmp_path / "model.gguf", splits=splits, kind="Q8_0"))

    def both(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        decoder = Decoder(describe(hf_config(model)), tp, torch.float32, torch.device("cpu"))
        with GGUFReader(gguf_checkpoint(tmp_path, model)) as reader:
            decoder.load(reader, lambda share: None)
        return logits(decoder), logits(load_decoder(directory, tp))

    ((found, wanted),) = on_ranks(1, both)
    error = (found - wanted).abs().max() / wanted.abs().max()
    assert 1e-5 < error < 0.02


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("deepseek2.expert_gating_func", 3, "expert_gating_func 3"),
        ("deepseek2.attention.temperature_scale", 0.1, "scales queries by their position"),
    ],
)
def test_files_of_other_models_are_refused_by_name(tmp_path: Path, key: str, value: float, names: str) -> None:
    directory = make_tiny(tmp_path, "deepseek_v3", seed=5)
    model = GGUFModel.open(write_latent_gguf(directory, tmp_path / "model.gguf", splits=True))
    model.settings[key] = value
    with pytest.raises(StartupError, match=names):
        hf_config(model)


def test_published_models_have_groups_that_older_files_leave_out(tmp_path: Path) -> None:
    directory = make_tiny(tmp_path, "deepseek_v3", seed=5, n_routed_experts=256, moe_intermediate_size=1, vocab_size=7)
    model = GGUFModel.open(write_latent_gguf(directory, tmp_path / "model.gguf", splits=False))
    config = hf_config(model)
    assert (config["n_group"], config["topk_group"]) == (1, 1)
    model.tensors["token_embd.weight"] = model.tensors["token_embd.weight"].shaped(129280, 64)
    config = hf_config(model)
    assert (config["n_group"], config["topk_group"]) == (8, 4)
