"""Interface of a model on one rank, as ranks load, test, time and run it. `Decoder` implements it for every described
family.

An implementation may compute all of its layers or nothing: then `one_of_each_kind` returns all of them, and
`with_layers` returns the model itself. In shapes, T is the number of tokens of a step and L the number of its rows of
logits. Does not know steps, requests or sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, KVSpec, LayerMemory
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.rows_by_slot import AdaptedRows
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.experts import Experts
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.memory_spec import MemoryGroup
from oarlock.workers.layers.placement import Placement
from oarlock.workers.models.class_reference import ClassReference
from oarlock.workers.weights.source import WeightSource


class RankModel(Protocol):
    """One rank's shard of a model, or of a pipeline stage of it. It has no weights before `load`, and keeps no state of
    sequences between calls."""

    @property
    def spec(self) -> DecoderSpec:
        """Specification of the whole model, over all ranks and stages."""

    @property
    def placement(self) -> Placement:
        """The rank among the ranks of its stage, the dtype of hidden states, and the device."""

    @property
    def stage(self) -> range:
        """The layers of this stage, by their numbers in the whole model; all layers if there is one stage."""

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding, so that it gets no hidden states."""

    @property
    def is_last(self) -> bool:
        """Whether this stage has the final norm and the output head."""

    @property
    def groups(self) -> tuple[MemoryGroup, ...]:
        """Memory groups of the whole model. A group's number is its index."""

    @property
    def vocab_start(self) -> int:
        """The first id of this rank's logits."""

    @property
    def vocab_local(self) -> int:
        """Number of ids in this rank's logits, the same on every rank; the last ids may be padding."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on this rank, also known before `load`."""

    @property
    def reference(self) -> ClassReference | None:
        """What the self-test compares results with before other code than ours serves; None: our code computes the
        model, or its weights mean nothing."""

    @property
    def why_not_prepared(self) -> str | None:
        """Reason why the most recent step did not run as one kernel call, for the log; None: it did."""

    @property
    def why_not_captured(self) -> str | None:
        """Reason why CUDA graphs cannot contain a step of this model, for the log; None: they can. Steps of such a
        model are launched operation by operation on every device."""

    def kv_specs(self, block_size: int, cache_dtype: str = "auto") -> list[KVSpec]:
        """Return the shapes of this rank's pages, of each group of pages that a layer of the stage reads, in the order
        of the groups' numbers.

        `block_size`: tokens. `cache_dtype`: a key of `oarlock.workers.attention.kv_format.FORMATS`.
        """

    def load(self, weights: WeightSource, on_progress: Callable[[float], None]) -> None:
        """Read this rank's slice of every weight. `on_progress` is called with the share of bytes read, ending with
        1.0."""

    def stand_in(self, token_ids: Tensor) -> Tensor | None:
        """Return rows [T, hidden] that replace the previous stage's hidden states, for trials of a single stage.

        Each row depends only on its entry of `token_ids`, int64 [T]. Returns None on the first stage.
        """

    def __call__(
        self,
        batch: ForwardBatch,
        memory: list[LayerMemory],
        backends: Mapping[int, AttentionBackend],
        plans: Mapping[int, Any],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run one step; return [T, hidden] after the final norm, or the hidden states for the next stage, in
        `placement.dtype`.

        `memory`: of each layer of the stage, or of the layers given to `with_layers`. `backends`: attention backend of
        each group of pages, by its number; `plans`: the results of their `prepare(batch)`. `hidden`: [T, hidden] from
        the previous stage, may be overwritten; None on the first stage.
        """

    def compute_logits(self, hidden: Tensor, adapters: AdaptedRows | None = None) -> Tensor:
        """Return the logits of rows [L, hidden] of the last stage's result, for this rank's vocabulary shard: float32
        [L, vocab_local].

        Padding ids get -inf. `adapters`: of these rows, or None if none of them has one.
        """

    def one_of_each_kind(self) -> list[int]:
        """Return the layers whose trial stands for the trial of all, in ascending order: one of each kind, and the
        layers whose memory these read. All layers if the model cannot run without some of them.

        Layers are counted from the first layer of the stage.
        """

    def with_layers(self, layers: list[int]) -> "RankModel":
        """Return a model of only these layers, counted as above, that shares this model's weights. It may be this
        model itself if `layers` are all of its layers."""

    def mixtures(self) -> Sequence[Experts]:
        """Return the MoE layers whose experts are tried row by row, and whose kernels are chosen by timing; empty if
        there are none, or if other code computes them."""

    def summed_outputs(self) -> Sequence[RowParallelLinear]:
        """Return the linear layers whose partial sums are all-reduced, to try the order of these sums. Only called if
        `why_not_rank_invariant` returned None."""

    def why_not_rank_invariant(self, memory: list[LayerMemory], backends: Mapping[int, AttentionBackend]) -> str | None:
        """Return the reason why the bits of hidden states and logits may depend on the number of ranks, or None if its
        kernels on the CPU add up in one order. `memory` and `backends` as in a call."""
