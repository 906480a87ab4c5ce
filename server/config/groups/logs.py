"""Options of logs, traces and recordings."""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.server.config.options import option

_GROUP = "Logs"


@dataclass(frozen=True)
class LogSettings:
    """Options of the group `Logs`."""

    log_level: str = option(
        "info",
        group=_GROUP,
        example="debug",
        choices=("debug", "info", "warning", "error"),
        help="least severe shown",
    )
    log_format: str = option(
        "text",
        group=_GROUP,
        example="json",
        choices=("text", "json"),
        help="one event a line, as key=value for people or as a JSON object for programs, of all processes",
    )
    enable_log_requests: bool = option(
        False,
        group=_GROUP,
        example="",
        help="one line per request that was generated: id, tokens, times, the label of its key; never its text",
    )
    access_log: bool = option(
        False,
        group=_GROUP,
        example="",
        help="one line per HTTP answer: client, method, path, status, bytes, seconds, the label of the key; without "
        "probes and metrics that succeed",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        group=_GROUP,
        example="http://localhost:4318/v1/traces",
        help="send a trace of each request to this OpenTelemetry collector, over HTTP (needs the extra otel)",
    )
    record: str | None = option(
        None,
        group=_GROUP,
        example="steps.rec",
        help="write every step to this new file, for `oarlock replay`; it holds all prompts and answers as token ids",
    )
    record_limit: int | None = option(
        2**30,
        group=_GROUP,
        example="8GiB",
        is_bytes=True,
        minimum=2**16,
        maximum=2**50,
        help="bytes after which recording stops, while serving goes on; none: no limit",
    )
