"""The good adapters that hostile ones are made from: of a tiny Llama, in PEFT's files and in GGUF."""

from pathlib import Path
from typing import Any

import gguf
import torch

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.lora.adapter_slots import AdapterSlots
from tests.fuzz.adapter_files import GGUF_FILE, Source
from tests.golden.paged_run import load_decoder
from tests.golden.peft_files import write_peft
from tests.golden.tiny_models import make_tiny, tiny_model

_SHAPE: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
          "num_key_value_heads": 1, "vocab_size": 40}  # fmt: skip


def make_source(folder: Path) -> Source:
    """Write a model and an adapter of it to `folder`, in both formats."""
    model = make_tiny(folder, "llama", **_SHAPE)
    peft = write_peft(folder / "peft", tiny_model("llama", **_SHAPE))
    writer = gguf.GGUFWriter(folder / GGUF_FILE, "llama")
    for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 6.0)
    for name, (outputs, inputs) in {"attn_q": (16, 16), "attn_k": (8, 16), "ffn_up": (24, 16)}.items():
        for half, shape in (("a", (4, inputs)), ("b", (outputs, 4))):
            writer.add_tensor(f"blk.0.{name}.weight.lora_{half}", torch.randn(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with torch.inference_mode():
        decoder = load_decoder(model, TensorParallel.solo())
    return Source(peft, folder / GGUF_FILE, decoder.spec, AdapterSlots(decoder, 1, 16))
