"""Memory of steps beside weights and KV memory: estimated, and where a device can be measured, by its largest step.

The estimate has the right form, so many bytes for each token and each row of logits; how far it is off on a device,
with its kernels and allocator, one measured step tells.
"""

from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.protocol import LOGITS, NULL_BLOCK, StepMetadata
from oarlock.workers.runner.greedy_step import SequenceChunk, greedy_step
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS, largest_step_bytes, step_bytes


class StepMemory:
    """Bytes of steps on one rank."""

    def __init__(
        self, config: WorkerConfig, spec: DecoderSpec, measured: int | None = None, *, has_head: bool = True
    ) -> None:
        """`measured`: what `largest_step` took; never taken to be less than the estimate. `has_head`: whether this rank
        computes logits, as those of the last pipeline stage do."""
        self._config, self._spec, self._has_head = config, spec, has_head
        self._estimate = largest_step_bytes(config, spec, has_head=has_head)
        self.largest = max(self._estimate, measured or 0)

    def of(self, step: StepMetadata) -> int:
        """Bytes of `step`: its part of the largest one."""
        if step.num_seqs == 0:
            return 0
        num_rows = len(step.logits_indices) + int((step.pool_kinds == LOGITS).sum())
        estimate = self._of(step.num_tokens, num_rows)
        return -(-estimate * self.largest // self._estimate)

    def _of(self, num_tokens: int, num_rows: int) -> int:
        return step_bytes(self._config, self._spec, num_tokens, num_rows if self._has_head else 0)


def largest_step(config: WorkerConfig) -> StepMetadata:
    """A step of `max_num_batched_tokens` tokens, in the null block: as few sequences as can be, at the ends of full
    contexts, and as many rows of logits as are computed at once."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    length, left = config.max_model_len, config.max_num_batched_tokens
    blocks = [NULL_BLOCK] * -(-length // config.block_size)
    chunks = []
    while left and len(chunks) < config.max_num_seqs:
        count = min(left, length)
        chunks.append(SequenceChunk([0] * count, length - count, blocks))
        left -= count
    num_tokens = config.max_num_batched_tokens - left
    return greedy_step(chunks, config.block_size, range(max(0, num_tokens - MAX_LOGITS_ROWS), num_tokens))
