"""Specification of a decoder model: the sublayers of every layer, the norms around them, the embedding and the head.

It holds shapes and order; each kind of sublayer is defined in its own file (`attention_spec.py`, `gated_mlp_spec.py`,
`mlp_spec.py`, `mamba2_spec.py`, `experts_spec.py`). Torch-free. Knows no Hugging Face key names (`models/hf_*.py` do).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.experts_spec import ExpertsSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.layer_input_spec import LayerInputTable
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.memory_spec import MemoryGroup, MemorySpec, PagesSpec, SlotsSpec, memory_groups
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.sharding import LARGEST_TP, SLICES
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.layers.tensor_spec import NOT_QUANTIZED, NormSpec, RankDtype, Sharding, Tap, TensorSpec
from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames
from oarlock.workers.quantization.formats.weight_format import WeightFormats
from oarlock.workers.quantization.registry import Quantization


class SublayerSpec(Protocol):
    """Interface of the specification of one kind of sublayer."""

    @property
    def module(self) -> str:
        """The module's name in a layer of a checkpoint."""

    @property
    def fused(self) -> Mapping[str, tuple[str, ...]]:
        """Fused tensor name -> the tensors that it contains, e.g. `qkv_proj` -> (`q_proj`, `k_proj`, `v_proj`)."""

    def tensors(self, hidden: int) -> list[TensorSpec]: ...

    @property
    def memory(self) -> MemorySpec | None:
        """The memory that the sublayer needs for each sequence; None: none."""

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

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks."""

    @property
    def pair_ops(self) -> int: ...

    def for_length(self, length: int) -> "SublayerSpec": ...


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """A sublayer in its layer, which adds `scale * post_norm(sublayer(norm(x)))` to the residual. Norms have the names
    of the checkpoint."""

    sublayer: SublayerSpec
    norm: str | None  # None: the sublayer reads the residual without a norm
    post_norm: str | None = None
    scale: float = 1.0
    input_scale: float = 1.0  # factor of the norm's result, which the sublayer reads
    is_held: bool = False  # the result is added after the next layer's branches instead; then without `scale`


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The branches of one layer, in stages: the branches of a stage all read the residual that enters it.

    Branches of a stage whose norms have the same name share that norm.
    """

    branches: tuple[BranchSpec, ...]
    lengths: tuple[int, ...] = ()  # number of branches in each stage; empty: one in each
    scalar: str | None = None  # name of a stored factor of the layer's result; None: it is not scaled
    # Norm of the sum of each stage's results, which is then added to the residual; None: they are added one by one.
    sum_norms: tuple[str | None, ...] = ()
    adds_held: bool = False  # the result that the layer before holds is added after the branches

    @property
    def holds(self) -> bool:
        """Whether a branch's result is held for the next layer."""
        return any(branch.is_held for branch in self.branches)

    @property
    def stages(self) -> tuple[tuple[BranchSpec, ...], ...]:
        """The branches of each stage, in the order of the stages."""
        return tuple(in_stages(self.branches, self.lengths))

    def tensors(self, hidden: int, norm: NormSpec) -> list[TensorSpec]:
        """Return the tensors of the layer, with names relative to the layer."""
        norms = [
            pair
            for branch in self.branches
            for pair in ((branch.norm, branch.input_scale), (branch.post_norm, 1.0))
            if pair[0] is not None
        ]
        norms += [(name, 1.0) for name in self.sum_norms if name is not None]
        # Branches that scale a norm differently hold it twice.
        found = [
            tensor if scale == 1.0 else replace(tensor, rank_dtype=RankDtype.FLOAT32)
            for name, scale in dict.fromkeys(norms)
            for tensor in norm.tensors(f"{name}.", hidden)
        ]
        for branch in self.branches:
            module = branch.sublayer.module
            found += [replace(tensor, name=f"{module}.{tensor.name}") for tensor in branch.sublayer.tensors(hidden)]
        if self.scalar is not None:
            found.append(TensorSpec(self.scalar, (1,), rank_dtype=RankDtype.FLOAT32))
        return found

    @property
    def memories(self) -> list[MemorySpec]:
        """The memory of its sublayers: at most one has pages, and at most one has slots."""
        return [memory for branch in self.branches if (memory := branch.sublayer.memory) is not None]

    @property
    def attention(self) -> SelfAttentionSpec | LatentAttentionSpec | None:
        """Its attention; None if it has none."""
        kinds = SelfAttentionSpec | LatentAttentionSpec
        found = (one.sublayer for one in self.branches if isinstance(one.sublayer, kinds))
        return next(found, None)

    @property
    def mlp(self) -> GatedMLPSpec | MLPSpec:
        return next(one.sublayer for one in self.branches if isinstance(one.sublayer, GatedMLPSpec | MLPSpec))


