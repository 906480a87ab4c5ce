"""Launch of steps on a device without waiting: plain decodes and small steps with prompts as graphs, others by
operation.

One copy brings a step to the device, and one copy brings its output back. In between the host reads nothing: sampled
tokens are inserted into the next step on the device. A decode is launched in two parts, the model and then sampling,
since masks may arrive after the step. The graph of a step with prompts has only the layers: any of its tokens may need
logits, so these are computed and sampled operation by operation. Knows the model, its pages and the samplers. Does not
know requests or processes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, CapturableBackend, LayerMemory, is_capturable
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import StepMetadata, empty_step
from oarlock.workers.runner.buckets import MOST_PROMPTS, bucket_of, prompt_bucket_of
from oarlock.workers.runner.cuda_graphs import Graph, GraphMaker
from oarlock.workers.runner.device_sampling import StepSampling
from oarlock.workers.runner.pending_output import Launched
from oarlock.workers.runner.step_inputs import InputPlace, StepInputs
from oarlock.workers.sampling.columns import Variant


class DeviceSteps:
    """`ModelSteps` of a decoder on a CUDA device.

    Set `memory`, optionally call `capture`, then run any number of steps, then call `release`.
    """

    def __init__(
        self,
        model: RankModel,
        backends: Mapping[int, AttentionBackend],
        inputs: StepInputs,
        sampling: StepSampling,
        *,
        rows_at_once: int,
        max_model_len: int,
    ) -> None:
        """Allocate the logits. `backends`: of each group of pages, by its number. `rows_at_once`: rows of logits that
        are computed together, at least the largest bucket."""
        self.model = model
        self._memory: list[LayerMemory] = []
        self._backends, self._inputs, self._sampling = backends, inputs, sampling
        # Whether plans of graphs stay valid while lengths change; without attention there is nothing to plan.
        self._is_capturable = is_capturable(backends)
        self._max_model_len = max_model_len
        device = sampling.sampled.device
        self._logits = torch.empty((rows_at_once, model.vocab_local), dtype=torch.float32, device=device)
        # By size, for steps without and with adapters.
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._prompt_graphs: dict[tuple[int, bool], Graph] = {}
        # [T, hidden_size] of the largest prompt graph; all prompt graphs write to it
        self._hidden = torch.empty(0, device=device)
        self._sampling_graphs: dict[tuple[int, Variant], Graph] = {}
        self._sizes: list[int] = []  # sizes of the graphs, ascending
        self._prompt_sizes: list[int] = []
        self._maker: GraphMaker | None = None

    @property
    def memory(self) -> list[LayerMemory]:
        """Memory of the layers, after it is allocated."""
        return self._memory

    @memory.setter
    def memory(self, memory: list[LayerMemory]) -> None:
        self._memory = memory
        states = next((one.states for one in memory if one.states is not None), None)
        if states is not None:
            self._inputs.sink = len(states.parts[0]) - 1

    @torch.inference_mode()
    def capture(self, maker: GraphMaker, sizes: Sequence[int], prompts: Sequence[int] = ()) -> int:
        """Capture more graphs, of `prompts` tokens and of `sizes` sequences, the largest first; return the number of
        graphs.

        Every rank must call this at the same point.
        """
        self._maker = maker
        for size in sorted(prompts, reverse=True):
            place = self._inputs.stage(empty_step(0), prompts=size)
            if size > len(self._hidden):
                spec, dtype = self.model.spec, self.model.placement.dtype
                self._hidden = torch.empty((size, spec.hidden_size), dtype=dtype, device=self._logits.device)
            for adapts in self._kinds_of(place):
                self._prompt_graphs[size, adapts] = maker.capture(self._prompts(place, adapts))
        self._prompt_sizes = sorted({size for size, _ in self._prompt_graphs})
        for size in sorted(sizes, reverse=True):
            place = self._inputs.stage(empty_step(0), size)
            for adapts in self._kinds_of(place):
                self._graphs[size, adapts] = maker.capture(self._decode(place, adapts))
            for variant in self._sampling.variants:
                work = partial(self._sampling.sample, self._logits[:size], place, 0, variant)
                self._sampling_graphs[size, variant] = maker.capture(work)
        self._sizes = sorted({size for size, _ in self._graphs})
        return len(self._graphs) + len(self._sampling_graphs) + len(self._prompt_graphs)

    def with_layers(self, model: RankModel, memory: list[LayerMemory]) -> Self:
        """Return steps of only the layers of `model` on their `memory`, without graphs. They share the buffers and the
        sampler with this object."""
        other = copy.copy(self)
        other.model, other.memory, other._sizes, other._prompt_sizes = model, memory, [], []
        return other

    def forward(self, step: StepMetadata) -> tuple[InputPlace, Tensor | None]:
        """Launch the model, as `ModelSteps` describes, by the smallest graph that holds `step` if there is one."""
        self._sampling.begin(step)
        bucket = bucket_of(step, self._sizes) if self._sizes else None
        prompts = prompt_bucket_of(step, self._prompt_sizes) if bucket is None else None
        place, adapts = self._inputs.stage(step, bucket, prompts), len(step.adapter_slots) > 0
        if bucket is not None:
            self._graphs[bucket, adapts].replay()
            return place, None
        if prompts is not None:
            self._prompt_graphs[prompts, adapts].replay()
            return place, self._hidden[: step.num_tokens]
        return place, self._compute(step, place)

    def sample(
        self, step: StepMetadata, place: InputPlace, hidden: Tensor | None, await_masks: Callable[[], None] | None
    ) -> Launched:
        """Launch the sampler, as `ModelSteps` describes."""
        if hidden is None:
            self._await(step, await_masks)
            self._sample_bucket(place, Variant.of(step))
        else:
            self._sample_rows(step, place, await_masks, hidden)
        return self._sampling.finish(step, place)

    def replays(self, step: StepMetadata) -> bool:
        """Return whether a graph runs the model of `step`, which then allocates nothing."""
        return bucket_of(step, self._sizes) is not None if self._sizes else False

    def release(self) -> None:
        """Destroy the graphs, before the process group is destroyed. Others may be captured afterwards."""
        for graphs in (self._graphs, self._sampling_graphs, self._prompt_graphs):
            graphs.clear()
        self._sizes, self._prompt_sizes = [], []
        if self._maker is not None:
            self._maker.release()

    def _await(self, step: StepMetadata, await_masks: Callable[[], None] | None) -> None:
        if await_masks is not None:
            await_masks()
        self._inputs.stage_masks(step)

    @staticmethod
    def _kinds_of(place: InputPlace) -> Sequence[bool]:
        """Return the kinds of steps to capture: without adapters, and with any mixture of them if they are served."""
        return (False, True) if place.shape.slots else (False,)

    def _decode(self, place: InputPlace, adapts: bool) -> Callable[[], None]:
        """Return the work of a plain decode, from the step in `place` to its logits. `adapts`: with adapters."""
        size = place.shape.seqs
        ones, bounds = [1] * size, [self._max_model_len] * size
        plans = None
        if self._is_capturable:
            batch = place.batch(ones, bounds, self._sampling.sampled)
            plans = {group: backend.prepare_decode(batch) for group, backend in self._capturable()}

        def work() -> None:
            if plans is None:  # a host device, whose lengths can be read
                lengths = place.tensors["seq_lens"].tolist()
                hidden = self._run(place.batch(ones, lengths, self._sampling.sampled, adapts=adapts))
            else:
                batch = place.batch(ones, bounds, self._sampling.sampled, adapts=adapts)
                hidden = self.model(batch, self.memory, self._backends, plans)
            adapters = place.logits_adapters(0) if adapts else None
            self._logits[:size].copy_(self.model.compute_logits(hidden, adapters))

        return work

    def _prompts(self, place: InputPlace, adapts: bool) -> Callable[[], None]:
        """Return the work of any step with the number of tokens of `place`, up to its hidden states. `adapts`: with
        adapters."""
        tokens, seqs = place.shape[:2]
        bounds, plans = [self._max_model_len] * seqs, None
        if self._is_capturable:
            most = min(MOST_PROMPTS + 1, seqs)  # padding may be one more long query
            batch = place.batch([tokens] + [0] * (seqs - 1), bounds, self._sampling.sampled)
            plans = {group: backend.prepare_prompts(batch, most) for group, backend in self._capturable()}

        def work() -> None:
            if plans is None:  # a host device, whose lengths can be read
                hidden = self._run(_without_padding(place, self._sampling.sampled, adapts=adapts))
            else:
                batch = place.batch([tokens] + [0] * (seqs - 1), bounds, self._sampling.sampled, adapts=adapts)
                hidden = self.model(batch, self.memory, self._backends, plans)
            self._hidden[:tokens].copy_(hidden)

        return work

    def _sample_bucket(self, place: InputPlace, wanted: Variant) -> None:
        """Sample the rows of a plain decode, padded to the sequences of `place`, whose logits a graph has computed."""
        bucket = place.shape.seqs
        for variant in self._sampling.variants:
            if variant.serves(wanted):
                self._sampling_graphs[bucket, variant].replay()
                return
        self._sampling.sample(self._logits[:bucket], place, 0, wanted)

    def _compute(self, step: StepMetadata, place: InputPlace) -> Tensor:
        """Return the hidden states of a step of any kind, computed operation by operation: [T, hidden_size]."""
        query_lens, lengths = np.diff(step.query_start_loc).tolist(), step.seq_lens.tolist()
        adapts = len(step.adapter_slots) > 0
        return self._run(place.batch(query_lens, lengths, self._sampling.sampled, adapts=adapts))

    def _run(self, batch: ForwardBatch) -> Tensor:
        """Return the hidden states of `batch`, whose lengths are known on the host: [T, hidden_size]."""
        plans = {group: backend.prepare(batch) for group, backend in self._backends.items()}
        return self.model(batch, self.memory, self._backends, plans)

    def _capturable(self) -> list[tuple[int, CapturableBackend]]:
        """Return the backends by group, if plans can stay valid while lengths change."""
        found = self._backends.items()
        return [(group, backend) for group, backend in found if isinstance(backend, CapturableBackend)]

    def _sample_rows(
        self, step: StepMetadata, place: InputPlace, await_masks: Callable[[], None] | None, hidden: Tensor
    ) -> None:
        """Compute logits and samples of a step of any kind, operation by operation. `hidden`: [T, hidden_size]."""
        variant, wanted = Variant.of(step), place.tensors["logits_indices"]
        for first in range(0, len(wanted), len(self._logits)):
            indices = wanted[first : first + len(self._logits)]
            adapters = place.logits_adapters(first) if len(step.adapter_slots) else None
            logits = self.model.compute_logits(hidden.index_select(0, indices), adapters)
            self._logits[: len(indices)].copy_(logits)
            if first == 0:
                self._await(step, await_masks)
            self._sampling.sample(self._logits[: len(indices)], place, first, variant)


def _without_padding(place: InputPlace, sampled: Tensor, *, adapts: bool) -> ForwardBatch:
    """Return the step in `place`, on the host, without sequences that have no tokens. `adapts`: with adapters."""
    starts, lengths = place.tensors["query_start_loc"], place.tensors["seq_lens"]
    queries = [count for count in starts.diff().tolist() if count]
    seqs = len(queries)
    batch = place.batch(queries, lengths[:seqs].tolist(), sampled, adapts=adapts)
    return replace(batch, query_start_loc=starts[: seqs + 1], seq_lens=lengths[:seqs], rows=batch.rows[:seqs])
