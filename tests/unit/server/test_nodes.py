"""Several hosts: what is missing or wrong is said before anything starts, and the secret is shown nowhere."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, replace

import pytest

from engine.config import EngineConfig, NodesConfig
from engine.errors import StartupError
from engine.ipc import messages
from server.config.nodes import SECRET, nodes_config, why_exposed
from server.config.settings import Settings, make_settings
from server.entrypoints.cli import main
from workers.config import WorkerConfig

THE_SECRET = "b5c1-8d0f-not-to-be-seen-anywhere-77e2"
ENVIRONMENT = {SECRET: THE_SECRET}
TWO = {"nnodes": 2, "node_rank": 0, "master_addr": "10.0.0.1"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("OARLOCK_"):
            monkeypatch.delenv(name)


def test_one_host_needs_nothing():
    assert nodes_config(Settings(), {}) is None
    assert nodes_config(make_settings({"node_rank": 0, "master_addr": "10.0.0.1"}), {}) is None


def test_everything_said_reaches_the_engine():
    given = TWO | {"node_rank": 1, "master_port": 7, "node_interface": "eth1", "node_timeout": 5.0}
    settings = make_settings(given)
    nodes = nodes_config(settings, ENVIRONMENT)
    assert nodes == NodesConfig(1, 2, "10.0.0.1", 7, "eth1", THE_SECRET, 5.0)
    config = settings.engine_config("model", nodes)
    assert (config.nodes, config.worker.nnodes) == (nodes, 2)


@pytest.mark.parametrize(
    ("values", "cause", "fix"),
    [
        ({"node_rank": None}, "which of them this host is, is not known", "--node-rank, from 0 to 1"),
        ({"node_rank": 2}, "--node-rank is 2, but of 2 hosts the last is 1", "from 0 to 1"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank is 1, but --nnodes is 1", "--nnodes"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2 with --nnodes 2", "behind a proxy"),
        ({"master_addr": None}, "the address of the head node is not known", "--master-addr"),
        ({}, "need a secret that they share", "--node-secret-file"),
    ],
)
def test_what_is_missing_is_named(values, cause, fix):
    with pytest.raises(StartupError) as caught:
        nodes_config(make_settings(TWO | values), {})
    assert cause in caught.value.cause and fix in caught.value.fix and caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "holds nothing"),
        (" \n", "holds nothing"),
        ("x" * 31, "holds only 31 characters"),
        ("x" * 20 + "\n" + "y" * 20, "holds several lines"),
    ],
)
def test_a_secret_that_is_none_is_refused_wherever_it_stands(tmp_path, text, cause):
    path = tmp_path / "secret"
    path.write_text(text)
    for settings, environment in (
        (make_settings(TWO), {SECRET: text}),
        (make_settings(TWO | {"node_secret_file": str(path)}), {}),
    ):
        with pytest.raises(StartupError) as caught:
            nodes_config(settings, environment)
        assert cause in caught.value.cause and "openssl rand -hex 32" in caught.value.fix
        assert not text.strip() or text.strip() not in str(caught.value)


@pytest.mark.parametrize(("content", "cause"), [(None, "No such file"), (b"\xff" * 40, "is not text")])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, cause):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StartupError, match=cause) as caught:
        nodes_config(make_settings(TWO | {"node_secret_file": str(path)}), ENVIRONMENT)
    assert str(path) in caught.value.cause


def test_the_file_comes_before_the_environment_and_its_white_space_does_not_count(tmp_path):
    path = tmp_path / "secret"
    path.write_text(f"{THE_SECRET}\n")
    nodes = nodes_config(make_settings(TWO | {"node_secret_file": str(path)}), {SECRET: "another one " * 4})
    assert nodes is not None and nodes.secret == THE_SECRET


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_a_file_that_others_can_read_is_a_warning(tmp_path, mode, exposed):
    path = tmp_path / "secret"
    path.write_text(THE_SECRET)
    path.chmod(mode)
    warning = why_exposed(make_settings(TWO | {"node_secret_file": str(path)}))
    assert (warning is not None) == exposed
    assert warning is None or f"chmod 600 {path}" in warning


def test_configurations_with_nodes_pass_the_engine_s_socket():
    nodes = NodesConfig(1, 2, "head", 29550, None, THE_SECRET, 9.0)
    config = EngineConfig(WorkerConfig("model", nnodes=2), nodes=nodes)
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_json(replace(config, nodes=None).to_json()).nodes is None


def test_the_secret_is_not_in_what_is_printed_or_recorded():
    nodes = NodesConfig(0, 2, "head", 29550, None, THE_SECRET)
    config = EngineConfig(WorkerConfig("model", nnodes=2), nodes=nodes)
    assert THE_SECRET not in f"{nodes} {nodes!r} {config} {config!r}"
    assert THE_SECRET not in json.dumps(asdict(config.worker)), "what recordings and ranks get"
    assert THE_SECRET.encode() in messages.config(config), "the engine needs it"


def test_the_secret_is_not_an_option(capsys):
    """A command line can be read by every user of the host."""
    assert main(["serve", "MODEL", f"--node-secret={THE_SECRET}"]) == 2
    assert "--node-secret-file" in capsys.readouterr().err


def test_config_shows_where_each_value_comes_from_but_no_secret(capsys, monkeypatch, tmp_path):
    path = tmp_path / "secret"
    path.write_text(THE_SECRET)
    monkeypatch.setenv(SECRET, THE_SECRET)
    monkeypatch.setenv("GROUP_RANK", "1")
    for name, value in {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["config", "--node-secret-file", str(path)]) == 0
    printed = capsys.readouterr()
    assert THE_SECRET not in printed.out + printed.err
    assert "torchrun" in printed.out and str(path) in printed.out


@pytest.mark.parametrize(
    ("arguments", "cause", "fix"),
    [
        (["--nnodes", "2", "--node-rank", "1"], "the address of the head node is not known", "--master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "of 2 hosts the last is 1", "0 to 1"),
        (["--nnodes", "2", "--node-rank", "1", "--master-addr", "h"], "need a secret", "OARLOCK_NODE_SECRET"),
        (["--node-rank", "1"], "--nnodes is 1", "the same --nnodes"),
    ],
)
def test_serve_says_what_is_wrong_before_it_starts_anything(capsys, arguments, cause, fix):
    assert main(["serve", "--port", "0", *arguments]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and cause in lines[0]
    assert lines[1].startswith("fix: ") and fix in lines[1]


@pytest.mark.parametrize(
    ("environment", "shown"), [(ENVIRONMENT, {"node_rank": 0, "secret": ""}), ({}, ["need a secret", SECRET])]
)
def test_doctor_checks_this_host_as_one_of_several(monkeypatch, environment, shown):
    words: list[str] = []
    monkeypatch.setattr("server.entrypoints.commands.doctor.run_program", lambda module, given: words.extend(given))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    main(["doctor", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "-tp", "2"])
    (passed,) = [json.loads(word.partition("=")[2]) for word in words if word.startswith("--nodes")]
    if isinstance(shown, dict):
        assert passed.items() >= shown.items()
    else:
        assert all(text in found for text, found in zip(shown, passed, strict=True))
    assert THE_SECRET not in " ".join(words) and SECRET not in os.environ


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_wrong_interface_is_named_with_those_there_are(capsys, monkeypatch, rank):
    monkeypatch.setenv(SECRET, THE_SECRET)
    given = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--node-interface", "nosuch0"]
    assert main(["serve", "--port", "0", "-tp", "2", *given]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("time=")]
    assert "nosuch0" in lines[-2] and "lo (127.0.0.1" in lines[-1]
    assert SECRET not in os.environ, "no process that is started gets it"


def test_a_port_that_is_taken_is_found_before_the_model_is_looked_for(capsys, monkeypatch):
    monkeypatch.setenv(SECRET, THE_SECRET)
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
        given += ["--master-port", str(other.getsockname()[1])]
        assert main(["serve", "./no/such/model", "--port", "0", "-tp", "2", *given]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("time=")]
    assert "already in use" in lines[-2] and "--master-port" in lines[-1]
    assert THE_SECRET not in "".join(lines)
