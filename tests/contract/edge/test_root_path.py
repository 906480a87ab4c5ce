"""A server below a path of its proxy: with the path and without, and no way around the guards of routes."""

from __future__ import annotations

import re

import anyio
import pytest

from oarlock.base.errors import StartupError


def _get(stage, path, **options):
    async def send():
        async with stage.client() as client:
            return await client.get(path, **options)

    return anyio.run(send)


@pytest.mark.slow
def test_routes_are_there_with_the_path_and_without(make_stage):
    stage = make_stage(root_path="/models/llm", served_model_name=("demo", "alias/with/slash"))
    for path in ("/health", "/v1/models", "/v1/models/alias/with/slash", "/openapi.json", "/docs", "/metrics"):
        assert _get(stage, path).status_code == _get(stage, f"/models/llm{path}").status_code == 200
    for path in ("/models/llm/nope", "/models", "/models/llmhealth", "/models/llm/models/llm/health"):
        answer = _get(stage, path)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "route_not_found"


def test_the_web_page_is_below_the_path(make_stage):
    stage = make_stage(root_path="/llm", api_key=("k",))
    moved = _get(stage, "/llm")
    assert (moved.status_code, moved.headers["location"]) == (308, "/llm/")  # whatever the Host header says
    page = _get(stage, "/llm/")
    assert page.status_code == 200
    parts = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert parts and [part for part in parts if part.startswith("/") or "://" in part] == []
    assert {_get(stage, f"/llm/{part}").status_code for part in parts if part.startswith("static/")} == {200}


def test_the_document_names_the_path(make_stage):
    assert _get(make_stage(root_path="/llm"), "/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert "servers" not in _get(make_stage(), "/openapi.json").json()


def test_guards_see_routes_by_their_canonical_path(make_stage):
    stage = make_stage(root_path="/llm", api_key=("k",), admin_api_key="boss")
    key = {"Authorization": "Bearer k"}
    for path in (
        "/llm/v1/models",
        "/llm/%76%31/models",
        "/%6clm/v1/models",
        "/llm//health",
        "/llm/health/../v1/models",
    ):
        assert _get(stage, path).status_code == 401, path
    assert _get(stage, "/llm/health").status_code == 200
    assert _get(stage, "/llm/v1/models", headers=key).status_code == 200
    assert _get(stage, "/%6clm/v1/models", headers=key).status_code == 200
    assert _get(stage, "/llm/admin/nope", headers=key).status_code == 403
    assert ("GET", "/v1/models", 200) in stage.counters.responses


@pytest.mark.parametrize("path", ["/v1", "/health", "/v1/models", "/v1/models/llm", "/admin"])
def test_a_path_that_could_mean_two_routes_is_refused_before_anything_loads(make_stage, path):
    with pytest.raises(StartupError, match="own route") as caught:
        make_stage(root_path=path)
    assert "--root-path" in caught.value.fix
