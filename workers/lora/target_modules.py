"""The modules of a model that adapters may update, and the choice among them by `--lora-target-modules`. Torch-free.

A *target* is the last part of a module's name, such as `q_proj`, or `experts` for every matrix of the routed experts.
A fused module, such as `qkv_proj`, means all of its parts. Only chosen modules have memory in the slots of adapters.
Modules that a rank multiplies together, such as q, k and v, share memory: if one is chosen, a slot has memory
for all of them.
"""

from collections.abc import Collection, Mapping, Sequence

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.decoder_spec import DecoderSpec, fused_modules, tensors_of
from oarlock.workers.layers.tensor_spec import RankDtype, Sharding, TensorSpec
from oarlock.workers.lora.adapted_modules import EMBEDDING, HEAD
from oarlock.workers.lora.adapter_config import rank_too_high
from oarlock.workers.lora.adapter_file import Adapter

EXPERTS = "experts"
# Routers and gates of shared experts choose in float32, outside the layers that have slots.
NOT_ADAPTED = "Train the adapter without it, or merge the adapter into the model with PEFT and serve that."
_WIDE = Sharding.WIDTH_OUTPUTS, Sharding.WIDTH_INPUTS
_LARGEST_SCALE = 3.4e38  # slots have scales in float32
Targets = Collection[str] | None  # None: all


def target_of(module: str) -> str:
    """Return the target that chooses `module`, by our name of it."""
    parts = module.split(".")
    return EXPERTS if parts[-3:-2] == [EXPERTS] else parts[-1]


def is_chosen(modules: Collection[str], targets: Targets) -> bool:
    """Return whether a layer of a rank, which consists of `modules`, has memory in slots."""
    return targets is None or any(target_of(module) in targets for module in modules)


def can_be_adapted(tensor: TensorSpec) -> bool:
    """Return whether adapters may update a tensor: the matrix of a linear layer, of the embedding or of the head."""
    if not tensor.is_matrix or tensor.rank_dtype in (RankDtype.FLOAT32, RankDtype.DEQUANTIZED):
        return False
    return tensor.sharding is not Sharding.VOCABULARY or tensor.name in (f"{EMBEDDING}.weight", f"{HEAD}.weight")


class SlotModules:
    """The modules of a model that have memory in slots if `targets` are chosen."""

    def __init__(self, spec: DecoderSpec, targets: Targets) -> None:
        self._targets = targets
        self._layers: Mapping[str, Sequence[str]] = _rank_layers(spec) if targets is not None else {}

    def has(self, module: str) -> bool:
        """Return whether `module`, which can be adapted, has memory."""
        return is_chosen(self._layers.get(module, (module,)), self._targets)


def _rank_layers(spec: DecoderSpec) -> dict[str, Sequence[str]]:
    """Return, for each module that a rank multiplies together with others, all modules of that layer."""
    fused = {part: whole for whole, parts in fused_modules(spec) for part in parts}
    layers: dict[str, list[str]] = {}
    for tensor in tensors_of(spec):  # a layer may lack some parts of a fused module, such as k and v
        if tensor.expert is None and tensor.is_matrix:
            module = tensor.name.removesuffix(".weight")
            is_shared_expert = tensor.sharding in _WIDE
            whole = module.rpartition(".")[0] if is_shared_expert else fused.get(module, module)
            layers.setdefault(whole, []).append(module)
    return {module: modules for modules in layers.values() for module in modules}


def targets_of(spec: DecoderSpec) -> list[str]:
    """Return all targets of a model, in the order of its modules."""
    tensors = (tensor for tensor in tensors_of(spec) if not tensor.expert)  # experts are alike
    modules = [tensor.name.removesuffix(".weight") for tensor in tensors if can_be_adapted(tensor)]
    head = [HEAD] if spec.tie_word_embeddings else []  # it may be adapted though its matrix is the embedding's
    return list(dict.fromkeys(target_of(module) for module in (*modules, *head)))


def resolved_targets(given: Sequence[str], spec: DecoderSpec) -> tuple[str, ...]:
    """Return the targets of `--lora-target-modules`, with the parts of fused modules in place of these, in the order of
    the model's modules. Raises `StartupError` for a name that chooses nothing."""
    known, fused = targets_of(spec), _parts_of_fused(spec)
    wanted: set[str] = set()
    for name in given:
        found = {name} if name in known else fused.get(name, set()).intersection(known)
        if not found:
            raise StartupError(
                f"--lora-target-modules {shown(name)}: {spec.architecture} has no such module that adapters update.",
                f"Choose among {', '.join(known)}.",
            )
        wanted |= found
    if not wanted:
        raise StartupError("--lora-target-modules is empty.", "Leave it out: adapters may then update every module.")
    return tuple(name for name in known if name in wanted)


def _parts_of_fused(spec: DecoderSpec) -> dict[str, set[str]]:
    """Return the targets that the last part of a fused module's name means."""
    found: dict[str, set[str]] = {}
    for whole, parts in fused_modules(spec):
        found.setdefault(whole.rpartition(".")[2], set()).update(map(target_of, parts))
    return found


def check_adapter(adapter: Adapter, spec: DecoderSpec, max_rank: int, targets: Targets, device: str = "cpu") -> None:
    """Check that an adapter fits into slots of `max_rank` with memory for `targets` on `device`. Raises
    `StartupError`."""
    if adapter.max_rank > max_rank:
        raise rank_too_high(shown(adapter.name), adapter.max_rank, max_rank)
    if (huge := next((pair for pair in adapter.pairs if abs(pair.scale) > _LARGEST_SCALE), None)) is not None:
        raise StartupError(
            f"adapter {shown(adapter.name)} scales its update of {huge.module} by {huge.scale:g}, and float32 has no "
            "such value.",
            "Use an adapter whose lora_alpha and alpha_pattern are smaller.",
        )
    tensors = {tensor.name: tensor for tensor in tensors_of(spec)}
    for pair in adapter.pairs:
        tensor = tensors.get(f"{pair.module}.weight")
        if pair.module != HEAD and (tensor is None or not can_be_adapted(tensor)):
            raise StartupError(
                f"adapter {shown(adapter.name)} updates {pair.module}, which cannot be adapted here.",
                NOT_ADAPTED,
            )
    if device == "cuda" and any(target_of(pair.module) == EXPERTS for pair in adapter.pairs):
        raise StartupError(
            f"adapter {shown(adapter.name)} updates experts, and on CUDA devices no kernel does.",
            "Use --device cpu, or merge the adapter into the model.",
        )
    left_out = _left_out(adapter, targets)
    if targets is not None and left_out:
        raise StartupError(
            f"adapter {shown(adapter.name)} updates {', '.join(left_out)}, and --lora-target-modules leaves "
            f"{'it' if len(left_out) == 1 else 'them'} out.",
            f"Start with --lora-target-modules {' '.join([*targets, *left_out])}, or without it.",
        )


def _left_out(adapter: Adapter, targets: Targets) -> list[str]:
    """Return the targets that an adapter updates and that are not chosen."""
    updated = dict.fromkeys(target_of(pair.module) for pair in adapter.pairs)
    return [] if targets is None else [target for target in updated if target not in targets]
