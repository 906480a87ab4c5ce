"""The demo model as a checkpoint of sentence-transformers: its last token's vector, normalised, with two prompts.

It was not trained for this, so its vectors mean nothing; their numbers are those that any library must compute.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.e2e.running import DEMO

PROMPTS = {"query": "Instruct: Find the function.\nQuery: ", "document": ""}
MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}


def embedding_demo(directory: Path, pooling: str = "lasttoken", dense: int | None = None) -> Path:
    """The checkpoint in `directory`: the demo's files beside those that say how its vectors are made.

    `dense`: the numbers that a Dense module makes of each vector, by a random matrix and tanh.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for file in DEMO.iterdir():
        if file.is_file() and file.name != "config.json":
            (directory / file.name).symlink_to(file)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(MODULES.items())
    ]
    config = json.loads((DEMO / "config.json").read_text())
    if dense is not None:
        modules.insert(2, {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
        modules[3] |= {"idx": 3, "name": "3"}
        _write_dense(directory / "2_Dense", config["hidden_size"], dense)
    files = {
        "config.json": config | {"is_matryoshka": True, "dtype": "float32"},
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": 512, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        "1_Pooling/config.json": {
            "word_embedding_dimension": config["hidden_size"],
            f"pooling_mode_{pooling}": True,
            "include_prompt": True,
        },
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    (directory / "2_Normalize").mkdir(exist_ok=True)
    return directory


def _write_dense(directory: Path, in_features: int, out_features: int) -> None:
    directory.mkdir(exist_ok=True)
    sizes = {"in_features": in_features, "out_features": out_features, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    (directory / "config.json").write_text(json.dumps(sizes | activation))
    draw = np.random.default_rng(5)
    weights = {"linear.weight": draw.normal(size=(out_features, in_features)) / in_features**0.5}
    weights["linear.bias"] = draw.normal(size=out_features) / 10
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, directory / "model.safetensors")
