"""The output of a start: the summary with its curl command, and progress on a terminal and without one."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace

import pytest

from oarlock.engine.types import EngineInfo
from oarlock.server.launch import banner
from oarlock.workers.config import GroupInfo

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
        "1024 blocks of 32 = 32768 tokens = 8 users at 4k, int8, 2.0 KiB per token",
        "in 1.2 s (loading 1.2 s)",
    ):
        assert part in text


def test_the_banner_says_that_the_text_part_is_served():
    info = replace(INFO, text_part_of="Qwen2_5_VLForConditionalGeneration")
    text = banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False)
    assert "demo (Qwen2ForCausalLM, the text part of Qwen2_5_VLForConditionalGeneration, 494.0M parameters)" in text


def test_the_banner_says_what_products_do_to_their_inputs():
    info = replace(INFO, quantization="gptq (4 bits, groups of 128)", input_rounding="8 bits")
    text = banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False)
    assert "weights as gptq (4 bits, groups of 128) 471.1 MiB per rank" in text
    assert "  values   matmul inputs are rounded to 8 bits; --dequantize computes in bfloat16" in text
    exact = banner.banner("http://127.0.0.1:8000", ("demo",), replace(info, input_rounding=None), 8192, True, {}, False)
    assert "--dequantize" not in exact


def test_the_banner_has_the_loaded_adapters_and_their_slots():
    info = replace(INFO, max_loras=4, max_lora_rank=16, adapter_slot_bytes=3 << 20)
    names = [f"adapter-{number}" for number in range(10)]
    text = banner.banner("url", ("demo",), info, 8192, True, {}, False, adapters=names)
    shown = (
        "  adapters adapter-0, adapter-1, adapter-2, adapter-3, adapter-4, adapter-5, adapter-6, adapter-7 and 2 more;"
    )
    assert shown in text
    assert " 4 slots of 3.0 MiB per rank, LoRA rank 16 at most\n" in " ".join(text.split(" ")).replace(
        "\n          ", ""
    )
    assert "none yet; 4 slots" in banner.banner("url", ("demo",), info, 8192, True, {}, False)
    assert "  adapters" not in banner.banner("url", ("demo",), INFO, 8192, True, {}, False, adapters=names)


def test_the_banner_counts_the_users_of_all_replicas():
    info = replace(INFO, data_parallel_size=2)
    text = banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {"loading": 1.25}, False)
    assert "bfloat16 on cpu x 2 x 2 replicas, attention" in text
    assert "= 32768 tokens on each of 2 replicas = 16 users at 4k" in text


@pytest.mark.parametrize(
    ("stages", "nodes", "shown"),
    [(1, 1, "cpu x 2, attention"), (1, 2, "cpu x 2 on 2 hosts,"), (3, 2, "cpu x 2 x 3 stages on 2 hosts,")],
)
def test_the_banner_names_where_the_ranks_are(stages, nodes, shown):
    info = replace(INFO, pipeline_parallel_size=stages, nnodes=nodes)
    assert shown in banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False)


def test_the_banner_says_what_is_not_proven_on_cuda():
    on_cuda = replace(INFO, device="cuda")
    texts = [banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False) for info in (INFO, on_cuda)]
    assert ["not measured on a GPU yet" in text for text in texts] == [False, True]


def test_the_banner_says_what_the_owner_of_the_model_says_about_it():
    about = "It knows docstrings and nothing else. " * 8
    text = banner.banner("http://127.0.0.1:8000", ("demo",), INFO, 8192, True, {}, False, about=about.strip())
    lines = [line for line in text.splitlines() if "docstrings" in line]
    assert lines[0].startswith("  about    It knows docstrings and nothing else. ")
    assert len(lines) > 1 and all(line.startswith("           ") and len(line) <= 120 for line in lines[1:])
    without = banner.banner("http://127.0.0.1:8000", ("demo",), INFO, 8192, True, {}, False)
    assert "about" not in without


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


def test_without_a_terminal_what_a_start_waits_for_is_said_again_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(banner.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    progress = banner.Progress(out)
    for left in range(90, 0, -1):
        progress("waiting for nodes", 0.0, f"node 1, {left} s left")
        now[0] += 1
    shown = [f"waiting for nodes   0% (node 1, {left} s left)" for left in (90, 60, 30)]
    assert out.getvalue().splitlines() == shown


def test_progress_is_sparse_without_a_terminal():
    stream = io.StringIO()
    progress = banner.Progress(stream)
    for thousandth in range(1001):
        progress("loading weights", thousandth / 1000)
    progress("warming up", 0.0)
    assert [line.split()[-1] for line in stream.getvalue().splitlines()] == ["25%", "50%", "75%", "100%"]


@pytest.mark.parametrize("page", [True, False])
def test_the_web_page_is_named_where_there_is_one(page):
    text = banner.banner("http://127.0.0.1:8000", ("demo",), INFO, 8192, True, {}, False, page)
    assert ("  page     http://127.0.0.1:8000/ in a browser" in text.splitlines()) == page


def test_windows_and_recurrent_states_have_lines_of_their_own() -> None:
    groups = (GroupInfo(329, 1 << 10, span=1024), GroupInfo(1025, 1 << 10), GroupInfo(17, 3 << 20, is_recurrent=True))
    text = banner.banner("url", ("m",), replace(INFO, groups=groups), 8192, True, {}, False)
    assert "  KV       1024 blocks of 32 = 32768 tokens = 8 users at 4k" in text
    assert "  window   328 blocks for the latest 1024 tokens\n" in text
    assert "  state    16 slots of 3.0 MiB: two for each running request, the others for checkpoints\n" in text
    text = banner.banner("url", ("m",), replace(INFO, groups=groups, data_parallel_size=2), 8192, True, {}, False)
    assert "  state    16 slots of 3.0 MiB on each of 2 replicas: two for each" in text and "16 users" in text
    only = replace(INFO, kv_bytes_per_token_per_rank=0, groups=(GroupInfo(9, 1 << 20, is_recurrent=True),))
    text = banner.banner("url", ("m",), only, 8192, True, {}, False)
    assert "  state    8 slots of 1.0 MiB: two for each" in text and "KV  " not in text


def test_users_fit_into_windows_and_slots_as_well() -> None:
    """Each user holds 41 blocks of a window: 1,024 tokens, a step of 256 tokens, and one block more."""
    full, window, slots = GroupInfo(1025, 1), GroupInfo(1 + 5 * 41, 1, span=1024), GroupInfo(7, 1, is_recurrent=True)
    for groups, users in (((full, window), 5), ((full, slots), 3), ((full,), 8), ((window,), 8)):
        text = banner.banner("url", ("m",), replace(INFO, groups=groups), 8192, True, {}, False)
        assert f" = {users} users at 4k" in text, groups


def test_the_banner_names_the_code_that_computes_a_class_and_its_costs():
    assert "  code " not in banner.banner("http://127.0.0.1:8000", ("demo",), INFO, 8192, True, {}, False)
    info = replace(INFO, architecture="DeepseekV3ForCausalLM", served_by="transformers")
    text = " ".join(banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False).split())
    assert "code computed by transformers' code (DeepseekV3ForCausalLM): slower than a described family" in text
    assert "no pipeline stages" in text and "every rank holds" not in text
    info = replace(info, served_by="checkpoint", is_replicated=True)
    text = " ".join(banner.banner("http://127.0.0.1:8000", ("demo",), info, 8192, True, {}, False).split())
    assert "computed by the checkpoint's own code" in text and "every rank holds the weights of all layers" in text
