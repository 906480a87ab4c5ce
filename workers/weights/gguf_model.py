"""A model in GGUF, in one file or in several parts: its settings, and its tensors under Hugging Face's names.

Torch-free; reads no tensor. The source for names and layouts is llama.cpp's converter (conversion/*.py and
gguf-py/gguf/constants.py).
"""

import os
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import Checkpoint, Located
from oarlock.workers.weights.gguf_header import FLOATS, SERVED, GGUFHeader, Value, read_header

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 1000


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The settings are those of the first file."""

    paths: tuple[Path, ...]
    settings: dict[str, Value]
    tensors: dict[str, Located]

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.paths[0]

    @staticmethod
    def open(path: Path) -> "GGUFModel":
        """`path`: of the only file, or of any part. Raises `StartupError` naming the file at fault."""
        paths = parts_of(path)
        headers = [read_header(part) for part in paths]
        settings = headers[0].settings
        if len(headers) == 1 and settings.get("split.count", 1) not in (0, 1):
            raise StartupError(
                f"{path} is one of {settings['split.count']} parts of a model.",
                "Give all parts the names that they were published with: NAME-00001-of-0000N.gguf.",
            )
        tensors: dict[str, Located] = {}
        for number, header in enumerate(headers):
            if len(headers) > 1:
                _check_part(header, number, len(headers))
            for name, entry in header.tensors.items():
                if name in tensors:
                    raise StartupError(
                        f"tensor {name!r} is both in {tensors[name].path.name} and in {header.path.name}.",
                        "Download the parts again; they do not belong together.",
                    )
                tensors[name] = Located(header.path, entry)
        announced = settings.get("split.tensors.count", len(tensors))
        if len(headers) > 1 and announced != len(tensors):
            raise StartupError(
                f"{paths[0]} announces {announced} tensors in {len(paths)} parts, which hold {len(tensors)}.",
                "Download the parts again; they do not belong together.",
            )
        return GGUFModel(paths, settings, tensors)


def parts_of(path: Path) -> tuple[Path, ...]:
    """`path` itself, or all parts in order where its name says that it is one of several."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MOST_PARTS:
        raise StartupError(f"{path} has the number of no part.", "Give it the name that it was published with.")
    paths = tuple(path.with_name(f"{found['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(
            f"{path} is one of {count} parts, and {missing[0]}{more} is missing beside it.",
            "Download the missing parts.",
        )
    return paths


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    found = header.settings.get("split.no", number), header.settings.get("split.count", count)
    if found != (number, count):
        raise StartupError(
            f"{header.path} says that it is part {found[0]} of {found[1]}, and its name that it is {number} of {count}"
            " (counted from 0).",
            "Give the parts the names that they were published with.",
        )


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_OF = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER,
    "phi3": _LAYER | {"ffn_up": "mlp.gate_up_proj"},  # the gate's rows are above up's
    "gemma2": _LAYER | _GEMMA,
    "gemma3": _LAYER | _GEMMA,
}
ARCHITECTURES = tuple(_LAYER_OF)
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")

