"""`oarlock migrate`: command lines of other servers, and what becomes of each flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from oarlock.server.cli.arguments import Parser, UsageError, add_settings, given_settings, parse
from oarlock.server.cli.bench import vllm_names
from oarlock.server.cli.main import main
from oarlock.server.cli.migrate import rows
from oarlock.server.cli.migrate.dialects import DIALECTS, VLLM
from oarlock.server.cli.migrate.lines import table_of, translate
from oarlock.server.config.settings import OPTIONS, make_settings
from oarlock.server.config.vllm_flags import FLAGS

Case = tuple[str, str, list[str]]


def _corpus() -> Iterator[Case]:
    """(line, ours, what is lost) of every line in the file."""
    text = Path(__file__).with_name("migrate_lines.txt").read_text()
    for block in text.split("\n\n")[1:]:
        line, ours, *lost = block.strip().splitlines()
        assert ours.startswith("= ") and all(each.startswith("! ") for each in lost), line
        yield line, ours[2:], [each[2:] for each in lost]


CORPUS = list(_corpus())


@pytest.mark.parametrize(
    ("line", "ours", "lost"),
    [
        (
            "VLLM_API_KEY=x CUDA_VISIBLE_DEVICES=0,1 vllm serve m -tp 2 --max-model-len 32k --dtype half --port=8001",
            "OARLOCK_API_KEY=x CUDA_VISIBLE_DEVICES=0,1 oarlock serve m --tensor-parallel-size 2 "
            "--max-model-len 32k --dtype half --port 8001 --host 0.0.0.0",
            [],
        ),
        ("vllm serve m --host h --max_model_len 4K", "oarlock serve m --host h --max-model-len 4K", []),
        (
            "vllm serve --host h --model m --served-model-name a b",
            "oarlock serve m --host h --served-model-name a b",
            [],
        ),
        ("vllm serve m --host h --no-enable-prefix-caching", "oarlock serve m --host h --no-enable-prefix-caching", []),
        ("vllm serve m --host h -q awq --enable-chunked-prefill", "oarlock serve m --host h", []),
        (
            "vllm serve m --host h --trust-remote-code --model-impl vllm",
            "oarlock serve m --host h --trust-remote-code --model-impl oarlock",
            [],
        ),
        ("vllm serve m --host h --swap-space 4", "oarlock serve m --host h", []),
        (
            "vllm serve m --tool-call-parser xlam --reasoning-parser=step3 --enable-auto-tool-choice --host h",
            "oarlock serve m --host h",
            ["--tool-call-parser xlam", "--reasoning-parser step3"],
        ),
        (
            "vllm serve m --host h --no-enable-chunked-prefill",
            "oarlock serve m --host h",
            ["--no-enable-chunked-prefill"],
        ),
        (
            "vllm serve m --enable-lora --lora-dtype float16 --wibble 1 2 --host h",
            "oarlock serve m --enable-lora --host h",
            ["--lora-dtype float16", "--wibble 1 2"],
        ),
        ("vllm serve m --host h --port 99999", "oarlock serve m --host h", ["--port 99999"]),
        ("vllm serve m --host h --kv-cache-memory-bytes 1.5G", "oarlock serve m --host h --kv-cache-memory 1.5G", []),
        ("vllm serve m --model n --uds /x --port 2", "oarlock serve n --uds /x", ["m"]),
        (
            "vllm serve m --host h --enforce-eager=maybe --trust-remote-code=false --headless no",
            "oarlock serve m --host h --no-trust-remote-code",
            ["--enforce-eager maybe", "--headless no"],
        ),
        ("vllm serve m --host h --port", "oarlock serve m --host h", ["--port"]),
        ("vllm serve m n --host h", "oarlock serve m --host h", ["n"]),
        ("vllm serve m --uds /run/x.sock", "oarlock serve m --uds /run/x.sock", []),
        ("VLLM_WIBBLE=1 vllm serve m --host h", "oarlock serve m --host h", ["VLLM_WIBBLE=1"]),
        (
            "vllm serve m --host h --kv-cache-memory-bytes 1.5g --max-num-batched-tokens 32 --max-num-seqs 64",
            "oarlock serve m --host h --kv-cache-memory 1500000000 --max-num-seqs 64",
            ["--max-num-batched-tokens 32"],
        ),
        ("python -m vllm.entrypoints.openai.api_server --host h --model 'a b'", "oarlock serve 'a b' --host h", []),
        ("vllm serve m", "oarlock serve m --host 0.0.0.0", []),
        ("VLLM_LOGGING_LEVEL=$L vllm serve m --host h", 'oarlock serve m --log-level "$L" --host h', []),
        (
            "docker run -p 80 -p 81:82 -p 8001:8000 -p 8002:8000 --env-file .env vllm/vllm-openai m",
            "oarlock serve m --host 0.0.0.0 --port 8001",
            ["--env-file .env", "-p 80", "-p 81:82", "-p 8002:8000"],
        ),
        ("docker run -P vllm/vllm-openai m", "oarlock serve m --host 127.0.0.1 --port 8000", ["-P"]),
        (
            "docker run -p ${PORT}:8000 vllm/vllm-openai m --api-key $KEY",
            'oarlock serve m --api-key "$KEY" --host 0.0.0.0 --port "${PORT}"',
            [],
        ),
        ("docker run vllm/vllm-openai m", "oarlock serve m --host 127.0.0.1 --port 8000", []),
        ("docker run -p '[::1]:9:8000' --gpus 2 -v /c:/root/.cache/huggingface vllm/vllm-openai m",
         "CUDA_VISIBLE_DEVICES=0,1 HF_HOME=/c oarlock serve m --host ::1 --port 9", []),
        (
            "docker run -p9:8000 --gpus some vllm/vllm-openai m",
            "oarlock serve m --host 0.0.0.0 --port 9",
            ["--gpus some"],
        ),
        ("docker run --net=host vllm/vllm-openai m", "oarlock serve m --host 0.0.0.0", []),
        ("docker run -p 8080:80 -v /m:/data text-generation-inference --model-id /data/x",
         "oarlock serve /m/x --host 0.0.0.0 --port 8080", []),
        (
            "llama-server -m m.gguf -c 8192 -np 4 -ngl 0 -t 8 --alias a,b -fa on -ctk q8_0 --jinja",
            "oarlock serve m.gguf --max-num-seqs 4 --device cpu --num-threads 8 --served-model-name a b "
            "--kv-cache-dtype int8 --max-model-len 2048 --port 8080",
            [],
        ),
        (
            "llama-server -m m -c 8192 -np 4 -kvu",
            "oarlock serve m --max-model-len 8192 --max-num-seqs 4 --port 8080",
            [],
        ),
        ("llama-server -m m -ngl 0 -ngl 9 -c 9 --ctx-size 0", "oarlock serve m --port 8080", []),
        (
            "LLAMA_ARG_NO_WEBUI=1 LLAMA_ARG_JINJA=0 LLAMA_ARG_MLOCK=1 llama-server -m m -lv 9",
            "oarlock serve m --no-web-page --port 8080",
            ["-lv 9"],
        ),
        ("llama-server -m m --model", "oarlock serve m --port 8080", ["--model"]),
        ("llama-server -m m -ngl all --n-gpu-layers=99 --gpu-layers auto", "oarlock serve m --port 8080", []),
        (
            "llama-server -m m.gguf --ssl-key-file k.pem --ssl-cert-file c.pem --api-prefix /llm --port 1",
            "oarlock serve m.gguf --ssl-keyfile k.pem --ssl-certfile c.pem --root-path /llm --port 1",
            [],
        ),
        ("llama-server -m m --host /run/x.sock --port 80", "oarlock serve m --uds /run/x.sock", []),
        (
            "llama-server -m m --host 10.0.0.1,::1",
            "oarlock serve m --host 10.0.0.1 --port 8080",
            ["--host 10.0.0.1,::1"],
        ),
        (
            "/opt/x/llama-server -hf a/b:Q4_K_M --no-webui -hft t",
            "HF_TOKEN=t oarlock serve a/b --no-web-page --port 8080",
            ["-hf a/b:Q4_K_M"],
        ),
        (
            "llama-server -m m.gguf -c 0 --temp 0.2 -np -1 --whatever x stray",
            "oarlock serve m.gguf --port 8080",
            ["--temp 0.2", "--whatever x stray"],
        ),
        (
            "LLAMA_ARG_N_GPU_LAYERS=9 LLAMA_ARG_WIBBLE=1 OMP_NUM_THREADS=2 llama-server -m m",
            "OMP_NUM_THREADS=2 oarlock serve m --port 8080",
            ["LLAMA_ARG_WIBBLE=1"],
        ),
        (
            "text-generation-launcher --model-id m --cors-allow-origin https://a.example --otlp-endpoint http://h:4317",
            "oarlock serve m --allowed-origins https://a.example --host 0.0.0.0 --port 3000",
            ["--otlp-endpoint http://h:4317"],
        ),
        (
            "text-generation-launcher --model-id m --quantize exl2 --json-output --hostname h -p 1",
            "oarlock serve m --log-format json --host h --port 1",
            ["--quantize exl2"],
        ),
        (
            "JSON_OUTPUT=true NGROK=0 DISABLE_CUSTOM_KERNELS=1 PORT=1 text-generation-launcher --model-id m",
            "oarlock serve m --log-format json --port 1 --host 0.0.0.0",
            ["DISABLE_CUSTOM_KERNELS=1"],
        ),
        ("OLLAMA_HOST=::1 ollama serve", "oarlock serve --host ::1 --port 11434", []),
        ("OLLAMA_HOST= ollama serve", "oarlock serve --port 11434", ["OLLAMA_HOST="]),
        ("docker run -p 1:11434 ollama/ollama run hf.co/a/b:Q4 hello you", "oarlock serve a/b --host 0.0.0.0 --port 1",
         ["hf.co/a/b:Q4"]),
        ("OLLAMA_HOST=:80 ollama serve", "oarlock serve --host 0.0.0.0 --port 80", []),
        ("OLLAMA_HOST=http://h ollama serve", "oarlock serve --host h --port 80", []),
        ("OLLAMA_HOST=https://h:1/ ollama start", "oarlock serve --host h --port 1", ["OLLAMA_HOST=https://h:1/"]),
        ("OLLAMA_HOST=[::1] ollama serve", "oarlock serve --host ::1 --port 11434", []),
        ("OLLAMA_WIBBLE=1 ollama serve", "oarlock serve --port 11434", ["OLLAMA_WIBBLE=1"]),
        (
            "sglang serve m --ep 1 --dist-init-addr [::1]:5 --chat-template a.jinja --tool-call-parser glm --fp x",
            "oarlock serve m --master-addr '[::1]' --master-port 5 --chat-template a.jinja --tool-call-parser glm45 "
            "--port 30000",
            ["--fp x"],
        ),
        (
            "SGLANG_X=1 sglang serve m --lora-paths a b --lora-eviction-policy fifo",
            "oarlock serve m --enable-lora --lora-modules a=a b=b --port 30000",
            ["SGLANG_X=1", "--lora-eviction-policy fifo"],
        ),
        (
            "sglang serve m --lora-paths '{\"lora_name\": 1}' --enable-lora",
            "oarlock serve m --enable-lora --port 30000",
            ['--lora-modules {"lora_name": 1}'],
        ),
    ],
)  # fmt: skip
def test_lines(line, ours, lost):
    check(line, ours, lost)


def check(line, ours, lost):
    found = translate(line)
    assert found.command() == ours
    assert [written for written, _ in found.lost] == lost
    assert all(sentence for _, sentence in found.notes + found.lost)


def test_published_lines():
    for line, ours, lost in CORPUS:
        check(line, ours, lost)


def test_the_corpus_is_large_and_every_line_of_ours_is_one_that_serve_takes():
    assert len(CORPUS) > 60
    parser = Parser()
    add_settings(parser, positional=True)
    for _, ours, _ in CORPUS:
        words = shlex.split(ours)
        words = words[words.index("serve") + 1 :]
        parsed = parse(parser, parser, ["1" if word.startswith("$") else word for word in words])
        assert parsed.notes == []
        make_settings(given_settings(parsed))


def test_no_flag_is_dropped_in_silence():
    """Without any one of its flags, a line becomes another, or something else is said about it."""
    for line, _, _ in CORPUS:
        words, whole = shlex.split(line), translate(line)
        for at, word in enumerate(words):
            if not word.startswith("-") or word == "-m" or (word in ("--host", "--port") and "-p" in words):
                continue  # python's own flag, and what a container's published address stands for
            end = at + 1
            while "=" not in word and end < len(words) and not words[end].startswith("-"):
                end += 1
            try:
                less = translate(shlex.join(words[:at] + words[end:]))
            except UsageError:  # the image or the program is gone as well
                continue
            assert (less.command(), less.notes, less.lost) != (whole.command(), whole.notes, whole.lost), (line, word)


def test_every_flag_of_vllm_that_is_known_is_explained():
    for name, flag in FLAGS.items():
        found = translate(f"vllm serve m --{name} 7 --host h")
        assert found.command() == "oarlock serve m --host h", name
        assert any(flag.holds in sentence for _, sentence in found.notes + found.lost), name


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.title)
def test_rows_name_existing_options_and_values_that_they_accept(dialect):
    for name, found in table_of(dialect).items():
        assert name == "" or re.fullmatch(r"-{1,2}[a-zA-Z][\w-]*|[A-Z][A-Z0-9_]+", name)
        for later, row in enumerate(found):
            used = [each for each in found[:later] if each.value and each.parts([row.value]) is not None]
            assert not used or row.value in ("", "{prompt}…"), f"{name} {row.value} is never used"
        for row in found:
            placeholders = {each: ["{}"] for each in re.findall(r"\{(\w+)\}", row.value)}
            note = rows.insert(row.note, placeholders)
            assert note.endswith(".") or (not note and not row.ours.startswith(("no equivalent", "partly")))
            if row.ours in ("not needed", "no equivalent"):
                continue
            ours = row.ours.replace("the same", f"{name} {row.value}".rstrip(" ,…")).removeprefix("partly ")
            for flag, *values in rows.fill(ours, placeholders):
                described = OPTIONS.get(flag.removeprefix("--").removeprefix("no-").replace("-", "_").lower())
                assert described is not None or re.fullmatch(r"[A-Z_]+=\{\}", flag), (name, flag)
                if values and "{}" not in values[0]:
                    described.from_text(values[0])


def test_names_are_followed_by_their_value_and_the_others_are_switches():
    table = rows.parse("-a --alpha {n} ALPHA 0|1 --beta | --seed {n} | one\n  sentence.\n{x} | not needed")
    assert {name: [row.value for row in found] for name, found in table.items()} == {
        "-a": ["{n}"], "--alpha": ["{n}"], "ALPHA": ["0|1"], "--beta": [""], "": ["{x}"],
    }  # fmt: skip
    assert table["--beta"][0].note == "one sentence."
    assert "| `-a --alpha N`, `ALPHA 0 or 1`, `--beta` | `--seed N` | one sentence. |\n" in rows.as_markdown(
        "-a --alpha {n} ALPHA 0|1 --beta | --seed {n} | one\n  sentence."
    )


@pytest.mark.parametrize("text", [VLLM.table, vllm_names.TABLE])
def test_a_table_of_the_documentation_has_every_row(text):
    lines = text.strip().replace("\n  ", " ").splitlines()
    assert len(rows.as_markdown(text).splitlines()) == 2 + len(lines)


def test_our_line_is_one_that_we_take(capsys):
    assert main(["migrate", "vllm serve m -tp 2 --enforce-eager --swap-space 4"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("note: --swap-space 4: ")
    words = shlex.split(shown.out)
    assert words[:3] == ["oarlock", "serve", "m"]
    assert main(["config", "show", *words[3:]]) == 0
    assert main(["migrate", "vllm serve m --enable-lora-bias"]) == 1
    assert "no equivalent: --enable-lora-bias: biases" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["", "ollama pull m", "docker run nginx", "vllm chat", "vllm serve 'm"])
def test_a_line_of_no_known_server(line, capsys):
    assert main(["migrate", line]) == 2
    assert capsys.readouterr().err.startswith("error: LINE ")
