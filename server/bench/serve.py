"""`bench serve` from start to end: ask the server for its model, warm it up, run the load, summarize.

A load is a closed loop of users, or an open loop with its own times of arrival, until a number or a time is reached. If
cancelled (Ctrl-C), it ends the open requests, counts them as interrupted, and returns the measurements so far.
"""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import uvloop

from oarlock.server.bench import metrics, workload
from oarlock.server.bench.client import AssignedAdapters, OpenRequest, RequestForm, choose_prompts, listed_model
from oarlock.server.bench.http_stream import EventReader, HttpClient, Target
from oarlock.server.bench.metrics import Cause, Result, Sample
from oarlock.server.bench.workload import (
    IdPrompts,
    Lengths,
    MultiTurn,
    Piece,
    Prompts,
    RandomPrompts,
    SharedPrefix,
    Traced,
    TracedPrompts,
    Workload,
    WorkloadTurn,
)

EVERY_S = 0.01
LATE_MS = 5.0  # a timer's own resolution is 1 ms
LATE_SHARE = 0.2  # fraction of the gap between two chunks
BUSY = 0.9
_T = TypeVar("_T")
_AFTER_NO_CONNECTION_S = 0.1  # a server that is gone is not asked ten thousand times a second
OnSample = Callable[[Sample], None]
DEFAULT_REQUESTS = 100


class LoopLag:
    """Record of how late the event loop runs a timer of 10 ms."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._began = self._cpu = 0.0

    def start(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._wait(asyncio.get_running_loop())

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.perf_counter() + EVERY_S
        self._handle = loop.call_later(EVERY_S, self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._late.append(max(0.0, time.perf_counter() - self._due))
        self._wait(loop)

    def stop(self) -> dict[str, Any]:
        """Stop and return the figures: `lag_ms` (p50, p99, longest) and `cpu_share` (CPU seconds per second)."""
        if self._handle is not None:
            self._handle.cancel()
        lasted = time.perf_counter() - self._began
        late = 1e3 * np.array(self._late or [max(0.0, time.perf_counter() - self._due)])
        lag = {"p50": np.percentile(late, 50), "p99": np.percentile(late, 99), "max": late.max()}
        return {
            "lag_ms": {name: float(value) for name, value in lag.items()},
            "cpu_share": (time.process_time() - self._cpu) / lasted if lasted else 0.0,
        }


def warning(client: dict[str, Any], gap_ms: float) -> str | None:
    """Return one sentence if the client may have distorted the figures. `gap_ms`: the median time between two
    chunks."""
    lag, share = client["lag_ms"]["p99"], client["cpu_share"]
    if share > BUSY:
        return (
            f"The client used {share:.0%} of a core: it was a bottleneck itself, so the times are too long. "
            "Use fewer streams, or several clients."
        )
    if lag > max(LATE_MS, LATE_SHARE * gap_ms):
        return (
            f"The client's event loop was {lag:.1f} ms late (p99): times may be too long by that much. The "
            "client lacked CPU time: run it on a less busy machine, or with fewer streams."
        )
    return None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Load schedule of a run. Exactly one of `concurrency` (closed loop) and `times_s` (open loop) is given.

    `count`: maximum conversations; `seconds`: none begins after this time. In an open loop, `times_s` decides.
    """

    concurrency: int | None = None
    times_s: Sequence[float] | None = None
    count: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class Measured:
    """Samples and duration of a run. `duration_s`: from its start to the end of its last request."""

    samples: list[Sample] = field(default_factory=list)
    duration_s: float = 0.0
    client: dict[str, Any] = field(default_factory=dict)
    is_interrupted: bool = False


