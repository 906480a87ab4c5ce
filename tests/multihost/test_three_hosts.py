"""Three hosts answer as one, and when one of them is killed all others end and name it."""

import re

import pytest

from oarlock.base.errors import EXIT_RANK_DIED
from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import RunningServer, eventually
from tests.golden.tiny_models import make_tiny
from tests.multihost.faults import KILLED, WITHIN_S
from tests.multihost.group import Group
from tests.multihost.hosts import hosts_for_test

pytestmark = pytest.mark.soak
PROMPTS = ["Q: What does os.path.join do?\nA:", "import os\nimport sys\n\n", "for line in file:\n"]
FLAGS = ("--dtype", "float32", "--served-model-name", "one")


@pytest.fixture(scope="module")
def hosts():
    with hosts_for_test("switch", 3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models by the way they are divided; the heads of the first, a mixture, fit three ranks. Answers of both may be
    long."""
    heads = {"hidden_size": 96, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = tmp_path_factory.mktemp("models")
    by_heads = make_tiny(folder, "qwen3_moe", tokenizer=True, max_position_embeddings=2 * LONG, **heads)
    return {"-tp": by_heads, "-pp": long_context_demo(folder)}


def answers(server):
    """Greedy answers to each prompt alone and to all at once."""
    ask = {"max_tokens": 12, "temperature": 0}
    alone = [server.complete(prompt, **ask)["choices"][0] for prompt in PROMPTS]
    together = server.complete(PROMPTS, **ask)["choices"]
    return [choice["text"] for choice in (*alone, *together)]


@pytest.mark.parametrize("size", ["-tp", "-pp"])
def test_three_hosts_answer_as_one_and_end_together(hosts, models, size):
    """Sums of three hosts, and three stages with a step in flight in each."""
    with RunningServer(models[size], *FLAGS) as server:
        expected = answers(server)
    with Group(hosts, models[size], *FLAGS, size, 3) as group:
        assert answers(group.head) == expected
        with hosts.head.inside():
            stream = OpenStream(group.head)
        assert stream.flowing.wait(30), group.logs
        for process in reversed(group.servers[2].processes()):
            process.kill()
        assert group.statuses(WITHIN_S) == [EXIT_RANK_DIED, EXIT_RANK_DIED, KILLED], group.logs
        stream.join(30)
        assert stream.done and stream.last["error"]["type"] == "server_error", stream.last
        for server in group.servers[:2]:
            assert re.search(r"(cause=.*|error: .*)(node 2\b|rank 2\b)", server.log), group.logs
            assert "Traceback" not in server.log, group.logs
        eventually(lambda: not any(server.left_behind() for server in group.servers), 30, "nothing is left")
