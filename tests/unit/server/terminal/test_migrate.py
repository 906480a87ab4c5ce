"""`oarlock migrate`: command lines of other servers, and what becomes of each flag."""

from __future__ import annotations

import shlex

import pytest

from server.config.settings import OPTIONS
from server.config.vllm_flags import FLAGS
from server.entrypoints.cli import main
from server.entrypoints.commands.migrate import tables
from server.entrypoints.commands.migrate.lines import translate


@pytest.mark.parametrize(
    ("line", "ours", "lost"),
    [
        ("vllm serve Qwen/Qwen3-0.6B", "oarlock serve Qwen/Qwen3-0.6B", []),
        (
            "VLLM_API_KEY=x CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 2 --max-model-len 32k --dtype half --port=8001",
            "OARLOCK_API_KEY=x CUDA_VISIBLE_DEVICES=0,1 oarlock serve m --tensor-parallel-size 2 "
            "--max-model-len 32000 --dtype float16 --port 8001",
            [],
        ),
        ("vllm serve m --max_model_len 4K", "oarlock serve m --max-model-len 4096", []),
        ("vllm serve --model m --served-model-name a b", "oarlock serve m --served-model-name a b", []),
        ("vllm serve m --no-enable-prefix-caching", "oarlock serve m --no-enable-prefix-caching", []),
        ("vllm serve m -q awq --enable-chunked-prefill --trust-remote-code", "oarlock serve m", []),
        ("vllm serve m --tool-call-parser hermes --swap-space 4", "oarlock serve m --tool-call-parser hermes", []),
        (
            "vllm serve m --tool-call-parser xlam --reasoning-parser=step3 --enable-auto-tool-choice --port 1",
            "oarlock serve m --port 1",
            ["--tool-call-parser xlam", "--reasoning-parser step3"],
        ),
        ("vllm serve m --no-enable-chunked-prefill", "oarlock serve m", ["--no-enable-chunked-prefill"]),
        (
            "vllm serve m --enable-lora --wibble 1 2 --port 1",
            "oarlock serve m --port 1",
            ["--enable-lora", "--wibble 1 2"],
        ),
        ("vllm serve m --port 99999", "oarlock serve m", ["--port 99999"]),
        ("vllm serve m --port", "oarlock serve m", ["--port"]),
        ("vllm serve m n", "oarlock serve m", ["n"]),
        ("VLLM_USE_V1=1 vllm serve m", "oarlock serve m", ["VLLM_USE_V1=1"]),
        ("python -m vllm.entrypoints.openai.api_server --model 'a b'", "oarlock serve 'a b'", []),
        (
            "docker run --gpus all -e HF_TOKEN=t -p 8000:8000 vllm/vllm-openai:latest --model m --seed 3",
            "HF_TOKEN=t oarlock serve m --seed 3",
            [],
        ),
        (
            "llama-server -m m.gguf -c 8192 -np 4 -ngl 0 -t 8 --alias a -fa on -ctk q8_0 --jinja",
            "oarlock serve m.gguf --max-model-len 2048 --max-num-seqs 4 --device cpu --num-threads 8 "
            "--served-model-name a --kv-cache-dtype int8",
            [],
        ),
        (
            "llama-server -m m.gguf --ssl-key-file k.pem --ssl-cert-file c.pem --api-prefix /llm",
            "oarlock serve m.gguf --ssl-keyfile k.pem --ssl-certfile c.pem --root-path /llm",
            [],
        ),
        (
            "text-generation-launcher --model-id m --cors-allow-origin https://a.example --otlp-endpoint http://h:4317",
            "oarlock serve m --allowed-origins https://a.example",
            ["--otlp-endpoint http://h:4317"],
        ),
        ("llama-server -m m.gguf --host /run/x.sock --port 80", "oarlock serve m.gguf --uds /run/x.sock", []),
        ("llama-server -m m.gguf --host 0.0.0.0 --port 80", "oarlock serve m.gguf --host 0.0.0.0 --port 80", []),
        ("llama-server -m m.gguf --embedding", "oarlock serve m.gguf --runner pooling", []),
        ("/opt/x/llama-server -hf a/b:Q4_K_M --no-webui", "oarlock serve a/b --no-web-page", ["-hf a/b:Q4_K_M"]),
        (
            "llama-server -m m.gguf -c 0 --temp 0.2 -np -1 --whatever",
            "oarlock serve m.gguf",
            ["--temp 0.2", "--whatever"],
        ),
        (
            "text-generation-launcher --model-id m --num-shard 2 --max-total-tokens 4096 --quantize eetq --json-output",
            "oarlock serve m --tensor-parallel-size 2 --max-model-len 4096 --quantization int8 --log-format json",
            [],
        ),
        (
            "docker run ghcr.io/huggingface/text-generation-inference:3 --model-id m --port 80",
            "oarlock serve m --port 80",
            [],
        ),
    ],
)  # fmt: skip
def test_lines(line, ours, lost):
    found = translate(line)
    assert found.command() == ours
    assert [written for written, _ in found.lost] == lost


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_of_vllm_that_is_known_is_told_about(name):
    found = translate(f"vllm serve m --{name} 7 --port 1")
    assert found.command() == "oarlock serve m --port 1"
    assert len(found.notes) + len(found.lost) >= 1
    assert any(FLAGS[name].holds in sentence for _, sentence in found.notes + found.lost)


@pytest.mark.parametrize("table", [tables.LLAMA_SERVER, tables.TGI])
def test_tables_name_options_that_there_are_and_values_that_they_take(table):
    for flag, theirs in table.items():
        assert flag.startswith("-")
        assert theirs.option in ("", "model") or theirs.option in OPTIONS
        assert theirs.option or theirs.holds.endswith((".", ")."))
        for ours in theirs.values.values():
            if ours:
                OPTIONS[theirs.option].from_text(ours)


def test_a_format_that_is_not_known_is_left_out_and_said_to_be_found_without(capsys):
    assert main(["migrate", "vllm serve m --tool-call-parser xlam"]) == 1
    shown = capsys.readouterr()
    assert shown.out == "oarlock serve m\n"
    assert "found in the chat template. Known: " in shown.err and "hermes" in shown.err


def test_our_line_is_one_that_we_take(capsys):
    assert main(["migrate", "vllm serve m -tp 2 --enforce-eager --swap-space 4"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("note: --swap-space 4: ")
    words = shlex.split(shown.out)
    assert words[:3] == ["oarlock", "serve", "m"]
    assert main(["config", "show", *words[3:]]) == 0
    assert main(["migrate", "vllm serve m --enable-lora"]) == 1
    assert "no equivalent: --enable-lora: adapters" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["", "ollama run m", "docker run nginx", "vllm chat", "vllm serve 'm"])
def test_a_line_of_no_known_server(line, capsys):
    assert main(["migrate", line]) == 2
    assert capsys.readouterr().err.startswith("error: LINE ")
