"""A real server with LoRA adapters: the demo adapter next to its model, loads, reloads and unloads under requests."""

from __future__ import annotations

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from fcntl import F_SETLEASE, F_UNLCK, F_WRLCK, fcntl
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from oarlock.server.config.options import format_size
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import ROOT, RunningServer, eventually

pytestmark = pytest.mark.slow
ADAPTER = ROOT / "models" / "oarlock-demo-lora"
BOSS = {"Authorization": "Bearer boss"}
QUESTION = "What does os.path.join do?"


def scaled(folder: Path, factor: float) -> Path:
    """A copy of the demo adapter whose change of the model is multiplied by `factor`."""
    shutil.copytree(ADAPTER, folder)
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    save_file({name: weight * factor if ".lora_B." in name else weight for name, weight in weights.items()}, file)
    return folder


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.soak)], ids=["one engine", "two replicas"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    scaled(folder / "none", 0.0)
    scaled(folder / "changing", 1.0)
    (scaled(folder / "broken", 1.0) / "adapter_model.safetensors").write_bytes(b"\xff" * 100)
    flags = ("--enable-lora", "--lora-dir", folder, "--max-loras", 2, "--max-lora-rank", 8, "-dp", request.param)
    flags += ("--lora-modules", f"short={ADAPTER}", "--admin-api-key", "boss", "--max-num-seqs", 8)
    with RunningServer(ROOT / "models" / "oarlock-demo", *flags) as running:
        running.folder = folder
        yield running


def answer(server: RunningServer, model: str | None, replica: int | None = None) -> str:
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
    body |= {"model": model} if model else {}
    response = server.client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert model is None or response.json()["model"] == model
    return response.json()["choices"][0]["message"]["content"]


def change(server: RunningServer, what: str, name: str, **fields: object) -> dict:
    response = server.client.post(f"/v1/{what}_lora_adapter", json={"lora_name": name, **fields}, headers=BOSS)
    assert response.status_code == 200, response.text
    return response.json()


def test_rows_of_several_adapters_and_none_answer_as_they_do_alone(server):
    models = [None, "short", "none"]
    base, short, none = (answer(server, model) for model in models)
    assert base == none and not base.startswith("In short:")
    assert short.startswith("In short:")
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda model: answer(server, model), models * 3))
    assert together == [base, short, none] * 3
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert (cards["short"]["parent"], cards["short"]["root"]) == ("oarlock-demo", str(ADAPTER))
    assert cards["none"]["root"] == str(server.folder / "none")


def test_a_name_with_new_content_never_meets_old_blocks(server):
    replicas = range(server.client.get("/v1/models").json()["data"][0]["data_parallel_size"])
    first = change(server, "load", "own", lora_path="changing")
    assert all(answer(server, "own", replica).startswith("In short:") for replica in replicas)
    second = change(server, "load", "own", lora_path="none", load_inplace=True)
    assert first["adapter_digest"] != second["adapter_digest"]
    assert {answer(server, "own", replica) for replica in replicas} == {answer(server, None)}
    change(server, "unload", "own")
    change(server, "load", "own", lora_path="changing")
    assert all(answer(server, "own", replica).startswith("In short:") for replica in replicas)
    change(server, "unload", "own")


def test_unloading_ends_the_requests_of_the_adapter_and_no_others(server):
    change(server, "load", "own", lora_path=str(server.folder / "changing"))
    streams = {name: OpenStream(server, 1500, model=name) for name in ("own", "short", "oarlock-demo")}
    for stream in streams.values():
        assert stream.flowing.wait(60), server.log
    change(server, "unload", "own")
    eventually(lambda: "error" in streams["own"].last, 30, "the stream of the adapter ends")
    error = streams["own"].last["error"]
    assert (error["param"], error["code"]) == ("model", "adapter_unloaded") and "'own'" in error["message"]
    for name in ("short", "oarlock-demo"):
        before = streams[name].last
        eventually(lambda name=name, before=before: streams[name].last is not before, 60, "the others go on")
        assert "error" not in streams[name].last
    assert server.client.post("/admin/abort", json={"all": True}, headers=BOSS).status_code == 200


