"""Simulated ranks: their report to the scheduler, the seconds of a step, and an executor with virtual time.

The seconds come from a formula, or from the roofline model: the larger of bytes read at memory speed and operations at
arithmetic speed, plus all-reduces and the fixed cost of every step. For plans, simulations, benchmarks and tests of the
engine. Does not know requests.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from oarlock.workers.adapters import NO_SLOT, STALLED, AdapterControl, AdapterReport, read_commands, report_fields
from oarlock.workers.capacity import RankWork
from oarlock.workers.config import GroupInfo, WorkerConfig, WorkerInfo
from oarlock.workers.kv_offload import KVReports
from oarlock.workers.protocol import CLS, LOGITS, TOKEN, StepMetadata, StepOutput

END_TOKEN = 0  # ends a response
HIDDEN_SIZE = 2  # small, as the vectors have no meaning here


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of one step: a constant for the weights, and a cost per computed token and per token of context."""

    step_s: float = 0.020
    token_s: float = 0.0006
    context_token_s: float = 2e-7

    def seconds(self, step: StepMetadata) -> float:
        context = int(step.seq_lens.sum())
        return self.step_s + self.token_s * step.num_tokens + self.context_token_s * context


def pooled_lens(step: StepMetadata, hidden_size: int) -> np.ndarray:
    """Return the number of values that ranks return for each pooled sequence: int32 [Q]."""
    seqs, kinds = step.pool_seqs, step.pool_kinds
    counts, lens = np.diff(step.query_start_loc)[seqs], step.seq_lens[seqs]
    ends, begins = lens == step.pool_lens, lens == counts
    vectors = np.select([kinds == TOKEN, kinds == CLS], [counts, begins], ends)
    return np.where(kinds == LOGITS, ends * step.pool_num_ids, vectors * hidden_size).astype(np.int32)


class VirtualClock:
    """Seconds since the start of a simulation, advanced by `SimulatedExecutor`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SimulatedAdapters:
    """LoRA adapters of simulated ranks: loading takes virtual seconds, and slots know only the digest they contain."""

    def __init__(
        self, max_loras: int, max_in_host_memory: int, clock: Callable[[], float], load_s: float = 0.1
    ) -> None:
        """Take `load_s`, the seconds of each load. A directory whose name begins with `broken` cannot be loaded, and a
        directory whose name begins with `stalled` cannot be read."""
        self.slots: list[str | None] = [None] * (1 + max_loras)
        self._max_in_host_memory = max_in_host_memory
        self._clock, self._load_s = clock, load_s
        self._loading: dict[str, tuple[float, str | None]] = {}  # digest -> time of the end, failure
        self.loaded: set[str] = set()

    def prepare(self, digest: str, directory: str) -> None:
        assert digest not in self.loaded and digest not in self._loading, "an adapter is loaded twice"
        assert len(self.loaded) + len(self._loading) < self._max_in_host_memory, "host memory is full"
        failure = _failure(directory.rpartition("/")[2])
        self._loading[digest] = self._clock() + self._load_s, failure

    def put(self, digest: str, slot: int) -> None:
        assert digest in self.loaded and 0 < slot < len(self.slots), "an adapter is put before it is loaded"
        self.slots = [None if held == digest else held for held in self.slots]
        self.slots[slot] = digest

    def drop(self, digest: str) -> None:
        self.slots = [None if held == digest else held for held in self.slots]
        self._loading.pop(digest, None)
        self.loaded.discard(digest)

    def ready(self) -> dict[str, str | None]:
        ended = {digest: failure for digest, (at_s, failure) in self._loading.items() if at_s <= self._clock()}
        for digest, failure in ended.items():
            del self._loading[digest]
            if failure is None:
                self.loaded.add(digest)
        return ended


def _failure(name: str) -> str | None:
    if name.startswith("stalled"):
        return STALLED
    return "it is broken" if name.startswith("broken") else None


class SimulatedExecutor:
    """Returns each step's output after its virtual seconds, with tokens that depend only on (seed, position).

    A step passes through the pipeline stages, whose costs are `costs`. A stage begins a step when the step has left
    the stage before, and the previous step has left this stage.
    """

    rank_pids: tuple[int, ...] = ()
    step_times_ns: tuple[int, ...] = ()
    best_in_flight = 1
    kv_reports: KVReports | None = None

    def __init__(
        self,
        config: WorkerConfig,
        info: WorkerInfo,
        costs: tuple[CostModel, ...],
        clock: VirtualClock,
        ends: np.ndarray,
    ) -> None:
        """Take `ends`, int64 by seed: the position at which each sequence gets `END_TOKEN`."""
        self.max_in_flight = max(2, len(costs))
        self.config = config
        self.info = info
        self._costs = costs
        self._clock = clock
        self._ends = ends
        self.num_tokens = 0  # tokens computed in all steps
        self.busy_s = [0.0] * len(costs)  # busy time of each stage
        self._free_at_s = [0.0] * len(costs)  # time at which each stage has finished all submitted steps
        self._steps: deque[tuple[StepMetadata, float]] = deque()  # step, time of its output
        self.adapters = SimulatedAdapters(config.max_loras, config.num_host_adapters, clock)
        self._adapter_control = AdapterControl(self.adapters)

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        at_s = self._clock.now_s
        for stage, cost in enumerate(self._costs):
            seconds = cost.seconds(step)
            at_s = self._free_at_s[stage] = max(at_s, self._free_at_s[stage]) + seconds
            self.busy_s[stage] += seconds
        self._steps.append((step, at_s))

    def send_masks(self, bits: np.ndarray) -> None:
        """Ignore the masks, since simulated tokens do not depend on them."""

    def collect(self) -> StepOutput:
        step, at_s = self._steps.popleft()
        self._clock.now_s = max(self._clock.now_s, at_s)
        self.num_tokens += step.num_tokens
        reports = self._run_commands(step) if len(step.adapter_commands) else []
        if len(step.adapter_slots):
            empty = [slot for slot in step.adapter_slots.tolist() if slot != NO_SLOT and not self.adapters.slots[slot]]
            assert not empty, "a step computes with an empty slot"
        mixed = step.seeds * 1_000_003 + step.sample_positions.astype(np.int64) * 7919
        sampled = np.where(
            step.sample_positions == self._ends[step.seeds], END_TOKEN, 1 + mixed % (self.info.vocab_size - 1)
        )
        token_ids = np.where(step.target_ids >= 0, step.target_ids, sampled)
        lens = pooled_lens(step, self.info.hidden_size)
        output = StepOutput(step.step_id, token_ids.astype(np.int32), np.ones(len(token_ids), bool), pooled_lens=lens)
        output.pooled = np.zeros(int(lens.sum()), np.float32)
        return replace(output, **report_fields(reports)) if reports else output

    def _run_commands(self, step: StepMetadata) -> list[AdapterReport]:
        commands = read_commands(step.adapter_commands, step.adapter_digests, step.adapter_texts)
        return self._adapter_control.run(commands)

    def ping(self) -> None:
        return None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        self._steps.clear()


def replica_info(
    worker: WorkerConfig,
    num_blocks: int,
    vocab_size: int,
    *,
    sliding_window: int | None = None,
    groups: tuple[GroupInfo, ...] = (),
) -> WorkerInfo:
    """Return the `WorkerInfo` that ranks would report. Raises `ValueError` without `max_model_len`."""
    if worker.max_model_len is None:
        raise ValueError("a simulation has no model to read max_model_len from: set it")
    return WorkerInfo(
        num_blocks=num_blocks,
        block_size=worker.block_size,
        max_model_len=worker.max_model_len,
        vocab_size=vocab_size,
        tensor_parallel_size=worker.tensor_parallel_size,
        device="simulated",
        dtype="none",
        attention_backend="none",
        architecture="Simulated",
        num_parameters=0,
        weight_bytes_per_rank=0,
        kv_bytes_per_token_per_rank=0,
        load_seconds=0.0,
        sliding_window=sliding_window,
        hidden_size=HIDDEN_SIZE,
        groups=groups,
    )


# Share of a device's data-sheet speed, or of a measured read, that steps reach.
BANDWIDTH_REACHED, OPS_REACHED = {"cuda": 0.80, "cpu": 0.80}, {"cuda": 0.55, "cpu": 0.90}
# Seconds that every step adds: launch, sampling, the engine and its messages.
STEP_S = {"cuda": 0.0005, "cpu": 0.0008}


class StepLoad(NamedTuple):
    """Work of one step."""

    tokens: int  # computed tokens
    rows: int  # rows of logits: one of each sequence
    context: int  # tokens whose keys and values are read
    pairs: float  # pairs of a computed token and a token of its context


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one device, or of a host whose ranks share it. Per second."""

    bandwidth: float  # bytes of memory read
    ops: float  # multiplications and additions in the model's dtype
    link: float  # bytes to another rank
    sum_s: float  # seconds of a very small all-reduce
    step_s: float  # seconds that every step adds
    is_shared: bool  # shared by all ranks

    @staticmethod
    def reached(device: str, bandwidth: float, ops: float, link: float, sum_s: float) -> "Speed":
        """Return the speed that steps reach, from a data sheet or a measurement."""
        kept = BANDWIDTH_REACHED[device] * bandwidth, OPS_REACHED[device] * ops
        return Speed(*kept, link, sum_s, STEP_S[device], device == "cpu")


