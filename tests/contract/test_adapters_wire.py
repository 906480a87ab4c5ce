"""LoRA adapters as clients see them: names on every route, the admin's routes, first uses, failures, unloads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import anyio
import httpx
import pytest

from oarlock.base import watched_reads
from oarlock.base.errors import StartupError
from oarlock.base.watched_reads import OnRead
from oarlock.engine import client
from oarlock.server.config.adapter_options import LoraModule
from oarlock.server.endpoints.completions import OpenAIServingCompletion
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.errors import DeadlineError
from oarlock.server.hub.adapter_path import AdapterPaths, FoundAdapter
from oarlock.server.llm import adapters as served
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from oarlock.server.schemas.generation import CompletionRequest
from oarlock.server.schemas.pooling import EmbeddingRequest
from oarlock.workers.adapter_digest import adapter_digest
from tests.contract.conftest import INFO, Stage

BOSS = {"Authorization": "Bearer boss"}
LORA = replace(INFO, max_loras=2, max_lora_rank=16)
HI = [{"role": "user", "content": "Hi"}]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
EMBEDS = PoolerConfig(Task.EMBED, kind="mean")
GENERATING = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
}
POOLING = {
    "/v1/embeddings": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["Ho"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Ho"},
}
PROMPTS = {
    "/v1/completions/render": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": HI},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": HI},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [17]},
}


def write(folder: Path, weights: str = "weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_text(weights)
    return folder


@pytest.fixture
def folder(tmp_path):
    """The directory of `--lora-dir`, with a good adapter and a broken one."""
    write(tmp_path / "adapters" / "sql")
    write(tmp_path / "adapters" / "bad", "broken")
    write(tmp_path / "secret")
    return tmp_path / "adapters"


@pytest.fixture
def make(make_stage, folder):
    def make(reply="one two three", **options):
        options = {"enable_lora": True, "lora_dir": str(folder), "admin_api_key": "boss", "offline": True, **options}
        return make_stage(reply, info=LORA, **options)

    return make


async def post(stage: Stage, path: str, body: dict, headers: dict | None = None) -> httpx.Response:
    async with stage.client() as client:
        return await client.post(path, json=body, headers=headers)


async def load(stage: Stage, name: str, path: object, **fields: object) -> httpx.Response:
    return await post(stage, LOAD, {"lora_name": name, "lora_path": str(path), **fields}, BOSS)


async def unload(stage: Stage, name: str) -> httpx.Response:
    return await post(stage, UNLOAD, {"lora_name": name}, BOSS)


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    assert "\n" not in error["message"]
    return response.status_code, error["param"], error["code"]


@pytest.mark.parametrize("path", [*GENERATING, *POOLING, *PROMPTS])
def test_each_route_takes_the_name_of_an_adapter_as_its_model(make, path):
    stage = make(pooler=EMBEDS if path in POOLING else None)
    body = (GENERATING | POOLING | PROMPTS)[path]

    async def run() -> list[httpx.Response]:
        return [await post(stage, path, body | {"model": name}) for name in ("sql", "demo", "nope")]

    own, base, unknown = anyio.run(run)
    assert (own.status_code, base.status_code, unknown.status_code) == (200, 200, 404)
    assert "nope" in unknown.text and "demo" in unknown.text
    if path in PROMPTS:  # the prompt does not depend on the adapter
        assert stage.engine.added == []
        return
    adapters = [request.adapter for request in stage.engine.requests]
    assert adapters and adapters == ["sql"] * (len(adapters) // 2) + [None] * (len(adapters) // 2)
    assert own.json()["model"] == "sql"
    if "system_fingerprint" in own.json():
        assert own.json()["system_fingerprint"] != base.json()["system_fingerprint"]


def test_requests_that_do_not_come_over_http_resolve_the_name_too(make):
    stage = make()
    embeds = make(pooler=EMBEDS)
    completion = OpenAIServingCompletion(stage.settings, stage.state, stage.counters)
    embedding = OpenAIServingEmbedding(embeds.settings, embeds.state, embeds.counters)

    async def run() -> list[str]:
        return [
            await completion.complete(CompletionRequest(model="sql", prompt="Hi"), "known"),
            await embedding.complete(EmbeddingRequest(model="sql", input="Hi"), "known"),
        ]

    async def late() -> None:
        await stage.state.async_llm.adapters.unload("sql")
        await embeds.state.async_llm.adapters.unload("sql")
        stage.engine.may_add.clear()
        embeds.engine.may_add.clear()
        with pytest.raises(DeadlineError):  # the load counts, too
            await completion.complete(CompletionRequest(model="sql", prompt="Hi", timeout=0.01), "known")
        with pytest.raises(DeadlineError):
            await embedding.complete(EmbeddingRequest(model="sql", input="Hi", timeout=0.01), "known")

    assert all('"model":"sql"' in response for response in anyio.run(run))
    assert [request.adapter for request in (*stage.engine.requests, *embeds.engine.requests)] == ["sql", "sql"]
    anyio.run(late)


def test_models_have_their_parent_and_root(make, folder):
    stage = make()

    async def run() -> tuple[list[dict], dict]:
        card = (await load(stage, "sql/2", "sql")).json()
        async with stage.client() as client:
            assert (await client.get("/v1/models/sql/2")).json() == card
            return (await client.get("/v1/models")).json()["data"], card

    cards, card = anyio.run(run)
    assert [(one["id"], one["parent"], one["root"]) for one in cards] == [
        ("demo", None, "demo"),
        ("alias/with/slash", None, "demo"),
        ("sql/2", "demo", "sql"),
        ("bad", "demo", str(folder / "bad")),
        ("sql", "demo", str(folder / "sql")),
    ]
    assert card["adapter_digest"] and card in cards


def test_only_the_admin_key_loads_and_unloads(make):
    stage, closed, off = make(api_key=("user",)), make(admin_api_key=None), make(enable_lora=False, lora_dir=None)
    off.state.async_llm.adapters = None

    async def run(path: str, body: dict) -> None:
        for target, key, status, code in (
            (stage, None, 401, "invalid_api_key"),
            (stage, "user", 403, "not_admin_key"),
            (closed, "boss", 403, "admin_disabled"),
            (off, "boss", 400, "lora_disabled"),
        ):
            answer = await post(target, path, body, {"Authorization": f"Bearer {key}"} if key else {})
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
            assert target.engine.added == []

    anyio.run(run, LOAD, {"lora_name": "x", "lora_path": "sql"})
    anyio.run(run, UNLOAD, {"lora_name": "sql"})


def test_clients_reach_only_the_allowed_directory(make, folder):
    secret = folder.parent / "secret"
    (folder / "out").symlink_to(secret)
    (folder / "in").symlink_to(folder / "sql")
    write(folder / "half").joinpath("adapter_model.safetensors").unlink()
    (folder / "half" / "adapter_model.safetensors").symlink_to(secret / "adapter_model.safetensors")
    (folder / "empty").mkdir()
    beside = write(folder.parent / "adapters of others")
    stage, no_folder = make(), make(lora_dir=None)
    absolute = [
        secret,
        beside,
        folder / ".." / "secret",
        "/etc",
        "/nowhere",
        "../secret",
        ".",
        "~/sql",
        "a\0b",
        "file:///etc",
    ]
    inside = [
        "out",
        "half",
        "empty",
        "sql/../../secret",
        "sql/adapter_config.json",
        "https://hub/a",
        "a" * 4000,
        folder,
    ]
    hostile = [(stage, path) for path in (*absolute, *inside)] + [(no_folder, path) for path in absolute]

    async def run() -> None:
        for target, path in hostile:
            assert error_of(await load(target, "x", path)) == (400, "lora_path", "adapter_failed"), path
            assert target.engine.added == []
        outside, missing = [(await load(stage, "x", path)).text for path in (secret, "/nowhere")]
        assert outside.replace(str(secret), "") == missing.replace("/nowhere", "")  # no oracle
        for number, path in enumerate(("sql", folder / "sql", "in", "sql/../sql")):
            assert (await load(stage, f"x{number}", path)).status_code == 200
        assert {info.directory for info in stage.engine.adapters.values()} == {str(folder / "sql")}
        for name in ("out", "half", "empty", "..", ".", "../secret", "sql/", "sql\0"):
            assert (await post(stage, "/v1/completions", {"prompt": "Hi", "model": name})).status_code == 404

    anyio.run(run)


@pytest.mark.parametrize(
    ("name", "is_alive", "cause", "exit_code"),
    [
        ("bad", True, "its header is damaged", 3),
        ("sql", False, "The engine has stopped while", 5),
        ("demo", True, "cannot have the name 'demo'", 3),
    ],
)
def test_an_adapter_that_fails_stops_the_start(make, folder, name, is_alive, cause, exit_code):
    stage = make()
    stage.engine.is_alive, progress = is_alive, []
    found = [FoundAdapter(LoraModule(each, "hub/id"), str(folder / "sql")) for each in ("first",) if is_alive]
    found.append(FoundAdapter(LoraModule(name, "hub/id"), str(folder / name)))
    with pytest.raises(StartupError, match=cause) as caught:
        anyio.run(stage.state.async_llm.adapters.load_at_start, found, lambda *reported: progress.append(reported))
    assert progress == [("loading adapters", number / len(found), one.module.name) for number, one in enumerate(found)]
    assert caught.value.exit_code == exit_code
    assert [adapter.root for adapter in stage.state.async_llm.adapters.list()] == ["hub/id"] * is_alive


@pytest.mark.parametrize("name", ["demo", "", " x", "a\nb", "x (replacement)", "x" * 129])
def test_names_that_an_adapter_cannot_have(make, name):
    stage = make()
    assert error_of(anyio.run(load, stage, name, "sql"))[:2] == (400, "lora_name")
    assert stage.engine.added == []


def test_case_is_ignored_in_names_of_adapters_too(make, folder):
    stage = make(ignore_model_case=True)

    async def run() -> None:
        assert error_of(await load(stage, "DEMO", "sql"))[:2] == (400, "lora_name")  # requests would get the model
        for name, own in (("SQL", "sql"), ("Sql", "sql"), ("DEMO", "DEMO")):  # at its first use and later
            answer = await post(stage, "/v1/completions", {"prompt": "Hi", "model": name})
            assert answer.json()["model"] == own
        assert [request.adapter for request in stage.engine.requests] == ["sql", "sql", None]

    anyio.run(run)


def test_the_first_use_loads_once_for_all_that_wait(make):
    stage = make()

    async def run() -> None:
        stage.engine.may_add.clear()
        body = {"prompt": "Hi", "model": "sql"}
        waiting = [asyncio.create_task(post(stage, "/v1/completions", body)) for _ in range(5)]
        late = await post(stage, "/v1/completions", body | {"timeout": 0.05})
        assert late.status_code == 408  # which does not stop the load
        assert (await post(stage, "/v1/completions", {"prompt": "Hi"})).status_code == 200
        assert not any(task.done() for task in waiting)
        stage.engine.may_add.set()
        assert {(await task).status_code for task in waiting} == {200}
        assert stage.engine.added == ["sql"]

    anyio.run(run)


def test_a_failed_first_use_is_not_tried_again_at_once(make, folder, monkeypatch):
    stage = make()

    async def ask() -> httpx.Response:
        return await post(stage, "/v1/completions", {"prompt": "Hi", "model": "bad"})

    async def run() -> None:
        for _ in range(3):
            assert error_of(await ask()) == (400, "model", "adapter_failed")
        assert stage.engine.added == ["bad"]
        write(folder / "bad")
        monkeypatch.setattr(served, "_RETRY_S", 0.0)
        assert (await ask()).status_code == 200

    anyio.run(run)


def test_an_unload_ends_open_requests_and_frees_the_name(make, folder):
    stage = make("one two three four", pause_after=2)

    async def run() -> None:
        await load(stage, "own", "sql")
        running = asyncio.create_task(post(stage, "/v1/completions", {"prompt": "Hi", "model": "own"}))
        other = asyncio.create_task(post(stage, "/v1/completions", {"prompt": "Hi"}))
        while len(stage.engine.requests) < 2:
            await asyncio.sleep(0)
        assert (await unload(stage, "own")).json() == {"id": "own", "object": "model", "deleted": True}
        ended = await asyncio.wait_for(running, 20)
        assert error_of(ended) == (404, "model", "adapter_unloaded") and "'own'" in ended.text
        assert not other.done()
        stage.engine.resume.set()
        assert (await other).status_code == 200
        assert error_of(await unload(stage, "own")) == (404, "lora_name", "adapter_not_found")
        gone = await post(stage, "/v1/completions", {"prompt": "Hi", "model": "own"})
        assert error_of(gone) == (404, "model", "model_not_found")

    anyio.run(run)


def test_an_adapter_is_replaced_only_by_one_that_loads(make, folder):
    stage = make()
    new = write(folder / "new", "other weights")

    async def run() -> None:
        first = (await load(stage, "own", "sql")).json()
        assert error_of(await load(stage, "own", "new")) == (400, "lora_name", "adapter_exists")
        assert error_of(await load(stage, "own", "bad", load_inplace=True)) == (400, "lora_path", "adapter_failed")
        assert [*stage.engine.adapters] == ["own"]
        async with stage.client() as client:
            assert (await client.get("/v1/models/own")).json() == first
        second = (await load(stage, "own", "new", load_inplace=True)).json()
        assert second["adapter_digest"] != first["adapter_digest"]
        assert {info.name: info.directory for info in stage.engine.adapters.values()} == {"own": str(new)}

    anyio.run(run)


def test_loads_are_bounded_and_can_be_cancelled(make, folder, monkeypatch):
    async def resolve(self: object, path: str, *, is_trusted: bool) -> str:
        return str(folder / path)

    monkeypatch.setattr(served, "_MOST_OPEN", 6)
    monkeypatch.setattr(AdapterPaths, "resolve", resolve)  # without a thread, all loads take the same turns of the loop
    stage = make()

    async def run() -> None:
        stage.engine.may_add.clear()
        loads = [asyncio.create_task(load(stage, f"x{number}", "sql")) for number in range(6)]
        while stage.engine.num_adding < served._AT_ONCE or len(stage.state.async_llm.adapters._changes) < 6:
            await asyncio.sleep(0)
        for _ in range(9):
            await asyncio.sleep(0)
        assert stage.engine.num_adding == served._AT_ONCE
        assert error_of(await load(stage, "x0", "sql")) == (400, "lora_name", "adapter_exists")
        assert error_of(await load(stage, "more", "sql")) == (503, None, "adapters_loading")
        assert (await unload(stage, "x0")).status_code == 200  # while it is loaded
        assert error_of(await loads[0]) == (404, "model", "adapter_not_found")
        stage.engine.may_add.set()
        assert [(await task).status_code for task in loads[1:]] == [200] * 5
        assert sorted(stage.engine.adapters) == [f"x{number}" for number in range(1, 6)]

    anyio.run(run)


def test_an_adapter_on_a_hung_disk_fails_alone_and_in_time(make, folder, monkeypatch):
    hung, clock = write(folder / "hung"), SimpleNamespace(now_s=1.0, monotonic=lambda: clock.now_s)
    begun, responds, digest = threading.Semaphore(0), threading.Event(), adapter_digest

    def blocked(directory: str, on_read: OnRead) -> str:
        if directory == str(hung):
            begun.release()
            assert responds.wait(30)
        return digest(directory, on_read)

    monkeypatch.setattr(client, "adapter_digest", blocked)
    monkeypatch.setattr(watched_reads, "time", clock)
    stage = make()

    async def silent(task: asyncio.Task[httpx.Response]) -> asyncio.Task[httpx.Response]:
        while not begun.acquire(blocking=False):
            await asyncio.sleep(0.001)
        return task

    async def use(model: str) -> httpx.Response:
        return await post(stage, "/v1/completions", {"prompt": "Hi", "model": model})

    async def run() -> None:
        waiting = await silent(asyncio.create_task(use("hung")))
        assert (await use("sql")).status_code == (await use("demo")).status_code == 200 and not waiting.done()
        left = await silent(asyncio.create_task(load(stage, "own", "hung")))
        left.cancel()  # by its client; the load goes on, until an unload cancels it
        assert error_of(await load(stage, "own", "hung")) == (400, "lora_name", "adapter_exists")
        assert (await unload(stage, "own")).status_code == 200
        clock.now_s += watched_reads.STALL_S
        response = await waiting
        assert error_of(response) == (503, None, "adapter_stalled")
        assert all(part in response.text for part in ("'hung'", str(hung), "Check its disk"))
        for again in (await use("hung"), await load(stage, "other", "hung")):  # while the thread is blocked
            assert error_of(again) == (503, None, "adapter_stalled")
        assert [*stage.engine.adapters] == ["sql"] and not begun.acquire(blocking=False)
        monkeypatch.setattr(served, "_RETRY_S", 0.0)
        responds.set()
        while (await use("hung")).status_code != 200:
            await asyncio.sleep(0.001)

    anyio.run(run)
