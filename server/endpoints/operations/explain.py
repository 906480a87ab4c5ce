"""`GET /v1/requests/{id}`: one request's record, joined with the engine's, as a timeline, seconds and a diagnosis."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from oarlock.engine.stats import RequestHistory
from oarlock.server.endpoints.operations.diagnosis import Findings, diagnose
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.errors import HttpError
from oarlock.server.http.request_record import MAX_RECORDS, RequestRecord, histories_of


def report(
    record: RequestRecord, histories: Sequence[RequestHistory], response_ids: Mapping[int, str], prefix_caching: bool
) -> dict[str, Any]:
    """The answer of `GET /v1/requests/{id}`. `histories`: of its first choices, in their order, as far as they are
    known. `response_ids`: ids of answers by the numbers that the engine has for their choices."""
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
        "timeline": _timeline(record, first, response_ids),
        "engine": [_shifted(history, start, record, response_ids) for history in histories],
    }


def _error(record: RequestRecord) -> dict[str, Any] | None:
    if record.error_status is None:
        return None
    return {"status": record.error_status, "code": record.error_code, "param": record.error_param}


def _seconds(record: RequestRecord, history: RequestHistory | None, now: float) -> dict[str, float]:
    """Seconds from the request to the last byte of its answer, by what they went to. Parts of `decode` are in it: time
    without its blocks, and stalls. Waiting for the client goes on beside all."""
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
    found["client_did_not_read"] = record.sending_s
    return found


def _timeline(record: RequestRecord, history: RequestHistory | None, ids: Mapping[int, str]) -> list[dict[str, Any]]:
    """Events in the order of their times, in seconds since the request came in."""
    events: list[tuple[float, str, dict[str, Any]]] = [(record.received_s, "received", {})]
    if record.parsed_s is not None:
        events.append((record.parsed_s, "validated", {}))
    if record.started_s is not None:
        events.append((record.started_s, "sent to the engine", {"choices": record.num_choices}))
    if history is not None:
        events += _engine_events(history, record, ids)
    if record.ended_s is not None:
        slow = round(record.sending_s, 3) or None
        reasons = sorted({choice.finish_reason or "abort" for choice in record.choices})
        details = {
            "status": record.status,
            "reasons": reasons or None,
            "code": record.error_code,
            "client_did_not_read_s": slow,
        }
        events.append((record.ended_s, "answered" if record.status else "client left", details))
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
    """The engine's history of one choice, in seconds since the request came in, and with the ids of answers."""
    replicas = {choice.engine_id: choice.replica for choice in record.choices}

    def since(at: float | None) -> float | None:
        return None if at is None else round(at - start_s, 4)

    decode = history["decode"]
    return {
        "replica": replicas[history["request_id"]],
        "queued_s": since(history["arrival_s"]),
        "running_then": history["num_running"],
        "waiting_then": history["num_waiting"],
        "behind": [ids[one] for one in history["ahead"] if one in ids],
        "steps_without_row": history["without_row"],
        "steps_without_blocks": history["without_blocks"],
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
    """Reports on the last requests to generate."""

    state_name = "explain"

    async def explain(self, given: str) -> dict[str, Any]:
        """`given`: the id of a request or of its answer. Raises `HttpError` (404)."""
        record = self.state.requests.find(given)
        if record is None:
            message = f"None of the last {MAX_RECORDS} requests to generate has this id."
            raise HttpError(404, message, param="id", code="request_not_found")
        histories = [] if self.state.async_llm is None else await histories_of(self.state.async_llm, record)
        wanted = {one for history in histories for one in history["ahead"]}
        return report(record, histories, self._response_ids(wanted), self.settings.enable_prefix_caching)

    def _response_ids(self, engine_ids: set[int]) -> dict[int, str]:
        """The ids of answers by the numbers that the engine has for their choices, as far as they are known."""
        found = {}
        for record in self.state.requests:
            record.refresh()
            for choice in record.choices:
                if choice.engine_id in engine_ids:
                    found[choice.engine_id] = record.response_id
        return found