class LoadRun:
    """One run against one server."""

    def __init__(
        self, client: HttpClient, form: RequestForm, workload: Workload, schedule: Schedule, on_sample: OnSample
    ) -> None:
        self._client = client
        self._form = form
        self._workload = workload
        self._schedule = schedule
        self._on_sample = on_sample
        self._measured = Measured()
        self._began = 0.0

    async def measure(self) -> Measured:
        """Send everything and wait for the last response."""
        measured, lag = self._measured, LoopLag()
        lag.start()
        self._began = time.perf_counter()
        loop = self._open_loop() if self._schedule.times_s is not None else self._closed_loop()
        try:
            await loop
        except asyncio.CancelledError:
            measured.is_interrupted = True
        measured.duration_s = time.perf_counter() - self._began
        measured.client = lag.stop()
        return measured

    async def _closed_loop(self) -> None:
        """Let each user send its next conversation as soon as its last has ended."""
        assert self._schedule.concurrency is not None
        numbers = self._numbers()

        async def user() -> None:
            for number in numbers:
                if await self._converse(number, None) == Cause.CONNECT:
                    await asyncio.sleep(_AFTER_NO_CONNECTION_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._schedule.concurrency):
                group.create_task(user())

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers of conversations to begin, until a limit is reached."""
        count, seconds = self._schedule.count, self._schedule.seconds
        for number in itertools.count() if count is None else range(count):
            if seconds is not None and time.perf_counter() - self._began >= seconds:
                return
            yield number

    async def _open_loop(self) -> None:
        """Begin conversations at their times, whether or not earlier ones have ended."""
        assert self._schedule.times_s is not None
        async with asyncio.TaskGroup() as group:
            for number, due in enumerate(self._schedule.times_s):
                # A timer counts from the beginning of the loop's iteration, so it may be early.
                while (wait := self._began + due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(self._converse(number, due))

    async def _converse(self, number: int, due: float | None) -> str | None:
        """Send the turns of one conversation. After a turn that failed, the rest cannot be sent, and fail with it.

        Returns the cause of the failure.
        """
        turns = self._workload.conversation(number)
        said: list[tuple[Piece, str]] = []
        for at, turn in enumerate(turns):
            sample = Sample(0.0, turn.output_tokens, due if at == 0 else None, input_tokens=turn.input_tokens)
            reader = EventReader(is_chat=self._form.is_chat, keep_text=len(turns) > 1)
            asking = OpenRequest(self._client, self._form, sample, reader, self._began)
            try:
                await asking.run(self._form.body(self._prompt(said, turn), turn.output_tokens, number))
            finally:
                self._keep(sample)
            if sample.failure is not None:
                for left in turns[at + 1 :]:
                    detail = f"turn {at + 1} failed: {sample.failure}"
                    now = time.perf_counter() - self._began
                    self._keep(Sample(now, left.output_tokens, failure=str(Cause.PREVIOUS_TURN), detail=detail))
                return sample.failure
            said.append((turn.prompt, "".join(reader.texts)))
        return None

    def _prompt(self, said: list[tuple[Piece, str]], turn: WorkloadTurn) -> Piece | list[dict[str, str]]:
        """Return the prompt of a turn: all messages of a chat, else the text so far."""
        if not self._form.is_chat:
            return "".join(f"{asked}{answer}" for asked, answer in said) + str(turn.prompt) if said else turn.prompt
        messages = []
        for asked, answer in said:
            messages += [{"role": "user", "content": str(asked)}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": str(turn.prompt)}]

    def _keep(self, sample: Sample) -> None:
        self._measured.samples.append(sample)
        self._on_sample(sample)


def run_until_done(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` on a new event loop. SIGINT and SIGTERM cancel it, in the main thread; it may still return."""

    async def main() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stops = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        handled = [number for number in stops if signal.getsignal(number) is not signal.SIG_IGN]
        for number in handled:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await work
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Settings of one run: times in seconds, rates per second, lengths in tokens, limits of `goodput` in ms.

    An open loop has `request_rate` or `ramp`, a closed one `concurrency`; a trace without it is sent at its own times.
    """

    url: str
    model: str | None = None
    adapters: AssignedAdapters | None = None
    endpoint: str = "completions"
    concurrency: int | None = None
    request_rate: float | None = None
    ramp: tuple[float, float] | None = None
    burstiness: float = 1.0
    num_requests: int | None = None
    duration: float | None = None
    workload: str = "random"
    input_tokens: int = 128
    output_tokens: int = 64
    length_spread: float = 0.0
    prompt_form: str = "auto"
    vocab_size: int | None = None
    prefix_tokens: int = 256
    num_prefixes: int = 1
    turns: int = 4
    trace: Sequence[Traced] = ()
    trace_speed: float = 1.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    warmup: int = 1
    goodput: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.input_tokens, self.output_tokens, self.length_spread)

    @property
    def turns_each(self) -> int:
        """Requests per conversation."""
        return self.turns if self.workload == "multi-turn" else 1

    def make_schedule(self) -> Schedule:
        """Return the load schedule of the run: users of a closed loop, or arrival times of an open loop."""
        count, seconds = self.num_requests, self.duration
        if self.trace:
            kept = self.trace[: count or len(self.trace)]
            if self.concurrency is not None:
                return Schedule(concurrency=self.concurrency, count=len(kept), seconds=seconds)
            return Schedule(times_s=[each.at_s / self.trace_speed for each in kept])
        if self.ramp is not None:
            number = count or (workload.ramp_count(seconds, *self.ramp) if seconds else DEFAULT_REQUESTS)
            return Schedule(times_s=workload.ramp_arrivals(number, *self.ramp, self.burstiness, self.seed).tolist())
        if self.request_rate is not None:
            number = count or (max(1, round(seconds * self.request_rate)) if seconds else DEFAULT_REQUESTS)
            return Schedule(
                times_s=workload.constant_arrivals(number, self.request_rate, self.burstiness, self.seed).tolist()
            )
        if count is None and seconds is None:
            count = DEFAULT_REQUESTS
        return Schedule(concurrency=self.concurrency or 1, count=count, seconds=seconds)

    def make_workload(self, prompts: Prompts) -> Workload:
        """Return the workload that generates the run's conversations."""
        match self.workload:
            case "shared-prefix":
                return SharedPrefix(prompts, self.lengths, self.prefix_tokens, self.num_prefixes)
            case "multi-turn":
                return MultiTurn(prompts, self.lengths, self.turns)
            case "trace":
                return TracedPrompts(prompts, self.trace)
            case _:
                return RandomPrompts(prompts, self.lengths)

    def settings(self, model: str, prompts: Prompts) -> dict[str, Any]:
        """Return the settings that the result records, for people to read and to decide whether two results are
        comparable."""
        used = {} if self.adapters is None else {"adapters": self.adapters.text}
        return {
            "url": self.url,
            "model": model,
            **used,
            "endpoint": self.endpoint,
            "load": self.load_text,
            "prompts": self._prompts_text(prompts),
            "goodput": dict(self.goodput),
            "ignore_eos": self.ignore_eos,
            "extra_body": dict(self.extra_body),
            "timeout_s": self.timeout,
            "seed": self.seed,
        }

    @property
    def load_text(self) -> str:
        """The load in one line."""
        if self.trace and self.concurrency is None:
            return f"open loop, the timestamps of the trace, {self.trace_speed:g} times as fast"
        shape = {1.0: "Poisson", float("inf"): "even"}.get(self.burstiness, f"gamma of shape {self.burstiness:g}")
        if self.ramp is not None:
            return f"open loop, {self.ramp[0]:g} to {self.ramp[1]:g} requests per second, {shape}"
        if self.request_rate is not None:
            return f"open loop, {self.request_rate:g} requests per second, {shape}"
        limit = f", {self.duration:g} s" if self.duration else ""
        return f"closed loop, {self.concurrency or 1} at a time{limit}"

    def _prompts_text(self, prompts: Prompts) -> str:
        if self.workload == "trace":
            text = f"trace of {len(self.trace)} requests"
        else:
            spread = f", lengths ± {self.length_spread:.0%}" if self.length_spread else ""
            text = f"{self.workload}, {self.input_tokens} tokens in, {self.output_tokens} out{spread}"
        if self.workload == "shared-prefix":
            text += f", after {self.num_prefixes} shared prefix(es) of {self.prefix_tokens}"
        if self.workload == "multi-turn":
            text += f", {self.turns} turns"
        return f"{text}, as {'token ids' if isinstance(prompts, IdPrompts) else 'words'}"


