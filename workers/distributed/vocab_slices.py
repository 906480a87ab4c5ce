"""Slices of the vocabulary, by which probabilities are added up: their bits do not depend on the number of ranks."""

VOCAB_SLICES = 8  # also `kSlices` in kernels/cpu/csrc/sampling/logits_row.h


def vocab_slice(vocab_size: int, size: int) -> int:
    """Ids of one slice: of a whole shard where `size` ranks cannot have the same number of slices."""
    return -(-vocab_size // (VOCAB_SLICES if VOCAB_SLICES % size == 0 else size))


def vocab_shard_size(vocab_size: int, size: int) -> int:
    """Ids of each rank's shard; the last ones may be beyond the vocabulary."""
    if size == 1:
        return vocab_size
    return vocab_slice(vocab_size, size) * (VOCAB_SLICES // size if VOCAB_SLICES % size == 0 else 1)