@dataclass(frozen=True, slots=True)
class Roofline:
    """Time of one server's steps by the roofline model: its pipeline stages run one after another."""

    stages: tuple[RankWork, ...]
    ranks: int  # ranks of each stage
    speed: Speed
    replicas: int = 1  # replicas that share the host

    def seconds(self, load: StepLoad) -> float:
        return self.speed.step_s + sum(self._stage_s(work, load) for work in self.stages)

    def _stage_s(self, work: RankWork, load: StepLoad) -> float:
        speed = self.speed
        crowd = self.ranks * self.replicas if speed.is_shared else 1
        # Tokens choose independently: an expert is read unless no token chooses it.
        experts = work.expert_bytes * (1.0 - (1.0 - work.expert_share) ** load.tokens)
        memory = work.kv_bytes * load.context + 2 * work.state_bytes * load.rows
        read_s = (work.weight_bytes + experts + memory) * crowd / speed.bandwidth
        ops = work.token_ops * load.tokens + work.row_ops * load.rows + work.pair_ops * load.pairs
        sums_s = work.num_sums * speed.sum_s
        if speed.link:
            sums_s += (work.sum_bytes + work.pass_bytes) * load.tokens / speed.link
        return max(read_s, ops * crowd / speed.ops) + sums_s


def decode_tokens_per_s(time: Roofline, users: int, context: int) -> float:
    """Return the generated tokens per second of all `users` together, each with `context` tokens, one token a step."""
    return users / time.seconds(StepLoad(users, users, users * context, users * context)) if users else 0.0


def prompt_tokens_per_s(time: Roofline, tokens: int) -> float:
    """Return the prompt tokens per second of a step that computes the first `tokens` of one prompt."""
    return tokens / time.seconds(StepLoad(tokens, 1, tokens, tokens * (tokens + 1) / 2))