def in_stages(branches: Sequence[Any], lengths: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return `branches` in stages of `lengths`, as in `LayerSpec`."""
    lengths = lengths or (1,) * len(branches)
    assert sum(lengths) == len(branches), "each branch is in a stage"
    ends = list(accumulate(lengths))
    return [tuple(branches[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A learned table with one row for each position, which is added to the embedding."""

    rows: int
    first: int = 0  # row of position 0

    @property
    def positions(self) -> int:
        """Number of positions that have a row."""
        return self.rows - self.first


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    default_length: int  # context length in tokens, unless the user asks for more
    longest_length: int  # largest context, in tokens, that the rotary angles or the table of positions support
    tie_word_embeddings: bool = False
    dtype: str | None = None  # dtype of the checkpoint: bfloat16 | float16 | float32
    embedding_scale: float = 1.0  # rounded to the dtype in which it is applied
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # final logits become cap * tanh(logits / cap)
    positions: PositionTable | None = None
    layer_inputs: LayerInputTable | None = None  # table of inputs that each layer gets from the tokens
    head_bias: bool = False
    names: TensorNames = NO_NAMES  # differences between the names in checkpoints and the names here
    wrapper: str | None = None  # class of the multimodal model of which this is the text part; None: no such model
    # Every tensor of a class that transformers' code computes; None: the layers describe theirs.
    class_tensors: tuple[TensorSpec, ...] | None = None
    is_remote_code: bool = False  # that class is Python code of the checkpoint
    length_limit: str | None = None  # why `longest_length` is less than the model's positions; None: it is not less

    @property
    def served_by(self) -> str:
        """The code that computes the model: "oarlock", or for a class without a description here "transformers", or
        "checkpoint" for Python code of the checkpoint."""
        if self.class_tensors is None:
            return "oarlock"
        return "checkpoint" if self.is_remote_code else "transformers"

    @property
    def is_replicated(self) -> bool:
        """Whether every tensor-parallel rank holds the weights of all layers, since no plan divides them."""
        whole = (Sharding.NONE, Sharding.VOCABULARY)
        return self.class_tensors is not None and all(tensor.sharding in whole for tensor in self.class_tensors)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def sublayers(self) -> list[SublayerSpec]:
        """The different sublayers of all layers, in the order of their first use."""
        return list(dict.fromkeys(branch.sublayer for layer in self.layers for branch in layer.branches))

    @property
    def tp_sizes(self) -> list[int]:
        """Every tensor-parallel size that divides this model."""
        sublayers = self.sublayers
        most = min(LARGEST_TP, *(one.most_ranks for one in sublayers))
        return [size for size in range(1, most + 1) if all(one.divides(size) for one in sublayers)]

    @property
    def _stage_starts(self) -> list[int]:
        """Layers that a pipeline stage may begin with: no layer whose predecessor holds a result for it."""
        return [index for index, layer in enumerate(self.layers) if not layer.adds_held]

    @property
    def most_stages(self) -> int:
        """The largest number of pipeline stages that all have layers."""
        return len(self._stage_starts)

    def layers_of_stage(self, stage: int, num_stages: int) -> range:
        """Return the layers of `stage`, as the function of this name divides them. Layers that hand on a result stay
        together."""
        starts = [*self._stage_starts, self.num_layers]
        shared = layers_of_stage(len(starts) - 1, stage, num_stages)
        return range(starts[shared.start], starts[shared.stop])

    @property
    def slices(self) -> int:
        """Number of slices into which inputs that ranks share are cut.

        It is the largest power of two up to 8 that is a tensor-parallel size of this model, so that the ranks of every
        smaller power of two hold whole slices.
        """
        sizes = self.tp_sizes
        return next(count for count in SLICES if count in sizes)

    @property
    def groups(self) -> tuple[MemoryGroup, ...]:
        """The memory groups of all layers. A group's number is its index."""
        needs = [(index, memory) for index, layer in enumerate(self.layers) for memory in layer.memories]
        return memory_groups(needs)

    def group_of(self, layer: int, kind: type[PagesSpec] | type[SlotsSpec]) -> int | None:
        """Return the number of the group with the pages, or the slots, of `layer`; None if it has none."""
        for memory in self.layers[layer].memories:
            if isinstance(memory, kind):
                key = replace(memory, of_layer=None) if isinstance(memory, PagesSpec) else memory
                return next(number for number, group in enumerate(self.groups) if group.memory == key)
        return None

    @property
    def cached_values(self) -> int:
        """Number of values in the keys and values of one token, in all layers. Copies on several ranks count once."""
        pages = [(group.memory, len(group.layers)) for group in self.groups if isinstance(group.memory, PagesSpec)]
        return sum(count * one.kv_heads * one.stored_width for one, count in pages)

    @property
    def attentions(self) -> list[SelfAttentionSpec]:
        """The different kinds of attention with keys and values of heads, in the order of their first use."""
        return [one for one in self.sublayers if isinstance(one, SelfAttentionSpec)]

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model. A tied head counts once."""
        return sum(math.prod(shape) for shape in tensor_shapes(self).values())

    @property
    def has_experts(self) -> bool:
        return any(isinstance(sublayer, ExpertsSpec) for sublayer in self.sublayers)

    @property
    def expert_share(self) -> float:
        """Fraction of a layer's experts that one token uses; 0 if there are no experts."""
        mixtures = [sublayer for sublayer in self.sublayers if isinstance(sublayer, ExpertsSpec)]
        return max((one.router.top_k / one.choices for one in mixtures), default=0.0)

    @property
    def active_parameters(self) -> int:
        """Number of parameters used for one token: only the chosen experts count."""
        tensors = {tensor.name: tensor for tensor in tensors_of(self)}
        return round(sum(math.prod(tensor.shape) * tensor.used for tensor in tensors.values()))

    def for_length(self, length: int) -> "DecoderSpec":
        """Return the model as it serves sequences of up to `length` tokens."""
        return self.with_sublayers(lambda sublayer: sublayer.for_length(length))

    def with_whole_blocks(self) -> "DecoderSpec":
        """Return the model as it is served if blocks are moved with the pages of all layers: layers with a window keep
        all keys, if others have none. Then layers that differ only in their windows are one memory group."""
        if all(memory.span is not None for memory, _ in self.groups if isinstance(memory, PagesSpec)):
            return self
        return self.with_sublayers(
            lambda one: replace(one, keeps_all=True) if isinstance(one, SelfAttentionSpec) else one
        )

    def with_sublayers(self, change: Callable[[SublayerSpec], SublayerSpec]) -> "DecoderSpec":
        """Return the model with `change` applied to each of its sublayers."""
        changed: dict[LayerSpec, LayerSpec] = {}
        for layer in dict.fromkeys(self.layers):
            branches = tuple(replace(branch, sublayer=change(branch.sublayer)) for branch in layer.branches)
            changed[layer] = replace(layer, branches=branches)
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))


