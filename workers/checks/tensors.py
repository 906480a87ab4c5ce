"""Checks that a checkpoint has exactly the tensors of its model, each with its shape and a supported dtype."""

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec, fused_modules, is_ignorable, tensor_shapes
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import SERVED as GGUF_TYPES
from oarlock.workers.model_files.gguf_model import GGUFCheckpoint, type_not_served
from oarlock.workers.platform.dtypes import SAFETENSORS_DTYPES
from oarlock.workers.quantization.formats.checkpoint_formats import CheckpointFormats
from oarlock.workers.quantization.formats.weight_format import StoredTensor, WeightFormats, stored


def check_tensors(checkpoint: Checkpoint, spec: DecoderSpec, formats: WeightFormats) -> None:
    """Check that every tensor of the model is there in its shape, and no other. Ranks check again as they load."""
    left = dict(checkpoint.tensors)
    is_gguf = isinstance(checkpoint, GGUFCheckpoint)
    for name, wanted in _wanted(checkpoint, spec, formats).items():
        found = left.pop(name, None)
        if found is None:
            if not wanted.required:
                continue
            raise StartupError(
                f"{checkpoint.directory} holds no tensor {name!r}, which {spec.architecture} needs.",
                "Use a complete checkpoint whose config.json names the right architecture.",
            )
        if not wanted.accepts(found.entry.shape):
            raise StartupError(
                f"{found.path}: tensor {name!r} has shape {list(found.entry.shape)}, "
                f"but config.json implies {' or '.join(str(list(shape)) for shape in wanted.shapes)}.",
                "Use the config.json that belongs to these weights.",
            )
        if found.entry.dtype not in (GGUF_TYPES if is_gguf else wanted.dtypes):
            if is_gguf:
                raise type_not_served(name, found)
            raise StartupError(
                f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
                "Use the model's bfloat16, float16 or float32 checkpoint.",
            )
    extra = sorted(name for name in left if not is_ignorable(spec, name) and not formats.ignores(name))
    if extra:
        raise StartupError(
            f"{left[extra[0]].path} holds tensor {extra[0]!r}, which {spec.architecture} does not use"
            f"{f' ({len(extra)} such tensors)' if len(extra) > 1 else ''}.",
            "Use a checkpoint whose config.json names the right architecture; adapters must be merged first.",
        )


def _wanted(checkpoint: Checkpoint, spec: DecoderSpec, formats: WeightFormats) -> dict[str, StoredTensor]:
    """Return the model's tensors. If the checkpoint has fused tensors, they replace their parts."""
    shapes = tensor_shapes(spec)
    for fused, parts in fused_modules(spec):
        for kind in ("weight", "bias"):
            names = [f"{part}.{kind}" for part in parts]
            if _holds(checkpoint, f"{fused}.{kind}", formats) and names[0] in shapes:
                parts_of = [shapes.pop(name) for name in names]
                shapes[f"{fused}.{kind}"] = (sum(shape[0] for shape in parts_of), *parts_of[0][1:])
    wanted: dict[str, StoredTensor] = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        weight_format = (
            formats.stored_format(module) if isinstance(formats, CheckpointFormats) and len(shape) == 2 else None
        )
        if weight_format is None:
            wanted[name] = stored(tuple(SAFETENSORS_DTYPES), *shape)
        else:
            weight_format.check(module, *shape)
            wanted |= {f"{module}.{kind}": tensor for kind, tensor in weight_format.tensors(*shape).items()}
    return wanted


def _holds(checkpoint: Checkpoint, fused: str, formats: WeightFormats) -> bool:
    module, _, kind = fused.rpartition(".")
    stored_so = isinstance(formats, CheckpointFormats) and kind == "weight" and formats.has(module)
    return stored_so or fused in checkpoint.tensors
