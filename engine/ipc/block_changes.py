"""Frame with the changes of an engine's prefix cache, for its frontend: hashes as ints of 32 bits."""

from array import array

from oarlock.engine.ipc.frames import Frame, FrameError, encode
from oarlock.engine.kv_cache.events import BlockChanges
from oarlock.engine.kv_cache.hashing import HASH_BYTES


def blocks(value: BlockChanges) -> bytes:
    """Write the changes; the hashes that are stored come first."""
    ints = array("i", b"".join((*value.stored, *value.removed)))
    return encode({"kind": "blocks", "cleared": value.is_cleared, "num_stored": len(value.stored)}, ints)


def read_blocks(frame: Frame) -> BlockChanges:
    """Read the changes from a frame. Raises `FrameError`."""
    data, num_stored, is_cleared = frame.ints.tobytes(), frame.head.get("num_stored"), frame.head.get("cleared")
    count, rest = divmod(len(data), HASH_BYTES)
    if rest or type(num_stored) is not int or not 0 <= num_stored <= count or type(is_cleared) is not bool:
        raise FrameError("a bad 'blocks' frame: hashes are missing")
    hashes = [data[start : start + HASH_BYTES] for start in range(0, len(data), HASH_BYTES)]
    return BlockChanges(is_cleared, hashes[:num_stored], hashes[num_stored:])
