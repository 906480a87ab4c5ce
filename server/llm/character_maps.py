"""Check of the table of character replacements in a `tokenizer.json` that was converted from a SentencePiece model.

The table consists of the trie's size in bytes (four bytes), the trie in darts-clone's format, and the replacements,
each terminated by a zero byte. The library reads it without checks: an invalid offset causes a panic, when the
tokenizer is loaded or when a request is tokenized.
"""

import base64
import binascii

import numpy as np

_VALUE = np.uint32(1 << 31)  # flag of a unit that holds the offset of a replacement
_MAX_BYTES = 8 << 20  # known tables have 300 KB


def longest_replacement(written: object) -> int:
    """Return the length of the longest replacement in characters. Raises `ValueError` with the cause if damaged."""
    if not isinstance(written, str) or len(written) > _MAX_BYTES:
        raise ValueError(f"it is not a string of at most {_MAX_BYTES} characters")
    try:
        data = base64.b64decode(written, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("it is not base64") from None
    size = int.from_bytes(data[:4], "little")
    if len(data) < 8 or size % 4 or not 4 <= size <= len(data) - 4:
        raise ValueError("its length is wrong")
    units, texts = np.frombuffer(data[4 : 4 + size], "<u4"), data[4 + size :]
    _check_offsets(units, texts)
    return max(len(text) for text in texts.decode("utf-8").split("\0"))  # a UnicodeDecodeError is a ValueError


def _check_offsets(units: np.ndarray, texts: bytes) -> None:
    """Check the trie. `units`: uint32 [N].

    Raises `ValueError` if the search for any text would leave `units`, or would not end at a replacement in `texts`.
    """
    is_value = units & _VALUE != 0
    indices = np.arange(len(units), dtype=np.int64)
    offsets = (units.astype(np.int64) >> 10) << ((units.astype(np.int64) & (1 << 9)) >> 6)
    children = (indices ^ offsets)[~is_value]
    if len(units) % 256 or (children.size and int((children | 255).max()) >= len(units)):
        raise ValueError("an offset in it is outside of the table")
    starts = (units[is_value] & ~_VALUE).astype(np.int64)
    bounds = np.frombuffer(texts, np.uint8)
    if starts.size and (int(starts.max()) >= len(texts) or bool(((bounds[starts] & 0xC0) == 0x80).any())):
        raise ValueError("an offset of a replacement is outside of the text")
