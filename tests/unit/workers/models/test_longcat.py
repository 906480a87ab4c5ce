"""LongCat-Flash: its settings, a checkpoint's layer as two of ours, and pipeline stages that keep both together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oarlock.base.errors import StartupError
from oarlock.workers.checks.limits import check_parallel
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, is_ignorable, tensor_shapes
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.models.registry import describe

_CHAT: dict[str, Any] = {
    "architectures": ["LongcatFlashForCausalLM"], "attention_bias": False, "attention_method": "MLA",
    "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "hidden_size": 6144, "kv_lora_rank": 512,
    "max_position_embeddings": 131072, "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 12,
    "n_routed_experts": 512, "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0,
    "router_bias": False, "v_head_dim": 128, "vocab_size": 131072, "zero_expert_num": 256,
    "zero_expert_type": "identity",
}  # fmt: skip
_SMALL = {"vocab_size": 100, "hidden_size": 96, "num_attention_heads": 4, "architectures": ["LongcatFlashForCausalLM"]}


def parts_of(spec: DecoderSpec) -> tuple[LatentAttentionSpec, ExpertsSpec]:
    attention, experts = (branch.sublayer for branch in spec.layers[0].branches[:2])
    assert isinstance(attention, LatentAttentionSpec) and isinstance(experts, ExpertsSpec)
    return attention, experts


@pytest.mark.soak
def test_published_settings() -> None:
    spec = describe(_CHAT)
    attention, experts = parts_of(spec)
    assert spec.num_layers == 56 and spec.layers == spec.layers[:2] * 28
    assert spec.num_parameters == pytest.approx(560.7e9, rel=0.002)
    assert spec.active_parameters == pytest.approx(27e9, rel=0.1), "on average; identities are chosen, too"
    assert spec.default_length == spec.longest_length == 131072 and spec.norm.eps == 1e-5
    assert attention.query_factor == 2.0 and attention.latent_factor == 12**0.5 and attention.eps == 1e-6
    assert attention.scale == 192**-0.5 and attention.rope == RopeSpec("default", 1e7, 64, interleaved=True)
    assert spec.cached_values == 56 * 576
    assert (experts.experts, experts.identities, experts.router.top_k, experts.router.scale) == (512, 256, 12, 6.0)


def test_missing_values_are_the_defaults_of_transformers() -> None:
    theirs: Any = AutoConfig.for_model("longcat_flash", **_SMALL)
    spec = describe(_SMALL)
    attention, experts = parts_of(spec)
    assert spec.num_layers == theirs.num_hidden_layers and spec.norm.eps == theirs.rms_norm_eps
    assert spec.layers[0].mlp.intermediate_size == theirs.ffn_hidden_size
    sizes = (attention.nope_width, attention.rope_width, attention.value_dim, attention.kv_rank, attention.q_rank)
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    assert sizes == tuple(getattr(theirs, key) for key in keys)
    assert attention.rope == RopeSpec("default", theirs.rope_parameters["rope_theta"], 64, interleaved=True)
    found = (experts.experts, experts.identities, experts.width, experts.router.top_k, experts.router.scale)
    keys = ("n_routed_experts", "zero_expert_num", "expert_ffn_hidden_size", "moe_topk", "routed_scaling_factor")
    assert found == tuple(getattr(theirs, key) for key in keys)
    assert spec.default_length == theirs.max_position_embeddings and not spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts_per_tok", 8),
        ("attention_method", "GQA"),
        ("mla_scale_q_lora", False),
        ("mla_scale_kv_lora", False),
        ("norm_topk_prob", True),
        ("router_bias", True),
        ("zero_expert_type", "zero"),
        ("q_lora_rank", None),
        ("head_dim", 128),
        ("num_hidden_layers", 28),
        ("intermediate_size", 6144),
    ],
)
def test_settings_that_change_the_result_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(StartupError, match=key):
        describe({**_CHAT, key: value})


@pytest.mark.soak
def test_every_tensor_of_transformers_has_its_name_and_shape() -> None:
    """But those of experts without matrices, which are written and never read."""
    sizes = {**_SMALL, "num_layers": 3, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 3}
    spec = describe(sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("longcat_flash", **sizes))
    stored: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        ours = spec.names.rename(name)
        assert ours is not None
        before, found, part = ours.rpartition(".experts.")
        if not found:
            stored[ours] = tuple(tensor.shape)
            continue
        halves = {"gate_up_proj": ("gate_proj", "up_proj")}.get(part, (part,))
        for expert, matrix in enumerate(tensor):
            stored |= {
                f"{before}.experts.{expert}.{one}.weight": tuple(matrix.chunk(len(halves))[0].shape) for one in halves
            }
    wanted = tensor_shapes(spec)
    left = stored.keys() - wanted.keys()
    assert {name: stored[name] for name in wanted} == wanted
    assert len(left) == 3 * 2 * 2 and all(is_ignorable(spec, name) for name in left)
    assert not any(is_ignorable(spec, name) for name in wanted)
    assert not is_ignorable(spec, "model.layers.0.shortcut.experts.6.up_proj.weight"), "more experts than chosen from"
    assert spec.names.rename("model.mtp.layers.0.self_attn.o_proj.weight") is None


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 28])
def test_pipeline_stages_keep_layers_together_that_hand_on_a_result(stages: int) -> None:
    spec = describe(_CHAT)
    parts = [spec.layers_of_stage(stage, stages) for stage in range(stages)]
    assert [layer for part in parts for layer in part] == list(range(56))
    assert all(part and part.start % 2 == 0 and len(part) % 2 == 0 for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 2


def test_more_stages_than_pairs_of_layers_are_refused() -> None:
    config, spec = WorkerConfig("", pipeline_parallel_size=29), describe(_CHAT)
    with pytest.raises(StartupError, match=r"29 does not fit this model: it has 56 layers, of which 28 can begin"):
        check_parallel(config, spec)
    check_parallel(replace(config, pipeline_parallel_size=28), spec)


def test_trials_run_the_layers_whose_results_their_layers_add() -> None:
    spec = describe({**_SMALL, "num_layers": 1, "n_routed_experts": 4, "moe_topk": 2})
    holds, adds = spec.layers
    spec = replace(spec, layers=(holds, adds, holds, replace(adds, scalar="layer_scalar")))
    decoder = Decoder(spec, TensorParallel.solo(), torch.float32, torch.device("cpu"))
    assert decoder.one_of_each_kind() == [0, 1, 2, 3]
    with pytest.raises(AssertionError, match="added by the next layer"):
        Decoder(replace(spec, layers=(holds, holds, adds)), TensorParallel.solo(), torch.float32, torch.device("cpu"))
