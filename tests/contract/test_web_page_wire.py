"""How the web page is sent: its headers, its size, when it is there, and when it is not."""

import base64
import hashlib
import re

import anyio
import pytest

from oarlock.server.http.pages import PATHS
from oarlock.server.http.server_state import Phase


def get(stage, path="/", **headers):
    async def send():
        async with stage.client() as client:
            return await client.get(path, headers={"accept-encoding": "identity", **headers})

    return anyio.run(send)


def modules(parts, name):
    """The paths of a script and of everything that it imports before it runs; `import(…)` comes later."""
    found, left = set(), [f"/static/{name}"]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += [f"/static/{each}" for each in re.findall(r'from "\./([\w-]+\.js)"', parts[path].text)]
    return found


def test_it_stays_small_and_asks_no_other_server(make_stage):
    stage = make_stage()
    parts = {path: get(stage, path) for path in PATHS}
    assert all(part.status_code == 200 for part in parts.values())
    zipped = {path: get(stage, path, **{"accept-encoding": "gzip, br"}) for path in PATHS}
    sizes = {path: int(part.headers["content-length"]) for path, part in zipped.items()}
    assert sum(sizes.values()) <= 400_000
    first = {"/", "/static/style.css", "/static/icon.svg"} | modules(parts, "app.js")
    assert sum(sizes[path] for path in first) <= 60_000  # what stands between the address and the first paint
    assert {path: part.content for path, part in zipped.items()} == {path: part.content for path, part in parts.items()}
    text = "".join(part.text for part in parts.values())
    addresses = set(re.findall(r"https?://[\w.-]+", text)) - {"http://www.w3.org"}  # the name of a namespace
    assert addresses == set()
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []


def test_the_policy_allows_only_its_own_parts(make_stage):
    page = get(make_stage())
    policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    foreign = r"<script(?! type=\"module\" src=\"static/)|<style|\son\w+=|\sstyle=|(?:src|href)=\"/"
    assert re.findall(foreign, page.text) == []


def test_every_html_page_is_framed_by_none_and_runs_nothing(make_stage):
    stage = make_stage()
    paths = [path for path in ("/", *get(stage, "/openapi.json").json()["paths"]) if "{" not in path]
    pages = {path: page for path in paths if "html" in (page := get(stage, path)).headers.get("content-type", "")}
    assert {"/", "/docs"} <= pages.keys()
    for path, page in pages.items():
        policy = dict(rule.split(" ", 1) for rule in page.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'", path
        assert "unsafe" not in page.headers["content-security-policy"]
        assert (page.headers["x-frame-options"], page.headers["referrer-policy"]) == ("DENY", "no-referrer")
        assert page.headers["x-content-type-options"] == "nosniff"
        for style in re.findall("<style>(.*?)</style>", page.text, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
            assert policy["style-src"] == f"'sha256-{digest}'"
        assert not re.search(r"<script(?! type=\"module\" src=)|\son\w+=|\sstyle=", page.text)


@pytest.mark.parametrize("path", ["/static/style.css", "/openapi.json", "/docs", "/v1/capabilities"])
def test_what_the_client_has_is_not_sent_again(make_stage, path):
    stage = make_stage()
    first = get(stage, path)
    again = get(stage, path, **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    zipped = get(stage, path, **{"accept-encoding": "gzip"})
    assert (zipped.headers["content-encoding"], zipped.content) == ("gzip", first.content)
    assert get(stage, "/static/app.js", **{"if-none-match": first.headers["etag"]}).status_code == 200


@pytest.mark.parametrize("path", ["/static/other.js", "/static/..%2fapp.py", "/static/index.html", "/static/"])
def test_nothing_else_is_sent(make_stage, path):
    answer = get(make_stage(), path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "route_not_found"


def test_it_needs_no_key_and_no_name_and_no_model(make_stage):
    stage = make_stage(api_key=("secret",))
    assert get(stage, "/static/app.js").status_code == 200
    assert get(stage, "/v1/models").status_code == 401
    foreign = make_stage()
    assert get(foreign, "/", host="llm.example.org").status_code == 200
    assert get(foreign, "/v1/models", host="llm.example.org").status_code == 403
    stage.state.phase = Phase.LOADING
    assert get(stage).status_code == 200


def test_it_can_be_turned_off(make_stage):
    stage = make_stage(web_page=False)
    assert {get(stage, path).status_code for path in PATHS} == {404}
    keyed = make_stage(web_page=False, api_key=("secret",))
    assert {get(keyed, path).status_code for path in PATHS} == {401}
