"""What people read: the banner, progress, log lines, error bodies; and where a model is found."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import shlex
from pathlib import Path

import pytest

from engine.errors import EngineDeadError, EngineError, QueueFullError, RequestError, StartupError
from engine.types import EngineInfo
from server.api.uvicorn_server import bind, url_of, warn_if_exposed
from server.config import model_path as model_files
from server.config.allowed_hosts import is_loopback
from server.config.settings import make_settings
from server.entrypoints import banner
from server.errors import MAX_MESSAGE, HttpError, ModelNotFoundError, describe, error_bytes
from server.observability import logs

ROOT = Path(__file__).resolve().parents[3]
INFO = EngineInfo(
    max_model_len=8192,
    vocab_size=4096,
    num_blocks=1025,
    block_size=32,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    tensor_parallel_size=2,
    device="cpu",
    dtype="bfloat16",
    attention_backend="torch",
    architecture="Qwen2ForCausalLM",
    num_parameters=494_000_000,
    weight_bytes_per_rank=494_000_000,
    kv_bytes_per_token_per_rank=2048,
    enable_prefix_caching=True,
    load_seconds=0.1,
    max_waiting_requests=512,
    max_waiting_tokens=1_000_000,
)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_banner_has_everything_needed_to_use_the_server():
    text = banner.banner("http://127.0.0.1:8000", ("demo", "alias"), INFO, 8192, True, {"loading": 1.25}, False)
    for part in (
        "http://127.0.0.1:8000",
        "demo, alias (Qwen2ForCausalLM, 494.0M parameters)",
        "bfloat16 on cpu x 2",
        "1024 blocks of 32 = 32768 tokens = 8 users at 4k",
        "in 1.2 s (loading 1.2 s)",
    ):
        assert part in text


@pytest.mark.parametrize("chat", [True, False])
def test_the_curl_line_can_be_pasted(chat):
    text = banner.banner("http://127.0.0.1:8000", ("demo",), INFO, 8192, chat, {}, True)
    words = shlex.split(text.splitlines()[-1].split("try", 1)[1])
    assert words[0] == "curl"
    assert words[2].endswith("/v1/chat/completions" if chat else "/v1/completions")
    assert "Authorization: Bearer KEY" in words
    assert json.loads(words[words.index("-d") + 1])["temperature"] == 0


def test_progress_rewrites_one_line_on_a_terminal():
    stream = Terminal()
    progress = banner.Progress(stream)
    for percent in range(0, 101, 5):
        progress("loading weights", percent / 100)
    progress.finish()
    assert "\n" not in stream.getvalue()
    assert stream.getvalue().count("\r") == 22
    assert "loading weights 100%" in stream.getvalue()
    assert set(progress.seconds) == {"starting", "loading weights"}


def test_progress_is_sparse_without_a_terminal():
    stream = io.StringIO()
    progress = banner.Progress(stream)
    for thousandth in range(1001):
        progress("loading weights", thousandth / 1000)
    progress("warming up", 0.0)
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["0%", "25%", "50%", "75%", "100%", "0%"]


def test_log_lines_cannot_be_forged(capsys):
    before = logging.getLogger().handlers[:]
    try:
        logs.configure("info")
        evil = "x\r\nlevel=ERROR forged\x1b[2J\u2028\x85"
        logs.logger("test").info(logs.event("happened", path=evil, size=1.5, missing=None, empty=""))
        logs.logger("test").debug("event=unseen")
    finally:
        logging.getLogger().handlers[:] = before
    lines = capsys.readouterr().err.split("\n")
    assert len(lines) == 2
    assert lines[0].isprintable()
    assert 'event=happened path="x\\r\\nlevel=ERROR forged\\e[2J\\u2028\\x85" size=1.500 empty=""' in lines[0]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (RequestError("m", "temperature"), 400, "invalid_request_error", None),
        (ModelNotFoundError("x" * 5000, ("demo",)), 404, "invalid_request_error", "model_not_found"),
        (QueueFullError("m", 2), 429, "rate_limit_error", "queue_full"),
        (EngineError("m"), 500, "server_error", "engine_error"),
        (EngineDeadError("m"), 503, "server_error", "engine_dead"),
        (HttpError(401, "m"), 401, "authentication_error", None),
        (ZeroDivisionError("secret"), 500, "server_error", None),
    ],
)
def test_every_error_has_four_keys(error, status, kind, code):
    answer = describe(error)
    body = json.loads(error_bytes(answer))["error"]
    assert answer.status == status
    assert set(body) == {"message", "type", "param", "code"}
    assert (body["type"], body["code"]) == (kind, code)
    assert "secret" not in body["message"]


def test_messages_are_short_and_always_encodable():
    body = json.loads(error_bytes(HttpError(400, "\ud800" + "x" * 10_000)))
    assert len(body["error"]["message"]) == MAX_MESSAGE


def _resolve(**values):
    return asyncio.run(model_files.resolve(make_settings(values), lambda phase, fraction, detail: None))


def test_the_demo_model_is_found_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(_resolve()) == ROOT / "models" / "oarlock-demo"
    assert model_files.display_name(None) == "oarlock-demo"


def test_a_directory_is_served_under_its_name(monkeypatch, tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert _resolve(model="./my-model") == str(folder)
    assert model_files.display_name("./my-model") == "my-model"
    assert model_files.display_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(StartupError, match="--revision"):
        _resolve(model="./my-model", revision="v1")


@pytest.mark.parametrize(
    "values",
    [
        *({"model": model} for model in ("../up", "a/b/c", "/no/such", "a b", "no such/dir/at/all", "-x")),
        {"model": "a/b", "revision": "../../x"},
    ],
    ids=str,
)
def test_what_is_no_hub_id_never_reaches_the_network(monkeypatch, values):
    async def forbidden(*args):
        raise AssertionError("asked the network")

    monkeypatch.setattr(model_files, "download", forbidden)
    monkeypatch.chdir("/")
    with pytest.raises(StartupError):
        _resolve(**values)


@pytest.mark.parametrize("name", ["model-q4.gguf", ""])
def test_gguf_is_told_by_name(tmp_path, name):
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(StartupError, match=r"GGUF, which is not served.*safetensors"):
        _resolve(model=str(tmp_path / name))


def test_addresses():
    assert [is_loopback(h) for h in ("127.0.0.1", "::1", "localhost", "127.9.9.9", "0.0.0.0", "evil")] == [
        *[True] * 4,
        False,
        False,
    ]
    assert warn_if_exposed("0.0.0.0", False)
    assert warn_if_exposed("0.0.0.0", True) is None
    assert warn_if_exposed("127.0.0.1", False) is None
    listener = bind("127.0.0.1", 0)
    assert url_of(listener).startswith("http://127.0.0.1:")
    listener.close()


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EACCES, "may not be opened by this user"),
        (errno.EADDRNOTAVAIL, "not an address of this machine"),
        (errno.EINVAL, "Cannot listen"),
    ],
)
def test_a_port_that_cannot_be_opened_is_explained(monkeypatch, number, cause):
    def refuse(self, address):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("socket.socket.bind", refuse)
    with pytest.raises(StartupError, match=cause):
        bind("127.0.0.1", 80)
