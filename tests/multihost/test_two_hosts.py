"""One model on two hosts answers as on one: the same text, the same bits, whatever the link between them is like."""

import signal

import pytest

from tests.e2e.running import DEMO, RunningServer
from tests.multihost.group import Group
from tests.multihost.hosts import hosts_for_test

pytestmark = pytest.mark.soak  # two ranks that flags start: test_faults.py
PROMPTS = ["Q: What does os.path.join do?\nA:", "import os\nimport sys\n\n", "for line in file:\n"]
FLAGS = ("--dtype", "float32", "--block-size", 16, "--served-model-name", "demo")
SIZES = {
    "TP 2": ("-tp", 2),
    "TP 4": ("-tp", 4),
    "PP 2": ("-pp", 2),
    "TP 2 x PP 2": ("-tp", 2, "-pp", 2),
}


def answers(server, max_tokens=12):
    """Text and log-probabilities, greedy and with a seed, for each prompt alone and for all at once; and by a grammar,
    whose masks follow their steps."""
    found = []
    for ask in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
        alone = [server.complete(prompt, **ask, max_tokens=max_tokens, logprobs=1)["choices"][0] for prompt in PROMPTS]
        together = server.complete(PROMPTS, **ask, max_tokens=max_tokens, logprobs=1)["choices"]
        found += [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in (*alone, *together)]
    by_grammar = server.complete(PROMPTS[0], max_tokens=8, temperature=0, structured_outputs={"regex": "[a-f]{40}"})
    return [*found, by_grammar["choices"][0]["text"]]


@pytest.fixture(scope="module")
def expected():
    """Answers of one rank on this host."""
    with RunningServer(DEMO, *FLAGS) as server:
        return answers(server)


@pytest.mark.parametrize(
    ("size", "kind", "launcher"),
    [
        ("TP 4", "switch", "flags"),
        ("PP 2", "switch", "LeaderWorkerSet"),
        ("TP 2", "switch", "torchrun"),
        ("TP 2 x PP 2", "switch", "torchrun per rank"),
    ],
)
def test_the_answers_match_one_host(expected, size, kind, launcher):
    with hosts_for_test(kind) as hosts, Group(hosts, DEMO, *FLAGS, *SIZES[size], launcher=launcher) as group:
        assert answers(group.head) == expected
        if launcher == "flags":
            assert "c10d" not in group.logs, "torch warns of hosts without a name, which nobody needs"
            group.node.process.send_signal(signal.SIGTERM)
            assert group.statuses(60) == [0, 0] and "level=ERROR" not in group.logs, group.logs


@pytest.mark.parametrize("size", ["TP 2", "PP 2"])
def test_a_slow_or_lossy_link_changes_no_answer(expected, size):
    with hosts_for_test("relay") as hosts, Group(hosts, DEMO, *FLAGS, *SIZES[size]) as group:
        for link in ({"delay_s": 0.005}, {"bytes_per_s": 1.25e6}, {"loss": 0.01}):
            hosts.emulate(**link)
            assert answers(group.head) == expected, link
