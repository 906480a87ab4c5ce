"""`GET /v1/requests/{id}`: one request's records in server and engine, as a timeline, seconds and a diagnosis.

The diagnosis is one sentence on where the time went or why the request failed, and the option that would change it. The
first rule that applies gives the diagnosis. Rules for failures come before rules for the largest part of the time.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oarlock.engine.stats import RequestHistory
from oarlock.server.endpoints.operations.adapter_waits import events_of_waits, first_load_s, seconds_of_waits
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.errors import HttpError
from oarlock.server.http.request_record import MAX_RECORDS, RequestRecord, histories_of

Diagnosis = tuple[str, str | None]  # (sentence, option that would help)
_LARGE = 0.3  # share of the total time above which a part is large
_FULL_BATCH = 8.0  # sequences in a step; from here, another engine helps a request more than a faster engine
_QUICK_S = 0.05  # shorter times need no explanation


@dataclass(frozen=True, slots=True)
class Findings:
    """One request as the rules see it."""

    record: RequestRecord
    history: RequestHistory | None  # history of its first choice; None: the engine does not know the request
    seconds: dict[str, float]
    prefix_caching: bool

    @property
    def state(self) -> str:
        """`processing` before the engine has the request, then `waiting`, `running`, `ended`."""
        if self.record.ended_s is not None:
            return "ended"
        if self.history is None:
            return "processing"
        runs = self.history["first_scheduled_s"] is not None
        return "running" if runs else "waiting"

    def share(self, name: str) -> float:
        """Return the share of a part in the total time, 0 to 1."""
        return self.seconds.get(name, 0.0) / max(self.seconds["total"], 1e-9)


def diagnose(found: Findings) -> Diagnosis:
    """Return the diagnosis, and the option that would help, or None."""
    for rule in _RULES:
        diagnosis = rule(found)
        if diagnosis is not None:
            return diagnosis
    raise AssertionError("the last rule always matches")


def _refused(found: Findings) -> Diagnosis | None:
    record = found.record
    status, code, param = record.error_status, record.error_code, record.error_param
    if status is None:
        return None
    if status == 429:
        return "It was refused because the queue was full.", "--max-waiting-requests"
    if status == 408:
        return "It was refused because nothing was generated within its time limit.", "--request-timeout"
    if status == 413:
        return "Its body was larger than the limit.", "--max-body-size"
    if code == "context_length_exceeded":
        return "Its prompt and completion do not fit into the context.", "--max-model-len"
    if code == "out_of_memory":
        return "The ranks did not have enough memory for a step with only this request.", "--max-num-batched-tokens"
    if code == "adapter_unloaded":
        return f"Its adapter {record.adapter!r} was unloaded before it was complete.", None
    if code == "adapter_failed":
        return f"Its adapter {record.adapter!r} could not be loaded; see the log for the reason.", None
    if code == "adapter_stalled":
        return f"The files of its adapter {record.adapter!r} could not be read for long: check their disk.", None
    if code == "replica_lost":
        return "The engine that ran it has stopped; see the log for the reason. The request can be sent again.", None
    if status < 500:
        field = "" if param is None else f" in its field `{param}`"
        return f"It was invalid{field} and refused with status {status}; the error message gives the fix.", None
    return f"The server failed on it with status {status}; see the log for details under its id.", None


def _client_left(found: Findings) -> Diagnosis | None:
    record = found.record
    if record.ended_s is None or (record.status and not _was_aborted(record)):
        return None
    after = f"after {found.seconds['total']:.1f} s"
    if not record.completion_tokens:
        return (
            f"It ended {after} without a token: the client disconnected, or the request was aborted, "
            f"while it {_stage(found)}."
        ), ("--max-num-seqs" if found.share("queued") > 0.5 else None)
    return (
        f"It ended {after} and {record.completion_tokens} tokens: the client disconnected, or the request was aborted."
    ), None


def _was_aborted(record: RequestRecord) -> bool:
    return any(choice.finish_reason in (None, "abort") for choice in record.choices)


def _stage(found: Findings) -> str:
    if found.share("queued") > 0.5:
        return "waited in the queue"
    return "was processed" if found.history is None else "ran"


def _timed_out(found: Findings) -> Diagnosis | None:
    if any(choice.finish_reason == "timeout" for choice in found.record.choices):
        return "Its time limit ended the completion early.", "--request-timeout"
    return None


def _slow_client(found: Findings) -> Diagnosis | None:
    if found.share("client_did_not_read") < _LARGE:
        return None
    waited = found.seconds["client_did_not_read"]
    return (
        (f"Its client read slowly: {waited:.1f} s of {found.seconds['total']:.1f} s passed with a full connection."),
        None,
    )


def _waited_for_adapter(found: Findings) -> Diagnosis | None:
    name, seconds = found.record.adapter, found.seconds
    if name is None or found.share("adapter") < _LARGE or seconds["adapter"] < _QUICK_S:
        return None
    waited = f"It waited {seconds['adapter']:.1f} s of {seconds['total']:.1f} s"
    if seconds["adapter_load"] < seconds["adapter"] / 2:
        return f"{waited} for a slot for its adapter {name!r}: other adapters were in all slots.", "--max-loras"
    if first_load_s(found.record, time.monotonic()) >= seconds["adapter_load"] / 2:
        return f"{waited} until its adapter {name!r} was loaded, which its first use began.", "--lora-modules"
    return f"{waited} until its adapter {name!r} was loaded into host memory again.", "--max-cpu-loras"


def _preempted(found: Findings) -> Diagnosis | None:
    history = found.history
    if history is None or found.share("preempted") < _LARGE / 3:
        return None
    lost, times = found.seconds["preempted"], _times(history["num_preemptions"])
    if not any(one["is_short"] for one in history["preemptions"]):
        return (
            f"It was preempted {times} for clients below their share, and waited {lost:.1f} s.",
            "--max-num-seqs",
        )
    return (
        f"KV memory ran out: it was preempted {times}, waited {lost:.1f} s, and was recomputed.",
        "--kv-cache-memory",
    )


def _stalled(found: Findings) -> Diagnosis | None:
    history = found.history
    if history is None or found.share("stalled") < _LARGE:
        return None
    longest = max(history["stalls"], key=lambda stall: stall["seconds"])
    waited = f"{found.seconds['stalled']:.1f} s of {found.seconds['total']:.1f} s were stalls"
    if longest["kind"] == "memory":
        return f"{waited}: the ranks refused steps for lack of memory.", "--max-num-batched-tokens"
    if longest["kind"] == "pause":
        return f"{waited}: the engine paused, most likely because the server did not read its events.", None
    if longest["num_prompt_tokens"]:
        tokens = longest["num_prompt_tokens"]
        return f"{waited}; the longest was a step with {tokens} prompt tokens.", "--max-step-ms"
    return f"{waited}; the longest was a step with {longest['num_sequences']} sequences: the machine was busy.", None


def _queued(found: Findings) -> Diagnosis | None:
    history = found.history
    if history is None or found.share("queued") < _LARGE or found.seconds["queued"] < _QUICK_S:
        return None
    waited = f"It waited {found.seconds['queued']:.1f} s of {found.seconds['total']:.1f} s"
    others = f"when it arrived, {history['num_waiting']} requests waited and {history['num_running']} ran"
    if history["without_blocks"] > history["without_row"]:
        return f"{waited} for KV memory: {others}.", "--kv-cache-memory"
    if history["without_row"]:
        return f"{waited} for a row in the batch: {others}.", "--max-num-seqs"
    if any(choice.has_grammar for choice in found.record.choices) and not history["num_waiting"]:
        return f"{waited} while its grammar was compiled; the grammar is cached for the next requests.", None
    return f"{waited} while the prompts of other requests were computed: {others}.", "--data-parallel-size"


def _prefill(found: Findings) -> Diagnosis | None:
    history = found.history
    if history is None or found.share("prefill") < 0.5 or found.seconds["prefill"] < _QUICK_S:
        return None
    took = f"Its prompt of {history['prompt_tokens']} tokens took {found.seconds['prefill']:.1f} s"
    chunks, cached = history["num_chunks"], history["cached_tokens"]
    if not found.prefix_caching:
        return f"{took}, and none of it was cached.", "--enable-prefix-caching"
    if chunks > 1 and any(chunk["beside"] for chunk in history["chunks"]):
        return (
            f"{took}, {cached} of them cached, in {chunks} steps that were kept short for requests that decode."
        ), "--max-step-ms"
    return f"{took}, {cached} of them cached, in {_steps(chunks)}.", "--tensor-parallel-size"


def _decode(found: Findings) -> Diagnosis | None:
    history = found.history
    decode = None if history is None else history["decode"]
    if history is None or decode is None or found.share("decode") < 0.5 or not decode["steps"]:
        return None
    per_token = 1e3 * found.seconds["decode"] / max(1, history["output_tokens"] - 1)
    batch = decode["mean_sequences"]
    text = f"Its {history['output_tokens']} tokens took {found.seconds['decode']:.1f} s, {per_token:.0f} ms each"
    text += f", in steps with {batch:.1f} sequences on average"
    if decode["prompt_tokens"] > decode["steps"] * batch:
        return f"{text} and {decode['prompt_tokens']} prompt tokens of other requests.", "--max-step-ms"
    return f"{text}.", "--data-parallel-size" if batch >= _FULL_BATCH else "--speculative-config"


def _before_engine(found: Findings) -> Diagnosis | None:
    if found.share("before_engine") < 0.5 or found.seconds["before_engine"] < _QUICK_S:
        return None
    took = found.seconds["before_engine"]
    return (
        (f"{took:.1f} s of {found.seconds['total']:.1f} s passed while its body was read and its prompt tokenized."),
        None,
    )


def _still_open(found: Findings) -> Diagnosis | None:
    if found.state == "ended":
        return None
    return f"It is {found.state}, for {found.seconds['total']:.1f} s now.", None


def _no_slow_stage(found: Findings) -> Diagnosis:
    if found.history is None and found.record.started_s is not None:
        return (
            (
                "The engine has no history of it: more than a thousand requests have ended since, or the "
                "engine was restarted."
            ),
            None,
        )
    return f"No stage was slow: it took {found.seconds['total']:.2f} s.", None


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _steps(number: int) -> str:
    return "one step" if number == 1 else f"{number} steps"


_RULES: tuple[Callable[[Findings], Any], ...] = (
    _refused,
    _client_left,
    _timed_out,
    _slow_client,
    _waited_for_adapter,
    _preempted,
    _stalled,
    _queued,
    _prefill,
    _before_engine,
    _decode,
    _still_open,
    _no_slow_stage,
)


def report(
    record: RequestRecord, histories: Sequence[RequestHistory], response_ids: Mapping[int, str], prefix_caching: bool
) -> dict[str, Any]:
    """Return the response of `GET /v1/requests/{id}`.

    `histories`: known histories of its first choices, in order. `response_ids`: engine id of a choice -> response id.
    """
    now = time.monotonic()
    first = min(histories, key=lambda history: history["arrival_s"], default=None)
    seconds = _seconds(record, first, now)
    findings = Findings(record, first, seconds, prefix_caching)
    sentence, flag = diagnose(findings)
    start = record.received_s
    return {
        "id": record.response_id or record.request_id,
        "request_id": record.request_id,
        "route": record.route,
        "key": record.key_label,
        "adapter": record.adapter,
        "received": round(record.received_at, 3),
        "state": findings.state,
        "status": record.status or None,
        "error": _error(record),
        "choices": record.num_choices,
        "finish_reasons": [choice.finish_reason for choice in record.choices],
        "prompt_tokens": record.prompt_tokens or (0 if first is None else first["prompt_tokens"]),
        "cached_tokens": record.cached_tokens or (0 if first is None else first["cached_tokens"]),
        "completion_tokens": record.completion_tokens,
        "diagnosis": sentence,
        "flag": flag,
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "timeline": _timeline(record, first, response_ids, now),
        "engine": [_shifted(history, start, record, response_ids) for history in histories],
    }


def _error(record: RequestRecord) -> dict[str, Any] | None:
    if record.error_status is None:
        return None
    return {"status": record.error_status, "code": record.error_code, "param": record.error_param}


def _seconds(record: RequestRecord, history: RequestHistory | None, now: float) -> dict[str, float]:
    """Return the seconds from the request to the last byte of its response, by their use.

    `preempted` (time without KV blocks) and `stalled` are parts of `decode`. `adapter` is the wait for the LoRA
    adapter, in `before_engine` during its first load, then in `queued` and `preempted`; `adapter_load` is the part of
    the loads. Waiting for the client overlaps all parts.
    """
    end_s = record.ended_s or now
    found = {"total": end_s - record.received_s, "before_engine": (record.started_s or end_s) - record.received_s}
    if history is not None:
        last_s = history["end_s"] or now
        scheduled_s = history["first_scheduled_s"] or last_s
        token_s = history["first_token_s"] or last_s
        found["queued"] = scheduled_s - history["arrival_s"]
        found["prefill"] = token_s - scheduled_s
        found["decode"] = last_s - token_s
        found["preempted"] = sum((one["back_s"] or last_s) - one["at_s"] for one in history["preemptions"])
        found["stalled"] = sum(stall["seconds"] for stall in history["stalls"])
    if record.adapter is not None:
        found |= seconds_of_waits(record, history, now)
    found["client_did_not_read"] = record.sending_s
    return found


def _timeline(
    record: RequestRecord, history: RequestHistory | None, ids: Mapping[int, str], now: float
) -> list[dict[str, Any]]:
    """Return events in the order of their times, in seconds since the request arrived."""
    events: list[tuple[float, str, dict[str, Any]]] = [(record.received_s, "received", {})]
    if record.parsed_s is not None:
        events.append((record.parsed_s, "validated", {}))
    if record.started_s is not None:
        events.append((record.started_s, "sent to the engine", {"choices": record.num_choices}))
    if history is not None:
        events += _engine_events(history, record, ids)
    events += events_of_waits(record, history, now)
    if record.ended_s is not None:
        slow = round(record.sending_s, 3) or None
        reasons = sorted({choice.finish_reason or "abort" for choice in record.choices})
        details = {
            "status": record.status,
            "reasons": reasons or None,
            "code": record.error_code,
            "client_did_not_read_s": slow,
        }
        events.append((record.ended_s, "answered" if record.status else "client disconnected", details))
    events.sort(key=lambda event: event[0])
    start = record.received_s
    return [
        {"at_s": round(at - start, 4), "event": name}
        | {key: value for key, value in details.items() if value is not None}
        for at, name, details in events
    ]


def _engine_events(
    history: RequestHistory, record: RequestRecord, ids: Mapping[int, str]
) -> list[tuple[float, str, dict[str, Any]]]:
    behind = [ids[one] for one in history["ahead"] if one in ids]
    counts = {"running": history["num_running"], "waiting": history["num_waiting"], "behind": behind or None}
    events: list[tuple[float, str, dict[str, Any]]] = [(history["arrival_s"], "queued", counts)]
    if history["first_scheduled_s"] is not None:
        cached = {"cached_tokens": history["cached_tokens"], "prompt_tokens": history["prompt_tokens"]}
        events.append((history["first_scheduled_s"], "began to run", cached))
    for chunk in history["chunks"]:
        events.append((chunk["at_s"], "prefill", {key: chunk[key] for key in ("step", "tokens", "beside")}))
    if history["num_chunks"] > len(history["chunks"]):
        more = {"chunks": history["num_chunks"] - len(history["chunks"])}
        events.append((history["chunks"][-1]["at_s"], "more prefill", more))
    if history["first_token_s"] is not None:
        events.append((history["first_token_s"], "first token", {}))
    for one in history["preemptions"]:
        why = "too few KV blocks" if one["is_short"] else "another client's share"
        events.append((one["at_s"], "preempted", {"why": why}))
        if one["back_s"] is not None:
            events.append((one["back_s"], "runs again", {}))
    for stall in history["stalls"]:
        details = {"kind": stall["kind"], "seconds": round(stall["seconds"], 3)}
        if stall["kind"] == "step":
            details |= {"sequences": stall["num_sequences"], "prompt_tokens": stall["num_prompt_tokens"]}
        events.append((stall["begun_s"], "stall", details))
    if history["end_s"] is not None:
        decode = history["decode"]
        details: dict[str, Any] = {"reason": history["reason"], "output_tokens": history["output_tokens"]}
        if decode is not None:
            details |= {"steps": decode["steps"], "mean_sequences": decode["mean_sequences"]}
        events.append((history["end_s"], "ended", details))
    return events


def _shifted(history: RequestHistory, start_s: float, record: RequestRecord, ids: Mapping[int, str]) -> dict[str, Any]:
    """Return the engine's history of one choice, in seconds since the request arrived, with the ids of responses."""
    replicas = {choice.engine_id: choice.replica for choice in record.choices}

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - start_s, 4)

    decode, adapter = history["decode"], history["adapter"]
    return {
        "replica": replicas[history["request_id"]],
        "queued_s": since(history["arrival_s"]),
        "running_then": history["num_running"],
        "waiting_then": history["num_waiting"],
        "behind": [ids[one] for one in history["ahead"] if one in ids],
        "steps_without_row": history["without_row"],
        "steps_without_blocks": history["without_blocks"],
        "adapter": None
        if adapter is None
        else {
            **adapter,
            "waits": [
                {**wait, "at_s": since(wait["at_s"]), "end_s": since(wait["end_s"])} for wait in adapter["waits"]
            ],
        },
        "began_s": since(history["first_scheduled_s"]),
        "cached_tokens": history["cached_tokens"],
        "prefill": {
            "chunks": history["num_chunks"],
            "tokens": history["computed_tokens"],
            "first": [{**chunk, "at_s": since(chunk["at_s"])} for chunk in history["chunks"]],
        },
        "first_token_s": since(history["first_token_s"]),
        "decode": None if decode is None else {**decode, "seconds": round(decode["seconds"], 4)},
        "preemptions": [
            {"at_s": since(one["at_s"]), "back_s": since(one["back_s"]), "is_short": one["is_short"]}
            for one in history["preemptions"]
        ],
        "num_preemptions": history["num_preemptions"],
        "stalls": [
            {**stall, "begun_s": since(stall["begun_s"]), "seconds": round(stall["seconds"], 4)}
            for stall in history["stalls"]
        ],
        "ended_s": since(history["end_s"]),
        "reason": history["reason"],
        "output_tokens": history["output_tokens"],
    }


class OpenAIServingExplain(OpenAIServing):
    """Reports on the latest generating requests."""

    state_name = "explain"

    async def explain(self, given: str) -> dict[str, Any]:
        """Return the report on a request. `given`: id of the request or its response. Raises `HttpError` (404)."""
        record = self.state.requests.find(given)
        if record is None:
            message = f"None of the last {MAX_RECORDS} generating requests has this id."
            raise HttpError(404, message, param="id", code="request_not_found")
        histories = [] if self.state.async_llm is None else await histories_of(self.state.async_llm, record)
        wanted = {one for history in histories for one in history["ahead"]}
        return report(record, histories, self._response_ids(wanted), self.settings.enable_prefix_caching)

    def _response_ids(self, engine_ids: set[int]) -> dict[int, str]:
        """Return the known mapping from the engine's ids of choices to the ids of responses."""
        found = {}
        for record in self.state.requests:
            record.refresh()
            for choice in record.choices:
                if choice.engine_id in engine_ids:
                    found[choice.engine_id] = record.response_id
        return found
