"""Verification finds nothing in right models with latent attention: in every format, in GGUF files, and with adapters.
It names a wrong update of a projection inside.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.gguf_model import GGUFModel
from tests.golden.gguf_latent import write_latent_gguf
from tests.golden.peft_files import write_peft
from tests.golden.quantised import CASES, write
from tests.golden.tiny_models import make_tiny, tiny_model
from tests.unit.workers.verify.cases import VerifyCase
from tests.unit.workers.verify.test_adapter_causes import changed_cut

pytestmark = pytest.mark.slow
SIZE = 2
# Widths that blocks of every format divide, and that the C++ kernel of attention takes.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "q_lora_rank": 128, "kv_lora_rank": 128,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 64}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [3.0, 3.3, 3.9,
        5.1], "original_max_position_embeddings": 128}  # fmt: skip
Make = Callable[[Path], VerifyCase]


def case_of(family: str, dtype: str = "bfloat16", quantization: str = "none", **settings: Any) -> Make:
    def make(folder: Path) -> VerifyCase:
        model = make_tiny(folder, family, seed=5, dtype=getattr(torch, dtype), **settings)
        length = 32  # DeepSeek V3.2 is served for contexts of up to 36 tokens
        return VerifyCase(
            model, folder / "verify", dtype, quantization=quantization, block_size=16, max_model_len=length
        )

    return make


def stored_as(name: str) -> Make:
    def make(folder: Path) -> VerifyCase:
        quantised = write(make_tiny(folder, "youtu", seed=5, **WIDE), folder, CASES[name])
        return VerifyCase(quantised.path, folder / "verify", "bfloat16", block_size=16)

    return make


def in_gguf(family: str, *, splits: bool, kind: str = "F32", **settings: Any) -> Make:
    def make(folder: Path) -> VerifyCase:
        dense = make_tiny(folder, family, seed=5, **WIDE, **settings)
        described = folder / "described"
        described.mkdir()
        path = write_latent_gguf(dense, folder / "model.gguf", splits=splits, kind=kind)
        (described / "model.gguf").symlink_to(path)
        (described / "config.json").write_text(json.dumps(hf_config(GGUFModel.open(path))))
        return VerifyCase(described, folder / "verify", "bfloat16", block_size=16)

    return make


RIGHT: dict[str, Make] = {
    "v3-int8": case_of("deepseek_v3", quantization="int8", **WIDE, **EXPERTS),
    "gguf-split": in_gguf("youtu", splits=True, kind="Q8_0"),
    "heads-gated": case_of("bailing_hybrid", "float32"),
    "v2": case_of("deepseek_v2", **EXPERTS),
    "v2-lite": case_of("deepseek_v2", "float32", q_lora_rank=None, topk_method="greedy", attention_bias=True),
    "indexed": case_of("deepseek_v32", **EXPERTS),
    "unrotated": case_of("kimi_linear", **EXPERTS),
    "more-roundings": case_of("minicpm3", "float32", rope_parameters=LONG),
    "halves": case_of("deepseek_v3", "float32", rope_interleave=False),
    "v3-int4": case_of("deepseek_v3", quantization="int4", **WIDE, **EXPERTS),
    "gptq": stored_as("gptq-4-32-sym"),
    "fp8": stored_as("fp8-block"),
    "gguf": in_gguf("deepseek_v3", splits=False, num_mtp_layers=0, **EXPERTS),
    "gguf-v2": in_gguf("deepseek_v2", splits=True, **EXPERTS),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.soak if at > 0 else ()) for at, one in enumerate(RIGHT)]
)
def test_nothing_is_found_in_a_right_model(tmp_path: Path, name: str) -> None:
    comparison, causes = RIGHT[name](tmp_path).run(SIZE)
    assert comparison.ok, comparison.first_fault
    assert causes == []


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> VerifyCase:
    folder, shape = tmp_path_factory.mktemp("adapted"), {"num_hidden_layers": 2}
    updated = write_peft(
        folder / "adapter", tiny_model("youtu", seed=5, **shape), updates=lambda name: not name.endswith("kv_b_proj")
    )
    return VerifyCase(make_tiny(folder, "youtu", seed=5, **shape), folder / "verify", adapter=updated)


@pytest.mark.parametrize("module", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"])
@pytest.mark.soak
def test_a_wrong_update_is_named(adapted: VerifyCase, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    name = f"model.layers.1.self_attn.{module}"
    changed_cut(name, lambda pair, shard: replace(pair, scale=1.0))(monkeypatch)
    comparison, causes = adapted.run(SIZE)
    assert not comparison.ok and len(causes) == 1
    assert causes[0].startswith(f"{name}: the adapter's update is not scaled"), causes


@pytest.mark.soak
def test_nothing_is_found_in_a_right_adapter(adapted: VerifyCase) -> None:
    comparison, causes = adapted.run(SIZE)
    assert comparison.ok and causes == []
