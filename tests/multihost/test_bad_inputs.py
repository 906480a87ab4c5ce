"""Starts of two hosts that must fail do so on both, in one line of cause and one of fix, before weights are read."""

import contextlib
import http.server
import re
import shutil
import socket
import threading

import pytest

from tests.e2e.running import DEMO, ROOT
from tests.golden.tiny_models import make_tiny
from tests.multihost.bad_inputs import BAD_INPUTS, BadInput
from tests.multihost.group import Group
from tests.multihost.hosts import hosts_for_test

CONFIGURATION, USAGE = 3, 2
WITHIN_S = 60.0
# Causes that tests of the settings and of what hosts tell each other (tests/unit/workers/ranks) show as well, reported
# by the way of a row that is tried: these run when they are asked for.
ALIKE = (
    "another type", "other limits", "another model", "another version of Oarlock", "another number of ranks",
    "other sources of the same version",
    "a number too high", "ranks that cannot be dealt", "torchrun with processes for other ranks",
)  # fmt: skip
ROWS = [pytest.param(row, id=row.name, marks=pytest.mark.every if row.name in ALIKE else ()) for row in BAD_INPUTS]

pytestmark = pytest.mark.soak  # what differs between hosts: tests/unit/workers/ranks


@pytest.fixture(scope="module")
def hosts():
    with hosts_for_test("switch") as hosts:
        yield hosts


def other_model(kind, folder):
    """A checkpoint that is not the demo."""
    if kind == "another model":
        return make_tiny(folder, "llama", tokenizer=True)
    path = shutil.copytree(DEMO, folder / "model")
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    return path


def other_oarlock(kind, folder):
    """A copy of this Oarlock that says it is another version, or has one more line in one of its files."""
    tree = folder / "tree"
    for name in ("oarlock", "server", "engine", "workers", "base"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if kind == "another version":
        (tree / "oarlock-99.9.dist-info").mkdir()
        (tree / "oarlock-99.9.dist-info" / "METADATA").write_text("Name: oarlock\nVersion: 99.9\n")
    else:
        with (tree / "workers" / "layers" / "mlp.py").open("a") as file:
            file.write("# changed\n")
    return tree


@contextlib.contextmanager
def listening(kind, host, port):
    """Occupy the port with a socket that never answers, or with a web server."""
    if kind is None:
        yield
        return
    with host.inside():
        if kind == "a web server":
            server = http.server.ThreadingHTTPServer((host.address, port), http.server.SimpleHTTPRequestHandler)
        else:
            server = socket.create_server((host.address, port))
    with server:
        if kind == "a web server":
            threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        if kind == "a web server":
            server.shutdown()


@pytest.mark.parametrize("row", ROWS)
def test_the_start_fails_and_names_the_reason(hosts, row: BadInput, tmp_path):
    own = {"head_env": row.head_env, "head_flags": row.head_flags}
    model = other_model(row.node_model, tmp_path) if row.node_model else None
    node_env = dict(row.node_env)
    if row.node_oarlock:
        node_env["PYTHONPATH"] = str(other_oarlock(row.node_oarlock, tmp_path))
    group = Group(hosts, DEMO, *row.flags, **own, node_env=node_env, node_flags=row.node_flags, node_model=model)
    expected = []
    with listening(row.listens, hosts.head, group.port), contextlib.ExitStack() as cleanup:
        cleanup.callback(group.kill_all)
        if row.head is not None:
            group.start_head()
            expected.append(row.head)
        if row.node is not None:
            group.start_node()
            expected.append(row.node)
        statuses = group.statuses(WITHIN_S)
        assert set(statuses) <= {CONFIGURATION, USAGE}, group.logs
        for server, words in zip(group.servers, expected, strict=True):
            causes = [line for line in server.log.splitlines() if line.startswith("error: ")]
            fixes = [line for line in server.log.splitlines() if line.startswith("fix: ")]
            assert (len(causes), len(fixes)) == (1, 1), group.logs
            assert re.search(words.replace("{port}", str(group.port)), causes[0]), group.logs
            assert "Traceback" not in server.log
