"""Verification of quantised checkpoints and GGUF models: right ones pass, and a scale that is cut wrongly is named."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.gguf_model import GGUFModel
from tests.golden.gguf_writer import all_of, q4_k_m, write_gguf
from tests.golden.quantised import CASES, write
from tests.golden.quantised_errors import GPT_OSS
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, altered, cut_scales_wrongly

LAYER = "model.layers.1"
SHAPE = {"hidden_size": 128, "head_dim": 16, "intermediate_size": 384, "num_hidden_layers": 2}
USUAL = (
    "gptq-4-32-asym-act", "gptq-8-64-sym", "gptq-4-32-fused", "awq-32", "packed-4-64-asym", "integers-channel",
    "floats-channel", "fp8-block", "nf4-nested", "mxfp4",
)  # fmt: skip
GGUF = {"gguf-q4-k-m": q4_k_m, "gguf-q4-0": all_of("Q4_0"), "gguf-q8-0": all_of("Q8_0"), "gguf-bf16": all_of("BF16")}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VerifyCase]:
    @cache
    def case(name: str) -> VerifyCase:
        folder = tmp_path_factory.mktemp(name)
        if name in GGUF:
            dense = make_tiny(folder, "llama", seed=5, **SHAPE | {"hidden_size": 256})
            described = folder / "described"
            described.mkdir()
            path = write_gguf(dense, folder / "model.gguf", GGUF[name])
            (described / "model.gguf").symlink_to(path)
            (described / "config.json").write_text(json.dumps(hf_config(GGUFModel.open(path))))
            return VerifyCase(described, folder / "verify", "bfloat16")
        family = CASES[name].family or ("phi3" if CASES[name].fused else "qwen2")
        shape = SHAPE | GPT_OSS if CASES[name].family else SHAPE
        path = write(make_tiny(folder, family, seed=5, **shape), folder, CASES[name]).path
        return VerifyCase(path, folder / "verify", "bfloat16")

    return case


def runs() -> list:
    """The usual forms on 2 ranks and one also alone, and the others on 4, which takes longer."""
    quick = {("gptq-4-32-asym-act", 1), *((name, 2) for name in (*USUAL, *GGUF))}
    every = [*sorted(quick), *((name, 4) for name in CASES if name not in USUAL)]
    alike = ("gptq-8-64-sym", "packed-4-64-asym", "gguf-q8-0", "gguf-bf16")  # another of the same program stands for it
    return [
        pytest.param(
            *run, marks=pytest.mark.soak if run not in quick else pytest.mark.product if run[0] in alike else ()
        )
        for run in every
    ]


@pytest.mark.parametrize(("name", "size"), runs())
@pytest.mark.slow
def test_a_right_model_is_right(cases: Callable[[str], VerifyCase], name: str, size: int) -> None:
    comparison, causes = cases(name).run(size)
    assert comparison.ok, comparison.first_fault
    assert causes == []


WRONG = [("self_attn.qkv_proj", "self_attn.q_proj.weight: the rows of rank 1"), ("mlp.down_proj", "mlp.down_proj")]


@pytest.mark.parametrize("name", [name for name in USUAL if name not in ("gptq-4-32-fused", "nf4-nested", "mxfp4")])
@pytest.mark.parametrize(("layer", "cause"), WRONG, ids=[layer for layer, _ in WRONG])
@pytest.mark.slow
def test_a_scale_cut_wrongly_is_named(
    cases: Callable[[str], VerifyCase], monkeypatch: pytest.MonkeyPatch, name: str, layer: str, cause: str
) -> None:
    """Rank 1 has each output's scales from the output before."""
    cut_scales_wrongly(monkeypatch, f"{LAYER}.{layer}")
    comparison, causes = cases(name).run(2)
    assert not comparison.ok
    assert f"{LAYER}.{cause}" in causes[0]
    assert "rank 1" in causes[0]
    if not name.endswith("-act"):  # there, groups are not of neighbours
        assert "wrong scales" in causes[0]


@pytest.mark.slow
def test_a_wrong_scale_of_an_expert_is_named(tmp_path: Path) -> None:
    def halved(scales: Tensor) -> Tensor:
        scales[2] -= 1  # exponents of two
        return scales

    shape = SHAPE | {"intermediate_size": 224, "num_local_experts": 5, "num_experts_per_tok": 2}
    case = VerifyCase(
        write(make_tiny(tmp_path, "gpt_oss", **shape), tmp_path, CASES["mxfp4"]).path,
        tmp_path / "verify",
        dequantize=True,  # so that what is rounded does not hide which experts are right
    )
    scales = f"{LAYER}.mlp.experts.down_proj_scales"
    _, causes = case.run(2, altered(case.model, tmp_path / "copy", scales, halved))
    assert causes == [f"{LAYER}.mlp.experts: expert 2"]
