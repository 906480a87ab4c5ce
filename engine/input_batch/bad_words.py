"""Finds the ids that would complete a bad word now, at a cost that does not depend on the number of words.

The words of a request form a tree by their tokens in reverse order, without the last one, which is the id to ban. Each
step walks it from the newest token back while some word matches, at most as far as the longest word. A node is split
when it is first reached, so words whose beginnings are never generated cost nothing.

Knows token ids. Does not know sequences or masks.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

Word = tuple[int, ...]
_Split = tuple[dict[int, "_Node"], list[int]]  # children by the token before; last ids of the words that end here
_Node = list[Word] | _Split  # until it is first reached, the words below it


class BadWords:
    """Tree of the bad words of one request; its choices share it."""

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.made_from = words
        self._root: dict[int, _Node] = _split([word for word in words if len(word) > 1], 0)[0]

    def completed_by(self, token_ids: Sequence[int], most: int, more: Sequence[int] = ()) -> list[int]:
        """The last ids of the words whose other tokens are the end of `token_ids` and `more`, one after the other,
        within `more` and the last `most` of `token_ids`."""
        found: list[int] = []
        children, most = self._root, most + len(more)
        for depth, token in enumerate(chain(reversed(more), reversed(token_ids)), 1):
            node = children.get(token) if depth <= most else None
            if node is None:
                break
            if isinstance(node, list):
                node = children[token] = _split(node, depth)
            children, ends = node
            found += ends
        return found


def _split(words: list[Word], depth: int) -> _Split:
    """Make a node for `words`, whose `depth` ids before the last are those on the path to it."""
    deeper: defaultdict[int, list[Word]] = defaultdict(list)
    ends = []
    length, before = depth + 1, -2 - depth
    for word in words:
        if len(word) == length:
            ends.append(word[-1])
        else:
            deeper[word[before]].append(word)
    return {**deeper}, ends
