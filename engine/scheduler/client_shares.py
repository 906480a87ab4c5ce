"""Whose turn it is when several clients wait: each has a virtual time, that of the work it has been given so far.

Fair queueing as Sheng et al. use it for language models ("Fairness in Serving Large Language Models", 2024): the client
with the least virtual time is next. Work is counted in tokens, of prompts when a request is admitted and of answers as
they are generated. A client that comes back after a pause begins at the time of those that are served now: nobody saves
up.

Knows tokens and names of clients; does not know blocks, rows or priorities.
"""

from collections.abc import Iterable

_OUTPUT_WEIGHT = 2.0  # of a generated token, in tokens of a prompt


class ClientShares:
    """The virtual times of all clients, in weighted tokens."""

    def __init__(self) -> None:
        self._now = 0.0
        self._times: dict[str, float] = {}

    @property
    def num_clients(self) -> int:
        """Of which a request was admitted, ever."""
        return len(self._times)

    def time_of(self, client: str) -> float:
        """Of its next request."""
        return max(self._now, self._times.get(client, 0.0))

    def begin(self, client: str, num_prompt_tokens: int, waiting: Iterable[str]) -> None:
        """A request of `client` is admitted, while these clients wait; `client` may be one of them."""
        begins = self.time_of(client)
        self._now = min([begins, *map(self.time_of, waiting)])
        self._times[client] = begins + num_prompt_tokens

    def generate(self, client: str, num_tokens: int) -> None:
        """So many tokens of answers were generated for `client`, of which a request was admitted before."""
        self._times[client] += _OUTPUT_WEIGHT * num_tokens
