"""Angles and rotation against transformers' own functions, for every kind and for partly rotated heads."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial

from oarlock.workers.layers.attention_spec import QueryScale, RopeSpec
from oarlock.workers.layers.rotary import (
    QueryScaleTable,
    RotaryTable,
    finish_heads,
    neighbours_with_torch,
    rotate,
    rotate_with_torch,
)
from oarlock.workers.models.registry import describe

KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "llama3-without-blend": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-given-attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "attention_factor": 1.25,
                             "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.8,
                    "truncate": False, "original_max_position_embeddings": 64},
    "yarn-flat-ramp": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 1.0, "beta_slow": 1.0,
                       "truncate": False, "original_max_position_embeddings": 64},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "factor": 2.0},
}  # fmt: skip


def llama_config(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "rope_parameters": dict(rope),
    }


def theirs_for(config: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig.from_dict(config))


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_cos_sin_and_rotation_equal_transformers(kind: str, head_dim: int) -> None:
    config = llama_config(KINDS[kind], head_dim)
    spec = describe(config).attentions[0].rope
    theirs = theirs_for(config)
    positions = torch.tensor([0, 1, 2, 31, 63, 64, 65, 130, 255])
    q, k = torch.randn(1, 4, 9, head_dim), torch.randn(1, 2, 9, head_dim)
    cos, sin = theirs(q, positions[None])
    ours_cos, ours_sin = RotaryTable(spec, torch.device("cpu"))(positions, 256)
    half = head_dim // 2
    assert torch.equal(ours_cos[:, 0], cos[0])
    assert torch.equal(ours_sin[:, 0, half:], sin[0][:, half:]) and torch.equal(
        ours_sin[:, 0, :half], -sin[0][:, :half]
    )
    expected = torch.cat(apply_rotary_pos_emb(q, k, cos, sin), 1)[0].transpose(0, 1)  # [T, heads, head_dim]
    together = torch.cat((q, k), 1)[0].transpose(0, 1).contiguous()
    torch.testing.assert_close(rotate(together, ours_cos, ours_sin, torch.float32), expected, rtol=1e-6, atol=1e-6)


def test_old_and_new_config_forms_mean_the_same() -> None:
    for rope in KINDS.values():
        new = llama_config(rope, 64)
        old = {key: value for key, value in new.items() if key != "rope_parameters"}
        inner = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
        old |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": rope["rope_type"], **inner}}
        assert describe(old).attentions[0].rope == describe(new).attentions[0].rope


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_partly_rotated_heads_equal_transformers(share: float) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = Phi3Config(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope,
                        pad_token_id=0)  # fmt: skip
    positions = torch.arange(40)
    q, k = torch.randn(1, 4, 40, 32), torch.randn(1, 2, 40, 32)
    cos, sin = Phi3RotaryEmbedding(config)(q, positions[None])
    expected = torch.cat(apply_partial(q, k, cos, sin), 1)[0].transpose(0, 1)
    table = RotaryTable(RopeSpec("default", 1e4, int(32 * share)), torch.device("cpu"))
    ours = rotate(torch.cat((q, k), 1)[0].transpose(0, 1).contiguous(), *table(positions, 40), torch.float32)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_dynamic_angles_equal_transformers_for_a_growing_sequence() -> None:
    """Token after token beyond the trained length: each call of theirs sees one more, each position of ours its own."""
    config = llama_config(KINDS["dynamic"], 64) | {"max_position_embeddings": 32}
    theirs = theirs_for(config)
    ours_cos, _ = RotaryTable(describe(config).attentions[0].rope, torch.device("cpu"))(torch.arange(80), 80)
    x = torch.zeros(1)
    theirs(x, torch.arange(20)[None])  # the prompt, within the trained length
    for position in range(20, 80):
        cos, _ = theirs(x, torch.tensor([[position]]))
        torch.testing.assert_close(ours_cos[position, 0], cos[0, 0], rtol=0, atol=1e-5)


@pytest.mark.usefixtures("form")
def test_rotation_is_computed_in_float32_and_rounded_once() -> None:
    table = RotaryTable(RopeSpec("default", 1e6, 64), torch.device("cpu"))
    cos, sin = table(torch.tensor([30_000, 7]), 30_001)
    x = torch.randn(2, 3, 64).bfloat16()
    ours = rotate(x, cos, sin, torch.bfloat16)
    assert torch.equal(ours, rotate(x.float(), cos, sin, torch.float32).bfloat16())


@pytest.mark.parametrize("shift", [0, 1])
def test_query_scales_are_transformers_and_depend_only_on_the_position(shift: int) -> None:
    """Ministral 3 counts from 0, Llama 4 from 1."""
    at_once, grown = (QueryScaleTable(QueryScale(0.1, 7, shift), torch.device("cpu")) for _ in range(2))
    positions = torch.arange(9000)
    ours = at_once(positions, 9000)
    if shift:
        theirs = torch.log1p(torch.floor((positions.float() + 1.0) / 7)) * 0.1 + 1.0
    else:
        theirs = get_llama_4_attn_scale(positions[None], 0.1, 7).flatten()
    torch.testing.assert_close(ours, theirs, rtol=3e-7, atol=0)
    assert len(ours.unique()) == 9000 // 7 + 1
    for longest in (1, 700, 7169, 9000):
        some = torch.tensor([longest - 1, longest // 2, 0])
        assert torch.equal(grown(some, longest), ours[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pairs_neighbours", [False, True])
@pytest.mark.usefixtures("form")
def test_heads_are_finished_in_float32_and_rounded_once(dtype: torch.dtype, pairs_neighbours: bool) -> None:
    table = RotaryTable(RopeSpec("default", 1e4, 32), torch.device("cpu"))
    angles = table(torch.tensor([300, 7, 0]), 301)
    x, weight, scale = torch.randn(3, 6, 48).to(dtype), torch.randn(6, 48), torch.tensor([1.0, 1.5, 0.7])
    ours = finish_heads(x, angles, (weight, 1e-5), scale, 4, dtype, pairs_neighbours=pairs_neighbours)
    apply_rope = neighbours_with_torch if pairs_neighbours else rotate_with_torch
    exact = apply_rope(x.double(), *(part.double() for part in angles), torch.float64)
    exact = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    exact[:, :4] *= scale.double().view(-1, 1, 1)
    torch.testing.assert_close(ours.double(), exact, atol=2e-6, rtol=torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", ["default", "dynamic"])
@pytest.mark.parametrize("size", [8, 24, 128])
def test_an_angle_depends_only_on_its_position(kind: str, size: int) -> None:
    """Not on how many tokens share the step, nor on how the table grew."""
    spec = RopeSpec(kind, 1e4, size, factor=2.0, original_max_positions=700)
    at_once, grown = RotaryTable(spec, torch.device("cpu")), RotaryTable(spec, torch.device("cpu"))
    cos, sin = at_once(torch.arange(5000), 5000)
    for longest in (1, 700, 1025, 3001, 5000):
        some = torch.tensor([longest - 1, longest // 2, 0])
        few_cos, few_sin = grown(some, longest)
        assert torch.equal(few_cos, cos[some]) and torch.equal(few_sin, sin[some])


@pytest.mark.parametrize("share", [1.0, 0.75])
@pytest.mark.parametrize("served", [64, 256])
def test_longrope_equals_transformers_at_the_length_it_is_served_for(share: float, served: int) -> None:
    """Within the trained length the short factors, and beyond it the long ones for every position."""
    pairs = int(32 * share) // 2
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": share,
            "short_factor": [1.0 + 0.05 * i for i in range(pairs)],
            "long_factor": [2.0 + 0.3 * i for i in range(pairs)]}  # fmt: skip
    config = Phi3Config(vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=1,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                        original_max_position_embeddings=64, rope_parameters=rope, pad_token_id=0)  # fmt: skip
    spec = describe({**config.to_dict(), "architectures": ["Phi3ForCausalLM"]})
    assert spec.default_length == 64 and spec.attentions[0].rope.attention_factor > 1
    positions = torch.arange(served)
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    ours_cos, ours_sin = RotaryTable(spec.for_length(served).attentions[0].rope, torch.device("cpu"))(positions, served)
    half = ours_cos.shape[-1] // 2
    assert torch.equal(ours_cos[:, 0], cos[0]) and torch.equal(ours_sin[:, 0, half:], sin[0][:, half:])


def test_short_factors_are_not_stretched_beyond_their_reach() -> None:
    spec = RopeSpec("longrope", 1e4, 8, 4.0, 64, 1.1, short_factors=(1.0,) * 4, long_factors=(4.0,) * 4)
    table = RotaryTable(spec, torch.device("cpu"))
    table(torch.arange(64), 64)  # the table itself may be longer
    with pytest.raises(ValueError, match=r"65 tokens is beyond the 64 .* `for_length`"):
        table(torch.arange(2), 65)
    RotaryTable(spec.for_length(65), torch.device("cpu"))(torch.arange(65), 65)


def test_an_unknown_kind_raises() -> None:
    with pytest.raises(ValueError, match="'spiral'"):
        RotaryTable(RopeSpec("spiral", 1e4, 8), torch.device("cpu"))
