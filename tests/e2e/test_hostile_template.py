"""A server whose chat template runs into its limits on some conversations answers all others meanwhile, and ends."""

import threading
import time

import psutil
import pytest

from tests.e2e.running import DEMO, RunningServer, eventually

ATTACKS = {  # one on the processor, one on memory; tests/unit/server/llm/test_chat_template.py has all kinds
    "endless": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "list": "{% set ns = namespace(l=[0]) %}{% for i in range(40) %}{% set ns.l = ns.l * 1000 %}{% endfor %}",
}
TEMPLATE = "".join(
    f"{{% if messages[0].content == '{name}' %}}{attack}{{% endif %}}" for name, attack in ATTACKS.items()
)
MOVED_BYTES = 300 << 20  # at most, of the server's own process


def _chat(server: RunningServer, content: str):
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return server.client.post("/v1/chat/completions", json=body)


@pytest.mark.soak
def test_a_hostile_template_stops_nothing_but_its_own_requests(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE + "{% for m in messages %}{{ m.content }}\n{% endfor %}import ")
    answers, times = {}, []
    with RunningServer(DEMO, "--chat-template", template) as server:
        assert _chat(server, "# paths").status_code == 200
        frontend = psutil.Process(server.process.pid)
        before, peak = frontend.memory_info().rss, 0
        waiting = [
            threading.Thread(target=lambda name=name: answers.update({name: _chat(server, name)})) for name in ATTACKS
        ]
        for thread in waiting:
            thread.start()
        while any(thread.is_alive() for thread in waiting):
            started = time.monotonic()
            assert server.client.get("/health").status_code == 200
            times.append(time.monotonic() - started)
            if len(times) == 1:
                assert _chat(server, "# paths").status_code == 200
            peak = max(peak, frontend.memory_info().rss)
        assert len(times) > 3, "the server answers while templates are rendered"
        assert peak - before < MOVED_BYTES
        for name, answer in answers.items():
            assert answer.status_code == 400, (name, answer.text)
            assert "chat template takes more" in answer.text or "chat template takes longer" in answer.text
        assert answers["endless"].json()["error"]["param"] == "messages"
        assert "event=chat_template_stopped" in server.log

        last = threading.Thread(target=lambda: answers.update(last=_chat(server, "endless")))
        last.start()
        eventually(lambda: server.client.get("/v1/state").status_code == 200, 30, "the state is told")
        assert server.stop() == 0
        last.join()
        assert answers["last"].status_code in (400, 503)
        eventually(lambda: not server.left_behind(), 30, "no process is left behind")
    print(f"/health: {max(times):.3f} s at most; memory: {(peak - before) >> 20} MiB more")
