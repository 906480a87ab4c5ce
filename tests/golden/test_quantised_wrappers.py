"""Quantised multimodal models: their text parts have the bits of the text model with the same stored weights.

The settings name modules as the checkpoint does, with its prefix.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from tests.golden.cases import PROMPT
from tests.golden.paged_run import PagedRun, load_decoder, on_ranks
from tests.golden.quantised import CASES, FILE, write
from tests.golden.tiny_models import make_tiny
from tests.golden.tiny_wrappers import rename_stored

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1}
TOKENS = [(7 * position) % 300 for position in range(PROMPT)]
SCHEMES = {
    "old": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    "new": {"model.": "model.language_model."},
}


def wrap(text: Path, folder: Path, prefixes: dict[str, str]) -> Path:
    """The checkpoint of a multimodal model whose text part is the text model in `text`, with one tensor for images."""
    path = folder / "wrapper"
    shutil.copytree(text, path)
    config = json.loads((path / "config.json").read_text())
    settings = config.pop("quantization_config")
    whole = {"architectures": ["LlavaOnevisionForConditionalGeneration"], "model_type": "llava_onevision",
             "text_config": config, "quantization_config": settings}  # fmt: skip
    (path / "config.json").write_text(json.dumps(whole))
    rename_stored(path, prefixes)
    stored = load_file(path / FILE)
    save_file(stored | {"vision_tower.encoder.weight": torch.zeros(3, 2)}, path / FILE, {"format": "pt"})
    return path


def logits(path: Path, size: int) -> Tensor:
    def run(tp: TensorParallel) -> Tensor:
        return PagedRun(load_decoder(path, tp)).step({0: TOKENS})[0]

    return on_ranks(size, run)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "name",
    ["gptq-4-64-asym", "awq-32", "packed-4-64-asym", "integers-channel", "floats-channel", "fp8-block", "nf4-nested"],
)
def test_a_wrapper_has_the_bits_of_its_text_model(tmp_path: Path, name: str, scheme: str) -> None:
    text = write(make_tiny(tmp_path, "qwen2", **SHAPE), tmp_path, CASES[name]).path
    wrapper = wrap(text, tmp_path, SCHEMES[scheme])
    size = 2 if scheme == "new" else 1
    assert torch.equal(logits(wrapper, size), logits(text, size))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_a_wrapper_too(tmp_path: Path, scheme: str) -> None:
    dense = make_tiny(
        tmp_path, "qwen3_moe", num_hidden_layers=2, hidden_size=128, moe_intermediate_size=192, num_experts=3
    )
    text = write(dense, tmp_path, CASES["gptq-4-64-asym"]).path
    assert torch.equal(logits(wrap(text, tmp_path, SCHEMES[scheme]), 2), logits(text, 2))
