"""`/v1/files`: forms in any pieces, lists, what is refused, and routes that are not served."""

from __future__ import annotations

import asyncio

import httpx
import jsonschema
import openai
import pytest
from openai.types import FileDeleted, FileObject
from openai.types.batch_create_params import BatchCreateParams

from oarlock.base.errors import StartupError
from tests.contract.batch_server import COMPLETION, jsonl, request_line, serving


@pytest.fixture
def serve(make_stage, tmp_path):
    with serving(make_stage, tmp_path / "batches") as start:
        yield start


@pytest.mark.slow
def test_files_are_kept_listed_read_and_deleted(serve, tmp_path):
    server = serve()
    contents = [jsonl([request_line(f"f{number}")]) + b"\r\n--x" * number for number in range(5)]
    files = [server.upload(content, expires_after={"anchor": "created_at", "seconds": 7200}) for content in contents]
    for file, content in zip(files, contents, strict=True):
        FileObject.model_validate(file.model_dump())
        assert (file.bytes, file.filename, file.purpose) == (len(content), "../../etc/in.jsonl", "batch")
        assert file.expires_at == file.created_at + 7200
        assert server.client.files.content(file.id).read() == content
        assert server.client.files.retrieve(file.id) == file
    newest_first = [file.id for file in reversed(files)]
    assert [file.id for file in server.client.files.list(limit=2)] == newest_first, "the client turns the pages"
    assert [file.id for file in server.client.files.list(order="asc")] == newest_first[::-1]
    assert not list(server.client.files.list(purpose="batch_output"))
    deleted = server.client.files.delete(files[0].id)
    FileDeleted.model_validate(deleted.model_dump())
    with pytest.raises(openai.NotFoundError):
        server.client.files.retrieve(files[0].id)
    outside = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "batches" not in path.parents]
    assert not outside and server.runner.files.directory.bytes.total == sum(map(len, contents[1:]))
    for name in ("..", "lock", "../lock", "file-" + "0" * 24, "%2e%2e%2flock"):
        answer = httpx.get(f"{server.url}/v1/files/{name}/content")
        assert answer.status_code == 404, name


_GOOD = {"endpoint": COMPLETION, "completion_window": "24h"}
_END = b"\r\n--b--\r\n"
_FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
_PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"", 400, None),
        (_FILE + b"x", 400, None),
        (_FILE + b"x" + _END, 400, "purpose"),
        (_FILE + _END, 400, "file"),
        (_PURPOSE + b"batch" + _END, 400, "file"),
        (_PURPOSE + b"fine-tune\r\n" + _FILE + b"x" + _END, 400, "purpose"),
        (_PURPOSE + b"x" * 2000 + _END, 400, "purpose"),
        (_FILE + b"x\r\n" + _FILE + b"y" + _END, 400, "file"),
        (_FILE.replace(b"file", b"colour") + b"x" + _END, 400, "colour"),
        (_FILE.replace(b"form-data", b"attachment") + b"x" + _END, 400, None),
        (_FILE.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n") + b"x" + _END, 400, None),
        (b"--b\r\n" + b"h" * 9000, 400, None),
        (b"--bxx" + _END, 400, None),
        (_PURPOSE * 20, 400, "purpose"),
        (_FILE + b"x\r\n" + _PURPOSE + b"batch" + _END + b"epilogue", 200, None),
        (b"preamble\r\n" + _PURPOSE + b"batch\r\n" + _FILE + b"\r\n--other\r\n--" + _END, 200, None),
    ],
)
def test_forms_in_any_pieces(make_stage, tmp_path, content, status, param):
    """Whole, byte by byte, and with each delimiter cut: the same file, or the same error."""
    stage = make_stage(batch_dir=str(tmp_path))
    kept = []

    async def send(size):
        async def pieces():
            for start in range(0, len(content), size):
                yield content[start : start + size]

        async with stage.client(headers={"Content-Type": "multipart/form-data; boundary=b"}) as client:
            answer = await client.post("/v1/files", content=pieces())
            assert answer.status_code == status, answer.text
            if status == 200:
                kept.append((await client.get(f"/v1/files/{answer.json()['id']}/content")).content)
            else:
                assert answer.json()["error"]["param"] == param

    async def all_sizes():
        for size in (1, 7, 100_000):
            await send(size)
        await stage.state.batches.close()

    asyncio.run(all_sizes())
    assert len(set(kept)) == (status == 200)
    assert not list((tmp_path / "uploads").iterdir())
    assert len(list((tmp_path / "files").iterdir())) == 2 * len(kept)


