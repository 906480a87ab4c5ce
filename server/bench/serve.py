"""`bench serve` from beginning to end: ask the server what it is, warm it up, run the load, summarize."""

from __future__ import annotations

import os

from oarlock.server.bench import metrics
from oarlock.server.bench.client.http_stream import HttpClient, Target
from oarlock.server.bench.client.request import RequestForm
from oarlock.server.bench.client.server_probe import choose_prompts, listed
from oarlock.server.bench.metrics import Sample
from oarlock.server.bench.plan import ServePlan
from oarlock.server.bench.result import Result
from oarlock.server.bench.run import LoadRun, OnSample, Schedule, run_until_done
from oarlock.server.bench.workload.workload import RandomPrompts


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