def measure(plan: ServePlan, on_sample: OnSample | None = None) -> Result:
    """Measure one run, on an event loop of its own. Ctrl-C ends it early, with the measurements up to then.

    `on_sample` is called as each request ends. The key of the server is the environment's OPENAI_API_KEY. Raises
    `StartupError` if the server cannot be measured, and `ValueError` for a wrong URL.
    """
    return run_until_done(_measure(plan, on_sample or _ignore_sample))


async def _measure(plan: ServePlan, on_sample: OnSample) -> Result:
    client = HttpClient(Target.parse(plan.url), os.environ.get("OPENAI_API_KEY"))
    try:
        found = await listed_model(client, plan.model, plan.adapters.names if plan.adapters else ())
        is_chat = plan.endpoint == "chat"
        form = RequestForm(found.model, is_chat, plan.ignore_eos, plan.timeout, plan.extra_body, plan.adapters)
        needs_text = is_chat or plan.workload == "multi-turn"
        vocab_size = plan.vocab_size or found.vocab_size
        prompts = await choose_prompts(client, form, plan.prompt_form, vocab_size, plan.seed, needs_text=needs_text)
        if plan.warmup:
            warm = Schedule(concurrency=plan.warmup, count=plan.warmup)
            await LoadRun(client, form, RandomPrompts(prompts, plan.lengths, "warm"), warm, _ignore_sample).measure()
        run = LoadRun(client, form, plan.make_workload(prompts), plan.make_schedule(), on_sample)
        measured = await run.measure()
    finally:
        client.close()
    return Result(
        kind="serve",
        settings=plan.settings(form.model, prompts),
        summary=metrics.summarize(measured.samples, measured.duration_s, plan.goodput),
        samples=measured.samples,
        client=measured.client,
        is_interrupted=measured.is_interrupted,
    )


def _ignore_sample(sample: Sample) -> None:
    """Ignore the sample, for callers that do not follow the run, and for the warm-up."""