@pytest.mark.slow
def test_invalid_requests_are_refused_by_name(serve):
    server = serve()
    file = server.upload([request_line("a")])
    good = {"input_file_id": file.id, "endpoint": COMPLETION, "completion_window": "24h"}
    for change, status, param in [
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "file_id"),
        ({"metadata": {"k": 5}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after"),
    ]:
        answer = httpx.post(f"{server.url}/v1/batches", json=good | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    for path in ("files?limit=0", "files?limit=x", "batches?limit=101", "files?order=up", "files?after=file-x"):
        answer = httpx.get(f"{server.url}/v1/{path}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] in path
    for path in ("batches?order=asc", "files?colour=red", "files?purpose=vision"):
        assert httpx.get(f"{server.url}/v1/{path}").status_code == 400
    assert httpx.post(f"{server.url}/v1/files", json={}).status_code == 415
    batch = server.ended(server.client.batches.create(**good))
    answer = httpx.post(f"{server.url}/v1/batches", json=good | {"input_file_id": batch.output_file_id})
    assert answer.status_code == 400 and "contains responses" in answer.text


def test_a_directory_must_be_usable(make_stage, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot be used: "):
        make_stage(batch_dir=str(tmp_path / "file"))
    broken = tmp_path / "broken" / "batches"
    broken.mkdir(parents=True)
    (broken / f"batch_{'0' * 24}.json").write_text("{}")
    with pytest.raises(StartupError, match="cannot be read"):
        make_stage(batch_dir=str(broken.parent))


def test_without_the_option_the_routes_name_it(make_stage):
    async def ask():
        async with make_stage().client() as client:
            return [await client.get(f"/v1/{path}") for path in ("files", "batches/x", "files/x/content")]

    for answer in asyncio.run(ask()):
        assert answer.status_code == 404 and "--batch-dir DIR" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "audio/speech",
        "images/generations",
        "moderations",
        "fine_tuning/jobs",
        "assistants",
        "threads/x/runs",
        "uploads",
    ],
)
def test_other_routes_of_the_api_are_refused_by_name(make_stage, path):
    async def ask():
        async with make_stage().client() as client:
            return await client.post(f"/v1/{path}", json={})

    error = asyncio.run(ask()).json()["error"]
    assert error["code"] == "route_not_supported" and error["message"].startswith(f"/v1/{path} is not supported")
    assert "/v1/chat/completions" in error["message"]


@pytest.mark.slow
def test_the_document_matches_responses(serve):
    server = serve()
    file = server.upload([request_line("a")])
    batch = server.ended(server.client.batches.create(**_GOOD, input_file_id=file.id))
    document = httpx.get(f"{server.url}/openapi.json").json()
    for method, path in [
        ("get", "/v1/files"),
        ("get", "/v1/files/{file_id}"),
        ("get", "/v1/batches"),
        ("get", "/v1/batches/{batch_id}"),
        ("delete", "/v1/files/{file_id}"),
    ]:
        filled = path.replace("{file_id}", batch.output_file_id).replace("{batch_id}", batch.id)
        answer = httpx.request(method, server.url + filled)
        shape = document["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**shape, "components": document["components"]})
    official = {name for name in BatchCreateParams.__annotations__ if not name.startswith("__")}
    assert set(document["components"]["schemas"]["CreateBatchRequest"]["properties"]) == official
