"""Ranks on the CPU whose decode steps run as graphs do on a device: padded, from and to memory of fixed places.

A graph's replay is a call of the work that was captured. Sampling is torch's, which reads steps as they come.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.forward_batch import BlockTables
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.protocol import StepMetadata, StepOutput, empty_step, table_width
from oarlock.workers.runner.buckets import bucket_sizes, prompt_sizes
from oarlock.workers.runner.cuda_graphs import Calls, Graph, Work
from oarlock.workers.runner.device_steps import DeviceSteps
from oarlock.workers.runner.eager_steps import EagerSteps
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.step_inputs import InputPlace, Shape, StepInputs
from oarlock.workers.runner.trial_steps import TrialMemory
from oarlock.workers.sampling.columns import Variant
from oarlock.workers.sampling.row_chunks import concatenate_outputs, empty_output, logits_rows
from oarlock.workers.sampling.sampler import Sampler, num_accepted


class TorchSampling:
    """`StepSampling` of the rows of the step alone, without padding; every rank samples from all ranks' logits."""

    variants = (Variant(random=True, filtered=True, processed=True),)  # others are launched outside of graphs

    def __init__(self, runner: ModelRunner, most_rows: int) -> None:
        self.sampled = torch.zeros(most_rows, dtype=torch.int64)
        self._tp, self._vocab = runner.tp, runner.spec.vocab_size
        assert isinstance(runner.steps, EagerSteps) and runner.steps.sampler is not None
        self._sampler = Sampler(TensorParallel.solo(), 0, self._vocab, self._vocab, runner.steps.sampler.histories)
        self._step: StepMetadata = empty_step(0)
        self._parts: list[StepOutput] = []

    def begin(self, step: StepMetadata) -> None:
        self._sampler.histories.write(step)
        self._step, self._parts = step, []

    def sample(self, logits: Tensor, place: InputPlace, first: int, variant: Variant) -> None:
        stop = min(first + len(logits), len(self._step.logits_indices))
        if stop == first:  # as at capture
            return
        assert variant.serves(Variant.of(self._step))
        whole = self._tp.all_gather(logits[: stop - first]).transpose(0, 1).flatten(1)  # [n, V and padding]
        tokens, part = self._sampler.sample(whole[:, : self._vocab].clone(), logits_rows(self._step, first, stop))
        self.sampled[first:stop] = tokens
        assert part is not None
        self._parts.append(part)

    def finish(self, step: StepMetadata, place: InputPlace) -> StepOutput | None:
        accepted = num_accepted(step, self.sampled) if len(step.num_drafts) else None
        if len(step.penalty_rows):
            self._sampler.histories.add(step, self.sampled, accepted)
        output = concatenate_outputs(self._parts) if self._parts else empty_output(step.step_id)
        output.num_accepted = None if accepted is None else accepted.numpy()
        self._step = empty_step(0)
        return output if self._tp.rank == 0 else None


class RecordedInputs(StepInputs):
    """Keeps the buckets that were staged, None for steps in their own shapes."""

    staged: tuple[tuple[int | None, int | None], ...] = ()  # sequences, and tokens of steps with prompts

    def stage(self, step: StepMetadata, bucket: int | None = None, prompts: int | None = None) -> InputPlace:
        self.staged = (*self.staged, (bucket, prompts))
        return super().stage(step, bucket, prompts)


class CountedGraph:
    """A graph that counts its replays."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.num_replays = 0
        self.is_released = False

    def replay(self) -> None:
        assert not self.is_released, "a graph that was destroyed is launched"
        self.num_replays += 1
        self._graph.replay()


class CountedCalls(Calls):
    """`Calls` that keep what was captured, in order."""

    def __init__(self) -> None:
        self.captured: list[CountedGraph] = []

    def release(self) -> None:
        for graph in self.captured:
            graph.is_released = True
        self.captured.clear()

    def capture(self, work: Work) -> CountedGraph:
        self.captured.append(CountedGraph(super().capture(work)))
        return self.captured[-1]


class GraphRunner(ModelRunner):
    """A `ModelRunner` of the CPU with graphs."""

    def allocate(self, num_blocks: Sequence[int]) -> None:
        super().allocate(num_blocks)
        config = self.config
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        rows = max(seqs, tokens)
        self.sizes, self.prompt_sizes = bucket_sizes(seqs), prompt_sizes(config)
        self.maker = CountedCalls()
        sampled = seqs * (1 + config.num_speculative_tokens)
        memory = TrialMemory.of(self.spec)
        groups, states = len(memory.pages_groups), seqs if memory.has_states else 0
        self.inputs = RecordedInputs(
            BlockTables(seqs, table_width(config), config.block_size, self.device, memory.pages_groups),
            Shape(rows, seqs, rows, groups * seqs * table_width(config), groups, states, rows if states else 0),
            sampled,
            self.spec.vocab_size,
        )
        assert config.max_model_len is not None
        self.steps = DeviceSteps(
            self.model, self.backends, self.inputs, TorchSampling(self, rows),
            rows_at_once=max(self.sizes), max_model_len=config.max_model_len,
        )  # fmt: skip
        self.steps.memory = self.layer_memory
        self.steps.capture(self.maker, self.sizes, self.prompt_sizes)

    def execute(self, step: StepMetadata, await_masks=None) -> StepOutput | None:
        """Runs `step` and then spoils its arrays, as another step would that is written in their place."""
        arrays = {name: np.array(value) for name, value in vars_of(step).items()}
        own = StepMetadata(step.step_id, **arrays)
        output = super().execute(own, await_masks)
        for array in arrays.values():
            array[...] = 77
        return output


def vars_of(step: StepMetadata) -> dict[str, np.ndarray]:
    """The arrays of a step by name."""
    names = [name for name in StepMetadata.__dataclass_fields__ if name != "step_id"]
    return {name: value for name in names if isinstance(value := getattr(step, name), np.ndarray)}
