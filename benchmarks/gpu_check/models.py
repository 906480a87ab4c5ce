"""The models that are timed: true shapes with dummy weights, which are made on the spot."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.part import NotHere, Where
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.memory_spec import SlotsSpec
from oarlock.workers.models.registry import read_spec
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata
from oarlock.workers.ranks.cpu_affinity import use_cpus
from oarlock.workers.runner.group_sizes import CHECKPOINT_SLOTS, RUNNING_SLOTS
from oarlock.workers.runner.memory_needs import weight_bytes
from oarlock.workers.runner.model_runner import ModelRunner

REST = 3 << 30  # bytes for a step and the libraries
SLOTS_OF_SEQUENCE = RUNNING_SLOTS + CHECKPOINT_SLOTS

_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "vocab_size": 248320,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
}
# Qwen3 as published: 596 million and 8.2 billion parameters. Qwen3.5's smallest model, most layers of which are
# recurrent. Youtu-LLM-2B, which has latent attention. Eight layers of Kimi Linear, one of which has latent attention;
# only the last has experts, and few.
SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "hybrid 0.8b": {
        **_QWEN3_5,
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3584,
        "tie_word_embeddings": True,
    },
    "latent 2b": {
        **_LATENT,
        "architectures": ["YoutuForCausalLM"],
        "model_type": "youtu",
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 1536,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "kimi, 8 layers": {
        **_LATENT,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": 163840,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 7,
        "num_experts": 8,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "hidden_size": 2304,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "intermediate_size": 9216,
        "tie_word_embeddings": False,
    },
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151936,
}
_QWEN3 |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "max_position_embeddings": 40960}
_TINY: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
_TINY |= {"intermediate_size": 96, "head_dim": 16, "vocab_size": 512, "full_attention_interval": 2}
_TINY |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2)
_TINY |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16)
_TINY_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
}
_TINY_LATENT |= {"v_head_dim": 16, "q_lora_rank": None, "linear_num_heads": 2, "linear_head_dim": 16}
_TINY_LATENT |= {"first_k_dense_replace": 1, "moe_intermediate_size": 32}


def config_json(shape: str, where: Where) -> str:
    """A model of that shape; on the CPU a tiny one."""
    fields = _QWEN3 | {"dtype": "bfloat16"} | SHAPES[shape]
    tiny = _TINY | (_TINY_LATENT if "kv_lora_rank" in fields else {})
    return json.dumps(fields | tiny if where.is_tiny else fields)


def that_fit(shape: str, where: Where, batches: Sequence[int], tokens: int) -> list[int]:
    """Numbers of sequences of `tokens` tokens for which the device has room. Raises `NotHere` if there are none."""
    with described(shape, where) as folder:
        spec = read_spec(folder)
    of_a_token, of_states = 2 * spec.cached_values, SLOTS_OF_SEQUENCE * slot_bytes(spec)
    free = torch.cuda.mem_get_info()[0] - weight_bytes(spec, "bfloat16") - REST if where.device == "cuda" else 0
    found = [batch for batch in batches if batch * ((tokens + 32) * of_a_token + of_states) <= free or where.is_tiny]
    if not found:
        raise NotHere(f"a model of {shape} does not fit the device")
    return found


@contextmanager
def described(shape: str, where: Where) -> Generator[str]:
    """A folder with the model's config.json."""
    with tempfile.TemporaryDirectory(prefix="oarlock-check-") as folder:
        (Path(folder) / "config.json").write_text(config_json(shape, where))
        yield folder


def runner_of(shape: str, where: Where, *, sequences: int, tokens: int, prompt: int = 1, **options: Any) -> ModelRunner:
    """A rank of a model of that shape with dummy weights, as `loaded` makes it."""
    with described(shape, where) as folder:
        return loaded(folder, where, sequences, tokens, prompt, load_format="dummy", **options)


def loaded(folder: str, where: Where, sequences: int, tokens: int, prompt: int, **options: Any) -> ModelRunner:
    """A loaded rank with blocks for `sequences` of `tokens` tokens, and steps of up to `prompt` tokens."""
    config = WorkerConfig(
        folder,
        device=where.device,
        dtype="bfloat16",
        max_model_len=tokens,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(sequences, prompt, 64),
    )
    config = preflight(config.with_(**options))
    blocks = sequences * -(-tokens // config.block_size) + 2
    config = config.with_(num_kv_blocks=blocks)
    use_cpus(config, 0)
    runner = ModelRunner(config, TensorParallel.solo())
    with torch.inference_mode():
        runner.load(lambda share: None)
        runner.allocate(runner.num_blocks_that_fit())
    return runner


def inner_parameters(spec: DecoderSpec) -> int:
    """Weights that each token of a prompt is multiplied with: neither embedding nor head."""
    matrices = 1 if spec.tie_word_embeddings else 2
    return spec.num_parameters - matrices * spec.vocab_size * spec.hidden_size


def slot_bytes(spec: DecoderSpec) -> int:
    """Bytes of the recurrent state of one sequence in all layers, on one rank in bfloat16."""
    return sum(
        len(layers) * memory.bytes_of_rank(1, "bfloat16")
        for memory, layers in spec.groups
        if isinstance(memory, SlotsSpec)
    )


def streamed_bytes(runner: ModelRunner) -> int:
    """Bytes of the weights that a step reads, without an embedding beside the head, of which it reads a few rows."""
    spec, item_bytes = runner.spec, runner.model.placement.dtype.itemsize
    embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size * item_bytes
    return runner.model.weight_bytes - embedding


def replaced(step: StepMetadata, **fields: Any) -> StepMetadata:
    return dataclasses.replace(step, **fields)
