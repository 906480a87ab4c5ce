"""Hash by which a full block is found: chained over the salt and every token up to the block's end.

Equal hashes mean equal content. From the tokens and salt of a prompt anyone can compute the hashes of its blocks.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 32


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], cache_salt: bytes, block_size: int, num_blocks: int
) -> None:
    """Extend `hashes`, which has those of the first blocks of `token_ids`, to `num_blocks`. All must be full.

    blake2b(hash of the block before, its token ids as int32); before the first block stands the hash of the salt.
    """
    while len(hashes) < num_blocks:
        parent = hashes[-1] if hashes else blake2b(cache_salt, digest_size=HASH_BYTES).digest()
        start = len(hashes) * block_size
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())
