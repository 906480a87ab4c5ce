"""Estimates the time of a step by the roofline model: bytes read at memory speed, operations at arithmetic speed.

The longer of the two decides; sums over ranks and the fixed cost of every step are added. numpy arrays can stand for
the numbers of many steps. Does not know requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from oarlock.workers.capacity import RankWork

# Share of the speed in a device's data sheet, or of a measured read, that steps reach.
BANDWIDTH_REACHED, OPS_REACHED = {"cuda": 0.80, "cpu": 0.80}, {"cuda": 0.55, "cpu": 0.90}
# Seconds that every step adds: launching it, sampling, the engine and its messages.
STEP_S = {"cuda": 0.0005, "cpu": 0.0008}


class StepLoad(NamedTuple):
    """Work of one step. Numbers, or arrays [steps] of them."""

    tokens: Any  # computed
    rows: Any  # of logits
    context: Any  # tokens whose keys and values are read
    pairs: Any  # of a computed token and a token of its context


class StepTime(Protocol):
    """Predicts the seconds of a step."""

    def seconds(self, load: StepLoad) -> Any: ...


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one device, or of a host whose ranks share it. Per second."""

    bandwidth: float  # bytes of memory read
    ops: float  # multiplications and additions of the numbers that the model computes in
    link: float  # bytes to another rank
    sum_s: float  # seconds of a very small sum over ranks
    step_s: float  # seconds that every step adds
    is_shared: bool  # by all ranks

    @staticmethod
    def reached(device: str, bandwidth: float, ops: float, link: float, sum_s: float) -> Speed:
        """Speed that steps reach, from a data sheet or a measurement."""
        kept = BANDWIDTH_REACHED[device] * bandwidth, OPS_REACHED[device] * ops
        return Speed(*kept, link, sum_s, STEP_S[device], device == "cpu")


@dataclass(frozen=True, slots=True)
class Roofline:
    """`StepTime` of one server by the roofline: its pipeline stages one after another."""

    stages: tuple[RankWork, ...]
    ranks: int  # of each stage
    speed: Speed
    replicas: int = 1  # that share the host

    def seconds(self, load: StepLoad) -> Any:
        return self.speed.step_s + sum(self._stage_s(work, load) for work in self.stages)

    def _stage_s(self, work: RankWork, load: StepLoad) -> Any:
        speed = self.speed
        crowd = self.ranks * self.replicas if speed.is_shared else 1
        read_s = (work.weight_bytes + work.kv_bytes * load.context) * crowd / speed.bandwidth
        ops = work.token_ops * load.tokens + work.row_ops * load.rows + work.pair_ops * load.pairs
        sums_s = work.num_sums * speed.sum_s
        if speed.link:
            sums_s += (work.sum_bytes + work.pass_bytes) * load.tokens / speed.link
        return _larger(read_s, ops * crowd / speed.ops) + sums_s


@dataclass(frozen=True, slots=True)
class Measured:
    """`StepTime` from measured steps: a straight line in each number."""

    step_s: float  # of every step
    token_s: float  # of each token of a prompt
    row_s: float  # of each row of logits: one for each sequence that decodes
    context_s: float = 0.0

    def seconds(self, load: StepLoad) -> Any:
        prompt = load.tokens - load.rows
        return self.step_s + self.token_s * prompt + self.row_s * load.rows + self.context_s * load.context


def _larger(one: Any, other: Any) -> Any:
    """The larger of two numbers, or of each pair of entries of two arrays."""
    return (one + other + abs(one - other)) / 2


def decode_tokens_per_s(time: StepTime, users: int, context: int) -> float:
    """Generated tokens a second of all `users` together, each with `context` tokens, one token a step."""
    return users / time.seconds(StepLoad(users, users, users * context, users * context)) if users else 0.0


def prompt_tokens_per_s(time: StepTime, tokens: int) -> float:
    """Prompt tokens a second of a step that computes the first `tokens` of one prompt."""
    return tokens / time.seconds(StepLoad(tokens, 1, tokens, tokens * (tokens + 1) / 2))
