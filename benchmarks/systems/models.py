"""A checkpoint in the peers' own formats: converted once, kept beside the peer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks import checkpoint
from benchmarks.environments import folder, python
from benchmarks.setup_peers import llamacpp_tree
from benchmarks.systems.system import Plan

# llama.cpp recognizes a tokenizer by a digest of what it does, and one made here is none of those it knows: its rule
# for splitting text is named instead. Its loader wants at least one merge, and the tokenizer made here has none. The
# benchmarks send token ids, so no text is split or merged.
_TO_GGUF = """
import runpy, sys
tree = sys.argv[1]
sys.path[:0] = [tree, tree + "/gguf-py"]
import conversion.base as base
import gguf
for kind in vars(base).values():
    if hasattr(kind, "get_vocab_base_pre"):
        kind.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
add = gguf.SpecialVocab.add_to_gguf
def add_with_merges(self, writer, quiet=False):
    self.merges = self.merges or ["\u0120 w"]
    add(self, writer, quiet)
gguf.SpecialVocab.add_to_gguf = add_with_merges
sys.argv = [tree + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
_GGUF_TYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def openvino_weights(plan: Plan) -> str:
    """The type in which OpenVINO's file holds the weights: it has no 16-bit export but float16."""
    if plan.quantization != "none":
        return plan.quantization
    return "float32" if plan.dtype == "float32" else "float16"


def openvino(plan: Plan) -> Path:
    """The directory with OpenVINO's form of the checkpoint."""
    model, weights = plan.model, openvino_weights(plan)
    kind = {"float16": "fp16", "float32": "fp32"}.get(weights, weights)
    command = [python("openvino").with_name("optimum-cli"), "export", "openvino", "--model", model]
    command += ["--task", "text-generation-with-past", "--weight-format", kind]
    return _made_once("openvino", f"{model.name}-{kind}", lambda out: [*command, out])


def llamacpp_type(plan: Plan) -> str:
    """The type of the weights in llama.cpp's file, as its tools name it."""
    return {"none": _GGUF_TYPES[plan.dtype], "int8": "q8_0", "int4": "q4_k_m"}[plan.quantization]


def llamacpp(plan: Plan) -> Path:
    """The file with llama.cpp's form of the checkpoint. Its converter knows 8 bits and more, its quantizer fewer."""
    model, kind = plan.model, llamacpp_type(plan)
    if plan.quantization == "int4":
        whole = llamacpp(replace(plan, quantization="none"))
        quantizer = folder("llamacpp") / "build" / "bin" / "llama-quantize"
        return _made_once("llamacpp", f"{model.name}-{kind}.gguf", lambda out: [quantizer, whole, out, kind.upper()])
    command = [python("llamacpp"), "-c", _TO_GGUF, llamacpp_tree(), model, "--outtype", kind]
    if checkpoint.is_hybrid(model):  # its converter expects layers that predict several tokens
        command.append("--no-mtp")
    command.append("--outfile")
    return _made_once("llamacpp", f"{model.name}-{kind}.gguf", lambda out: [*command, out])


def _made_once(peer: str, name: str, command: Callable[[Path], list[str | Path]]) -> Path:
    """The file or directory, made by `command` under another name first, so that it is whole or not there."""
    out = folder(peer) / "models" / name
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"partial-{os.getpid()}-{name}")
    print(f"converting {name} for {peer}", file=sys.stderr, flush=True)
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    try:
        result = subprocess.run(
            command(partial), env=env | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"converting {name} for {peer} failed:\n{result.stderr[-3000:]}")
        partial.rename(out)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        partial.unlink(missing_ok=True)
    return out