def slices_of(spec: DecoderSpec, formats: WeightFormats) -> int:
    """Return the number of slices of inputs that are divided among ranks: the largest power of two up to 8 that the
    model and its quantization support."""
    slices = spec.slices
    if isinstance(formats, Quantization):
        while not all(formats.can_split(sublayer.shared_inputs, slices) for sublayer in spec.sublayers):
            slices //= 2
    return slices


def matrices_of(spec: DecoderSpec) -> list[str]:
    """Return the modules that have a weight matrix: the linear layers and the embedding."""
    return [
        tensor.name.removesuffix(".weight")
        for tensor in tensors_of(spec)
        if tensor.is_matrix and tensor.rank_dtype is not RankDtype.FLOAT32 and tensor.rank_dtype not in NOT_QUANTIZED
    ]


def tensors_of(spec: DecoderSpec, layers: range | None = None) -> Iterator[TensorSpec]:
    """Yield every tensor of an ordinary (not fused) checkpoint of this model, by its full name.

    With `layers`, yield only the tensors of the pipeline stage that has these layers.
    """
    if spec.class_tensors is not None:  # it has no pipeline stages
        yield from spec.class_tensors
        return
    layers = layers if layers is not None else range(spec.num_layers)
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    table = spec.vocab_size, spec.hidden_size
    if is_first or (is_last and spec.tie_word_embeddings):
        yield TensorSpec(f"{_EMBEDDING}weight", table, Sharding.VOCABULARY)
    if is_first and spec.positions is not None:
        rows = spec.positions.rows, spec.hidden_size
        yield TensorSpec(f"{_POSITIONS}weight", rows, is_table=True)
    if is_last:
        yield from spec.norm.tensors(_NORM, spec.hidden_size)
    if is_first and spec.layer_inputs is not None:
        yield from spec.layer_inputs.tensors(spec.hidden_size, spec.num_layers)
    for index in layers:
        yield from _tensors_of_layer(spec.layers[index], index, spec.hidden_size, spec.norm)
    if is_last and not spec.tie_word_embeddings:
        yield TensorSpec(f"{_HEAD}weight", table, Sharding.VOCABULARY)
    if is_last and spec.head_bias:
        yield TensorSpec(f"{_HEAD}bias", table[:1], Sharding.VOCABULARY, rank_dtype=RankDtype.FLOAT32)


