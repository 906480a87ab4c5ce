"""A GGUF file served as a user does it: the text of the safetensors checkpoint that it was made from."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from oarlock.base.errors import StartupError
from oarlock.server.hub.gguf_directory import described
from oarlock.workers.kernels.cpu.build import cache_directory
from tests.e2e.running import DEMO, RunningServer, command, environment, free_port
from tests.e2e.terminal import CTRL_C, Terminal
from tests.golden.gguf_writer import all_of, q4_k_m, write_gguf

QUESTION = {"messages": [{"role": "user", "content": "What does os.path.join do?"}], "temperature": 0, "max_tokens": 60}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache that these tests alone fill; the kernels in it are the user's."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "oarlock").mkdir()
    (folder / "oarlock" / "kernels").symlink_to(cache_directory())
    return str(folder)


@pytest.fixture(scope="module")
def serve(cache: str) -> Callable[..., RunningServer]:
    def start(*arguments: str | Path) -> RunningServer:
        return RunningServer(*arguments, "--dtype", "float32", env={"XDG_CACHE_HOME": cache})

    return start


def answers(server: RunningServer) -> tuple[str, str, list[int]]:
    """(the model's name, a chat's text, the ids of a prompt)."""
    url = f"http://127.0.0.1:{server.port}"
    chat = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=60).json()
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "x = os.path.join(<|im_end|> é)\n\n  1234"}, timeout=60).json()
    return chat["model"], chat["choices"][0]["message"]["content"], ids["tokens"]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        pytest.param("F16", 2, marks=pytest.mark.soak),
        pytest.param("Q8_0", 1, marks=pytest.mark.soak),
        ("mix", 1),
    ],
    ids=lambda value: str(value),
)
def test_the_text_is_that_of_the_checkpoint(
    serve: Callable[..., RunningServer], tp1: RunningServer, tmp_path: Path, kind: str, size: int
) -> None:
    kind_of = q4_k_m if kind == "mix" else all_of(kind)
    part_bytes = 4_000_000 if kind == "F16" else 0
    folder = tmp_path / "one-model"
    folder.mkdir()
    write_gguf(DEMO, folder / "demo.gguf", kind_of, part_bytes=part_bytes, tokenizer__ggml__pre="qwen2")
    model = folder if kind == "mix" else sorted(folder.glob("*.gguf"))[0]
    _, text, ids = answers(tp1)
    with serve(model, "--tensor-parallel-size", str(size)) as server:
        name, own_text, own_ids = answers(server)
    assert own_ids == ids and name == ("one-model" if kind == "mix" else "demo")
    if kind == "F16":  # the numbers are the same: the checkpoint is in bfloat16
        assert own_text == text
    else:
        assert own_text[:40] == text[:40]


@pytest.mark.soak
def test_a_person_at_a_terminal_is_offered_what_ollama_has(tmp_path: Path, cache: str) -> None:
    models = tmp_path / "models"
    digest, manifest = "sha256:" + "0" * 64, models / "manifests" / "registry.ollama.ai" / "library" / "demo" / "latest"
    for folder in (models / "blobs", manifest.parent):
        folder.mkdir(parents=True)
    write_gguf(DEMO, tmp_path / "demo.gguf", all_of("Q8_0"), tokenizer__ggml__pre="qwen2")
    (tmp_path / "demo.gguf").rename(models / "blobs" / digest.replace(":", "-"))
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": digest}
    manifest.write_text(json.dumps({"layers": [{"mediaType": "x", "digest": "y"}, layer]}))
    port = free_port()
    env = environment(XDG_CACHE_HOME=cache, HF_HOME=str(tmp_path), OLLAMA_MODELS=str(models), PS1="shell: ")
    with Terminal(command("serve", "--port", port), env) as terminal:
        terminal.expect("1  demo:latest .* ollama\nPress a digit")
        terminal.type("1")
        terminal.expect("The same without a question: oarlock serve demo:latest")
        terminal.expect("model +demo:latest")
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=QUESTION, timeout=60).json()
        assert answer["choices"][0]["message"]["content"].startswith("Join two or more pathname")
        terminal.type(CTRL_C)
        assert terminal.wait() == 0
    with Terminal(["sh", "-i"], env) as terminal:  # a job in the background is asked nothing, and stops for nobody
        terminal.expect("shell: ")
        terminal.type(shlex.join(command("serve", "--port", port)) + " &\n")
        terminal.expect("model +oarlock-demo")
        terminal.type("kill $!; wait; exit\n")
        terminal.wait()
        assert "Press a digit" not in terminal.text


def test_a_directory_with_several_files_is_refused(tmp_path: Path, cache: str) -> None:
    write_gguf(DEMO, tmp_path / "demo.gguf", all_of("Q8_0"), tokenizer__ggml__pre="qwen2")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert "contains several GGUF models: demo.gguf, other.gguf" in refused(tmp_path, cache)


def test_bad_files_are_refused_before_anything_is_loaded(
    tmp_path: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    kind_of = all_of("F16")
    path = write_gguf(DEMO, tmp_path / "demo.gguf", kind_of, tokenizer__ggml__pre="brand-new")
    with pytest.raises(StartupError, match="pre-tokenizer 'brand-new' is not supported"):
        described(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match="is truncated: tensor"):
        described(path)
    path = write_gguf(DEMO, tmp_path / "experts.gguf", kind_of, tokenizer__ggml__pre="qwen2", qwen2__expert_count=8)
    with pytest.raises(StartupError, match="mixture of 8 experts"):
        described(path)
    odd = write_gguf(
        DEMO, tmp_path / "odd.gguf", lambda name, shape: "TQ1_0" if "ffn_up" in name else "F32",
        tokenizer__ggml__pre="qwen2",
    )  # fmt: skip
    assert "is TQ1_0, which is not supported" in refused(odd, cache)


def refused(model: Path, cache: str) -> str:
    """Run `serve` on a refused model and return its two lines of error."""
    done = subprocess.run(
        command("serve", model, "--port", "0"), env=environment(XDG_CACHE_HOME=cache), capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_description_is_written_once_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_gguf(DEMO, tmp_path / "demo.gguf", all_of("F16"), tokenizer__ggml__pre="qwen2")
    first = described(path)
    assert described(path) == first
    assert json.loads((first / "config.json").read_text())["torch_dtype"] == "float16"
    write_gguf(DEMO, path, all_of("Q8_0"), tokenizer__ggml__pre="qwen2")
    assert described(path) != first
