"""The pairs of PEFT's tensors, from their names and shapes, for linear layers. Torch-free; reads no tensor."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD, AdaptedModules, ExpertStack, Part
from oarlock.workers.lora.adapter_config import AdapterConfig
from oarlock.workers.lora.adapter_pair import (
    OTHER_MODEL,
    AdapterMatrix,
    AdapterPair,
    StoredPair,
    add_pairs,
    check_shape,
    half_of,
)
from oarlock.workers.lora.peft_experts import StoredStack, expert_pairs
from oarlock.workers.model_files.located import LocatedTensor

_LONGEST_NAME = 1000  # characters
# The name of the adapter may follow the half's. An embedding's halves are parameters, not weights of modules.
_HALF = re.compile(
    r"(?P<module>.+?)\.lora_(?:(?P<half>[AB])(?:\.[^.]+)?\.weight|embedding_(?P<of_table>[AB])(?:\.[^.]+)?)"
)
_PREFIX = "base_model.model."
# Modules that wrap another while it is trained.
_WRAPPERS = re.compile(r"(?:^module\.(?=base_model\.))|(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_BASE = ".base_layer"
_OF_TRAINING = re.compile(r".+\.lora_velora_embed(?:\.[^.]+)?")  # VeLoRA reads it only while it trains


def peft_pairs(
    path: Path, stored: Mapping[str, LocatedTensor], config: AdapterConfig, spec: DecoderSpec
) -> tuple[AdapterPair, ...]:
    """Return the pairs of `stored`, the tensors of the file `path`, in the order of the model's tensors.

    Tensors of modules that nothing reads here, such as modules of an image encoder, are ignored, as they are in a
    checkpoint. Raise `StartupError` naming the tensor at fault.
    """
    if spec.class_tensors is not None and config.has_inputs_first:
        raise StartupError(
            f"{config.path}: fan_in_fan_out is not supported for {spec.architecture}, which transformers computes.",
            "Merge the adapter into the model with PEFT and serve that.",
        )
    modules = AdaptedModules(spec)
    pairs: dict[str, AdapterPair] = {}
    stacks: list[StoredStack] = []
    for name, found in _by_module(path, stored, modules).items():
        parts = modules.find(name[0])
        if parts is None:
            continue
        pair = found.complete(path)
        if isinstance(parts, ExpertStack):
            stacks.append(StoredStack(*name, pair, parts))
            continue
        if not parts:
            raise StartupError(
                f"{path}: tensor {shown(pair.a.name)} fits nowhere: {spec.architecture} has no such linear layer.",
                OTHER_MODEL,
            )
        add_pairs(path, pairs, _pairs_of_layer(path, *name, pair, parts, modules, config))
    add_pairs(path, pairs, expert_pairs(path, stacks, config))
    return tuple(sorted(pairs.values(), key=lambda pair: modules.order[pair.module]))


@dataclass(slots=True)
class _Halves:
    """The halves of a pair that were found so far."""

    is_table: bool  # they are named as the halves of an embedding
    a: AdapterMatrix | None = None
    b: AdapterMatrix | None = None

    def complete(self, path: Path) -> StoredPair:
        """Return both halves. Raise `StartupError` if a half is missing."""
        if self.a is not None and self.b is not None:
            return StoredPair(self.a, self.b, self.is_table)
        half = self.a or self.b
        assert half is not None, "a module is known by a half of its pair"
        raise StartupError(
            f"{path} holds tensor {shown(half.name)} without its lora_{'A' if self.a is None else 'B'}.",
            "Use a complete adapter.",
        )


def _by_module(
    path: Path, stored: Mapping[str, LocatedTensor], modules: AdaptedModules
) -> dict[tuple[str, int], _Halves]:
    """Return the halves of each (module of transformers, number of wrappers around its parameter).

    PEFT wraps the parameters of a module in each other. Raise `StartupError` for a tensor that is no half of a pair.
    """
    found: dict[tuple[str, int], _Halves] = {}
    for name, located in stored.items():
        plain = _WRAPPERS.sub("", name).removeprefix(_PREFIX) if len(name) <= _LONGEST_NAME else ""
        match = _HALF.fullmatch(plain)
        if match is None:
            if _OF_TRAINING.fullmatch(plain) or _is_base(plain, located, modules):
                continue
            raise StartupError(
                f"{path}: tensor {shown(name)} is not a half of a pair (lora_A, lora_B, lora_embedding_A or "
                "lora_embedding_B of a module).",
                "Use a LoRA adapter without further weights, such as biases or whole modules.",
            )
        module, depth = match["module"], 0
        while module.endswith(_BASE):
            module, depth = module.removesuffix(_BASE), depth + 1
        kind, is_table = match["half"] or match["of_table"], match["half"] is None
        pair = found.setdefault((module, depth), _Halves(is_table))
        if pair.is_table is not is_table or (pair.a if kind == "A" else pair.b) is not None:
            raise StartupError(
                f"{path}: tensor {shown(name)} is stored twice, under different names.",
                "Use a file that holds one adapter, and each tensor once.",
            )
        half = half_of(path, name, located)
        if kind == "A":
            pair.a = half
        else:
            pair.b = half
    return found


def _is_base(name: str, located: LocatedTensor, modules: AdaptedModules) -> bool:
    """Return whether a tensor is the model's own embedding or head, which PEFT saves with their adapters."""
    module, _, kind = name.rpartition(f"{_BASE}.")
    parts = modules.find(module) if module and kind in ("weight", "bias") else None
    if not isinstance(parts, list) or len(parts) != 1 or parts[0].module not in (EMBEDDING, HEAD):
        return False
    outputs, inputs = modules.shape(parts[0].module) or (0, 0)
    if kind == "bias":
        return f"{parts[0].module}.bias" in modules.order and located.entry.shape == (outputs,)
    return located.entry.shape == ((outputs, inputs) if parts[0].module == HEAD else (inputs, outputs))


def _pairs_of_layer(
    path: Path,
    name: str,
    depth: int,
    pair: StoredPair,
    parts: list[Part],
    modules: AdaptedModules,
    config: AdapterConfig,
) -> Iterator[AdapterPair]:
    """Yield a pair for each module that the module `name` of transformers holds. All have the same A."""
    is_table = parts[0].module == EMBEDDING
    if pair.is_table is not is_table or depth:
        raise StartupError(
            f"{path}: tensor {shown(pair.a.name)} has a name that {parts[0].module} cannot have.",
            "Embeddings have lora_embedding_A and lora_embedding_B; linear layers have lora_A and lora_B.",
        )
    key = config.key_of(name)
    if key is None and config.ties_head and parts[0].module == HEAD:
        key = name
    if key is None:
        raise config.not_targeted(path, pair.a.name)
    rank, scale, shape = config.rank_of(key), config.scale_of(key), modules.shape(parts[0].module)
    assert shape is not None, "parts are linear layers"
    implied = f"the model and {config.path.name}"
    check_shape(path, pair.a, (rank, shape[1]), implied)
    check_shape(path, pair.b, (parts[0].rows.stored, rank), implied)
    for part in parts:
        yield AdapterPair(part.module, rank, scale, pair.a, pair.b.with_rows(part.rows), modules.expert(part.module))
