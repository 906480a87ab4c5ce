"""A decoder model as plain values: the sublayers of every layer, the norms around them, and what begins and ends it.

What a sublayer is made of is known to its own file alone (`attention_spec.py`, `gated_mlp_spec.py`); here is shape and
order. Torch-free. Knows no Hugging Face key names (`models/hf_*.py` do).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from oarlock.workers.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.sharding import LARGEST_TP, SLICES
from oarlock.workers.layers.tensor_spec import Cut, Kept, NormSpec, Tap, TensorSpec
from oarlock.workers.quantization.formats.form import WeightForms
from oarlock.workers.quantization.registry import Quantization


class SublayerSpec(Protocol):
    """One kind of sublayer, as plain values."""

    @property
    def module(self) -> str:
        """Its name in a layer of a checkpoint."""

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that a checkpoint may store as one, by the name of that."""

    def tensors(self, hidden: int) -> list[TensorSpec]: ...

    @property
    def taps(self) -> list[Tap]: ...

    @property
    def title(self) -> str: ...

    @property
    def reads(self) -> str: ...

    @property
    def leaves(self) -> str: ...

    @property
    def gguf(self) -> Mapping[str, str]: ...

    @property
    def gguf_norms(self) -> tuple[str, str]: ...

    @property
    def most_ranks(self) -> int: ...

    def divides(self, size: int) -> bool: ...

    @property
    def sizes(self) -> str: ...

    @property
    def shared_inputs(self) -> int: ...

    @property
    def shared_inputs_name(self) -> str: ...

    @property
    def step_values(self) -> int: ...

    @property
    def pair_ops(self) -> int: ...

    def for_length(self, length: int) -> "SublayerSpec": ...


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """A sublayer in its layer: the residual gets `scale * post_norm(sublayer(norm(x)))`. Norms are named as in a
    checkpoint."""

    sublayer: SublayerSpec
    norm: str | None  # None: the sublayer reads the residual itself
    post_norm: str | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Branches of one layer, one after the other; or, `parallel`, all of them on what enters the layer."""

    branches: tuple[BranchSpec, ...]
    parallel: bool = False  # branches whose norms have the same name share that norm

    def tensors(self, hidden: int, norm: NormSpec) -> list[TensorSpec]:
        """Tensors by their names in the layer."""
        names = [name for branch in self.branches for name in (branch.norm, branch.post_norm) if name is not None]
        found = [tensor for name in dict.fromkeys(names) for tensor in norm.tensors(f"{name}.", hidden)]
        for branch in self.branches:
            module = branch.sublayer.module
            found += [replace(tensor, name=f"{module}.{tensor.name}") for tensor in branch.sublayer.tensors(hidden)]
        return found

    @property
    def attention(self) -> SelfAttentionSpec:
        return next(one.sublayer for one in self.branches if isinstance(one.sublayer, SelfAttentionSpec))

    @property
    def mlp(self) -> GatedMLPSpec:
        return next(one.sublayer for one in self.branches if isinstance(one.sublayer, GatedMLPSpec))


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    default_length: int  # tokens of context that are served unless more are asked for
    longest_length: int  # the largest context, in tokens, that its angles support
    tie_word_embeddings: bool = False
    dtype: str | None = None  # as the checkpoint declares it: bfloat16 | float16 | float32
    embedding_scale: float = 1.0  # rounded to the dtype it is applied in
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # final logits become cap * tanh(logits / cap)
    unserved: tuple[str, ...] = ()  # what names of tensors begin with that belong to no layer here, and stay unused

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sublayers(self) -> list[SublayerSpec]:
        """The different sublayers of all layers, in the order in which they first come."""
        return list(dict.fromkeys(branch.sublayer for layer in self.layers for branch in layer.branches))

    @property
    def tp_sizes(self) -> list[int]:
        """Every tensor-parallel size that divides this model."""
        sublayers = self.sublayers
        most = min(LARGEST_TP, *(one.most_ranks for one in sublayers))
        return [size for size in range(1, most + 1) if all(one.divides(size) for one in sublayers)]

    @property
    def slices(self) -> int:
        """Number of slices into which inputs are cut that ranks share: the largest power of two up to 8 that is a
        tensor-parallel size of this model, so that ranks of every smaller one hold whole slices."""
        sizes = self.tp_sizes
        return next(count for count in SLICES if count in sizes)

    @property
    def attention(self) -> SelfAttentionSpec:
        """The attention of all layers where KV memory is shared between them, with the window and the angles of the
        first one. Raises `StartupError` naming the size that is not the same everywhere."""
        of_all = [layer.attention for layer in self.layers]
        for field in ("num_heads", "num_kv_heads", "head_dim"):
            found = sorted({getattr(one, field) for one in of_all})
            if len(found) > 1:
                raise StartupError(
                    f"{self.architecture}: {field} differs between layers ({', '.join(map(str, found))}), and pages of "
                    "keys and values have one size for all layers.",
                    "Use a model whose layers are alike in it.",
                )
        return of_all[0]

    @property
    def longest_window(self) -> int | None:
        """The longest sliding window, in tokens; None when a layer has none."""
        windows = [window for layer in self.layers if (window := layer.attention.window) is not None]
        return max(windows) if len(windows) == len(self.layers) else None

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model; a tied head counts once."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    @property
    def has_experts(self) -> bool:
        return any(isinstance(sublayer, ExpertsSpec) for sublayer in self.sublayers)

    @property
    def expert_share(self) -> float:
        """Share of a layer's experts that one token has; 0: there are none."""
        mixtures = [sublayer for sublayer in self.sublayers if isinstance(sublayer, ExpertsSpec)]
        return max((one.router.top_k / one.experts for one in mixtures), default=0.0)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that one token is computed with: of experts only those that it gets."""
        return round(sum(math.prod(tensor.shape) * tensor.used for tensor in tensors_of(self)))

    def for_length(self, length: int) -> "DecoderSpec":
        """The model as it serves sequences of up to `length` tokens."""
        return self.with_sublayers(lambda sublayer: sublayer.for_length(length))

    def with_sublayers(self, change: Callable[[SublayerSpec], SublayerSpec]) -> "DecoderSpec":
        """The model with `change` made to each of its sublayers."""
        changed: dict[LayerSpec, LayerSpec] = {}
        for layer in dict.fromkeys(self.layers):
            branches = tuple(replace(branch, sublayer=change(branch.sublayer)) for branch in layer.branches)
            changed[layer] = replace(layer, branches=branches)
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))


def slices_of(spec: DecoderSpec, forms: WeightForms) -> int:
    """Number of slices of inputs that are cut among ranks: of the numbers of ranks that are served, the largest power
    of two up to 8."""
    slices = spec.slices
    if isinstance(forms, Quantization):
        while not all(forms.cuts(sublayer.shared_inputs, slices) for sublayer in spec.sublayers):
            slices //= 2
    return slices


def matrices_of(spec: DecoderSpec) -> list[str]:
    """Modules that have a matrix: those of products, and the embedding."""
    return [
        tensor.name.removesuffix(".weight")
        for tensor in tensors_of(spec)
        if tensor.is_matrix and tensor.kept is not Kept.FLOAT32
    ]


def tensors_of(spec: DecoderSpec, layers: range | None = None) -> Iterator[TensorSpec]:
    """Every tensor of an ordinary (not fused) checkpoint of this model, or of the stage with `layers`, by its whole
    name."""
    layers = layers if layers is not None else range(spec.num_layers)
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    table = spec.vocab_size, spec.hidden_size
    if is_first or (is_last and spec.tie_word_embeddings):
        yield TensorSpec(f"{_EMBEDDING}weight", table, Cut.VOCABULARY)
    if is_last:
        yield from spec.norm.tensors(_NORM, spec.hidden_size)
    of_layer = {layer: layer.tensors(spec.hidden_size, spec.norm) for layer in dict.fromkeys(spec.layers)}
    for index in layers:
        for tensor in of_layer[spec.layers[index]]:
            yield replace(tensor, name=f"{_LAYERS}{index}.{tensor.name}")
    if is_last and not spec.tie_word_embeddings:
        yield TensorSpec(f"{_HEAD}weight", table, Cut.VOCABULARY)


def tensor_shapes(spec: DecoderSpec, layers: range | None = None) -> dict[str, tuple[int, ...]]:
    """Name and full shape of every tensor of `tensors_of`."""
    return {tensor.name: tensor.shape for tensor in tensors_of(spec, layers)}


def fused_modules(spec: DecoderSpec) -> Iterator[tuple[str, list[str]]]:
    """Modules that a checkpoint may store as one, by the name of that."""
    for index, layer in enumerate(spec.layers):
        for sublayer in (branch.sublayer for branch in layer.branches):
            before = f"{_LAYERS}{index}.{sublayer.module}."
            for fused, parts in sublayer.fused.items():
                yield before + fused, [before + part for part in parts]


def is_ignorable(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor of the checkpoint may stay unused: what it says is known already, or not served."""
    if name.endswith("rotary_emb.inv_freq"):  # a buffer that old checkpoints saved; computed from config.json here
        return True
    return name.startswith(spec.unserved) or (spec.tie_word_embeddings and name == f"{_HEAD}weight")


# Modules of a layer that a checkpoint may store as one, by the name of that.
FUSED_MODULES = {
    f"{kind.module}.{whole}": tuple(f"{kind.module}.{part}" for part in parts)
    for kind in (SelfAttentionSpec, GatedMLPSpec)
    for whole, parts in kind.fused.items()
}
_LAYERS, _EMBEDDING, _NORM, _HEAD = "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """The layers of `stage`, one at least where there are as many layers as stages.

    Stages hold neighbouring layers, as equally many as possible: earlier ones have one more where they cannot be dealt
    equally, since the last stage has the output head too. The first embeds; the last norms and samples, and holds a
    tied embedding a second time.
    """
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def is_in_stage(spec: DecoderSpec, name: str, layers: range) -> bool:
    """Whether the stage with `layers` holds the tensor `name`, in whichever form a checkpoint stores it. A name that no
    stage knows is in all of them."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    if name.startswith(_LAYERS):
        number = name.removeprefix(_LAYERS).partition(".")[0]
        return not number.isdigit() or int(number) >= spec.num_layers or int(number) in layers
    if name.startswith(_EMBEDDING):
        return is_first or (is_last and spec.tie_word_embeddings)
    return is_last or not name.startswith((_NORM, _HEAD))
