"""Log-probabilities of consecutive prompt tokens as columns: as objects, 95,000 tokens with 20 alternatives each would
take 200 MB and half a second; as columns they take 16 MB and are cut, sent and joined like bytes.

Knows numbers. Does not know where they come from or who asked.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from engine.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ScoredTokens(Sequence[TokenLogprobs]):
    """n tokens with k alternatives each. An entry is made when it is looked at."""

    num_top: int  # k
    token_ids: array  # int32 [n]
    ranks: array  # int32 [n]
    logprobs: array  # float32 [n]
    top_ids: array  # int32 [n * k]
    top_logprobs: array  # float32 [n * k]

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> "ScoredTokens": ...
    def __getitem__(self, index: int | slice) -> "TokenLogprobs | ScoredTokens":
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "columns are cut, not picked from"
            one, top = slice(start, stop), slice(start * self.num_top, stop * self.num_top)
            columns = self.token_ids[one], self.ranks[one], self.logprobs[one]
            return ScoredTokens(self.num_top, *columns, self.top_ids[top], self.top_logprobs[top])
        start = range(len(self))[index] * self.num_top
        end = start + self.num_top
        top = tuple(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))
        return TokenLogprobs(self.token_ids[index], self.logprobs[index], self.ranks[index], top)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return (self[index] for index in range(len(self)))
