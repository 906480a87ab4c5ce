"""A GGUF model as a Hugging Face checkpoint: the `config.json` for its settings, and its tensors' names.

The inverse of llama.cpp's converter (conversion/*.py); settings of a single architecture are in its family's file.
Torch-free.
"""

import math
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec, tensors_of
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.model_files.checkpoint import Checkpoint
from oarlock.workers.model_files.gguf_header import FLOATS
from oarlock.workers.model_files.gguf_model import (
    ROPE_FACTORS,
    GGUFCheckpoint,
    GGUFFamily,
    GGUFModel,
    GGUFSettings,
    GGUFTransform,
    Tiles,
    gguf_file,
    shortest,
)
from oarlock.workers.model_files.located import LocatedTensor
from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames
from oarlock.workers.models.hf_fields import others_like
from oarlock.workers.models.registry import GGUF_FAMILIES, describe

_MAX_ROPE_FACTORS = 4096  # the widest known heads have 512 elements
_TOP = {
    "token_embd": "model.embed_tokens", "position_embd": "model.embed_positions", "output_norm": "model.norm",
    "output": "lm_head",
}  # fmt: skip


def hf_config(model: GGUFModel) -> dict[str, Any]:
    """Return the settings of `config.json`. Raise `StartupError` for an unsupported architecture."""
    settings = GGUFSettings(model)
    family = _family(settings)
    missing = family.missing
    heads = settings.count(".attention.head_count", missing.get("heads"))
    hidden = settings.count(".embedding_length")
    if not heads and family.has_attention:
        raise StartupError(f"{model.path} has no attention heads.", "Use a dense decoder model.")
    head_dim = settings.count(".attention.key_length", hidden // max(1, heads))
    if not family.has_latents and settings.count(".attention.value_length", head_dim) != head_dim:
        raise StartupError(f"{model.path} has heads of keys and of values that differ in width.", "Use another model.")
    count = settings.of_layer if family.layers_differ else settings.count
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type or family.name,
        "vocab_size": _vocab_size(model),
        "hidden_size": hidden,
        "num_hidden_layers": settings.count(".block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": count(".attention.head_count_kv", missing.get("kv_heads", heads)),
        "head_dim": head_dim,
        "intermediate_size": count(".feed_forward_length", missing.get("width")),
        "max_position_embeddings": settings.count(".context_length", missing.get("positions", 0)),
        "rms_norm_eps": settings.number(".attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": settings.number(".rope.freq_base", float(missing.get("theta", 10_000))),
        "rope_scaling": _rope_scaling(settings, head_dim),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "torch_dtype": _dtype(model),
    }
    for key, setting in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if settings.has(f"tokenizer.ggml.{setting}_token_id"):
            config[f"{key}_token_id"] = settings.count(f"tokenizer.ggml.{setting}_token_id")
    experts = settings.count(".expert_count", 0)
    own = family.own(settings, config)
    if experts and not family.has_experts:
        raise StartupError(
            f"{model.path} is a mixture of {experts} experts, which {family.name} models are not.", "Use another model."
        )
    for limits in (".swiglu_clamp_exp", ".swiglu_clamp_shexp"):
        if any(settings.numbers(limits, config["num_hidden_layers"]) if settings.has(limits) else ()):
            raise StartupError(
                f"{model.path} clamps its experts' activations, which {family.name} models do not.",
                "Use another model.",
            )
    used = {"num_experts": experts, "num_experts_per_tok": settings.count(".expert_used_count")} if experts else {}
    return config | used | own


def open_checkpoint(directory: Path, names: TensorNames = NO_NAMES) -> Checkpoint:
    """Read and check every header. `names`: of the model's family. Raise `StartupError` naming the file, and the tensor
    if a tensor is at fault."""
    path = gguf_file(directory)
    if path is not None and not any(directory.glob("*.safetensors*")):
        return gguf_checkpoint(directory, GGUFModel.open(path))
    return Checkpoint.open(directory, names)


def gguf_checkpoint(directory: Path, model: GGUFModel) -> GGUFCheckpoint:
    """Return the tensors of `model` under Hugging Face's names. Tensors that no sublayer knows keep the names of the
    file.

    `directory` contains the model's description.
    """
    spec, family = describe(hf_config(model)), _family(GGUFSettings(model))
    names, layouts = dict(_names(spec, model, family)), dict(layouts_of(spec, family))
    bare = {tensor.name for tensor in tensors_of(spec)}  # names, with the kind if the tensor has one
    tensors: dict[str, LocatedTensor] = {}
    placed: dict[str, GGUFTransform] = {}
    for name, found in model.tensors.items():
        if name in ROPE_FACTORS or name.endswith(".attn_rot_embd"):  # part of the description
            continue
        found = _in_its_shape(name, found)
        if name in names:  # a tensor that the converter writes without a kind
            ours = names[name] if names[name] in bare else f"{names[name]}.weight"  # the norms of Falcon-H1
            tensors[ours] = found
            if ours in layouts:
                placed[ours] = layouts[ours]
            continue
        module, _, kind = name.rpartition(".")
        module = names.get(module, module)
        if "*" in module:
            count = found.entry.shape[0]
            tensors |= {f"{module.replace('*', str(expert))}.{kind}": found.part(expert) for expert in range(count)}
            continue
        if name.endswith(".ffn_gate_inp_shexp.weight"):  # a row, which the converter stores as a vector
            found = found.shaped(1, found.entry.shape[-1])
        if family.stores_blocks and (blocks := spec.names.blocks_of(module)) is not None:
            tensors |= blocks.split(f"{module}.{kind}", found)
            continue
        tensors[module if module in bare else f"{module}.{kind}"] = found
        if module in layouts and (kind == "weight" or not layouts[module].added):  # biases of norms are not shifted
            placed[f"{module}.{kind}"] = layouts[module]
    return GGUFCheckpoint(directory, tensors, placed)


def _in_its_shape(name: str, found: LocatedTensor) -> LocatedTensor:
    """Return a tensor in Hugging Face's shape. In the file, vectors of recurrent layers may be matrices, their
    convolutions have no dimension of 1, or two, and the matrices of a latent for each head are a stack."""
    kind, shape = name.rpartition(".ssm_")[2], found.entry.shape
    if name.endswith((".attn_k_b.weight", ".attn_v_b.weight")) and len(shape) == 3:
        return found.shaped(shape[0] * shape[1], shape[2])
    if kind in ("a", "d", "norm.weight"):
        return found.shaped(math.prod(shape))
    if re.fullmatch(r"conv1d(_[qkv])?\.weight", kind):
        return found.shaped(math.prod(shape[:-1]), 1, shape[-1])
    return found


def _family(settings: GGUFSettings) -> GGUFFamily:
    found = GGUF_FAMILIES.get(settings.architecture)
    if found is None:
        raise StartupError(
            f"{settings.model.path}: architecture {settings.architecture[:80]!r} is not supported.",
            others_like(settings.architecture, GGUF_FAMILIES),
        )
    return found


def _names(spec: DecoderSpec, model: GGUFModel, family: GGUFFamily) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, Hugging Face's name) of each module."""
    yield from {**_TOP, **family.others_on_top}.items()
    stored = {name.split(".")[2] for name in model.tensors if name.startswith("blk.") and name.count(".") > 2}
    for index, layer in enumerate(spec.layers):
        there, here = f"blk.{index}.", f"model.layers.{index}."
        if layer.scalar is not None:
            yield f"{there}layer_output_scale", here + layer.scalar
        for branch in layer.branches:
            sublayer = branch.sublayer
            before, after = sublayer.gguf_norms
            if family.mlp_norm is not None and before == GatedMLPSpec.gguf_norms[0]:
                before = family.mlp_norm
            for norm, name in zip((branch.norm, branch.post_norm), (before, after), strict=True):
                if norm is not None:
                    yield there + name, here + norm
            for part, name in sublayer.gguf.items():
                # A fused module may have the same name in the file as one of its parts. It is fused only if no other
                # part is stored.
                parts = sublayer.fused.get(part, ())
                others = {sublayer.gguf[one] for one in parts if one in sublayer.gguf} - {name}
                if not others & stored:
                    yield there + name, f"{here}{sublayer.module}.{part}"


def layouts_of(spec: DecoderSpec, family: GGUFFamily) -> Iterator[tuple[str, GGUFTransform]]:
    """Yield modules whose values are permuted or shifted in the file, with their layouts."""
    added = GGUFTransform(added=spec.norm.offset)
    # Rows of layers without rotation are permuted as well.
    is_permuted = family.pairs_neighbours and not any(
        attention.rope is not None and attention.rope.interleaved for attention in spec.attentions
    )
    if spec.norm.offset:
        yield "model.norm", added
    for index, layer in enumerate(spec.layers):
        here = f"model.layers.{index}."
        for branch in layer.branches:
            if spec.norm.offset:
                yield from ((here + norm, added) for norm in (branch.norm, branch.post_norm) if norm is not None)
            sublayer = branch.sublayer
            if isinstance(sublayer, GatedDeltaSpec):
                yield from _delta_layouts(f"{here}{sublayer.module}.", sublayer, family)
            if isinstance(sublayer, Mamba2Spec | KimiDeltaSpec):
                yield f"{here}{sublayer.module}.A_log", GGUFTransform(is_decay=True)
            if not isinstance(sublayer, SelfAttentionSpec):
                continue
            heads, kv_heads = sublayer.num_heads, sublayer.num_kv_heads
            inside = f"{here}{sublayer.module}."
            if sublayer.qk_norm is not None and sublayer.qk_norm.offset:
                yield from (
                    (f"{inside}{norm}", GGUFTransform(added=sublayer.qk_norm.offset)) for norm in ("q_norm", "k_norm")
                )
            if is_permuted:
                for part, count in (("q_proj", heads), ("k_proj", kv_heads), ("qkv_proj", heads + kv_heads)):
                    yield inside + part, GGUFTransform(count, sublayer.head_dim)


def _delta_layouts(inside: str, delta: GatedDeltaSpec, family: GGUFFamily) -> Iterator[tuple[str, GGUFTransform]]:
    """Yield the layouts of a gated delta net, whose modules' names begin with `inside`."""
    each = delta.num_value_heads // delta.num_key_heads
    if not family.tiles_values or each == 1:
        yield f"{inside}A_log", GGUFTransform(is_decay=True)
        return
    heads, width, before = (delta.num_key_heads, each), delta.value_width, 2 * delta.key_size
    of_heads = Tiles(0, *heads, 1)
    yield f"{inside}A_log", GGUFTransform(is_decay=True, tiles=of_heads)
    yield from ((f"{inside}{part}", GGUFTransform(tiles=of_heads)) for part in ("dt_bias", "in_proj_a", "in_proj_b"))
    yield from (
        (f"{inside}{part}", GGUFTransform(tiles=Tiles(before, *heads, width))) for part in ("in_proj_qkv", "conv1d")
    )
    yield f"{inside}in_proj_z", GGUFTransform(tiles=Tiles(0, *heads, width))
    yield f"{inside}out_proj", GGUFTransform(tiles_of_inputs=Tiles(0, *heads, width))


def _vocab_size(model: GGUFModel) -> int:
    found = model.tensors.get("token_embd.weight")
    if found is None:
        raise StartupError(
            f"{model.path} holds no tensor 'token_embd.weight'.", "Use a file that holds the whole model."
        )
    return found.entry.shape[0]


def _dtype(model: GGUFModel) -> str:
    """Return the compute dtype: the dtype of the matrices if all have the same, otherwise bfloat16."""
    types = {found.entry.dtype for found in model.tensors.values() if len(found.entry.shape) == 2}
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return names[types.pop()] if len(types) == 1 and types <= set(FLOATS) else "bfloat16"


def _rope_scaling(settings: GGUFSettings, head_dim: int) -> dict[str, Any] | None:
    kind = settings.text(".rope.scaling.type", "none")
    plain, short, long = (_rope_factors(settings.model, name) for name in ROPE_FACTORS)
    if short or long:  # Phi-3
        table: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        if settings.has(".rope.scaling.attn_factor"):
            table["attention_factor"] = settings.number(".rope.scaling.attn_factor")
        return table
    if plain:  # Llama 3.x: factors that its rope type `llama3` gives for each frequency
        length = settings.count(".context_length")
        return {
            "rope_type": "longrope",
            "short_factor": plain,
            "long_factor": plain,
            "original_max_position_embeddings": length,
        }
    if kind in ("none", "longrope"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": settings.number(".rope.scaling.factor")}
    if kind != "yarn":
        raise StartupError(
            f"{settings.model.path}: rope scaling {kind[:80]!r} is not supported.", "Supported: none, linear, yarn."
        )
    table = {
        "rope_type": "yarn",
        "factor": settings.number(".rope.scaling.factor"),
        "original_max_position_embeddings": settings.count(".rope.scaling.original_context_length"),
    }
    own = (("attention_factor", "yarn_attn_factor"), ("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow"))
    for key, setting in own:
        if settings.has(f".rope.scaling.{setting}"):
            table[key] = settings.number(f".rope.scaling.{setting}")
    return table


def _rope_factors(model: GGUFModel, name: str) -> list[float]:
    """Return a small tensor of the file that belongs to the model's description, or an empty list if it is missing."""
    found = model.tensors.get(name)
    if found is None:
        return []
    if found.entry.dtype != "F32" or len(found.entry.shape) != 1:
        raise StartupError(f"{found.path}: tensor {name!r} is not a row of F32.", "Use another file of the model.")
    if found.entry.shape[0] > _MAX_ROPE_FACTORS:
        raise StartupError(
            f"{found.path}: tensor {name!r} has {found.entry.shape[0]} numbers, and heads have at most "
            f"{_MAX_ROPE_FACTORS} pairs of elements.",
            "Use another file of the model.",
        )
    factors = array("f")
    with found.path.open("rb") as file:
        file.seek(found.entry.begin)
        factors.frombytes(file.read(found.entry.end - found.entry.begin))
    return [shortest(factor) for factor in factors]
