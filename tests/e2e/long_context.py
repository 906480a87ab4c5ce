"""The demo model with room for sequences that no test outlasts.

A test that acts while a request runs needs one that still runs then, however fast the machine is. The demo's own
context of 2,048 tokens is over in half a second where the kernels are fast.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.e2e.running import DEMO

CONTEXT = 65_536  # tokens: some 15 s of decoding at 4,000 tokens/s
LONG = CONTEXT - 1_000  # tokens to ask for, beside a short prompt


def long_context_demo(directory: Path, *, layers: int | None = None) -> Path:
    """A checkpoint in `directory`: the demo's files, and its configuration with a context of `CONTEXT` tokens.

    `layers`: as many of the demo's alone, where a test computes a long prompt whose text does not matter.
    """
    for file in DEMO.iterdir():
        if file.is_file():
            (directory / file.name).symlink_to(file)
    written = directory / "config.json"
    written.unlink()
    config = json.loads((DEMO / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    if layers is not None:
        config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
        _keep_layers(directory / "model.safetensors", layers)
    written.write_text(json.dumps(config))
    return directory


def _keep_layers(weights: Path, layers: int) -> None:
    tensors = load_file(weights)
    weights.unlink()
    kept = {name: of for name, of in tensors.items() if ".layers." not in name or int(name.split(".")[2]) < layers}
    save_file(kept, weights, {"format": "pt"})
