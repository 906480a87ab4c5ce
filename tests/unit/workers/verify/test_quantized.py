"""Verification of weights that are rounded at load: right ones pass, and a scale that is cut wrongly is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.workers.verify.dequantised_reference import RoundingLoss
from oarlock.workers.verify.wrong_scales import wrong_scales
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, cut_scales_wrongly

FORMS = ("int8", "int4")
LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., VerifyCase]:
    """By family and form; each reference is run when it is first asked for."""
    made: dict[tuple[str, str], VerifyCase] = {}

    def case(family: str, form: str) -> VerifyCase:
        if (family, form) not in made:
            folder = tmp_path_factory.mktemp(family)
            model = make_tiny(folder, family, seed=5, hidden_size=128, head_dim=16, intermediate_size=256)
            made[family, form] = VerifyCase(model, folder / "verify", quantization=form)
        return made[family, form]

    return case


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "phi3", "nemotron", "starcoder2", "olmo"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_a_right_model_is_right(cases: Callable[..., VerifyCase], form: str, family: str, size: int) -> None:
    comparison, causes = cases(family, form).run(size)
    assert comparison.ok, comparison.first_fault
    assert causes == []


_COUNTS = {"gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}


@pytest.mark.parametrize("family", [*_COUNTS, "nemotron_h"])
@pytest.mark.slow
def test_experts_are_right(tmp_path: Path, family: str) -> None:
    """With a gate every token has all of them: none is chosen by a rounding. Those of Nemotron-H have no gate."""
    counts = {_COUNTS[family]: 3, "num_experts_per_tok": 3} if family in _COUNTS else {}
    model = make_tiny(tmp_path, family, seed=5, hidden_size=128, head_dim=16, **counts)
    comparison, causes = VerifyCase(model, tmp_path / "verify", quantization="int8").run(2)
    assert comparison.ok and causes == [], comparison.first_fault


# Families with a gate on attention, norms after the rotation, scaled queries, chunks, and weights on experts' inputs;
# every token has all experts.
_FAMILIES: dict[str, dict[str, Any]] = {
    "ministral3": {},
    "hunyuan_v1_moe": {"num_experts": 3, "moe_topk": 3},
    "afmoe": {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64,
              "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {"num_local_experts": 3, "num_experts_per_tok": 3, "intermediate_size_mlp": 128,
                    "no_rope_layer_interval": 2},
}  # fmt: skip


@pytest.mark.parametrize("form", ["none", *FORMS])
@pytest.mark.parametrize("family", _FAMILIES)
@pytest.mark.slow
def test_other_forms_of_attention_and_experts_are_right_in_bfloat16(tmp_path: Path, family: str, form: str) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    model = make_tiny(tmp_path, family, seed=5, dtype=torch.bfloat16, **shape, **_FAMILIES[family])
    comparison, causes = VerifyCase(model, tmp_path / "verify", "bfloat16", quantization=form).run(2)
    assert comparison.ok and causes == [], comparison.first_fault


@pytest.mark.slow
def test_a_table_of_layers_inputs_is_rounded_as_the_embedding(tmp_path: Path) -> None:
    """It has 8 bits if other weights have 4. Both runs round the same inputs, so their errors are equal."""
    model = make_tiny(tmp_path, "gemma4_text", seed=3)
    comparison, _ = VerifyCase(model, tmp_path / "verify", quantization="int4").run(1)
    gated = next(row for row in comparison.rows if row.name == "0.input_gated")
    assert gated.worst.rms_ratio < 1.1


@pytest.mark.slow
def test_written_out_weights_are_right(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "qwen2", seed=5, hidden_size=128, head_dim=16, intermediate_size=256)
    case = VerifyCase(model, tmp_path / "verify", "bfloat16", quantization="int8", dequantize=True)
    comparison, causes = case.run(2)
    assert comparison.ok and causes == [], comparison.first_fault


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_the_cost_of_rounding_is_reported_by_layer(cases: Callable[..., VerifyCase], form: str) -> None:
    case = cases("qwen2", form)
    loss = RoundingLoss.read(case.folder)
    assert loss is not None
    assert [layer.layer for layer in loss.layers] == list(range(len(loss.layers)))
    step, answers = (0.0065, 0.05) if form == "int8" else (0.085, 0.5)  # of such weights, normally distributed
    assert [layer.weights for layer in loss.layers] == [pytest.approx(step, rel=0.2)] * len(loss.layers)
    assert all(layer.weights < layer.hidden < answers for layer in loss.layers)
    assert 0 < loss.logits < answers
    assert json.loads((case.folder / "rounding.json").read_text())["logits"] == loss.logits


WRONG = [("self_attn.qkv_proj", "self_attn.q_proj.weight: the rows of rank 1"), ("mlp.down_proj", "mlp.down_proj")]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("layer", "cause"), WRONG, ids=[name for name, _ in WRONG])
@pytest.mark.slow
def test_a_scale_cut_wrongly_is_named(
    cases: Callable[..., VerifyCase], monkeypatch: pytest.MonkeyPatch, form: str, layer: str, cause: str
) -> None:
    """Rank 1 has each output's scales from the output before."""
    case = cases("qwen2", form)
    cut_scales_wrongly(monkeypatch, f"{LAYER}.{layer}")
    comparison, causes = case.run(2)
    assert not comparison.ok
    assert f"{LAYER}.{cause}" in causes[0]
    assert "rank 1" in causes[0]
    assert "wrong scales" in causes[0]


def test_scales_are_found_by_what_they_do() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(40, 64).double(), torch.randn(5, 64).double()
    bias = torch.randn(5).double()
    wrong = weight.clone()
    wrong[3, 32:] *= 0.5
    assert wrong_scales(inputs, weight, inputs @ weight.T + bias) is None
    found = wrong_scales(inputs, weight, inputs @ wrong.T + bias)
    assert found == "wrong scales: that of its output 3, inputs 32 to 63 is 0.5 times the right one"
    wrong[3, 40] += 30.0  # no factor of a group does that
    assert wrong_scales(inputs, weight, inputs @ wrong.T) is None
    assert wrong_scales(inputs[:5], weight, inputs[:5] @ wrong.T) is None  # too few tokens to tell
