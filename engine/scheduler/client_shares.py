"""Fair shares of clients: each has a virtual time, the work done for it so far, and the client with the least is next.

Fair queueing as Sheng et al. use it for language models ("Fairness in Serving Large Language Models", 2024). Work is
counted in tokens, of prompts when a request is admitted and of answers as they are generated. A client that comes back
after a pause begins at the time of those that are served now: no client saves up a share.

Knows tokens and names of clients; does not know blocks, rows or priorities.
"""

from collections.abc import Iterable

_OUTPUT_WEIGHT = 2.0  # of a generated token, in tokens of a prompt


class ClientShares:
    """Virtual times of all clients, in weighted tokens."""

    def __init__(self) -> None:
        self._now = 0.0
        self._times: dict[str, float] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients that ever had a request admitted."""
        return len(self._times)

    def time_of(self, client: str) -> float:
        """Virtual time at which the next request of `client` begins."""
        return max(self._now, self._times.get(client, 0.0))

    def begin(self, client: str, num_prompt_tokens: int, waiting: Iterable[str]) -> None:
        """Count an admitted request of `client` while the clients `waiting` wait; `client` may be one of them."""
        begins = self.time_of(client)
        self._now = min([begins, *map(self.time_of, waiting)])
        self._times[client] = begins + num_prompt_tokens

    def generate(self, client: str, num_tokens: int) -> None:
        """Count generated tokens of `client`, which had a request admitted before."""
        self._times[client] += _OUTPUT_WEIGHT * num_tokens
