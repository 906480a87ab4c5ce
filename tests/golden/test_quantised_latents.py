"""The matrices of latent attention's heads, which are written out from every format of a checkpoint, and never rounded
at load."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.latent_attention import LatentAttention
from oarlock.workers.preflight import open_model
from oarlock.workers.runner.memory_needs import rank_weight_bytes
from tests.golden.paged_run import load_decoder, on_ranks
from tests.golden.quantised import CASES, FILE, write
from tests.golden.tiny_models import make_tiny

HEADS, NOPE = 8, 12
# Heads of 28 rows, so that ranks cut blocks of 64 and 128 rows, and rows that are packed together.
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "kv_lora_rank": 128, "q_lora_rank": 128,
         "v_head_dim": 16}  # fmt: skip
MATRIX = "model.layers.0.self_attn.kv_b_proj"


def matrices(path: Path, size: int, quantization: str = "none") -> Tensor:
    """The rows of `kv_b_proj` as all of `size` ranks hold them together: float32 [outputs, inputs]."""

    def read(tp: TensorParallel) -> Tensor:
        decoder = load_decoder(path, tp, quantization=quantization)
        config = WorkerConfig(str(path), device="cpu", dtype="float32", quantization=quantization)
        opened = open_model(config.with_(tensor_parallel_size=tp.size))
        assert decoder.weight_bytes == rank_weight_bytes(opened.config, opened.spec, opened.formats)
        attention = decoder.layers[0].attention
        assert isinstance(attention, LatentAttention)
        both = []
        for multiply, inputs in ((attention.matrices.keys, NOPE), (attention.matrices.values, SHAPE["kv_lora_rank"])):
            one_hot = torch.eye(inputs).unsqueeze(1).expand(-1, HEADS // tp.size, -1).contiguous()
            both.append(multiply(one_hot))  # [inputs, heads, outputs]
        keys, values = both
        return torch.cat((keys.transpose(0, 1), values.permute(1, 2, 0)), 1).flatten(0, 1)

    return torch.cat(on_ranks(size, read))


@pytest.mark.parametrize(
    "name",
    [
        "gptq-4-32-sym",
        "fp8-block",
        "nf4-nested",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("awq-32", "gptq-8-32-asym-act", "packed-4-64-asym")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("integers-channel", "floats-channel")),
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("fp8-block-128-bf16", "fp8-tensor")),
    ],
)
def test_every_rank_has_the_rows_of_its_heads(tmp_path: Path, name: str) -> None:
    quantised = write(make_tiny(tmp_path, "youtu", **SHAPE), tmp_path, CASES[name])
    for size in (1, 4):
        torch.testing.assert_close(
            matrices(quantised.path, size), quantised.weights[MATRIX].float(), rtol=1e-6, atol=1e-9
        )


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounding_at_load_leaves_them_as_they_are(tmp_path: Path, quantization: str) -> None:
    path = make_tiny(tmp_path, "youtu", **SHAPE)
    stored = load_file(path / FILE)[f"{MATRIX}.weight"]
    for size in (1, 2):
        assert torch.equal(matrices(path, size, quantization), stored)
