"""The pairs of llama.cpp's adapters, which are GGUF files. Torch-free; reads no tensor.

The source for names and layouts is llama.cpp's convert_lora_to_gguf.py: it treats B like the rows of the adapted
matrix, and A like its columns. It records a single alpha, and no other setting of PEFT.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from oarlock.base.errors import StartupError, shown
from oarlock.workers.gguf_config import layouts_of
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD, AdaptedModules, Part
from oarlock.workers.lora.adapter_pair import (
    OTHER_MODEL,
    AdapterMatrix,
    AdapterPair,
    StoredPair,
    add_pairs,
    check_shape,
    half_of,
)
from oarlock.workers.model_files.gguf_model import PLAIN, GGUFFamily, GGUFModel, GGUFSettings, GGUFTransform
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.models.registry import GGUF_FAMILIES

_HALF = re.compile(r"(?P<name>.+)\.weight\.lora_(?P<half>[ab])")
_ON_TOP = {"token_embd": EMBEDDING, "output": HEAD}
_CONVERT = "Convert the adapter with llama.cpp's convert_lora_to_gguf.py, or use PEFT's files."


def gguf_pairs(path: Path, spec: DecoderSpec) -> tuple[AdapterPair, ...]:
    """Return the pairs of the GGUF file `path` for the model `spec`, in the order of the model's tensors.

    Raise `StartupError` naming the file, and the setting or tensor at fault.
    """
    model = GGUFModel.open(path)
    family, alpha = _settings(model, spec)
    modules, names, layouts = AdaptedModules(spec), _names(spec), dict(layouts_of(spec, family))
    found: dict[str, AdapterPair] = {}
    for name, (a, b) in _halves(model).items():
        stored_name = f"{name}.weight.lora_a"
        chosen = _chosen(names.get(name, []), b.entry.shape, modules, family)
        if chosen is None:
            raise StartupError(
                f"{path}: tensor {shown(stored_name)} fits nowhere: {spec.architecture} has no such linear layer, or "
                f"lora_b of shape {list(b.entry.shape)} has another number of rows than it.",
                OTHER_MODEL,
            )
        module, parts = chosen
        if spec.names.is_transposed(module):
            raise StartupError(
                f"{path}: tensor {shown(stored_name)} is of a matrix that llama.cpp's converter transposes, so that it "
                "confuses the halves of its pair.",
                "Use PEFT's files of this adapter.",
            )
        if "*" in module:
            pairs = _pairs_of_experts(path, stored_name, a, b, module, modules, alpha)
        else:
            pair = StoredPair(half_of(path, stored_name, a), half_of(path, f"{name}.weight.lora_b", b))
            pairs = _pairs_of_layer(path, pair, parts, modules, layouts.get(module, PLAIN), alpha)
        add_pairs(path, found, pairs)
    return tuple(sorted(found.values(), key=lambda pair: modules.order[pair.module]))


def _settings(model: GGUFModel, spec: DecoderSpec) -> tuple[GGUFFamily, float]:
    """Return the family and alpha. Raise `StartupError` for a file that is no LoRA adapter of such a model."""
    settings = GGUFSettings(model)
    if len(model.paths) > 1:
        raise StartupError(f"{model.path} is a part of an adapter, which must be in one file.", _CONVERT)
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if (value := settings.text(key, "")) != wanted:
            raise StartupError(f"{model.path}: {key} is {shown(value)}, and must be {wanted!r}.", _CONVERT)
    if settings.has("adapter.alora.invocation_tokens"):
        raise StartupError(
            f"{model.path}: adapter.alora.invocation_tokens is not supported: the adapter is an activated LoRA, which "
            "begins in the middle of a prompt.",
            "Use a LoRA adapter.",
        )
    family = GGUF_FAMILIES.get(settings.architecture)
    if family is None:
        raise StartupError(f"{model.path}: architecture {shown(settings.architecture)} is not supported.", OTHER_MODEL)
    of_model = [one.name for one in GGUF_FAMILIES.values() if spec.architecture in one.architectures]
    if of_model and family.name not in of_model:
        raise StartupError(
            f"{model.path} adapts models of the architecture {family.name}, and {spec.architecture} is {of_model[0]}.",
            OTHER_MODEL,
        )
    alpha = settings.number("adapter.lora.alpha", 0.0)
    if not math.isfinite(alpha):
        raise StartupError(f"{model.path}: adapter.lora.alpha is {alpha}, which is no finite number.", _CONVERT)
    return family, alpha


def _names(spec: DecoderSpec) -> Mapping[str, list[str]]:
    """Return the modules that each name in a file may mean: a fused module may have the same name as a part of it.

    A star in a module is the index of any expert.
    """
    found = {name: [module] for name, module in _ON_TOP.items()}
    for index, layer in enumerate(spec.layers):
        for sublayer in (branch.sublayer for branch in layer.branches):
            for part, name in sublayer.gguf.items():
                found.setdefault(f"blk.{index}.{name}", []).append(f"model.layers.{index}.{sublayer.module}.{part}")
    return found


def _halves(model: GGUFModel) -> dict[str, tuple[LocatedTensor, LocatedTensor]]:
    """Return A and B of each name. Raise `StartupError` for any other tensor, and for half a pair."""
    found: dict[str, dict[str, LocatedTensor]] = {}
    for name, located in model.tensors.items():
        match = _HALF.fullmatch(name)
        if match is None:
            raise StartupError(
                f"{model.path}: tensor {shown(name)} is not a half of a pair (lora_a or lora_b of a matrix).",
                "Use a LoRA adapter without further weights, such as norms.",
            )
        found.setdefault(match["name"], {})[match["half"]] = located
    for name, halves in found.items():
        if len(halves) < 2:
            (half,) = halves
            raise StartupError(
                f"{model.path} holds tensor {shown(f'{name}.weight.lora_{half}')} without its other half.",
                "Use a complete adapter.",
            )
    return {name: (halves["a"], halves["b"]) for name, halves in found.items()}


def _chosen(
    candidates: list[str], shape_of_b: tuple[int, ...], modules: AdaptedModules, family: GGUFFamily
) -> tuple[str, list[Part]] | None:
    """Return the candidate that has as many rows as B, and the modules in it; None if there is none."""
    for module in candidates:
        if "*" in module:
            first = modules.parts(module.replace("*", "0"))
            if len(shape_of_b) == 3 and first and first[0].rows.stored == shape_of_b[1]:
                return module, first
        else:
            parts = modules.parts(module, in_blocks=family.stores_blocks)
            if len(shape_of_b) == 2 and parts and parts[0].rows.stored == shape_of_b[0]:
                return module, parts
    return None


def _pairs_of_layer(
    path: Path, pair: StoredPair, parts: list[Part], modules: AdaptedModules, layout: GGUFTransform, alpha: float
) -> Iterator[AdapterPair]:
    """Yield a pair for each of `parts`. `layout`: the order of the rows and columns of the adapted matrix."""
    a, b, rank = pair.a, pair.b, pair.b.shape[1]
    if parts[0].module == EMBEDDING:
        a = replace(a, transposed=True)
    _check_inputs(path, a, rank, parts[0].module, modules)
    a = replace(a, columns=replace(a.columns, tiles=layout.tiles_of_inputs))
    for part in parts:
        rows = replace(
            part.rows,
            interleaved_heads=layout.interleaved_heads,
            head_dim=layout.head_dim,
            tiles=layout.tiles,
        )
        yield AdapterPair(part.module, rank, _scale(alpha, rank), a, b.with_rows(rows), modules.expert(part.module))


def _pairs_of_experts(
    path: Path, name: str, a: LocatedTensor, b: LocatedTensor, module: str, modules: AdaptedModules, alpha: float
) -> Iterator[AdapterPair]:
    """Yield the pairs of all experts: A is [experts, rank, inputs], and B is [experts, outputs, rank]."""
    experts = modules.experts(module.replace("*", "0"))
    if len(a.entry.shape) != 3 or not a.entry.shape[0] == b.entry.shape[0] == experts:
        raise StartupError(
            f"{path}: tensor {shown(name)} has shape {list(a.entry.shape)}, and lora_b has {list(b.entry.shape)}, but "
            f"the model has {experts} experts.",
            OTHER_MODEL,
        )
    for expert in range(experts):
        one = module.replace("*", str(expert))
        half, other = half_of(path, name, a.part(expert)), half_of(path, f"{name[:-1]}b", b.part(expert))
        rank = other.shape[1]
        _check_inputs(path, half, rank, one, modules)
        yield AdapterPair(one, rank, _scale(alpha, rank), half, other, expert)


def _check_inputs(path: Path, a: AdapterMatrix, rank: int, module: str, modules: AdaptedModules) -> None:
    shape = modules.shape(module)
    assert shape is not None, "parts are linear layers"
    check_shape(path, a, (rank, shape[1]), "the model and lora_b")


def _scale(alpha: float, rank: int) -> float:
    """Return the factor of B (A x) as in llama.cpp: 1 without an alpha."""
    return alpha / rank if alpha else 1.0
