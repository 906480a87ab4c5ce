"""`bench serve` from beginning to end: ask the server what it is, warm it up, run the planned load, summarize."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oarlock.server.bench import metrics, workload
from oarlock.server.bench.client import RequestForm, choose_prompts, listed
from oarlock.server.bench.http_stream import HttpClient, Target
from oarlock.server.bench.metrics import Sample
from oarlock.server.bench.result import Result
from oarlock.server.bench.run import LoadRun, OnSample, Schedule, run_until_done
from oarlock.server.bench.workload import (
    IdPrompts,
    Lengths,
    MultiTurn,
    Prompts,
    RandomPrompts,
    SharedPrefix,
    Traced,
    TracedPrompts,
    Workload,
)

DEFAULT_REQUESTS = 100


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Settings of one run: times in seconds, rates per second, lengths in tokens, limits of `goodput` in ms.

    An open loop has `request_rate` or `ramp`, a closed one `concurrency`; a trace without it is sent at its own times.
    """

    url: str
    model: str | None = None
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
        """Load schedule of the run: users of a closed loop, or arrival times of an open loop."""
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
        """Workload that generates the run's conversations."""
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
        """Settings that the result records: for people to read, and to decide whether two results can be compared."""
        return {
            "url": self.url,
            "model": model,
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
            return f"open loop, the times of the trace, {self.trace_speed:g} times as fast"
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
            text += f", behind {self.num_prefixes} prefix(es) of {self.prefix_tokens}"
        if self.workload == "multi-turn":
            text += f", {self.turns} turns"
        return f"{text}, as {'token ids' if isinstance(prompts, IdPrompts) else 'words'}"


def measure(plan: ServePlan, on_sample: OnSample | None = None) -> Result:
    """One run, on an event loop of its own. Ctrl-C ends it early, with what was measured up to then.

    `on_sample` is called as each request ends. The key of the server is the environment's OPENAI_API_KEY. Raises
    `StartupError` when the server cannot be measured, and `ValueError` for a wrong URL.
    """
    return run_until_done(_measure(plan, on_sample or _nothing))


async def _measure(plan: ServePlan, on_sample: OnSample) -> Result:
    client = HttpClient(Target.parse(plan.url), os.environ.get("OPENAI_API_KEY"))
    try:
        found = await listed(client, plan.model)
        is_chat = plan.endpoint == "chat"
        form = RequestForm(found.model, is_chat, plan.ignore_eos, plan.timeout, plan.extra_body)
        needs_text = is_chat or plan.workload == "multi-turn"
        vocab_size = plan.vocab_size or found.vocab_size
        prompts = await choose_prompts(client, form, plan.prompt_form, vocab_size, plan.seed, needs_text=needs_text)
        if plan.warmup:
            warm = Schedule(concurrency=plan.warmup, count=plan.warmup)
            await LoadRun(client, form, RandomPrompts(prompts, plan.lengths, "warm"), warm, _nothing).measure()
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


def _nothing(sample: Sample) -> None:
    """Ignores the sample, for callers that do not follow the run, and for the warm-up."""
