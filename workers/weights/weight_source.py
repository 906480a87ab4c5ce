"""The reader of a checkpoint, in whichever format it is."""

from collections.abc import Callable

from oarlock.workers.weights.checkpoint import Checkpoint
from oarlock.workers.weights.gguf.checkpoint import GGUFCheckpoint
from oarlock.workers.weights.gguf.reader import GGUFReader
from oarlock.workers.weights.reader import WeightReader


def weight_source(
    checkpoint: Checkpoint, *, check_finite: bool, on_read: Callable[[], None]
) -> WeightReader | GGUFReader:
    """A `WeightSource` to be closed, or used as a context manager. `on_read`: see `WeightReader`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return GGUFReader(checkpoint, check_finite=check_finite, on_read=on_read)
    return WeightReader(checkpoint, check_finite=check_finite, on_read=on_read)