_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
_INTERLEAVED = re.compile(r".*\.self_attn\.(q|k|qkv)_proj\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Differences between stored numbers and those of a Hugging Face checkpoint."""

    # In so many heads at the beginning, row 2 * j + c is row j of half c: Hugging Face's rotation pairs the halves of a
    # head, and GGUF's for Llama pairs neighbours.
    interleaved_heads: int = 0
    head_dim: int = 0
    added: float = 0.0  # to every number: Gemma's norms scale by 1 + weight


PLAIN = Layout()


def hf_name(architecture: str, name: str) -> str | None:
    """Hugging Face's name of tensor `name`; None where the model's description takes its place, or it is unknown."""
    layer = _LAYER_NAME.fullmatch(name)
    if layer is not None:
        found = _LAYER_OF[architecture].get(layer[2])
        return None if found is None else f"model.layers.{int(layer[1])}.{found}.{layer[3]}"
    top = _TOP_NAME.fullmatch(name)
    return f"{_TOP[top[1]]}.{top[2]}" if top is not None and top[1] in _TOP else None


def layout(architecture: str, hf: str, num_heads: int, num_kv_heads: int, head_dim: int) -> Layout:
    """Layout of the tensor whose Hugging Face name is `hf`."""
    if architecture in ("gemma2", "gemma3") and hf.endswith("norm.weight"):
        return Layout(added=1.0)
    found = _INTERLEAVED.fullmatch(hf) if architecture == "llama" else None
    if found is None:
        return PLAIN
    heads = {"q": num_heads, "k": num_kv_heads, "qkv": num_heads + num_kv_heads}[found[1]]
    return Layout(heads, head_dim)


_FIX = "Use a file that llama.cpp's converter wrote."


class Settings:
    """The settings of one model. Those of its architecture are named without the architecture, with a dot in front."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.architecture = self.text("general.architecture", "")
        if self.architecture not in ARCHITECTURES:
            raise StartupError(
                f"{model.path}: architecture {self.architecture[:80]!r} is not supported.",
                f"Supported in GGUF: {', '.join(ARCHITECTURES)}.",
            )

    def has(self, key: str) -> bool:
        return self._key(key) in self.model.settings

    @overload
    def count(self, key: str, default: None = None) -> int: ...
    @overload
    def count(self, key: str, default: int) -> int: ...
    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, or one for each layer if all are the same."""
        value = self._value(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or value < 0:
            raise self._wrong(key, "one whole number")
        return value

    @overload
    def number(self, key: str, default: None = None) -> float: ...
    @overload
    def number(self, key: str, default: float) -> float: ...
    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float):
            raise self._wrong(key, "a number")
        assert isinstance(value, int | float)
        return shortest(float(value))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._value(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts")
        return value

    def numbers(self, key: str, length: int) -> array:
        """The list of `length` numbers at `key`. Raises `StartupError` for anything else."""
        value = self._value(key, None)
        if not isinstance(value, array) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers")
        return value

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _value(self, key: str, default: object) -> object:
        value = self.model.settings.get(self._key(key), default)
        if value is None:
            raise StartupError(f"{self.model.path} has no setting {self._key(key)!r}.", _FIX)
        return value

    def _wrong(self, key: str, what: str) -> StartupError:
        return StartupError(f"{self.model.path}: setting {self._key(key)!r} must be {what}.", _FIX)


def shortest(value: float) -> float:
    """The number with the fewest digits that is `value` in float32: what it was before it was stored so."""
    try:
        stored = struct.pack("<f", value)
    except OverflowError:  # it was stored as a double
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value


class GGUFCheckpoint(Checkpoint):
    """`tensors` also has those that no model has a place for, under the names of the file."""

    def __init__(self, directory: Path, tensors: dict[str, Located], layouts: dict[str, Layout]) -> None:
        super().__init__(directory, tensors)
        self._layouts = layouts

    @staticmethod
    def of(directory: Path, model: GGUFModel) -> "GGUFCheckpoint":
        """`directory` is where the model's description lies."""
        settings = Settings(model)
        heads = settings.count(".attention.head_count")
        kv_heads = settings.count(".attention.head_count_kv", heads)
        head_dim = settings.count(".attention.key_length", settings.count(".embedding_length") // heads)
        tensors: dict[str, Located] = {}
        layouts: dict[str, Layout] = {}
        for name, found in model.tensors.items():
            if name in ROPE_FACTORS or name.endswith(".attn_rot_embd"):  # part of the description
                continue
            hf = hf_name(settings.architecture, name) or name
            tensors[hf] = found
            layouts[hf] = layout(settings.architecture, hf, heads, kv_heads, head_dim)
        return GGUFCheckpoint(directory, tensors, layouts)

    @property
    def has_blocks(self) -> bool:
        """Whether a matrix is stored in another form than floating point."""
        return any(found.entry.dtype not in FLOATS for found in self.tensors.values())

    def layout(self, name: str) -> Layout:
        return self._layouts.get(name, PLAIN)


def gguf_file(directory: Path) -> Path | None:
    """The first file of the GGUF model that the description in `directory` is of; None if there is none."""
    links = sorted(directory.glob("*.gguf"))
    if not links:
        return None
    # Only one step: the parts of a model are found by their names beside each other.
    return Path(os.readlink(links[0])) if links[0].is_symlink() else links[0]


def type_not_served(name: str, found: Located) -> StartupError:
    return StartupError(
        f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
        f"Use a file whose tensors are among {', '.join(SERVED)}: most models have one named Q4_K_M or Q8_0.",
    )


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check every header. Raises `StartupError` naming the file, and the tensor where one is at fault."""
    path = gguf_file(directory)
    if path is not None and not any(directory.glob("*.safetensors*")):
        return GGUFCheckpoint.of(directory, GGUFModel.open(path))
    return Checkpoint.open(directory)
