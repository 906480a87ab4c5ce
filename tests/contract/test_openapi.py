"""The OpenAPI document is valid 3.1, has an example of every body, and responses match its schemas."""

from __future__ import annotations

import copy
import json
import re

import anyio
import httpx
import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from oarlock.server.endpoints.operations import route
from oarlock.server.http.middleware import POOLING
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from tests.contract.batch_server import request_line, serving
from tests.contract.test_adapters_wire import LORA, write


@pytest.fixture
def document(make_stage):
    return _all(make_stage(), [("GET", "/openapi.json", None)])[0].json()


def _all(stage, calls):
    async def send():
        async with stage.client(headers={"Authorization": "Bearer boss", "X-Request-Id": "known"}) as client:
            return [await client.request(method, path, json=body) for method, path, body in calls]

    return anyio.run(send)


@pytest.mark.slow
def test_the_document_is_valid_and_names_no_response_that_is_never_sent(make_stage, document, tmp_path):
    """The one with batches, which the other is a part of."""
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named <= document["components"]["schemas"].keys()
    plain, document = document, _all(make_stage(batch_dir=str(tmp_path)), [("GET", "/openapi.json", None)])[0].json()
    assert plain["paths"].items() <= document["paths"].items()
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    assert document["openapi"].startswith("3.1")
    # pydantic puts the module's path into the names of two classes with one name.
    assert [name for name in document["components"]["schemas"] if "__" in name] == []
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["summary"], path
            assert "422" not in operation["responses"], path
            name = "/MessageError" if path.startswith("/v1/messages") else "/Error"
            assert operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"].endswith(name)


def test_metrics_name_the_routes_of_the_document(make_stage, document):
    assert make_stage().counters.routes == {path for path in document["paths"] if "{" not in path}


def test_the_response_to_every_example_matches_its_schema(make_stage, document, tmp_path):
    write(tmp_path / "sql")
    adapters = {"enable_lora": True, "lora_dir": str(tmp_path), "info": LORA}
    poolers = (None, PoolerConfig(Task.EMBED))
    stages = [make_stage("ok", admin_api_key="boss", pooler=pooler, **adapters) for pooler in poolers]
    calls, expected = [], []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            status, good = next(item for item in operation["responses"].items() if item[0].startswith("2"))
            content = good["content"]
            if "application/json" not in content or path.endswith("/cancel") or method == "delete":
                continue  # what has ended cannot be cancelled, and what is deleted is asked for below
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            examples = [example["value"] for example in body.get("examples", {}).values()]
            assert examples or "requestBody" not in operation, path
            for example in examples or [None]:
                if example is None or not example.get("stream"):
                    filled = path.replace("{model}", "demo").replace("{response_id}", "resp_known")
                    calls.append((method.upper(), filled.replace("{id}", "known"), example))
                    expected.append((int(status), content["application/json"]["schema"]))
    assert len(calls) > 14
    assert calls[-1][1] == "/admin/drain"  # after which nothing else is answered
    of_vectors = [call for call in calls if call[1] in POOLING]
    answers = iter(_all(stages[0], [call for call in calls if call[1] not in POOLING]))
    of_vectors = iter(_all(stages[1], of_vectors))
    for call, (status, shape) in zip(calls, expected, strict=True):
        answer = next(of_vectors if call[1] in POOLING else answers)
        assert answer.status_code == status, (call, answer.text)
        jsonschema.validate(answer.json(), {**shape, "components": document["components"]})


def test_errors_match_their_schema(make_stage, document):
    calls = [
        ("GET", "/nope", None),
        ("GET", "/v1/models/nope", None),
        ("DELETE", "/v1/models", None),
        ("POST", "/tokenize", {}),
        ("POST", "/detokenize", {"tokens": [-1]}),
        ("POST", "/v1/completions", {"prompt": "x", "n": 0}),
    ]
    shape = {"$ref": "#/components/schemas/Error", "components": document["components"]}
    for answer in _all(make_stage(), calls):
        assert answer.status_code in (400, 404, 405)
        jsonschema.validate(answer.json(), shape)


