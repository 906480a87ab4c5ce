"""How the web page is sent: its headers, its size, when it is there, and when it is not."""

import base64
import hashlib
import re
from pathlib import Path

import anyio
import pytest

from oarlock.server.http import pages
from oarlock.server.http.pages import PATHS
from oarlock.server.http.server_state import Phase

# KaTeX 0.19.1 (MIT) and highlight.js 11.12.0 (BSD-3-Clause) as their packages have them: beginnings of SHA-256.
VENDORED = {
    "highlight-bash.min.js": "7db1758fe6f04cd4",
    "highlight-c.min.js": "edada72825cceb7d",
    "highlight-cpp.min.js": "aa67eeacdbbda9f4",
    "highlight-css.min.js": "2f4264d9a07a4f54",
    "highlight-diff.min.js": "cbd7cf3b49bee36d",
    "highlight-go.min.js": "05658f281f7f1223",
    "highlight-java.min.js": "7987da1c2dcc1d83",
    "highlight-javascript.min.js": "c3dbd515a79e2c00",
    "highlight-json.min.js": "8f2343ffbcc4fdea",
    "highlight-markdown.min.js": "73cb474b4687421a",
    "highlight-python.min.js": "fd5d479dcc9d07b9",
    "highlight-rust.min.js": "fde151d2b246bef4",
    "highlight-sql.min.js": "79bead5cf2bfa93d",
    "highlight-typescript.min.js": "0e10ce9a81d42f8d",
    "highlight-xml.min.js": "2e8c8ba1e7a200cd",
    "highlight-yaml.min.js": "7010955f1f87aef1",
    "highlight.LICENSE": "6c081431591d9df6",
    "highlight.min.js": "67a339aa68880a40",
    "katex.LICENSE": "766ccc1f306c885a",
    "katex.min.js": "fa140498b8cfc830",
}


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
    text = "".join(part.text for path, part in parts.items() if "/vendor/" not in path)
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


def test_libraries_are_the_published_files_with_their_licences(make_stage):
    folder = Path(pages.__file__).parent / "static" / "vendor"
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in folder.iterdir()}
    assert files == VENDORED
    for name in files:
        library = name.split(".")[0].split("-")[0]
        assert f"{library}.LICENSE" in files
        if name.endswith(".js"):
            assert get(make_stage(), f"/static/vendor/{name}").content == (folder / name).read_bytes()


@pytest.mark.parametrize("path", ["/static/style.css", "/openapi.json", "/docs", "/v1/capabilities"])
def test_data_that_the_client_has_is_not_sent_again(make_stage, path):
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
