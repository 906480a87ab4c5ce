"""Bodies of the corpus, on every POST route, streamed and not: an answer or an error body, nothing left open."""

from __future__ import annotations

import anyio
import pytest

from oarlock.server.http.middleware import POOLING
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from tests.fuzz.bodies import routes_of
from tests.fuzz.checks import problem_of
from tests.fuzz.corpus import corpus

NUM_ROUTES = 17
EMBEDS = PoolerConfig(Task.EMBED, normalize=True)
KIB = 1024
# Each small body on every other route; large ones where most can go wrong. `make fuzz` sends all of them everywhere.
LIMITS = {"/v1/chat/completions": 5000 * KIB}


def rounds(document, pooling):
    """(route, stream) of everything that the document has, for models that embed or for all others."""
    routes = routes_of(document)
    assert len(routes) >= NUM_ROUTES
    own = POOLING - {"/rerank", "/v2/rerank", "/score"}  # the same by other names
    routes = [route for route in routes if (route.path in own if pooling else route.path not in POOLING)]
    return [(route, stream) for route in routes for stream in ((False, True) if route.streams else (False,))]


@pytest.mark.slow
@pytest.mark.parametrize("pooler", [None, EMBEDS], ids=["generate", "embed"])
def test_no_body_breaks_a_route(make_stage, pooler, tmp_path):
    stage = make_stage(admin_api_key="boss", pooler=pooler, batch_dir=str(tmp_path))
    problems = []

    async def send():
        async with stage.client(timeout=60, headers={"Authorization": "Bearer boss"}) as client:
            document = (await client.get("/openapi.json")).json()
            for number, (route, stream) in enumerate(rounds(document, pooling=pooler is not None)):
                limit = LIMITS.get(route.path, 64 * KIB)
                cases = [case for case in corpus(route, stream, large=limit > 64 * KIB) if len(case.content) <= limit]
                assert len(cases) > 90
                assert len({case.name for case in cases}) == len(cases)
                step = 9 if stream else 3  # most are refused before it matters whether they stream
                for case in cases[number % step :: step]:
                    answer = await client.post(route.path, content=case.content, headers=case.headers)
                    refused = case.refused and not case.by_engine  # there is no real engine here
                    problem = problem_of(
                        answer.status_code, answer.headers, answer.content, refused=refused, param=case.param
                    )
                    if problem:
                        problems.append(f"{route.path}{' streamed' if stream else ''}, {case.name}: {problem}")

    anyio.run(send)
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems)
    assert stage.state.num_in_flight == 0
    assert len(stage.engine.finished) + len(stage.engine.aborted) == len(stage.engine.requests)
