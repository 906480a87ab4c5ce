"""Chooses how a device keeps the histories of penalties: counted in the host's memory, or dense beside the logits."""

import torch

from oarlock.workers.sampling.dense_histories import DenseHistories
from oarlock.workers.sampling.token_histories import Histories, TokenHistories


def make_histories(
    device: torch.device, num_rows: int, max_model_len: int, vocab_start: int, vocab_local: int, vocab_size: int
) -> Histories:
    """Empty histories of `num_rows` rows. This rank's shard of the vocabulary has the ids from `vocab_start` on,
    `vocab_local` of them."""
    if device.type != "cpu":
        return DenseHistories(num_rows, vocab_start, vocab_local, device)
    # The last token is not computed, and the one that is sampled ahead after an end is counted as well.
    return TokenHistories(num_rows, min(max_model_len + 2, vocab_size))
