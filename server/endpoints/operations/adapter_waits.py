"""Waits of one request for its LoRA adapter: their seconds, and their events in the timeline.

A request may wait in the server, until its adapter is loaded for the first time; and in the engine, until the adapter
is in host memory again, or until a slot is free.
"""

from typing import Any

from oarlock.engine.stats import AWAITS_LOAD, RequestHistory
from oarlock.server.http.request_record import RequestRecord

_SHORTEST_S = (
    0.001  # shorter waits in the server have no event: every request with an adapter asks whether it is loaded
)


def seconds_of_waits(record: RequestRecord, history: RequestHistory | None, now: float) -> dict[str, float]:
    """Return the seconds for which a request with an adapter waited for the adapter, by name as in the report.

    `adapter`: all of them. `adapter_load`: the part until the adapter was in host memory.
    """
    load_s, slot_s = first_load_s(record, now), 0.0
    adapter = None if history is None else history["adapter"]
    if adapter is not None:
        load_s, slot_s = load_s + adapter["load_s"], adapter["slot_s"]
        for wait in adapter["waits"]:
            lasting_s = now - wait["at_s"] if wait["end_s"] is None else 0.0
            if wait["awaited"] == AWAITS_LOAD:
                load_s += lasting_s
            else:
                slot_s += lasting_s
    return {"adapter": load_s + slot_s, "adapter_load": load_s}


def first_load_s(record: RequestRecord, now: float) -> float:
    """Return the seconds for which the request waited in the server for the first load of its adapter."""
    begun_s = record.adapter_awaited_s
    return 0.0 if begun_s is None else (record.adapter_ready_s or record.ended_s or now) - begun_s


def events_of_waits(
    record: RequestRecord, history: RequestHistory | None, now: float
) -> list[tuple[float, str, dict[str, Any]]]:
    """Return the timeline's events of waits for the adapter: time, name, details."""
    events = []
    if record.adapter_awaited_s is not None and first_load_s(record, now) >= _SHORTEST_S:
        events.append(_event(record, "its first load", record.adapter_awaited_s, record.adapter_ready_s))
    adapter = None if history is None else history["adapter"]
    for wait in [] if adapter is None else adapter["waits"]:
        awaited = "its load" if wait["awaited"] == AWAITS_LOAD else "a slot"
        events.append(_event(record, awaited, wait["at_s"], wait["end_s"]))
    return events


def _event(
    record: RequestRecord, awaited: str, begun_s: float, end_s: float | None
) -> tuple[float, str, dict[str, Any]]:
    """Return the event of one wait. `end_s`: None if the request still waits, or ended while it waited."""
    seconds = None if end_s is None else round(end_s - begun_s, 3)
    return begun_s, "waits for adapter", {"adapter": record.adapter, "awaits": awaited, "seconds": seconds}
