"""Drafts by lookup: the tokens that followed the last ones of a sequence at an earlier place in its prompt or answer.

The longest run of the last `longest` to `shortest` tokens that occurs earlier is looked up, at its latest place (prompt
lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding). The tokens that followed there are the draft.
Where they reach the end of the sequence they are repeated, as in LZ77: the sequence is in a loop.

Pure: the same tokens give the same drafts. Knows token ids; does not know requests, costs or the fate of a draft.
"""

from array import array
from bisect import bisect_left

import numpy as np

_BASE = 0x9E3779B97F4A7C15  # odd; of a polynomial over the ids, modulo 2^64
_MASK = (1 << 64) - 1
_FOLD = 4096  # newest tokens whose runs are kept in dicts, at 300 bytes each; all others take 12 bytes for each length


class NgramIndex:
    """Index of the last place of each run of `shortest` to `longest` tokens of one growing sequence.

    A new token costs the same however long the sequence is. Runs are found by hashes of 64 bits and then compared: two
    runs with equal hashes would hide a draft, but never give a wrong one.
    """

    __slots__ = ("_hashes", "_last_ends", "_longest", "_num_folded", "_num_seen", "_recent", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        assert 1 <= shortest <= longest
        self._shortest = shortest
        self._longest = longest
        # by length less `shortest`: sorted hashes, and the place of the last token of the last run with each
        self._hashes: list[array[int]] = []  # uint64
        self._last_ends: list[array[int]] = []  # int32
        self._recent: list[dict[int, int]] = []  # hash -> that place, of runs that end after those
        self._num_folded = 0  # tokens in the sorted part
        self._num_seen = 0  # tokens of which every run is in one of the two

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Propose `most` tokens after `token_ids`, or none. The sequence may only have grown since the last call."""
        length = len(token_ids)
        self._catch_up(token_ids)
        for size in range(min(self._longest, length - 1), self._shortest - 1, -1):
            end = self._find(token_ids, size)
            if end >= 0:
                start, period = end + 1, length - end - 1
                if period >= most:
                    return token_ids[start : start + most]
                return [token_ids[start + place % period] for place in range(most)]
        return []

    def _find(self, token_ids: list[int], size: int) -> int:
        """Last earlier place at which the last `size` tokens ended; -1: nowhere."""
        run = token_ids[-size:]
        key, place = _hash(run), size - self._shortest
        end = self._recent[place].get(key, -1)
        if end < 0:
            hashes = self._hashes[place]
            at = bisect_left(hashes, key)
            if at < len(hashes) and hashes[at] == key:
                end = self._last_ends[place][at]
        return end if end >= 0 and token_ids[end - size + 1 : end + 1] == run else -1

    def _catch_up(self, token_ids: list[int]) -> None:
        """Index every run that ends before the last token: nothing follows a run that ends there."""
        until = len(token_ids) - 1
        if not self._recent or until - self._num_folded > _FOLD:
            self._fold(token_ids[:until])
            return
        for end in range(self._num_seen, until):
            for place, recent in enumerate(self._recent):
                start = end + 1 - self._shortest - place
                if start >= 0:
                    recent[_hash(token_ids[start : end + 1])] = end
        self._num_seen = until

    def _fold(self, token_ids: list[int]) -> None:
        """Sort all runs of `token_ids`: a few milliseconds for each 10,000 tokens."""
        self._hashes.clear()
        self._last_ends.clear()
        ids = np.array(token_ids, np.uint64)  # [n]
        for size in range(self._shortest, self._longest + 1):
            keys = np.zeros(max(0, len(ids) - size + 1), np.uint64)  # of the runs, by the place of the first token
            for offset in range(size):
                keys = keys * np.uint64(_BASE) + ids[offset : offset + len(keys)]
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            is_last = np.append(keys[1:] != keys[:-1], True)[: len(keys)]
            self._hashes.append(array("Q", keys[is_last].tobytes()))
            self._last_ends.append(array("i", (order[is_last] + size - 1).astype(np.int32).tobytes()))
        self._recent = [{} for _ in self._hashes]
        self._num_folded = self._num_seen = len(token_ids)


def _hash(run: list[int]) -> int:
    key = 0
    for token in run:
        key = (key * _BASE + token) & _MASK
    return key
