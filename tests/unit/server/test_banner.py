"""The output of a start: the summary with its curl command, and progress on a terminal and without one."""

from __future__ import annotations

import io
import json
import shlex

import pytest

from engine.types import EngineInfo
from server.entrypoints import banner

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
    kv_cache_dtype="int8",
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
        "1024 blocks of 32 = 32768 tokens = 8 users at 4k, int8, 2.0 KiB a token",
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
