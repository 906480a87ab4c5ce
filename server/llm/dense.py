"""Dense modules of sentence-transformers: a linear layer and an activation, behind the pooling of a text's vector.

Computed in float64, each vector for itself and in one order of sums, so that its bits depend on nothing else in its
batch. A layer has a few million weights at most, which is a millisecond for each vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oarlock.engine.errors import StartupError
from oarlock.engine.preflight import is_there
from oarlock.server.hub.checkpoint_json import read_json

if TYPE_CHECKING:
    import numpy as np

_WEIGHTS = "model.safetensors"
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # of the file -> numpy's
_READ = {"in_features", "out_features", "bias", "activation_function"}  # of config.json
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "module_input_name": (None, "sentence_embedding"),
    "module_output_name": (None, "sentence_embedding"),
    "use_residual": (None, False),
}
# The last part of a name in torch.nn.modules -> its function in `_functions`.
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """One module, as its folder describes it."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str  # of ACTIVATIONS

    @staticmethod
    def load(folder: Path, in_features: int) -> DenseConfig:
        """`in_features`: the numbers that the module before it makes. Raises `StartupError`."""
        file = folder / "config.json"
        if not is_there(file):
            raise StartupError(f"{file} is missing, which modules.json names.", "Fetch the whole checkpoint.")
        config = read_json(file)
        taken, made = config.get("in_features"), config.get("out_features")
        if type(taken) is not int or type(made) is not int or made < 1:
            raise StartupError(f"{file} has no in_features and out_features.", "Fetch that file again.")
        if taken != in_features:
            raise StartupError(
                f"{file} takes vectors of {taken} numbers, and those before it have {in_features}.",
                "Fetch the whole checkpoint again: its files do not belong together.",
            )
        name = str(config.get("activation_function", ""))
        activation = name.rpartition(".")[2]
        if not name.startswith("torch.nn.") or activation not in ACTIVATIONS:
            raise StartupError(
                f"{file} asks for the activation {name[:80]!r}, which is not known here.",
                f"Known are, of torch.nn: {', '.join(ACTIVATIONS)}.",
            )
        for key in config.keys() - _READ:
            if config[key] not in _HARMLESS.get(key, ()):
                raise StartupError(
                    f"{file} has {key} {str(config[key])[:80]!r}, which is not served here.",
                    "Serve a checkpoint without it.",
                )
        return DenseConfig(folder, taken, made, config.get("bias", True) is not False, activation)


class DenseLayers:
    """The weights of a checkpoint's modules, in their order."""

    def __init__(self, configs: Sequence[DenseConfig]) -> None:
        """Reads the weights. Raises `StartupError`."""
        functions = _functions()
        self._layers = [(*_read(config), functions[config.activation]) for config in configs]

    def __call__(self, vectors: np.ndarray) -> np.ndarray:
        """Transform vectors: float32 [n, in_features] -> float64 [n, out_features]."""
        import numpy as np

        return np.stack([self._one(vector) for vector in vectors.astype(np.float64)])

    def _one(self, vector: np.ndarray) -> np.ndarray:
        import numpy as np

        for weight, bias, activation in self._layers:
            # Not `@`: a library's order of sums may follow the number of its threads, which are those of the ranks.
            vector = np.einsum("oi,i->o", weight, vector)
            vector = activation(vector if bias is None else vector + bias)
        return vector


def _read(config: DenseConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """Read weight [out, in] and bias [out] as float64."""
    import numpy as np

    from oarlock.engine.preflight import read_header  # with what it imports, which no other checkpoint needs here

    file = config.folder / _WEIGHTS
    if not is_there(file):
        fix = "Weights in pickles (pytorch_model.bin) are not read: convert them to safetensors."
        raise StartupError(f"{file} is missing.", fix)
    entries, content = read_header(file), file.read_bytes()
    wanted = {"linear.weight": (config.out_features, config.in_features)}
    if config.bias:
        wanted["linear.bias"] = (config.out_features,)
    if entries.keys() != wanted.keys():
        raise StartupError(
            f"{file} holds {', '.join(sorted(entries)) or 'nothing'}, not {' and '.join(wanted)}.",
            "Fetch that folder of the checkpoint again.",
        )
    data, found = len(content) - max(entry.end for entry in entries.values()), []
    for name, shape in wanted.items():
        entry = entries[name]
        if entry.shape != shape or entry.dtype not in _DTYPES:
            raise StartupError(
                f"{name} in {file} is {entry.dtype} {list(entry.shape)}, not of a float type and {list(shape)}.",
                "Fetch that folder of the checkpoint again.",
            )
        values = np.frombuffer(content[data + entry.begin : data + entry.end], _DTYPES[entry.dtype])
        if entry.dtype == "BF16":  # the upper half of a float32
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if not np.isfinite(values).all():
            raise StartupError(f"{name} in {file} holds NaN or infinity.", "Fetch that folder of the checkpoint again.")
        found.append(values.astype(np.float64).reshape(shape))
    return found[0], found[1] if config.bias else None


def _functions() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Activation functions by name, each of float64 [n]."""
    import numpy as np

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(0.5 * x))

    def gelu(x: np.ndarray) -> np.ndarray:
        return x * 0.5 * (1 + np.array([math.erf(value / math.sqrt(2)) for value in x]))

    return {
        "Identity": lambda x: x,
        "Tanh": np.tanh,
        "ReLU": lambda x: np.maximum(x, 0.0),
        "GELU": gelu,
        "Sigmoid": sigmoid,
        "SiLU": lambda x: x * sigmoid(x),
    }
