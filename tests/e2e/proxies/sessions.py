"""How much of the prompts is found in the prefix cache of two servers, by how nginx chooses between them.

    .venv/bin/python -m tests.e2e.proxies.sessions

Conversations that begin with the same instructions and grow by a turn each time. A way of choosing has instructions of
its own, so that it finds nothing that another has left.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.proxies.load import completion
from tests.e2e.proxies.proxy import Proxy, why_missing
from tests.e2e.running import RunningServer

HASH = r"hash \$oarlock_session consistent;[^\n]*"
BY_SESSION, ROUND_ROBIN, AT_RANDOM = "by session, as in the file", "in turns", "at random"
POLICIES = {BY_SESSION: {}, ROUND_ROBIN: {HASH: ""}, AT_RANDOM: {HASH: "random;"}}  # what is changed in the file
SESSIONS, TURNS = 15, 6  # of an even number of sessions, in turns, each would stay with one of two servers
KEY = "key"


def conversation(policy: str, session: int, turn: int) -> str:
    """The prompt of one turn: instructions, then all turns of this session up to now."""
    name = hashlib.sha256(policy.encode()).hexdigest()[:8]  # as long for every policy
    shared = "".join(f"# Rule {number} of {name}: names are short, and say what they are.\n" for number in range(12))
    own = (
        f"def step_{session}_{number}(value):\n    return value + {session * number}\n" for number in range(turn * 5)
    )
    return shared + "".join(own)


def cached_share(url: str, key: str, policy: str, sessions: int, turns: int) -> float:
    """The share of all prompt tokens that was found in a cache. `key`: an API key of the servers behind `url`."""
    found = asked = 0
    for turn in range(turns):
        for session in range(sessions):
            body = {"prompt": conversation(policy, session, turn + 1), "max_tokens": 1}
            ending = completion(url, key, f"{policy} {session}", body, stream=False)
            assert ending.complete, ending
            found += ending.cached_tokens
            asked += ending.prompt_tokens
    return found / asked


def share_through_nginx(
    policy: str, folder: Path, ports: Sequence[int], key: str, sessions: int = SESSIONS, turns: int = TURNS
) -> float:
    """The cached share of two servers at these ports. `folder`: empty, for nginx."""
    with Proxy("nginx", folder, ports, POLICIES[policy]) as proxy:
        return cached_share(proxy.url, key, policy, sessions, turns)


def main() -> None:
    if reason := why_missing("nginx"):
        raise SystemExit(f"error: {reason}")
    flags = ("--api-key", KEY)
    with RunningServer(None, *flags) as one, RunningServer(None, *flags) as two:
        print("| two servers are chosen | prompt tokens from the cache |\n|---|---|")
        for policy in POLICIES:
            with tempfile.TemporaryDirectory() as folder:
                share = share_through_nginx(policy, Path(folder), (one.port, two.port), KEY)
            print(f"| {policy} | {share:.0%} |", flush=True)
        print(f"| (one server alone) | {cached_share(one.url, KEY, 'one', SESSIONS, TURNS):.0%} |")


if __name__ == "__main__":
    main()
