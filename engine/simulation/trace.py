"""Traces of requests for the simulator: when each arrives, its prompt, and how long its answer will be."""

import random
from dataclasses import dataclass

from oarlock.engine.pooling_params import PoolingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. Times are virtual seconds."""

    time_s: float
    prompt_token_ids: tuple[int, ...]
    num_output_tokens: int  # the last of them ends the sequence
    priority: int = 0
    max_tokens: int | None = None  # the limit in the request; None: num_output_tokens
    client: str = ""
    yields: bool = False  # to all that do not
    pooling: PoolingParams | None = None  # vectors are wanted, and no answer


def make_trace(
    *,
    num_requests: int,
    requests_per_s: float,
    mean_prompt_tokens: int,
    mean_output_tokens: int,
    max_prompt_tokens: int,
    shared_prefix_tokens: int = 0,
    vocab_size: int = 32_000,
    seed: int = 0,
) -> list[Arrival]:
    """Poisson arrivals, exponential lengths, and a prefix of `shared_prefix_tokens` that all prompts share."""
    rng = random.Random(seed)
    prefix = tuple(rng.randrange(vocab_size) for _ in range(shared_prefix_tokens))
    trace = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(requests_per_s)
        length = min(max_prompt_tokens - len(prefix), 1 + int(rng.expovariate(1 / mean_prompt_tokens)))
        own = tuple(rng.randrange(vocab_size) for _ in range(max(1, length)))
        trace.append(Arrival(now, prefix + own, 1 + int(rng.expovariate(1 / mean_output_tokens))))
    return trace
