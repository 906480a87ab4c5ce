"""Mistakes of the operator: one line of cause, one line of fix, an exit code, and no traceback.

One mistake for each place that finds some is run as a user would, in a separate process. The others are run in this
process, which has imported the slowest modules; child processes are started as always.
"""

import gc
import json
import os
import shutil
import socket
import subprocess

import pytest
import torch

from oarlock.server.cli.main import main
from tests.e2e.running import DEMO, ROOT, command, environment, free_port

USAGE, CONFIGURATION, MEMORY = 2, 3, 4


def start(*arguments, **env):
    """`oarlock serve …` that is expected to fail: (status, its `error:` line, its `fix:` line)."""
    result = subprocess.run(
        command("serve", *arguments), cwd=ROOT, env=environment(**env), capture_output=True, text=True, timeout=120
    )
    return explained(result.returncode, result.stdout + result.stderr)


@pytest.fixture
def start_here(capfd, monkeypatch):
    """Function like `start` that runs the command in this process."""

    def run(*arguments):
        status = main(["serve", *map(str, arguments)])
        return explained(status, "".join(capfd.readouterr()))

    for name in [name for name in os.environ if name.startswith("OARLOCK_")]:
        monkeypatch.delenv(name)
    yield run
    gc.enable()  # a start that fails leaves it off


def explained(status, output):
    """(status, the `error:` line, the `fix:` line) of an output that must have one of each."""
    assert "Traceback" not in output, output
    causes = [line for line in output.splitlines() if line.startswith("error: ")]
    fixes = [line for line in output.splitlines() if line.startswith("fix: ")]
    assert (len(causes), len(fixes)) == (1, 1), output
    assert output.count(causes[0].removeprefix("error: ")) == 1, output  # the log does not repeat it
    assert status in (USAGE, CONFIGURATION, MEMORY), (status, output)
    return status, causes[0], fixes[0]


@pytest.fixture
def copy(tmp_path):
    """A copy of the demo checkpoint, to damage."""
    return shutil.copytree(DEMO, tmp_path / "model")


def test_the_port_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, cause, fix = start(DEMO, "--port", port)
    assert status == CONFIGURATION and str(port) in cause and "--port" in fix


def test_ranks_that_do_not_divide_the_heads(start_here):
    status, cause, fix = start_here(DEMO, "-tp", 3, "--port", free_port())
    assert status == CONFIGURATION
    assert "3" in cause and "8" in cause  # the ranks and the heads
    assert all(size in fix for size in ("1", "2", "4", "8"))


def test_no_such_directory(start_here):
    status, cause, fix = start_here("/no/such/model", "--port", free_port())
    assert status == CONFIGURATION and "/no/such/model" in cause and fix


def test_a_directory_for_kv_blocks_that_is_a_file(tmp_path, start_here):
    (tmp_path / "kv").write_text("")
    status, cause, fix = start_here(DEMO, "--kv-offload-path", tmp_path / "kv", "--port", free_port())
    assert status == CONFIGURATION and str(tmp_path / "kv") in cause and "--kv-offload-path" in fix


def test_a_directory_without_a_model(tmp_path, start_here):
    status, cause, _ = start_here(tmp_path, "--port", free_port())
    assert status == CONFIGURATION and "config.json" in cause


@pytest.mark.parametrize("spoil", ["truncate", "pointer"])
def test_a_corrupt_checkpoint(copy, spoil, start_here):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 18000000\n"
    spoiled = {"truncate": content[:-1000], "pointer": pointer}
    file.write_bytes(spoiled[spoil])
    status, cause, fix = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "model.safetensors" in cause and fix


def test_a_missing_file(copy, start_here):
    (copy / "model.safetensors").unlink()
    status, cause, _ = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "safetensors" in cause


def test_a_pickled_checkpoint_is_not_opened(copy, start_here):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    status, _, fix = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "safetensors" in fix


def test_a_missing_tokenizer(copy, start_here):
    for file in copy.glob("*token*"):
        file.unlink()
    status, cause, _ = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "tokenizer" in cause


def test_a_broken_config(copy, start_here):
    (copy / "config.json").write_text("{")
    status, cause, _ = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "config.json" in cause


def test_a_generation_config_with_a_temperature_that_is_none(copy, start_here):
    (copy / "generation_config.json").write_text('{"temperature": "hot"}')
    status, cause, fix = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "'temperature' in" in cause and "--generation-config vllm" in fix


def test_an_unknown_architecture(copy, start_here):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    status, cause, fix = start_here(copy, "--port", free_port())
    assert status == CONFIGURATION and "MambaForCausalLM" in cause and "oarlock models --supported" in fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device(start_here):
    status, cause, fix = start_here(DEMO, "--device", "cuda", "--port", free_port())
    assert status == CONFIGURATION and "CUDA" in cause and "--device cpu" in fix


def test_a_context_that_does_not_fit_the_kv_memory(start_here):
    status, cause, fix = start_here(DEMO, "--kv-cache-memory", "64KiB", "--port", free_port())
    assert status == MEMORY and "KV" in cause and "--kv-cache-memory" in fix


def test_memory_that_the_machine_does_not_have(start_here):
    status, cause, fix = start_here(DEMO, "--kv-cache-memory", "900TiB", "--port", free_port())
    assert (
        status == MEMORY
        and "900.0 TiB of --kv-cache-memory" in cause
        and "is free" in cause
        and "--kv-cache-memory" in fix
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tensor-paralel-size", "2"], "--tensor-parallel-size"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--dtype", "float8"], "--dtype"),
        (["--port", "70000"], "--port"),
        (["--kv-cache-memory", "much"], "--kv-cache-memory"),
        (["--config", "/no/such/file.toml"], "/no/such/file.toml"),
        (["--max-num-batched-tokens", "16"], "--max-num-batched-tokens"),
    ],
)
def test_a_wrong_option(arguments, named, start_here):
    status, cause, fix = start_here(DEMO, *arguments)
    assert status in (USAGE, CONFIGURATION) and named in cause + fix


def test_a_wrong_variable():
    _, cause, fix = start(DEMO, OARLOCK_PROT="8001")
    assert "OARLOCK_PROT" in cause and "OARLOCK_PORT" in fix


def test_an_unknown_command():
    result = subprocess.run(command("sreve"), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.returncode == USAGE and "serve" in result.stderr and "Traceback" not in result.stderr