def test_the_page_of_the_api_needs_no_network(make_stage):
    page = _all(make_stage(), [("GET", "/docs", None)])[0]
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    links = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert links[0].startswith("data:image/svg+xml;base64,") and links[1] == "openapi.json"
    assert "img-src data:" in page.headers["content-security-policy"]
    parts = re.findall(r'<h2 id="([^"]*)"', page.text)
    assert len(set(parts)) == len(parts) > 30, "a part for each operation"
    assert [link for link in links[2:] if links[2:].count(link) == 2] == links[2:], "from the contents and its heading"
    assert {link.removeprefix("#") for link in links[2:]} == set(parts)
    assert "`" not in re.sub(r"<pre>.*?</pre>", "", page.text, flags=re.DOTALL)
    assert "<script" not in page.text
    assert "@import" not in page.text
    for words in ("/v1/completions", "truncate_prompt_tokens", "integer, 1 to 128", "curl -s"):
        assert words in page.text
    assert json.dumps({"prompt": "Once"})[:-1] not in page.text  # escaped, as everything in the page


def test_documents_are_made_once_and_again_for_another_model(make_stage, monkeypatch):
    made = []
    for name in ("page", "capabilities"):
        make = getattr(route, name)
        monkeypatch.setattr(route, name, lambda *given, make=make: made.append(make) or make(*given))
    stage = make_stage()
    paths = [("GET", path, None) for path in ("/docs", "/v1/capabilities", "/openapi.json")]
    assert [answer.content for answer in _all(stage, paths * 3)][:3] == [a.content for a in _all(stage, paths)]
    assert len(made) == 2
    stage.state.async_llm = copy.copy(stage.state.async_llm)
    _all(stage, paths)
    assert len(made) == 4


IDS = {"{model}": "demo", "{id}": "known", "{response_id}": "resp_0"}
# A value that each query parameter does not allow.
WRONG = {"after": "nothing", "limit": "0", "order": "up", "purpose": "assistants"}


def _operations(document):
    for path, operations in document["paths"].items():
        filled = re.sub(r"{\w+}", lambda name: IDS.get(name[0], "none"), path)
        for method, operation in operations.items():
            names = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            yield method.upper(), filled, names, operation.get("x-any-query", False)


@pytest.mark.slow
def test_query_parameters_are_honoured_or_refused_by_name_on_every_route(make_stage, tmp_path):
    with serving(make_stage, tmp_path) as serve:
        server = serve(admin_api_key="boss")
        server.batch([request_line("one")])
        with httpx.Client(base_url=server.url, headers={"Authorization": "Bearer boss"}, timeout=60) as client:
            made = client.post("/v1/responses", json={"input": "Hi"}).json()["id"]
            calls, open_to_all = [], set()
            for method, path, names, takes_any in _operations(client.get("/openapi.json").json()):
                path = path.replace("resp_0", made)
                if takes_any:
                    assert not names
                    open_to_all.add(path)
                    continue
                answer = client.request(method, path, params={"oder": "asc"})
                error = answer.json().get("error", {})
                assert (answer.status_code, "'oder'" in error["message"]) == (400, True), (method, path, answer.text)
                assert all(name in error["message"] for name in names), path
                calls += [(path, name) for name in names]
            assert open_to_all == {"/health", "/health/live", "/health/ready", "/version", "/metrics", "/docs"}
            assert len(calls) == 9
            for path, name in calls:
                assert client.get(path).json().get("data"), (path, client.get(path).text)
                found = client.get(path, params={name: WRONG[name]})
                assert (found.status_code, found.json()["error"]["param"]) == (400, name), (path, name, found.text)
                assert client.get(path, params=[(name, "1"), (name, "2")]).status_code == 400


@pytest.mark.parametrize("query", ["api-version=2024-10-21", "beta=true"])
def test_the_version_that_a_client_was_written_for_is_no_parameter_of_a_route(make_stage, query):
    stage = make_stage("ok")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert _all(stage, [("POST", f"/v1/messages?{query}", body)])[0].status_code == 200
    assert _all(stage, [("GET", f"/health?{query}&t=17", None), ("GET", "/?utm_source=x", None)])[1].status_code == 200
