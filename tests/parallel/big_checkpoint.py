"""A checkpoint of several hundred MB in several files, and ways to load it in a new process.

    python -m tests.parallel.big_checkpoint DIRECTORY slices|whole      prints the process's peak resident memory

`slices` loads rank 0 of 2 as a rank does. `whole` is the planted fault: the same, but from a state dict that was read
whole first, as a careless loader would.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

MIB = 1 << 20
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "vocab_size": 16384,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def write_big_checkpoint(directory: Path, num_files: int = 4) -> int:
    """Random bfloat16 weights in `num_files` files with an index; returns their bytes."""
    from oarlock.workers.layers.decoder_spec import tensor_shapes
    from oarlock.workers.models.registry import describe

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    shapes = list(tensor_shapes(describe(CONFIG)).items())
    noise = np.random.default_rng(0).integers(0, 1 << 16, 8 * MIB + 11, np.uint16)
    noise = (noise & 0x80FF) | 0x3C00  # any mantissa and sign, magnitudes about 0.01: no tensor compresses or is zero
    weight_map, total = {}, 0
    for number in range(num_files):
        name = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = shapes[number::num_files]
        total += _write_file(directory / name, part, noise)
        weight_map |= {tensor: name for tensor, _ in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _write_file(path: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], noise: np.ndarray) -> int:
    header, position = {}, 0
    for name, shape in shapes:
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        left = position // 2
        while left:
            left -= file.write(noise[:left].tobytes()) // 2
    return position


def peak_bytes(pid: int | str = "self") -> int:
    """The most resident memory this process ever had: code, heap, and pages of mapped files, all counted."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise ValueError("this kernel does not report the peak of resident memory")


class WholeStateDict:
    """The planted fault: a weight source that has read everything."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.tensors = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.tensors |= {name: tensor.clone() for name, tensor in load_file(path).items()}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape_of(self, name: str) -> None: ...

    def take(self, name: str, into, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        into.copy_(self.tensors[name].narrow(dim, start, into.shape[dim]))

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Check nothing: only the memory counts."""


def main(directory: Path, way: str) -> int:
    import torch

    from oarlock.workers.distributed.parallel_state import TensorParallel
    from oarlock.workers.model_files.checkpoint import Checkpoint
    from oarlock.workers.models.decoder import Decoder
    from oarlock.workers.models.registry import read_spec
    from oarlock.workers.weights.reader import WeightReader

    torch.set_num_threads(1)
    decoder = Decoder(read_spec(str(directory)), TensorParallel(0, 2), torch.bfloat16, torch.device("cpu"))
    source = WholeStateDict(directory) if way == "whole" else WeightReader(Checkpoint.open(directory))
    decoder.load(source, lambda share: None)
    print(json.dumps({"peak": peak_bytes(), "shard": decoder.weight_bytes}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
