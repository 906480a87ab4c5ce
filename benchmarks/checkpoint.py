"""Checkpoints for benchmarks: the shape of a real model, seeded random weights, made once outside the repository.

Speed depends on shapes and not on the values of weights, so nothing need be downloaded. The files of dense models are
written by transformers' own classes, so that any server can read them; mixtures of experts are in `mixtures.py`, and
a model with recurrent layers in `hybrids.py`.

    python -m benchmarks.checkpoint --shape 0.5b     # prints the directory, making it if it is not there
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks import hybrids, mixtures
from oarlock.base.paths import cache_home

# Qwen2.5 as published: 0.5B has 494 million parameters (988 MB in bfloat16), 1.5B has 1,544 million (3.1 GB). `quick`
# is the same architecture in a second, for trying the programs themselves; `small` is for what takes many prompts.
SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
    "1.5b": {
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
    },
    # An 8B model's layers, of which it has two.
    "8b-2-layers": {
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14_336,
        "vocab_size": 32_768,
        "max_position_embeddings": 4096,
    },
    "small": {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 2048,
        "vocab_size": 32_768,
        "max_position_embeddings": 4096,
    },
    "quick": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
    },
}
SEED = 20_25
ALL = (*SHAPES, *mixtures.MIXTURES, *hybrids.HYBRIDS)


def vocab_size(shape: str) -> int:
    return (SHAPES | mixtures.MIXTURES | hybrids.HYBRIDS)[shape]["vocab_size"]


def title(shape: str) -> str:
    """The name of the model whose shape it is."""
    published = {
        "granite-1b-a400m": "Granite 3.1 1B-A400M",
        "olmoe-1b-7b": "OLMoE 1B-7B",
        "small-mixture": "a mixture of 32 experts",
        "deepseek-v2-lite": "DeepSeek-V2-Lite",
        "deepseek-v2-lite-32-experts": "DeepSeek-V2-Lite with 32 experts",
        "qwen3.5-0.8b": "Qwen3.5-0.8B",
        "qwen3-0.8b": "a Qwen3 of 0.8B",
    }
    return published.get(shape, f"Qwen2.5-{shape.upper()}")


def cache_folder() -> Path:
    """Folder in which checkpoints are kept."""
    return cache_home() / "oarlock" / "load"


def parameters(shape: str) -> tuple[int, int]:
    """Number of parameters that are read for one token, with the output head and without it."""
    if shape in mixtures.MIXTURES:
        return mixtures.active_parameters(shape)
    if shape in hybrids.HYBRIDS:
        return hybrids.parameters(shape)
    s = SHAPES[shape]
    hidden, head = s["hidden_size"], s["hidden_size"] // s["num_attention_heads"]
    kv = s["num_key_value_heads"] * head
    attention = 2 * hidden**2 + 2 * hidden * kv + hidden + 2 * kv
    layer = attention + 3 * hidden * s["intermediate_size"] + 2 * hidden
    inner = s["num_hidden_layers"] * layer + hidden
    return inner + s["vocab_size"] * hidden, inner


def is_hybrid(model: Path) -> bool:
    """Whether the directory holds a checkpoint with recurrent layers."""
    return model.name.startswith("qwen3.5-")


def ensure(shape: str = "0.5b", *, folder: Path | None = None) -> Path:
    """The directory of the checkpoint. It is written whole or not at all, so an interrupted attempt is not used."""
    name = "qwen2-quick" if shape == "quick" else f"qwen2-{shape}-random" if shape in SHAPES else f"{shape}-random"
    out = (folder or cache_folder()) / name
    if not (out / "config.json").exists():
        partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        print(f"making {out}", file=sys.stderr, flush=True)
        if shape in mixtures.MIXTURES:
            mixtures.write(shape, partial, SEED)
        elif shape in hybrids.HYBRIDS:
            hybrids.write(shape, partial, SEED)
        else:
            _write_model(SHAPES[shape], partial)
        _write_tokenizer(vocab_size(shape), partial)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    return out


def _write_model(shape: dict[str, Any], out: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    rope: Any = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = Qwen2Config(
        **shape, tie_word_embeddings=True, rope_parameters=rope, bos_token_id=0, eos_token_id=0, dtype="bfloat16"
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts them at zero, and a zero bias would hide a lost one
                parameter.normal_(std=0.02)
    model.to(torch.bfloat16).save_pretrained(out)


def _write_tokenizer(vocab_size: int, out: Path) -> None:
    """Byte-level: the 256 bytes first, then invented words, so that every id up to the last can be decoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    pieces = [end, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"Ġw{number}" for number in range(vocab_size - len(pieces))]  # Ġ is the byte-level mark of a space
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=end, clean_up_tokenization_spaces=False
    ).save_pretrained(out)


def prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random prompts of token ids, the same for every server asked with this seed; no special token among them."""
    import random

    draw = random.Random(f"prompts-{seed}")
    return [[draw.randrange(257, vocab_size) for _ in range(length)] for _ in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=ALL, default="0.5b")
    print(ensure(parser.parse_args().shape))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
