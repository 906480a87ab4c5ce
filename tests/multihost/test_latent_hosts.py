"""Latent attention, and recurrent layers beside it, have the same bits on several hosts as on one.

Ranks of one host compute a layer in one call, and add up in memory that they share. On several hosts they cannot: each
operation is a call of its own, and every rank writes the same rows of all heads.
"""

import signal

import pytest

from tests.e2e.running import RunningServer
from tests.golden.class_models import FOR_KERNELS, make_class
from tests.multihost.group import Group
from tests.multihost.hosts import hosts_for_test

pytestmark = pytest.mark.soak
BEGINNING = "def f(x):\n    return x\n\n" * 8  # more than a block, which later requests find in the prefix cache
PROMPTS = [BEGINNING + rest for rest in ("import ", "for line in file:\n", "")]
FLAGS = ("--dtype", "bfloat16", "--block-size", 16, "--served-model-name", "tiny")


def answers(server):
    """Texts and log-probabilities, greedy and with a seed, of all prompts together, then of each from its cached
    beginning."""
    found = []
    for ask in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
        asked = {**ask, "max_tokens": 12, "logprobs": 1}
        together = server.complete(PROMPTS, **asked)["choices"]
        alone = [server.complete(prompt, **asked) for prompt in PROMPTS]
        assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16 for one in alone)
        found += [(one["text"], one["logprobs"]["token_logprobs"]) for one in together]
        found += [(one["choices"][0]["text"], one["choices"][0]["logprobs"]["token_logprobs"]) for one in alone]
    return found


@pytest.mark.parametrize(
    ("family", "num_hosts", "cache", "sizes"),
    [
        ("deepseek_v3", 2, "int8", ("-tp", 2, "-pp", 2)),
        ("kimi_linear", 2, "fp8", ("-tp", 2)),
        ("kimi_linear", 3, "auto", ("-pp", 3)),  # only the second host has attention
    ],
)
def test_hosts_answer_as_one(tmp_path, family, num_hosts, cache, sizes):
    model, flags = make_class(tmp_path, family, **FOR_KERNELS), (*FLAGS, "--kv-cache-dtype", cache)
    with RunningServer(model, *flags) as server:
        expected = answers(server)
    with hosts_for_test("switch", num_hosts) as hosts, Group(hosts, model, *flags, *sizes) as group:
        assert answers(group.head) == expected
        group.node.process.send_signal(signal.SIGTERM)
        assert group.statuses(60) == [0] * num_hosts and "level=ERROR" not in group.logs, group.logs
