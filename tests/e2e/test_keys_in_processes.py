"""No child process has the server's keys, since an attack on one of them could reveal its environment."""

import psutil
import pytest

from tests.e2e.running import DEMO, RunningServer

KEYS = {"OARLOCK_API_KEY": "key-of-a-client", "OARLOCK_ADMIN_API_KEY": "key-of-the-operator", "HF_TOKEN": "hub-token"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}


@pytest.mark.soak
def test_no_child_process_has_a_key_in_its_environment():
    with RunningServer(DEMO, "-tp", 2, env=KEYS) as server:
        server.client.headers["Authorization"] = f"Bearer {KEYS['OARLOCK_API_KEY']}"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert server.client.post("/v1/chat/completions", json=chat).status_code == 200  # starts a template process
        grammar = chat | {"response_format": SCHEMA}
        assert server.client.post("/v1/chat/completions", json=grammar).status_code == 200  # and the sandbox
        large = {"prompt": [1] * 50_000, "max_tokens": 2}
        assert server.client.post("/v1/completions", json=large).status_code == 400  # and the reader of large bodies
        children = psutil.Process(server.process.pid).children(recursive=True)
        names = " ".join(" ".join(child.cmdline()) for child in children)
        for module in ("oarlock.engine.core", "template_process", "large_body", "sandbox"):
            assert module in names, f"{module} is not running, so nothing is known about it: {names}"
        assert len(children) >= 6, "engine, two ranks, and the three above"
        for child in children:
            assert not set(KEYS) & set(child.environ()), child.cmdline()
