"""Whether a checkpoint's output head equals its embedding, as config.json says, or is another matrix.

Compares the bytes in the files up to the first difference. Torch-free.
"""

from oarlock.workers.weights.checkpoint import Checkpoint, Located

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PIECE = 8 << 20  # bytes


def head_differs(checkpoint: Checkpoint) -> bool:
    """True when both are stored and differ in dtype, shape or bytes."""
    embedding, head = checkpoint.find(EMBEDDING), checkpoint.find(HEAD)
    if embedding is None or head is None:
        return False
    alike = (embedding.entry.dtype, embedding.entry.shape) == (head.entry.dtype, head.entry.shape)
    return not (alike and _same_bytes(embedding, head))


def _same_bytes(one: Located, other: Located) -> bool:
    with one.path.open("rb", buffering=0) as a, other.path.open("rb", buffering=0) as b:
        a.seek(8 + int.from_bytes(a.read(8), "little") + one.entry.begin)
        b.seek(8 + int.from_bytes(b.read(8), "little") + other.entry.begin)
        left = one.entry.end - one.entry.begin
        while left:
            size = min(left, _PIECE)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True
