"""An idle server uses almost no processor time, however many ranks it has."""

import time

import pytest

WATCHED_S = 3.0


def cpu_seconds(server):
    return sum(sum(process.cpu_times()[:2]) for process in server.processes())


@pytest.mark.parametrize("name", ["tp1", pytest.param("tp2", marks=pytest.mark.soak)])
def test_an_idle_server_uses_under_two_percent_of_a_core(name, request):
    server = request.getfixturevalue(name)
    server.text("import ", max_tokens=4)
    time.sleep(1)  # what follows a request is over
    before = cpu_seconds(server)
    time.sleep(WATCHED_S)
    used = cpu_seconds(server) - before
    assert used < 0.02 * WATCHED_S, f"{used:.3f} s of CPU in {WATCHED_S:g} s over {len(server.processes())} processes"
