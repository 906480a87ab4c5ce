"""Ranks without a model: KV memory that remembers what was written where, and tokens that depend on it.

A token is a function of (history, seed, position), and the history is read back through the block table, so that any
error in paging, sharing, recomputation or batching shows as a wrong token or a failed check.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.input_batch.input_batch import InputBatch
from oarlock.engine.input_batch.sampling_metadata import GrammarBitmask, fill_one_by_one
from oarlock.engine.kv_cache.sequence_memory import UNSENT, num_state_slots, page_groups
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.sequence import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, Status
from oarlock.engine.simulated_ranks import SimulatedAdapters, replica_info
from oarlock.engine.types import FinishReason, Request, SamplingParams, TokenEvent, TokenLogprobs
from oarlock.workers.adapters import NO_SLOT, AdapterControl, max_commands, read_commands, report_fields
from oarlock.workers.config import GroupInfo, WorkerConfig, WorkerInfo
from oarlock.workers.errors import WorkerError
from oarlock.workers.protocol import (
    ALL_BANNED,
    FINITE,
    NONFINITE,
    StepMetadata,
    StepOutput,
    refusal,
)
from tests.unit.engine.pooling_fakes import ROOT, FakePooler, chain, expected_vectors, score
from tests.unit.engine.sampling_fakes import VOCAB, FakeHistories, allowed_ids, choices_of, matcher_of, past_of
from tests.unit.engine.state_fakes import FakeStates

EOS = 7


def make_config(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    block_size: int = 4,
    max_model_len: int = 64,
    step_timeout_s: float = 120.0,
    speculative: SpeculativeConfig | None = None,
    stages: int = 1,
    max_loras: int = 0,
    max_cpu_loras: int | None = None,
    **engine,
) -> EngineConfig:
    worker = WorkerConfig(
        "nowhere",
        device="cpu",
        dtype="float32",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        max_model_len=max_model_len,
        step_timeout_s=step_timeout_s,
        pipeline_parallel_size=stages,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        num_speculative_tokens=0 if speculative is None else speculative.num_speculative_tokens,
    )
    return EngineConfig(worker, speculative=speculative, **engine)


def make_info(
    config: EngineConfig,
    num_blocks: int = 33,
    sliding_window: int | None = None,
    groups: tuple[GroupInfo, ...] = (),
) -> WorkerInfo:
    return replica_info(config.worker, num_blocks, VOCAB, sliding_window=sliding_window, groups=groups)


def make_request(request_id: int, prompt, *, priority: int = 0, is_low_priority: bool = False, **params) -> Request:
    whose = {name: params.pop(name) for name in ("cache_salt", "client", "adapter") if name in params}
    sampling = SamplingParams(**{"seed": request_id, "max_tokens": 4, **params})
    return Request(request_id, tuple(prompt), sampling, priority, is_low_priority=is_low_priority, **whose)


def next_token(history: int, seed: int, position: int, banned=(), past=()) -> int:
    """`past` is whatever else moves logits: it must be the same whenever the same token is chosen again."""
    assert len(set(banned)) < VOCAB
    offset = 0
    while (token := hash((history, seed, position, offset, *past)) % VOCAB) in banned:
        offset += 1
    return token


def root_of(digest: str | None) -> int:
    """History before the first token of a request with the adapter `digest`."""
    return ROOT if digest is None else hash((ROOT, int(digest, 16)))


def expected_tokens(request: Request, max_len: int = 64, root: int = ROOT) -> list[int]:
    """Tokens that the fake model generates for `request` when it runs alone."""
    params = request.params
    history = root
    for position, token in enumerate(request.prompt_token_ids):
        history = chain(history, token, position)
    length = len(request.prompt_token_ids)
    stops = {*params.eos_token_ids, *params.stop_token_ids}
    tokens: list[int] = []
    while len(tokens) < params.max_tokens and length + len(tokens) < max_len:
        position = length + len(tokens)
        banned = set(range(VOCAB)) - allowed_ids(params, tokens)
        if len(banned) == VOCAB:
            break
        past = past_of(params, request.prompt_token_ids, tokens)
        token = next_token(history, params.seed, position, banned, past)
        tokens.append(token)
        history = chain(history, token, position)
        if token in stops or (params.grammar is not None and len(tokens) >= int(params.grammar.text)):
            break
    return tokens


def expected_prompt_scores(request: Request, root: int = ROOT) -> list[tuple[int, float]]:
    history = root
    scores = []
    prompt = request.prompt_token_ids
    for position, token in enumerate(prompt[:-1]):
        history = chain(history, token, position)
        scores.append((prompt[position + 1], score(history, prompt[position + 1])))
    return scores


@dataclass
class Faults:
    """Faults of the fake ranks, and when they occur."""

    poisoned_seeds: tuple[int, ...] = ()  # rows with such a seed have logits that are not finite,
    poisoned_from: int = 0  # from this position on
    poisoned_ids: frozenset[int] = frozenset()  # vectors made in a step with such a token of theirs are not finite
    die_at_step: int | None = None
    hang_at_step: int | None = None
    die_at_ping: int | None = None
    refuses: Callable[[StepMetadata], bool] = lambda step: False  # for lack of memory


class FakeExecutor:
    """An executor with one rank of plain Python; checks every step."""

    rank_pids, step_times_ns, best_in_flight, kv_reports = (), (), 1, None

    def __init__(self, config: EngineConfig, info: WorkerInfo, faults: Faults | None = None) -> None:
        self.max_in_flight = max(2, config.worker.pipeline_parallel_size)
        self.config = config.worker
        self.info = info
        self.faults = faults or Faults()
        self.num_steps = 0
        self.num_pings = 0
        self.is_closed = False
        self._spans = {number: group.span for number, group in page_groups(info, 1).items() if number != UNSENT}
        # By memory group: slot -> (history, token, position)
        self._kv: dict[int, dict[int, tuple[int, int, int]]] = {number: {} for number in self._spans}
        num_slots = num_state_slots(info)
        self.states = None if num_slots is None else FakeStates(num_slots)
        self._steps: deque[StepMetadata] = deque()
        width = -(-info.max_model_len // info.block_size)
        shape = config.worker.max_num_seqs, width
        self._tables = {number: np.full(shape, -1, np.int32) for number in self._spans}  # -1: never written
        # For each step of `_steps`, the tables of its sequences in each group: [S, width]
        self.tables: deque[dict[int, np.ndarray]] = deque()
        self._lacks_masks = False  # the newest of them
        self._histories = FakeHistories()
        self._pooler = FakePooler(self.faults.poisoned_ids)
        self._last_step_id = 0
        self._sampled = np.zeros(0, np.int32)  # by the step before
        self._has_refused = False  # the step before
        self.num_refused = 0
        worker = config.worker
        # A load takes a few steps.
        self.adapters = SimulatedAdapters(worker.max_loras, worker.num_host_adapters, lambda: float(self.num_steps), 3)
        self._adapter_control = AdapterControl(self.adapters)

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        assert not self.is_closed and len(self._steps) < self.max_in_flight
        assert not self._lacks_masks, "the masks of the step before were not sent"
        self._lacks_masks = masks_follow
        assert step.step_id > self._last_step_id
        self._last_step_id = step.step_id
        self._write_tables(step, step.table_blocks)
        tables = {number: table[step.rows] for number, table in self._tables.items()}
        self._check(step, tables)
        self._steps.append(step)
        self.tables.append(tables)

    def send_masks(self, bits: np.ndarray) -> None:
        assert self._lacks_masks and bits.shape == self._steps[-1].mask_bits.shape
        self._steps[-1].mask_bits = bits
        self._lacks_masks = False

    def collect(self) -> StepOutput:
        assert len(self._steps) > self._lacks_masks, "the step waits for its masks"
        step, tables = self._steps.popleft(), self.tables.popleft()
        self.num_steps += 1
        commands = read_commands(step.adapter_commands, step.adapter_digests, step.adapter_texts)
        reports = report_fields(self._adapter_control.run(commands))
        if step.step_id == self.faults.die_at_step:
            raise WorkerError(1, step.step_id, "killed by signal 9")
        if step.step_id == self.faults.hang_at_step:
            raise WorkerError(1, step.step_id, "no answer within 5 s", hung=True)
        is_behind = step.is_ahead and self._has_refused
        self._has_refused = is_behind or self.faults.refuses(step)
        if self._has_refused:
            self._spoil(step, tables)
            if self.states is not None and (not is_behind or self.config.pipeline_parallel_size > 1):
                self.states.spoil(step)  # earlier stages run a step behind one that a later stage refuses
            return replace(refusal(step.step_id), **reports)
        unknown = step.token_ids < 0
        step.token_ids[unknown] = self._sampled[-1 - step.token_ids[unknown]]
        output = self._answer(step, self._compute(step, tables))
        self._histories.add(step, output.token_ids.tolist())
        self._sampled = output.token_ids
        return replace(output, **reports)

    def _write_tables(self, step: StepMetadata, blocks: np.ndarray) -> None:
        entries = zip(step.table_groups, step.table_rows, step.table_columns, blocks, strict=True)
        for group, row, column, block in entries:
            self._tables[int(group)][row, column] = block

    def _spoil(self, step: StepMetadata, tables: dict[int, np.ndarray]) -> None:
        """Spoil everything that a refused step may have written."""
        self.num_refused += 1
        for number, table in tables.items():
            for slot in self._slots_of_step(step, table):
                self._kv[number][slot] = (0, -1, -1)
        self._write_tables(step, np.full(len(step.table_blocks), -1))
        self._histories.write(step)
        for row in step.rows.tolist():
            self._histories.spoil(row)
            self._pooler.spoil(row)

    def ping(self) -> None:
        self.num_pings += 1
        if self.num_pings == self.faults.die_at_ping:
            raise WorkerError(0, self._last_step_id, "exit status 1")

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        self.is_closed = True

    def _check(self, step: StepMetadata, tables: dict[int, np.ndarray]) -> None:
        worker, size = self.config, self.info.block_size
        has_commands = len(step.adapter_commands) > 0
        assert has_commands or step.num_seqs > 0
        assert step.num_seqs <= worker.max_num_seqs
        assert (step.num_seqs > 0) == (step.num_tokens > 0) and step.num_tokens <= worker.max_num_batched_tokens
        assert len(step.adapter_slots) in (0, step.num_seqs)
        assert len(step.adapter_commands) <= max_commands(worker)
        assert len(set(step.adapter_slots.tolist()) - {NO_SLOT}) <= worker.max_loras
        for table in tables.values():
            slots = self._slots_of_step(step, table)
            assert len(set(slots)) == step.num_tokens, "two tokens share a slot"
            assert min(slots, default=size) >= size, "the null block is written"
        entries = {*zip(step.table_groups, step.table_rows, step.table_columns, strict=True)}
        assert len(entries) == len(step.table_blocks)
        ends = step.query_start_loc.tolist()
        for s in range(step.num_seqs):
            positions = step.positions[ends[s] : ends[s + 1]].tolist()
            assert positions == list(range(step.seq_lens[s] - len(positions), step.seq_lens[s])), "positions jump"
        if self.states is not None:
            self.states.check(step)

    def _slots_of_step(self, step: StepMetadata, table: np.ndarray) -> list[int]:
        """Return the slots of the tokens' keys and values in one group, whose table is [S, width]."""
        size, seqs = self.info.block_size, np.repeat(np.arange(step.num_seqs), np.diff(step.query_start_loc))
        return (table[seqs, step.positions // size].astype(int) * size + step.positions % size).tolist()

    def _roots(self, step: StepMetadata) -> list[int]:
        """Return the history before the first token of each sequence, which its adapter decides."""
        slots = step.adapter_slots.tolist() or [NO_SLOT] * step.num_seqs
        digests = [None if slot == NO_SLOT else self.adapters.slots[slot] for slot in slots]
        assert all(digest or slot == NO_SLOT for digest, slot in zip(digests, slots, strict=True)), "an empty slot"
        return list(map(root_of, digests))

    def _compute(self, step: StepMetadata, tables: dict[int, np.ndarray]) -> list[int]:
        """Write every token's KV into each group and return the history up to and including each token."""
        found, roots = [], self._roots(step)
        for number, table in tables.items():
            kv, slots, span, histories = self._kv[number], self._slots_of_step(step, table), self._spans[number], []
            ends = step.query_start_loc.tolist()
            for s in range(step.num_seqs):
                start = int(step.positions[ends[s]])
                first = 0 if span is None else max(0, start - span + 1)
                history = self._context(kv, self._slots(table[s], start), first, roots[s])
                for t in range(ends[s], ends[s + 1]):
                    token, position = int(step.token_ids[t]), int(step.positions[t])
                    history = chain(history, token, position)
                    kv[slots[t]] = (history, token, position)
                    histories.append(history)
            found.append(histories)
        if self.states is not None:
            found.append(self.states.run(step))
        assert all(histories == found[0] for histories in found), "groups with other tokens"
        return found[0]

    def _slots(self, table: np.ndarray, length: int) -> list[int]:
        size, blocks = self.info.block_size, table.tolist()
        return [blocks[p // size] * size + p % size for p in range(length)]

    def _context(self, kv: dict[int, tuple[int, int, int]], slots: list[int], first: int, root: int) -> int:
        """Read the context back through the block table: each entry from `first` on must follow the one before."""
        history = root
        for position in range(first, len(slots)):
            stored, token, at = kv[slots[position]]
            follows = position == first > 0 or stored == chain(history, token, position)
            assert at == position and follows, "KV of another sequence"
            history = stored
        return history

    def _answer(self, step: StepMetadata, histories: list[int]) -> StepOutput:
        banned, past = choices_of(step, self._histories)
        tokens, logprobs = [], []
        poisoned = np.isin(step.seeds, self.faults.poisoned_seeds)
        poisoned &= step.sample_positions >= self.faults.poisoned_from
        finite = np.where(poisoned, NONFINITE, FINITE).astype(np.uint8)
        for row, index in enumerate(step.logits_indices.tolist()):
            history, target = histories[index], int(step.target_ids[row])
            assert step.sample_positions[row] == step.positions[index] + 1
            assert target < 0 or not (banned[row] or past[row]), "a scored row has constraints"
            if len(banned[row]) == VOCAB:
                target = 0
                finite[row] = NONFINITE if finite[row] == NONFINITE else ALL_BANNED
            seed, position = int(step.seeds[row]), int(step.sample_positions[row])
            if target < 0:
                target = next_token(history, seed, position, banned[row], sorted(past[row]))
            tokens.append(target)
            logprobs.append(score(history, target))
        output = StepOutput(step.step_id, np.array(tokens, np.int32), finite, num_accepted=_num_accepted(step, tokens))
        output.pooled_lens, output.pooled = self._pooler.pool(step, histories)
        k = step.max_num_logprobs
        if k < 0:
            return output
        top_ids = np.tile(np.arange(k, dtype=np.int32), (len(tokens), 1))
        return replace(
            output,
            logprobs=np.array(logprobs, np.float32),
            ranks=np.ones(len(tokens), np.int32),
            top_ids=top_ids,
            top_logprobs=-top_ids.astype(np.float32),
        )


def _num_accepted(step: StepMetadata, sampled: list[int]) -> np.ndarray | None:
    """By sequence: how many of its drafts are what was sampled before them."""
    if not len(step.num_drafts):
        return None
    row_of = {int(index): row for row, index in enumerate(step.logits_indices)}
    accepted = []
    for end, count in zip(step.query_start_loc[1:].tolist(), step.num_drafts.tolist(), strict=True):
        drafts = range(end - count, end)
        wrong = [place for place, t in enumerate(drafts) if step.token_ids[t] != sampled[row_of[t - 1]]]
        accepted.append(wrong[0] if wrong else count)
    return np.array(accepted, np.int32)


class Driver:
    """Runs the scheduler, the input batch and the fake ranks step by step, and checks every step.

    At a pipeline depth of 2 a step may begin while the one before is in flight, with stages one in each of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_blocks: int = 33,
        faults: Faults | None = None,
        sliding_window: int | None = None,
        groups: tuple[GroupInfo, ...] = (),
    ) -> None:
        self.config = config
        self.info = make_info(config, num_blocks, sliding_window, groups)
        self.scheduler = Scheduler(config, self.info)
        self.executor = FakeExecutor(config, self.info, faults)
        self.input_batch = InputBatch(max_num_seqs=self.scheduler.max_num_seqs, vocab_size=VOCAB)
        self.now = 0.0
        self.in_flight: deque[SchedulerOutput] = deque()
        self.items: list[ScheduledTokens] = []  # of the step that was begun last
        self.num_ahead = 0  # steps that began while another was in flight
        self._must_finish = self._must_drain = False
        self._masks: GrammarBitmask | None = None  # that the ranks lack
        self.num_late_masks = 0  # steps whose masks had to wait for the answer to the one before
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, TokenEvent] = {}
        self.events: list[TokenEvent] = []
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.pooled: dict[int, list[float]] = {}
        self.roots: dict[int, int] = {}  # request id -> history before its first token

    def add(self, request: Request) -> None:
        grammar = request.params.grammar
        self.scheduler.add(request, self.now, None if grammar is None else matcher_of(grammar))
        adapter = self.scheduler.requests.by_id[request.request_id].adapter
        self.roots[request.request_id] = root_of(None if adapter is None else adapter.digest)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []

    def begin(self, num_withdrawn: int = 0) -> SchedulerOutput | None:
        """Decide a step and submit it, without the first `num_withdrawn` of its sequences."""
        assert self.may_begin
        self._send_masks()
        self._must_drain &= bool(self.in_flight)
        if self._must_drain:
            self._must_finish = True
            return None
        self.now += 0.01
        cached = [dict(pool.block_of_hash) for pool in self.scheduler.memory.pools]
        output = self.scheduler.schedule(self.now, ahead=bool(self.in_flight))
        if output is not None:
            self._check(output, cached)
            if num_withdrawn and output.num_seqs:
                self.scheduler.withdraw(output, output.items()[:num_withdrawn], self.now)
                self.scheduler.audit()
        is_sent = output is not None and (output.num_seqs > 0 or bool(output.adapter_commands))
        if output is not None and is_sent:
            self.items = output.items()
            step, masks = self.input_batch.build(output)
            self.executor.submit(step, masks_follow=masks is not None)
            self._masks = masks
            self.num_ahead += bool(self.in_flight)
            self.in_flight.append(output)
        self.see(self.scheduler.take_events())
        if not is_sent:
            self._must_finish = bool(self.in_flight)
            return None
        return output

    @property
    def may_begin(self) -> bool:
        config = self.config
        return len(self.in_flight) < max(config.pipeline_depth or 1, config.num_micro_batches) and not self._must_finish

    def finish(self, output: SchedulerOutput | None = None) -> list[TokenEvent]:
        """Apply the answer to the oldest step in flight, which is `output` if given."""
        self._send_masks()
        oldest = self.in_flight.popleft()
        assert output is None or output is oldest
        output, self._must_finish = oldest, False
        answer = self._collect()
        if answer.out_of_memory:
            return self._roll_back(output)
        result = ModelRunnerOutput(answer)
        events = list(self.scheduler.update_from_output(output, result, self.now))
        self.see(events)
        self.num_late_masks += self._masks is not None
        self.scheduler.audit()
        return events

    def _roll_back(self, output: SchedulerOutput) -> list[TokenEvent]:
        if self._masks is not None:
            self.executor.send_masks(self._masks.allow_all)
            self._masks = None
        for _ in self.in_flight:
            assert self._collect().out_of_memory
        events = self.scheduler.roll_back([output, *self.in_flight], self.now)
        self.in_flight.clear()
        self.input_batch.forget_histories()
        self.see(events)
        self.scheduler.audit()
        return events

    def _collect(self) -> StepOutput:
        answer = self.executor.collect()
        self.scheduler.requests.report_adapters(answer, self.now)
        self.see(self.scheduler.take_events())
        return answer

    def remove_adapter(self, name: str) -> None:
        """Unload an adapter; its requests end in the order of their arrival."""
        requests = self.scheduler.requests
        assert self.scheduler.adapters is not None
        open_ids = [number for number, seq in requests.by_id.items() if seq.request.adapter == name]
        events = self.scheduler.adapters.remove(name, list(requests.by_id.values()), self.now)
        assert [event.request_id for event in events] == open_ids
        self.see(events)
        self.scheduler.audit()

    def _send_masks(self) -> None:
        if (masks := self._masks) is None or (len(self.in_flight) > 1 and masks.must_wait):
            return
        self._masks = None
        self.executor.send_masks(masks.compute(self.fill_masks))
        self.see([self.scheduler.complete(seq, self.now) for seq in masks.complete])
        ends = [self.scheduler.end_without_mask(seq, error, self.now) for seq, error in masks.failed.items()]
        self.see([event for event in ends if event is not None])
        self._must_drain |= None in ends

    fill_masks = staticmethod(fill_one_by_one)

    def step(self) -> SchedulerOutput | None:
        """Begin a step, and finish the oldest one when no more may begin."""
        output = self.begin() if self.may_begin else None
        if self.in_flight and not (output is not None and self.may_begin):
            output = output or self.in_flight[0]
            self.finish()
        return output

    def abort(self, request_id: int) -> None:
        event = self.scheduler.abort(request_id, self.now)
        self.see([] if event is None else [event])
        self.scheduler.audit()

    def run(self, most: int = 5000) -> "Driver":
        for _ in range(most):
            if not self.scheduler.has_work and not self.in_flight:
                return self
            assert self.step() is not None, "there is work, but no step"
        raise AssertionError(f"not idle after {most} steps")

    def see(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events.append(event)
            assert event.request_id not in self.ends, "an event after the terminal one"
            self.tokens[event.request_id] += event.token_ids
            if event.prompt_logprobs:
                assert len(self.tokens[event.request_id]) == len(event.token_ids), "scores after the first token"
                self.prompt_logprobs.setdefault(event.request_id, []).extend(event.prompt_logprobs)
            if event.pooled:
                self.pooled.setdefault(event.request_id, []).extend(event.pooled)
            if event.finish_reason is not None:
                self.ends[event.request_id] = event

    def check_outputs(self) -> None:
        """Every request has ended once, with the tokens that it gets when it runs alone."""
        assert self.ends.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            if request.pooling is not None:
                vectors, reason = self.pooled.get(request_id, []), self.ends[request_id].finish_reason
                expected = np.array(expected_vectors(request, self.roots[request_id]), np.float32).tolist()
                assert vectors == (expected if reason is FinishReason.STOP else expected[: len(vectors)])
                assert reason is not FinishReason.LENGTH
                continue
            expected = expected_tokens(request, self.scheduler.limits.max_len, self.roots[request_id])
            got = self.tokens[request_id]
            if self.ends[request_id].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == expected
                if request.params.prompt_logprobs is not None:
                    pairs = [(e.token_id, e.logprob) for e in self.prompt_logprobs.get(request_id, ())]
                    assert pairs == expected_prompt_scores(request, self.roots[request_id])
            else:
                assert got == expected[: len(got)]

    def check_idle(self) -> None:
        memory = self.scheduler.memory
        assert memory.num_held == 0
        assert memory.num_free + memory.num_cached == memory.num_total
        if memory.slots is not None:
            memory.slots.begin_step()
            assert memory.slots.num_available == memory.slots.num_total, "a slot is held, pinned or never saved"
        self.scheduler.audit()

    def _check(self, output: SchedulerOutput, cached: list[dict[bytes, int]]) -> None:
        """`cached`: the prefix cache before this step was decided."""
        scheduler = self.scheduler
        allocated = {(group, block) for group, _, _, block in output.new_blocks}
        new = [seq for seq in output.new_rows if seq.status is Status.RUNNING]
        assert not (output.num_preempted and new), "blocks freed by preemption are given to a new sequence"
        assert not (output.num_preempted and self.in_flight), "a sequence whose token is to come is preempted"
        assert output.num_seqs <= scheduler.max_num_seqs
        if scheduler.adapters is not None:
            assert len({item.seq.adapter for item in output.items()} - {None}) <= self.config.worker.max_loras
        assert sum(item.num_tokens for item in output.items()) <= scheduler.max_num_batched_tokens
        for item in output.items():
            assert item.num_tokens > 0 and item.start + item.num_tokens == item.seq.num_computed_tokens
            size = scheduler.memory.block_size
            first, last = item.start // size, (item.start + item.num_tokens - 1) // size
            for manager, before in zip(scheduler.memory.managers, cached, strict=True):
                for block in item.seq.tables[manager.index].block_ids[first : last + 1]:
                    block_hash = manager.pool.hash_of_block[block]
                    is_new = (manager.number, block) in allocated or before.get(block_hash or b"") != block
                    assert block_hash is None or is_new, "a cached block is written"
                    assert block_hash is not None or manager.pool.refs[block] == 1, "a shared block is written"