@lru_cache(maxsize=256)  # layers: a plan asks for the tensors of each a hundred times, and a mixture has a thousand
def _tensors_of_layer(layer: LayerSpec, index: int, hidden: int, norm: NormSpec) -> tuple[TensorSpec, ...]:
    """Return the tensors of the layer number `index` by their full names."""
    return tuple(replace(tensor, name=f"{_LAYERS}{index}.{tensor.name}") for tensor in layer.tensors(hidden, norm))


def tensor_shapes(spec: DecoderSpec, layers: range | None = None) -> dict[str, tuple[int, ...]]:
    """Return the name and full shape of every tensor of `tensors_of`."""
    return {tensor.name: tensor.shape for tensor in tensors_of(spec, layers)}


def fused_modules(spec: DecoderSpec) -> Iterator[tuple[str, list[str]]]:
    """Yield (name of a fused module, the modules that it contains) for modules that a checkpoint may fuse."""
    for index, layer in enumerate(spec.layers):
        for sublayer in (branch.sublayer for branch in layer.branches):
            before = f"{_LAYERS}{index}.{sublayer.module}."
            for fused, parts in sublayer.fused.items():
                yield before + fused, [before + part for part in parts]


def is_ignorable(spec: DecoderSpec, name: str) -> bool:
    """Return whether a checkpoint tensor may stay unused because its content is known already or not served."""
    if name.endswith("rotary_emb.inv_freq"):  # a buffer in old checkpoints; computed from config.json here
        return True
    if spec.names.rename(name) is None or (spec.tie_word_embeddings and name == f"{_HEAD}weight"):
        return True
    return _is_of_identity(spec, name)


def _is_of_identity(spec: DecoderSpec, name: str) -> bool:
    """Return whether a tensor is of an expert whose result is its input, for which transformers writes matrices that
    nothing reads."""
    before, _, inside = name.partition(".experts.")
    layer, _, module = before.removeprefix(_LAYERS).partition(".")
    expert = inside.partition(".")[0]
    if not (layer.isdecimal() and expert.isdecimal() and int(layer) < spec.num_layers):
        return False
    sublayers = [branch.sublayer for branch in spec.layers[int(layer)].branches]
    mixtures = [one for one in sublayers if isinstance(one, ExpertsSpec) and one.module == module]
    return any(one.experts <= int(expert) < one.choices for one in mixtures)


_FUSING = (
    SelfAttentionSpec, GatedMLPSpec, MLPSpec, GatedDeltaSpec, KimiDeltaSpec, Mamba2Spec, ShortConvolutionSpec,
)  # fmt: skip
# Fused module of a layer -> the modules that it contains.
FUSED_MODULES = {
    f"{kind.module}.{whole}": tuple(f"{kind.module}.{part}" for part in parts)
    for kind in _FUSING
    for whole, parts in kind.fused.items()
}
_LAYERS, _EMBEDDING, _NORM, _HEAD = "model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."
_POSITIONS = "model.embed_positions."
EMBEDDING_WEIGHT = f"{_EMBEDDING}weight"


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of `stage`; at least one if there are as many layers as stages.

    Stages hold consecutive layers, divided as equally as possible. Earlier stages have one more if the division leaves
    a remainder, since the last stage also has the output head. The first stage has the embedding. The last has the
    final norm and the sampler, and a second copy of a tied embedding.
    """
    each, more = divmod(num_layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def is_in_stage(spec: DecoderSpec, name: str, layers: range) -> bool:
    """Return whether the stage with `layers` holds the tensor `name`, fused or not. Unknown names are in all stages."""
    is_first, is_last = layers.start == 0, layers.stop == spec.num_layers
    if name.startswith(_LAYERS):
        number = name.removeprefix(_LAYERS).partition(".")[0]
        return not number.isdigit() or int(number) >= spec.num_layers or int(number) in layers
    if name.startswith(_EMBEDDING):
        return is_first or (is_last and spec.tie_word_embeddings)
    if name.startswith((_POSITIONS, *LayerInputTable.modules)):
        return is_first
    return is_last or not name.startswith((_NORM, _HEAD))