def test_a_broken_adapter_is_one_error_line_and_disturbs_nobody(server):
    for _ in range(2):
        body = {"model": "broken", "prompt": "x", "max_tokens": 1}
        response = server.client.post("/v1/completions", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "model", "adapter_failed")
        assert "\n" not in error["message"] and "adapter_model.safetensors" in error["message"]
    assert answer(server, "short").startswith("In short:")
    assert "Traceback" not in server.log


def test_adapters_are_seen(server):
    response = server.client.post("/v1/completions", json={"model": "short", "prompt": "x", "max_tokens": 3})
    explained = server.client.get(f"/v1/requests/{response.json()['id']}", headers=BOSS).json()
    assert explained["adapter"] == "short" and explained["seconds"]["adapter"] < explained["seconds"]["total"]
    text = server.client.get("/metrics").text
    (info,) = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert 'max_lora="2"' in info and 'waiting_lora_adapters=""' in info
    tokens = [line for line in text.splitlines() if line.startswith("oarlock:adapter_generation_tokens_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in tokens if 'adapter="short"' in line) >= 3
    adapters = server.client.get("/v1/state").json()["engines"][0]["adapters"]
    assert (adapters["slots"], adapters["waiting"]) == (2, 0)
    assert {"short", "none"} >= {one["name"] for one in adapters["shown"] if one["slot"]}
    size = server.client.get("/v1/capabilities").json()["adapters"]["bytes_per_slot_per_rank"]
    assert size > 0 and f"adapters short; 2 slots of {format_size(size)} per rank" in server.log


@pytest.mark.soak
def test_a_hung_disk_ends_one_request_and_delays_no_other(tmp_path):
    """The disk: a lease, because of which the kernel blocks the ranks as they open a file, up to 45 seconds."""
    for index, name in enumerate("abc"):
        scaled(tmp_path / name, float(index))
    limit = tmp_path / "limit"  # of silence, shorter in all processes of this server
    limit.mkdir()
    (limit / "sitecustomize.py").write_text("import oarlock.base.watched_reads as reads\nreads.STALL_S = 3.0\n")
    flags = ("--enable-lora", "--lora-dir", tmp_path, "--max-loras", 1, "--max-cpu-loras", 1, "--max-lora-rank", 8)
    flags += ("--tensor-parallel-size", 2, "--max-num-seqs", 4)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    environment = {"PYTHONPATH": f"{limit}:{ROOT}"}
    with (
        (tmp_path / "a" / "adapter_config.json").open("r+b") as file,
        RunningServer(ROOT / "models" / "oarlock-demo", *flags, env=environment) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = {name: answer(server, name) for name in "abcb"}  # a has left the memory of the ranks
        fcntl(file, F_SETLEASE, F_WRLCK)
        body = {"model": "a", "prompt": "x", "max_tokens": 1}
        waiting = pool.submit(server.client.post, "/v1/completions", json=body)
        metric = "oarlock:num_requests_waiting_for_adapter"
        eventually(lambda: server.metrics()[metric] == 1, 30, "the request waits for the disk", every_s=0.1)
        assert [answer(server, name) for name in "bc"] == [first["b"], first["c"]] and not waiting.done()
        for response in (waiting.result(30), server.client.post("/v1/completions", json=body)):
            error = response.json()["error"]
            assert (response.status_code, error["param"], error["code"]) == (503, None, "adapter_stalled")
            assert f"'a' could not be loaded: nothing could be read from {tmp_path / 'a'} for" in error["message"]
        fcntl(file, F_SETLEASE, F_UNLCK)
        eventually(lambda: server.client.post("/v1/completions", json=body).status_code == 200, 30, "it is read again")
        assert [answer(server, name) for name in "abc"] == list(first.values())
        fcntl(file, F_SETLEASE, F_WRLCK)
        waiting = pool.submit(server.client.post, "/v1/completions", json=body)
        eventually(lambda: server.metrics()[metric] == 1, 30, "the request waits for the disk", every_s=0.1)
        assert server.stop() == 0 and "Traceback" not in server.log
        assert not server.left_behind()
    signal.signal(signal.SIGIO, before)
