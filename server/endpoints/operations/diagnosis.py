"""One sentence on where a request's time went or why it failed, and the option that would change it.

The rules stand in the order in which they are tried; the first that holds speaks. What took the largest part is told,
once what went wrong is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oarlock.engine.stats import RequestHistory
from oarlock.server.http.request_record import RequestRecord

Told = tuple[str, str | None]  # the sentence, and the option
_LARGE = 0.3  # of the whole time
_FULL_BATCH = 8.0  # sequences in a step, from which on another engine helps one request more than a faster one
_QUICK_S = 0.05  # then there is nothing to explain


@dataclass(frozen=True, slots=True)
class Findings:
    """One request as the rules see it."""

    record: RequestRecord
    history: RequestHistory | None  # of its first choice; None: the engine does not know it
    seconds: dict[str, float]
    prefix_caching: bool

    @property
    def state(self) -> str:
        """`processing` before the engine has it, then `waiting`, `running`, `ended`."""
        if self.record.ended_s is not None:
            return "ended"
        if self.history is None:
            return "processing"
        runs = self.history["first_scheduled_s"] is not None
        return "running" if runs else "waiting"

    def share(self, name: str) -> float:
        """Share of the whole time, 0..1."""
        return self.seconds.get(name, 0.0) / max(self.seconds["total"], 1e-9)


def diagnose(found: Findings) -> Told:
    """The sentence, and the option that would help, or None."""
    for rule in _RULES:
        told = rule(found)
        if told is not None:
            return told
    raise AssertionError("the last rule always holds")


def _refused(found: Findings) -> Told | None:
    record = found.record
    status, code, param = record.error_status, record.error_code, record.error_param
    if status is None:
        return None
    if status == 429:
        return "It was refused, because as many requests waited as may wait.", "--max-waiting-requests"
    if status == 408:
        return "Nothing was generated within its time limit, so it was refused.", "--request-timeout"
    if status == 413:
        return "Its body was larger than bodies may be.", "--max-body-size"
    if code == "context_length_exceeded":
        return "Its prompt and answer do not fit the context.", "--max-model-len"
    if code == "out_of_memory":
        return "The ranks had not enough memory for a step of it alone.", "--max-num-batched-tokens"
    if code == "replica_lost":
        return "The engine that worked on it has stopped; the log says why. The same request may be sent again.", None
    if status < 500:
        field = "" if param is None else f" in its field `{param}`"
        return f"It was wrong{field}, and refused with status {status}; the answer says what to change.", None
    return f"The server failed on it with status {status}; the log has the details under its id.", None


def _client_left(found: Findings) -> Told | None:
    record = found.record
    if record.ended_s is None or (record.status and not _was_aborted(record)):
        return None
    after = f"after {found.seconds['total']:.1f} s"
    if not record.completion_tokens:
        return f"It ended {after} without a token: its client left, or it was aborted, while it {_stage(found)}.", (
            "--max-num-seqs" if found.share("queued") > 0.5 else None
        )
    return f"It ended {after} and {record.completion_tokens} tokens: its client left, or it was aborted.", None


def _was_aborted(record: RequestRecord) -> bool:
    return any(choice.finish_reason in (None, "abort") for choice in record.choices)


def _stage(found: Findings) -> str:
    if found.share("queued") > 0.5:
        return "waited in the queue"
    return "was processed" if found.history is None else "ran"


def _timed_out(found: Findings) -> Told | None:
    if any(choice.finish_reason == "timeout" for choice in found.record.choices):
        return "Its time limit cut its answer off.", "--request-timeout"
    return None


def _slow_client(found: Findings) -> Told | None:
    if found.share("client_did_not_read") < _LARGE:
        return None
    waited = found.seconds["client_did_not_read"]
    return (
        f"Its client read slowly: {waited:.1f} s of {found.seconds['total']:.1f} s went by with a full connection.",
        None,
    )


def _preempted(found: Findings) -> Told | None:
    history = found.history
    if history is None or found.share("preempted") < _LARGE / 3:
        return None
    lost, times = found.seconds["preempted"], _times(history["num_preemptions"])
    if not any(one["is_short"] for one in history["preemptions"]):
        return (
            f"It gave its place to clients with less than their share {times}, and waited {lost:.1f} s.",
            "--max-num-seqs",
        )
    return (
        f"KV memory ran out: it lost its blocks {times}, waited {lost:.1f} s, and was computed again.",
        "--kv-cache-memory",
    )


def _stalled(found: Findings) -> Told | None:
    history = found.history
    if history is None or found.share("stalled") < _LARGE:
        return None
    longest = max(history["stalls"], key=lambda stall: stall["seconds"])
    waited = f"{found.seconds['stalled']:.1f} s of {found.seconds['total']:.1f} s were stalls"
    if longest["kind"] == "memory":
        return f"{waited}: the ranks refused steps for lack of memory.", "--max-num-batched-tokens"
    if longest["kind"] == "pause":
        return f"{waited}: the engine stood still, most likely because the server did not take its events.", None
    if longest["num_prompt_tokens"]:
        tokens = longest["num_prompt_tokens"]
        return f"{waited}, the longest a step with {tokens} prompt tokens.", "--max-step-ms"
    return f"{waited}, the longest a step with {longest['num_sequences']} sequences: the machine was busy.", None


def _queued(found: Findings) -> Told | None:
    history = found.history
    if history is None or found.share("queued") < _LARGE or found.seconds["queued"] < _QUICK_S:
        return None
    waited = f"It waited {found.seconds['queued']:.1f} s of {found.seconds['total']:.1f} s"
    others = f"when it came, {history['num_waiting']} waited and {history['num_running']} ran"
    if history["without_blocks"] > history["without_row"]:
        return f"{waited} for KV memory: {others}.", "--kv-cache-memory"
    if history["without_row"]:
        return f"{waited} for one of the places in a step: {others}.", "--max-num-seqs"
    if any(choice.has_grammar for choice in found.record.choices) and not history["num_waiting"]:
        return f"{waited} while its grammar was compiled, which is kept for the next requests.", None
    return f"{waited} while the prompts of others were computed: {others}.", "--data-parallel-size"


def _prefill(found: Findings) -> Told | None:
    history = found.history
    if history is None or found.share("prefill") < 0.5 or found.seconds["prefill"] < _QUICK_S:
        return None
    took = f"Its prompt of {history['prompt_tokens']} tokens took {found.seconds['prefill']:.1f} s"
    chunks, cached = history["num_chunks"], history["cached_tokens"]
    if not found.prefix_caching:
        return f"{took}, and nothing of it could be cached.", "--enable-prefix-caching"
    if chunks > 1 and any(chunk["beside"] for chunk in history["chunks"]):
        return f"{took}, {cached} of them cached, in {chunks} steps kept short for answers beside it.", "--max-step-ms"
    return f"{took}, {cached} of them cached, in {_steps(chunks)}.", "--tensor-parallel-size"


def _decode(found: Findings) -> Told | None:
    history = found.history
    decode = None if history is None else history["decode"]
    if history is None or decode is None or found.share("decode") < 0.5 or not decode["steps"]:
        return None
    per_token = 1e3 * found.seconds["decode"] / max(1, history["output_tokens"] - 1)
    batch = decode["mean_sequences"]
    told = f"Its {history['output_tokens']} tokens took {found.seconds['decode']:.1f} s, {per_token:.0f} ms each"
    told += f", in steps with {batch:.1f} sequences on average"
    if decode["prompt_tokens"] > decode["steps"] * batch:
        return f"{told} and {decode['prompt_tokens']} prompt tokens of others.", "--max-step-ms"
    return f"{told}.", "--data-parallel-size" if batch >= _FULL_BATCH else "--speculative-config"


def _before_engine(found: Findings) -> Told | None:
    if found.share("before_engine") < 0.5 or found.seconds["before_engine"] < _QUICK_S:
        return None
    took = found.seconds["before_engine"]
    return (
        f"{took:.1f} s of {found.seconds['total']:.1f} s went by while its body was read and its prompt tokenized.",
        None,
    )


def _still_open(found: Findings) -> Told | None:
    if found.state == "ended":
        return None
    return f"It is {found.state}, for {found.seconds['total']:.1f} s now.", None


def _nothing(found: Findings) -> Told:
    if found.history is None and found.record.started_s is not None:
        return (
            "The engine does not know it any more: more than a thousand have ended since, or it was started anew.",
            None,
        )
    return f"Nothing stands out: it took {found.seconds['total']:.2f} s.", None


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _steps(number: int) -> str:
    return "one step" if number == 1 else f"{number} steps"


_RULES: tuple[Callable[[Findings], Any], ...] = (
    _refused,
    _client_left,
    _timed_out,
    _slow_client,
    _preempted,
    _stalled,
    _queued,
    _prefill,
    _before_engine,
    _decode,
    _still_open,
    _nothing,
)
