"""Steps of a decoder or of its pipeline stage, launched operation by operation: on the CPU, and with pipeline stages.

A row of logits is computed only if the step asks for it, and at most `MAX_LOGITS_ROWS` at once.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionBackend, LayerMemory
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch, with_sampled
from oarlock.workers.attention.rows_by_slot import adapted_rows
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.models.rank_model import RankModel
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS
from oarlock.workers.sampling.row_chunks import concatenate_outputs, empty_output, logits_rows
from oarlock.workers.sampling.sampler import Sampler, num_accepted


class EagerSteps:
    """`ModelSteps` of a decoder. Set `memory` before the first step."""

    def __init__(
        self,
        model: RankModel,
        backends: Mapping[int, AttentionBackend],
        tables: BlockTables,
        stage: PipelineStage,
        sampler: Sampler | None,
        *,
        answers: bool,
    ) -> None:
        """Set the rank's role. `backends`: of each group of pages, by its number. `sampler`: None on all stages but
        the last. `answers`: whether this rank returns the outputs."""
        self.model, self.sampler = model, sampler
        self.memory: list[LayerMemory] = []  # memory of the layers, after it is allocated
        self._backends, self._tables, self._answers = backends, tables, answers
        self._stage: PipelineStage | None = stage  # None if no other stage takes part, as in trials
        # Integers [L], sampled by the last step.
        self._sampled = torch.empty(0, dtype=torch.int64, device=tables.tables.device)

    def with_layers(self, model: RankModel, memory: list[LayerMemory]) -> Self:
        """Return steps of only the layers of `model` on their `memory`, in which no other stage takes part. They share
        everything else with this object."""
        other = copy.copy(self)
        other.model, other.memory, other._stage = model, memory, None
        return other

    def forward(self, step: StepMetadata) -> tuple[ForwardBatch, Tensor]:
        """Run the layers, as `ModelSteps` describes."""
        model = self.model
        if len(step.table_blocks):
            self._tables.write(step)
        batch = ForwardBatch.from_step(step, self._tables)
        if step.is_ahead and (step.token_ids < 0).any():
            batch.token_ids = with_sampled(batch.token_ids, self._sampled)
        plans = {}
        for group, backend in self._backends.items():
            plans[group] = backend.prepare(batch)
        if model.is_first:
            hidden = None
        elif self._stage is None:
            hidden = model.stand_in(batch.token_ids)
        else:
            place = model.placement
            hidden = self._stage.receive(batch.num_tokens, model.spec.hidden_size, place.dtype, place.device)
        return batch, model(batch, self.memory, self._backends, plans, hidden)

    def sample(
        self, step: StepMetadata, batch: ForwardBatch, hidden: Tensor | None, await_masks: Callable[[], None] | None
    ) -> StepOutput | None:
        """Sample the rows of logits, as `ModelSteps` describes, or send `hidden` to the next stage."""
        assert hidden is not None
        if self.sampler is None:
            if self._stage is not None:
                self._stage.send(hidden)
            return None
        if len(step.history_rows):
            self.sampler.histories.write(step)
        if batch.num_logits == 0:
            return empty_output(step.step_id) if self._answers else None
        parts, sampled = [], []
        for start in range(0, batch.num_logits, MAX_LOGITS_ROWS):
            stop = min(start + MAX_LOGITS_ROWS, batch.num_logits)
            # ascending and unique: if there are T indices, they are all tokens
            indices = batch.logits_indices[start:stop]
            rows = hidden if len(indices) == len(hidden) else hidden.index_select(0, indices)
            adapters = None
            if batch.adapters is not None:
                slot_of = step.adapter_slots_of_tokens[step.logits_indices[start:stop]]
                adapters = adapted_rows(slot_of, hidden.device)
            logits = self.model.compute_logits(rows, adapters)  # float32 [L, vocab_local]
            if await_masks is not None and len(step.mask_rows):
                await_masks()
            is_whole = stop - start == batch.num_logits
            tokens, part = self.sampler.sample(logits, step if is_whole else logits_rows(step, start, stop))
            sampled.append(tokens)
            if part is not None:
                parts.append(part)
        self._sampled = sampled[0] if len(sampled) == 1 else torch.cat(sampled)
        accepted = num_accepted(step, self._sampled) if len(step.num_drafts) else None
        if len(step.penalty_rows):
            self.sampler.histories.add(step, self._sampled, accepted)
        if not self._answers:
            return None
        output = parts[0] if len(parts) == 1 else concatenate_outputs(parts)
        output.num_accepted = None if accepted is None else accepted.cpu().numpy()
        return output
