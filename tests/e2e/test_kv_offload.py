"""KV blocks beyond the pool on real servers: over evictions, a restart, shared and damaged files."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, RunningServer, eventually

PROMPT = "Q: What does os.path.join do?\nA: Join one or more path segments.\n\n" * 12
LAST = "Q: What does str.split do?\nA: Return a list of the words.\n\n" * 12
FLAGS = ("--dtype", "float32", "--max-model-len", 512, "--block-size", 16, "--max-num-seqs", 2)
HEADS = {"num_key_value_heads": 1, "head_dim": 16}
SHAPE = {"intermediate_size": 6144, "num_hidden_layers": 4, "layer_types": None, **HEADS}
BLOCK_BYTES = 16 * 2 * 4 * 1 * 16 * 4  # tokens, keys and values, layers, heads, numbers, bytes of each
POOL = ("--load-format", "dummy", "--tokenizer", DEMO, "--kv-cache-memory", 40 * BLOCK_BYTES)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose blocks take so much longer to compute than to read that they are read, however busy the machine is
    while it measures both."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((DEMO / "config.json").read_text()) | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ask(server: RunningServer, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were not computed."""
    answer = server.complete(prompt, max_tokens=16, temperature=0)
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def push_out(server: RunningServer) -> None:
    for number in range(4):
        server.complete(f"{number} " + "and so on " * 100, max_tokens=2)


@pytest.mark.soak
def test_text_is_the_same_from_memory_and_files(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, *POOL, "--kv-offload-path", tmp_path / "kv", "--kv-offload-memory", "4MiB")
    with RunningServer(model, *flags) as server:
        assert "event=kv_offload host_blocks=" in server.log
        text, _ = ask(server)
        push_out(server)
        again, cached = ask(server)
        assert again == text
        assert cached >= 128
        metrics = server.metrics()
        assert metrics["oarlock:kv_offload_loaded_blocks_total"] * 16 == cached
        assert metrics["oarlock:kv_offload_hit_tokens_total"] == cached
        assert metrics["oarlock:kv_offload_host_blocks"] > 0
        eventually(lambda: server.metrics()["oarlock:kv_offload_written_blocks_total"] >= 8, 60, "blocks are written")
        last, cached = ask(server, LAST)  # once, and never evicted
        assert cached == 0
        assert server.stop() == 0
        assert "event=kv_flushed" in server.log and " left=0 " in server.log
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    for harm in (False, True):
        if harm:
            for path in files:
                path.write_bytes(b"")
        with RunningServer(model, *flags) as first, RunningServer(model, *flags) as second:
            for server in (first, second):  # both, before one of them removes what is damaged
                eventually(partial(_finds, server, len(files)), 60, "files are found")
            for server in (first, second):
                assert ask(server)[0] == text
                again, cached = ask(server, LAST)
                assert again == last
                assert harm or cached >= 128, "it was written when the server ended"
                assert harm or server.metrics()["oarlock:kv_offload_failed_blocks_total"] == 0


def _finds(server: RunningServer, count: int) -> bool:
    return server.metrics()["oarlock:kv_offload_disk_blocks"] >= count
