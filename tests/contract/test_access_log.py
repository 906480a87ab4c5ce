"""`--access-log`: one line for each answer, without probes, queries, bodies and keys."""

from __future__ import annotations

import asyncio
import logging


def _lines(caplog) -> list[dict]:
    return [line.msg.fields for line in caplog.records if line.name == "oarlock.access"]


def _ask(stage, *calls) -> None:
    async def scenario() -> None:
        async with stage.client() as client:
            for method, path, options in calls:
                await client.request(method, path, **options)

    asyncio.run(scenario())


def test_one_line_for_each_answer(make_stage, caplog, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("alice sk-secret\n")
    stage = make_stage("some text", access_log=True, api_key_file=str(keys))
    headers = {"Authorization": "Bearer sk-secret", "X-Request-Id": "abc"}
    with caplog.at_level(logging.INFO, "oarlock.access"):
        _ask(
            stage,
            ("POST", "/v1/completions?api-version=sk-secret", {"json": {"prompt": "hidden words"}, "headers": headers}),
            ("POST", "/v1/completions", {"json": {"prompt": "x", "stream": True}, "headers": headers}),
            ("GET", "/v1/models", {}),
        )
    plain, streamed, refused = _lines(caplog)
    assert (plain["method"], plain["path"], plain["status"]) == ("POST", "/v1/completions", 200)
    assert (plain["key"], plain["request_id"], plain["client"]) == ("alice", "abc", "127.0.0.1")
    assert plain["bytes"] > 100 and streamed["bytes"] > plain["bytes"] and plain["seconds"] >= 0
    assert refused["status"] == 401 and "key" not in refused
    assert "secret" not in caplog.text and "hidden" not in caplog.text


def test_probes_and_metrics_have_a_line_only_where_they_fail(make_stage, caplog):
    stage = make_stage(access_log=True)
    with caplog.at_level(logging.INFO, "oarlock.access"):
        _ask(stage, *(("GET", path, {}) for path in ("/health", "/health/live", "/metrics", "/v1/state")))
        assert _lines(caplog) == []
        stage.engine.is_alive = False
        _ask(stage, ("GET", "/health", {}))
    assert [line["status"] for line in _lines(caplog)] == [503]


def test_without_the_option_there_is_none(make_stage, caplog):
    with caplog.at_level(logging.INFO, "oarlock.access"):
        _ask(make_stage(), ("GET", "/v1/models", {}))
    assert _lines(caplog) == []
