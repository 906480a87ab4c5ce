"""Which ids would complete a banned word now: a walk back through the text, whatever the number of words.

The words of a request form a tree by their tokens in reverse, without the last, which is the one to ban. A step walks
from the newest token back as far as some word goes on: at most as many steps as the longest word has tokens. A node is
split when it is first walked through, so a thousand long words cost no more than what is written comes near to.

Knows token ids. Does not know sequences or masks.
"""

from collections import defaultdict
from collections.abc import Sequence

Word = tuple[int, ...]
_Split = tuple[dict[int, "_Node"], list[int]]  # by the token before: what goes on there; and what ends here
_Node = list[Word] | _Split  # as long as it was never walked through: the words behind it


class BadWords:
    """Of one request; its choices share it."""

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.made_from = words
        self._root: dict[int, _Node] = _split([word for word in words if len(word) > 1], 0)[0]

    def completed_by(self, token_ids: Sequence[int], most: int) -> list[int]:
        """Ids that complete a word whose beginning is the end of `token_ids`, within its last `most` ids."""
        found: list[int] = []
        children = self._root
        for depth, token in enumerate(reversed(token_ids), 1):
            node = children.get(token) if depth <= most else None
            if node is None:
                break
            if isinstance(node, list):
                node = children[token] = _split(node, depth)
            children, ends = node
            found += ends
        return found


def _split(words: list[Word], depth: int) -> _Split:
    """Words whose `depth` ids before the last are those walked through, by the id before them."""
    deeper: defaultdict[int, list[Word]] = defaultdict(list)
    ends = []
    length, before = depth + 1, -2 - depth
    for word in words:
        if len(word) == length:
            ends.append(word[-1])
        else:
            deeper[word[before]].append(word)
    return {**deeper}, ends
