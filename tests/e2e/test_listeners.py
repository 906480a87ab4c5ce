"""A server on one host listens on its HTTP port alone, at any number of ranks, does not import Ray, and leaves nothing
behind when it is asked to end.
"""

import os
import signal

import psutil
import pytest

from oarlock.workers.distributed.all_reduce import SharedMemoryGroup
from tests.e2e.running import DEMO, ROOT, RunningServer
from tests.e2e.test_death import nothing_left

pytestmark = pytest.mark.skipif(not SharedMemoryGroup.supported(), reason="ranks of this processor sum by gloo")


def check_only_http_listens(server):
    assert server.text("import ", max_tokens=4)
    sockets = [there for process in server.processes() for there in process.net_connections("inet")]
    listening = [there.laddr for there in sockets if there.status == psutil.CONN_LISTEN]
    assert [address.port for address in listening] == [server.port]
    assert {there.laddr.port for there in sockets} == {server.port}, "nor is any other socket open"


@pytest.mark.parametrize("name", ["tp1", "tp2"])
def test_only_http_listens(name, request):
    check_only_http_listens(request.getfixturevalue(name))


@pytest.mark.soak
def test_only_http_listens_with_pipeline_stages_ray_is_not_imported_and_all_leave_when_asked(tmp_path):
    trace = tmp_path / "imported"  # by a `ray` that stands in the path of every process
    (tmp_path / "ray.py").write_text(f"open({str(trace)!r}, 'a').write('imported')")
    path = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    with RunningServer(DEMO, "-pp", 2, env=path) as server:
        check_only_http_listens(server)
        paths = [process.environ()["PYTHONPATH"].split(os.pathsep) for process in server.processes()]
        assert all(str(tmp_path) in path for path in paths) and not trace.exists(), "only with its flag is Ray imported"
        assert server.stop(signal.SIGTERM, within_s=60) == 0, server.log
        assert "Traceback" not in server.log
        nothing_left(server)
