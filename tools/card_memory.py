"""Tables of the memory of a 24 GB card under configs/1gpu.toml and 2gpu.toml, as in their comments.

The sizes of weights, of a step and of a token's keys and values are those that the server computes with.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from oarlock.server.config.settings import Settings
from oarlock.server.config.sources import load_settings
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.models.registry import read_spec
from oarlock.workers.runner.memory_needs import largest_step_bytes, weight_bytes
from tests.house.rules import ROOT

CARD = 22.5  # GiB that the smallest cards of 24 GB show: L4 and A10. RTX 3090 and 4090: 24.0
LIBRARIES = 1.0  # GiB for CUDA's context, NCCL, workspaces and graphs: a guess that errs upwards
GIB = 2**30
WIDTH = 16

_QWEN: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Fields of each model's config.json that decide its sizes, and the parameters that its card names.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen2.5-7B": (
        _QWEN
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
        | {"num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768},
        7_615_616_512,
    ),
    "Qwen2.5-14B": (
        _QWEN
        | {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40}
        | {"num_key_value_heads": 8, "vocab_size": 152064, "max_position_embeddings": 32768},
        14_770_033_664,
    ),
    "Llama-3.1-8B": (
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5}
        | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
        | {"rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 8192}},
        8_030_261_248,
    ),
}
SHOWN = {"1gpu": ("Qwen2.5-7B", "Llama-3.1-8B"), "2gpu": ("Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-14B")}


def spec_of(model: str) -> DecoderSpec:
    fields = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields | MODELS[model][0]))
        return read_spec(folder)


def step_bytes_of(model: str, settings: Settings) -> int:
    """Bytes of one card's part of the largest step."""
    tokens = settings.max_num_batched_tokens
    assert tokens is not None and settings.dtype == "bfloat16"
    config = WorkerConfig(
        "",
        device="cuda",
        dtype="bfloat16",
        tensor_parallel_size=settings.tensor_parallel_size,
        max_num_batched_tokens=tokens,
    )
    return largest_step_bytes(config, spec_of(model))


def column(model: str, name: str) -> list[str]:
    """The figures of one model under `configs/NAME.toml`, of each card."""
    settings, spec = load_settings({}, {}, f"{ROOT}/configs/{name}.toml").settings, spec_of(model)
    ranks, share = settings.tensor_parallel_size, settings.gpu_memory_utilization
    of_token = 2 * spec.cached_values // ranks  # bytes of a token's keys and values in bfloat16
    weights, step = weight_bytes(spec, "bfloat16") / ranks / GIB, step_bytes_of(model, settings) / GIB
    left = CARD * share - weights - step - LIBRARIES
    fitting = int(left * GIB / of_token)
    return [
        model,
        f"{CARD * share:.2f} GiB",
        f"-{weights:.2f} GiB",
        f"-{step:.2f} GiB",
        f"-{LIBRARIES:.2f} GiB",
        f"{left:.2f} GiB",
        f"{of_token / 1024:.0f} KiB",
        f"{fitting // 1000 * 1000:,}",
        f"{fitting // 1024}",
    ]


def table(name: str) -> str:
    """Table for the comment in `configs/NAME.toml`."""
    settings = load_settings({}, {}, f"{ROOT}/configs/{name}.toml").settings
    heads = [
        "",
        f"{CARD} GiB x {settings.gpu_memory_utilization}",
        "weights in bfloat16",
        f"a step of {settings.max_num_batched_tokens:,} tokens",
        "CUDA and its libraries",
        "= KV memory",
        "of a token",
        "tokens that fit",
        "users with 1,024 tokens",
    ]
    columns = [column(model, name) for model in SHOWN[name]]
    rows = zip(heads, *columns, strict=True)
    return "\n".join(f"#   {head:<24}" + "".join(f"{cell:>{WIDTH}}" for cell in cells) for head, *cells in rows)


if __name__ == "__main__":
    for shown in SHOWN:
        print(table(shown))
