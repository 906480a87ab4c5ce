"""A GGUF model in one file or several parts: its settings, and its tensors under Hugging Face's names.

Torch-free; reads no tensor. The source for names and layouts is llama.cpp's converter (conversion/*.py and
gguf-py/gguf/constants.py).
"""

import os
import re
import struct
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import FLOATS, SERVED, GGUFHeader, Value, read_header
from oarlock.workers.model_files.located import LocatedTensor

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_PARTS = 1000


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """Files, settings and tensors of a model. The settings come from the first file."""

    paths: tuple[Path, ...]
    settings: dict[str, Value]
    tensors: dict[str, LocatedTensor]

    @property
    def path(self) -> Path:
        """The first file, for messages."""
        return self.paths[0]

    @staticmethod
    def open(path: Path) -> "GGUFModel":
        """Open the model whose only file, or any part, is `path`. Raise `StartupError` naming the file at fault."""
        paths = parts_of(path)
        headers = [read_header(part) for part in paths]
        settings = headers[0].settings
        if len(headers) == 1 and settings.get("split.count", 1) not in (0, 1):
            raise StartupError(
                f"{path} is one of {settings['split.count']} parts of a model.",
                "Give all parts the names that they were published with: NAME-00001-of-0000N.gguf.",
            )
        tensors: dict[str, LocatedTensor] = {}
        for number, header in enumerate(headers):
            if len(headers) > 1:
                _check_part(header, number, len(headers))
            for name, entry in header.tensors.items():
                if name in tensors:
                    raise StartupError(
                        f"tensor {name!r} is both in {tensors[name].path.name} and in {header.path.name}.",
                        "Download the parts again; they do not belong together.",
                    )
                tensors[name] = LocatedTensor(header.path, entry)
        announced = settings.get("split.tensors.count", len(tensors))
        if len(headers) > 1 and announced != len(tensors):
            raise StartupError(
                f"{paths[0]} announces {announced} tensors in {len(paths)} parts, which hold {len(tensors)}.",
                "Download the parts again; they do not belong together.",
            )
        return GGUFModel(paths, settings, tensors)


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return `path` itself, or all parts in order if its name has a part number."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return (path,)
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= _MOST_PARTS:
        raise StartupError(
            f"{path} has no valid part number in its name.", "Give it the name that it was published with."
        )
    paths = tuple(path.with_name(f"{found['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1))
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(
            f"{path} is one of {count} parts, and {missing[0]}{more} is missing in the same directory.",
            "Download the missing parts.",
        )
    return paths


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    found = header.settings.get("split.no", number), header.settings.get("split.count", count)
    if found != (number, count):
        raise StartupError(
            f"{header.path} declares part {found[0]} of {found[1]}, but its name means part {number} of {count}"
            " (counted from 0).",
            "Give the parts the names that they were published with.",
        )


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True, slots=True)
class GGUFTransform:
    """Differences between stored values and a Hugging Face checkpoint's values."""

    # In this many leading heads, row 2 * j + c is row j of half c: Hugging Face's rotation pairs the halves of a head,
    # and GGUF's for Llama pairs neighbours.
    interleaved_heads: int = 0
    head_dim: int = 0
    added: float = 0.0  # added to every stored value: Gemma's norms scale by 1 + weight
    is_decay: bool = False  # every stored value is -exp(value)
    tiles: "Tiles | None" = None  # order of the rows
    tiles_of_inputs: "Tiles | None" = None  # order of the inputs of a matrix


@dataclass(frozen=True, slots=True)
class Tiles:
    """Blocks of `width` rows from row `first` on, which a file stores in another order.

    Hugging Face has `inner` blocks for each of `outer` ones, one after another: the value heads of each key head. The
    file has the first block of each, then the second of each, and so on.
    """

    first: int
    outer: int
    inner: int
    width: int

    def stored(self, row: int) -> tuple[int, int]:
        """Return the stored row of Hugging Face's `row`, and the number of rows from there on that follow each other in
        both orders."""
        if row < self.first:
            return row, self.first - row
        block, inside = divmod(row - self.first, self.width)
        outer, inner = divmod(block, self.inner)
        return self.first + (inner * self.outer + outer) * self.width + inside, self.width - inside


PLAIN = GGUFTransform()


_SIGMOID = 2  # the number of sigmoid scores, `LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID`
_FIX = "Use a file that llama.cpp's converter wrote."


class GGUFSettings:
    """Settings of one model. Settings of its architecture have keys without its name, beginning with a dot."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.architecture = self.text("general.architecture", "")

    def has(self, key: str) -> bool:
        return self._key(key) in self.model.settings

    @overload
    def count(self, key: str, default: None = None) -> int: ...
    @overload
    def count(self, key: str, default: int) -> int: ...
    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the common value of a list with one integer for each layer."""
        value = self._value(key, default)
        if isinstance(value, array) and len(set(value)) == 1:
            value = value[0]
        if type(value) is not int or value < 0:
            raise self._wrong(key, "an integer")
        return value

    def of_layer(self, key: str, default: int | None = None) -> int:
        """Return an integer, or the first that is not 0 of a list with one integer for each layer."""
        value = self._value(key, default)
        if isinstance(value, array):
            value = next((one for one in value if one != 0), 0)
        if type(value) is not int or value < 0:
            raise self._wrong(key, "an integer")
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
            raise self._wrong(key, "a list of strings")
        return value

    def numbers(self, key: str, length: int) -> array:
        """Return the list of `length` numbers at `key`. Raise `StartupError` for anything else."""
        value = self._value(key, None)
        if not isinstance(value, array) or len(value) != length:
            raise self._wrong(key, f"a list of {length} numbers")
        return value

    def layer_kinds(self, layers: int, period: int | None = None) -> list[str]:
        """Return the kind of attention of each layer, from the list of layers that have a window.

        One number instead means that every such layer has none. `period`: this number if the file has neither.
        """
        key = ".attention.sliding_window_pattern"
        value = self._value(key, period)
        if type(value) is int and value > 0:
            value = [(index + 1) % value for index in range(layers)]
        elif not isinstance(value, array) or len(value) != layers:
            raise self._wrong(key, f"a positive integer, or a list of {layers} flags")
        return ["sliding_attention" if slides else "full_attention" for slides in value]

    def check_whole_heads(self, head_dim: int) -> None:
        """Raise `StartupError` if only a part of each head is rotated, which no model of this architecture does."""
        rotated = self.count(".rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise StartupError(
                f"{self.model.path} rotates {rotated} of {head_dim} elements of a head, which "
                f"{self.architecture} models do not.",
                "Use the model's safetensors checkpoint.",
            )

    def check_sigmoid_router(self) -> None:
        """Raise `StartupError` if the scores of experts are not sigmoids, as they are in this architecture."""
        if self.count(".expert_gating_func", _SIGMOID) != _SIGMOID:
            raise StartupError(
                f"{self.model.path} has a router without sigmoid scores, which {self.architecture} models do not.",
                "Use the model's safetensors checkpoint.",
            )

    def _key(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _value(self, key: str, default: object) -> object:
        value = self.model.settings.get(self._key(key), default)
        if value is None:
            raise StartupError(f"{self.model.path} has no setting {self._key(key)!r}.", _FIX)
        return value

    def _wrong(self, key: str, what: str) -> StartupError:
        return StartupError(f"{self.model.path}: setting {self._key(key)!r} must be {what}.", _FIX)


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """An architecture of llama.cpp: the inverse of its converter (conversion/*.py), except for tensor names, which the
    sublayers know."""

    name: str
    architecture: str  # Hugging Face's name of the architecture
    own: Callable[
        [GGUFSettings, dict[str, Any]], dict[str, Any]
    ]  # maps the settings common to all architectures to additional settings
    model_type: str | None = None  # None: same as `name`
    # Defaults of settings that files may omit: `heads`, `kv_heads`, `positions`, `theta`, `width` of MLPs.
    missing: Mapping[str, int] = field(default_factory=dict)
    has_experts: bool = False  # True if models may have experts
    mlp_norm: str | None = None  # norm before the MLP or experts; None: the sublayers' name
    has_attention: bool = True  # False: its models have no attention
    has_latents: bool = False  # True: heads of keys and of values may differ in width, and `own` reads both
    layers_differ: bool = False  # True if layers may differ in their key-value heads and widths, which `own` resolves
    others_on_top: Mapping[str, str] = field(default_factory=dict)  # names in the file of modules outside the layers
    pairs_neighbours: bool = False  # True if it rotates neighbours, so that rows of q and k are permuted
    stores_blocks: bool = False  # True if rows of several modules alternate as in Hugging Face's checkpoints
    tiles_values: bool = False  # True if the value heads of a gated delta net are in the order of `Tiles`
    # Further classes whose files have this name: `own` returns them for some models, or it is their text part.
    others: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.architecture, *self.others)


def shortest(value: float) -> float:
    """Return the number with the fewest digits that equals `value` in float32, i.e. the number before it was stored."""
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
    """Checkpoint of a GGUF model. `tensors` includes tensors that no model uses, under their names in the file."""

    def __init__(self, directory: Path, tensors: dict[str, LocatedTensor], layouts: dict[str, GGUFTransform]) -> None:
        super().__init__(directory, tensors)
        self._layouts = layouts

    @property
    def has_blocks(self) -> bool:
        """True if a matrix is stored in blocks instead of floating point."""
        return any(found.entry.dtype not in FLOATS for found in self.tensors.values())

    def layout(self, name: str) -> GGUFTransform:
        return self._layouts.get(name, PLAIN)


def gguf_file(directory: Path) -> Path | None:
    """Return the first file of the GGUF model described in `directory`, or None if there is none."""
    links = sorted(directory.glob("*.gguf"))
    if not links:
        return None
    # Follow only one link: the parts of a model are found by their names next to each other.
    return Path(os.readlink(links[0])) if links[0].is_symlink() else links[0]


def type_not_served(name: str, found: LocatedTensor) -> StartupError:
    return StartupError(
        f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
        f"Use a file whose tensors are among {', '.join(SERVED)}: most models have one named Q4_K_M or Q8_0.",
    )
