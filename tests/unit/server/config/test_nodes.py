"""Several hosts: what is missing or wrong is said before anything starts."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.server.cli.main import main
from oarlock.server.config.nodes import nodes_config, ray_resources
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings, make_settings
from oarlock.server.config.sources import load_settings
from oarlock.server.launch.ray_driver import last_error
from oarlock.server.launch.ray_group import RayGroup, request
from oarlock.workers.config import NodesConfig, WorkerConfig

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
    nodes = nodes_config(settings, {})
    assert nodes == NodesConfig(1, 2, "10.0.0.1", 7, "eth1", 5.0)
    config = settings.engine_config("model", nodes)
    assert (config.nodes, config.worker.nnodes) == (nodes, 2)


@pytest.mark.parametrize(
    ("values", "cause", "fix"),
    [
        ({"node_rank": None}, "the rank of this host is not known", "--node-rank, from 0 to 1"),
        ({"node_rank": 2}, "--node-rank is 2, but with 2 hosts it is at most 1", "from 0 to 1"),
        ({"nnodes": 1, "node_rank": 1}, "--node-rank is 1, but --nnodes is 1", "--nnodes"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2 with --nnodes 2", "behind a proxy"),
        ({"master_addr": None}, "the address of the head node is not known", "--master-addr"),
    ],
)
def test_missing_values_are_named(values, cause, fix):
    with pytest.raises(StartupError) as caught:
        nodes_config(make_settings(TWO | values), {})
    assert cause in caught.value.cause and fix in caught.value.fix and caught.value.exit_code == 3


ON_RAY = {"distributed_executor_backend": "ray", "device": "cpu", "nnodes": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("values", "cause", "fix"),
    [
        (
            {"node_rank": 0},
            "--node-rank is given together with --distributed-executor-backend ray",
            "Leave --node-rank out",
        ),
        ({"master_addr": "a"}, "--master-addr is given together with", "on one host only"),
        ({"data_parallel_size": 2}, "--data-parallel-size 2 is given together with", "Ray Serve"),
        ({"device": "auto"}, "needs to know the device", "--device cuda or --device cpu"),
        ({"nnodes": 3}, "2 ranks cannot be distributed evenly over 3 hosts", "--nnodes"),
        ({}, "needs the Python package ray, which is missing", "pip install 'oarlock[ray]'"),
    ],
)
def test_groups_that_ray_cannot_place_are_refused_before_it_is_asked(monkeypatch, values, cause, fix):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError) as caught:
        nodes_config(make_settings(ON_RAY | values), {})
    assert cause in caught.value.cause and fix in caught.value.fix and caught.value.exit_code == 3


def test_another_executor_is_refused_by_name():
    with pytest.raises(OptionError, match="--distributed-executor-backend is 'uni', but it must be one of mp, ray"):
        make_settings({"distributed_executor_backend": "uni"})


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ({}, {"CPU": 1.0}),
        ({"num_threads": 3, "pipeline_parallel_size": 2}, {"CPU": 6.0}),
        ({"device": "cuda", "num_threads": 3, "tensor_parallel_size": 8}, {"CPU": 4.0, "GPU": 4.0}),
    ],
)
def test_ray_is_asked_for_an_equal_share_of_each_host(values, share):
    assert ray_resources(make_settings(ON_RAY | values)) == share


def test_a_part_gets_the_options_of_the_command_without_its_secrets_and_its_http(tmp_path):
    path = tmp_path / "oarlock.toml"
    path.write_text('dtype = "float32"\nenforce_eager = true')
    given = ON_RAY | {"model": "m", "api_key": ("k",), "port": 1, "check_weights": False, "kv_cache_memory": 2**20}
    loaded = load_settings(given, {"OARLOCK_BLOCK_SIZE": "16"}, str(path))
    asked = request(loaded, {"HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "HOME": "/", "OARLOCK_CPU_LEVEL": "avx2"})
    words = asked["command"][asked["command"].index("serve") + 1 :]
    model = ["m", "--dtype=float32", "--no-check-weights"]
    assert words[: len(model)] == model
    assert {"--enforce-eager", "--block-size=16", "--kv-cache-memory=1048576", "--nnodes=2"} < set(words)
    assert words[-1] == "--distributed-executor-backend=mp" and not [
        word for word in words if "key" in word or "port" in word
    ]
    carried = {name: value for name, value in asked["environment"].items() if name != "PYTHONPATH"}
    assert carried == {"HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "OARLOCK_CPU_LEVEL": "avx2"}
    assert asked["port"] == 0, "a free one: several groups may have their heads on one host"


def test_the_last_output_of_a_part_is_the_reason_of_its_failure():
    assert last_error(["x", "error: A.", "fix: B.", "y"], 3) == ("A.", "B.")
    cause, fix = last_error(["x"], -9)
    assert cause == "the task was killed by signal 9. x" and "Ray's logs" in fix


def test_parts_of_a_group_that_has_failed_are_not_waited_for_as_others_are():
    waits = []
    group = object.__new__(RayGroup)
    group._driver = SimpleNamespace(stdin=SimpleNamespace(close=lambda: None), wait=waits.append)
    group.close(in_order=True)
    group.close()
    assert waits == [15.0, 3.0], "5 s to notice a cut link, and all within 10 s"


def test_configurations_with_nodes_pass_the_engine_s_socket():
    nodes = NodesConfig(1, 2, "head", 29550, None, 9.0, "none/1")
    config = EngineConfig(WorkerConfig("model", nnodes=2), nodes=nodes)
    assert EngineConfig.from_json(config.to_json()) == config
    assert EngineConfig.from_json(replace(config, nodes=None).to_json()).nodes is None


@pytest.mark.parametrize("words", [["--node-secret-file", "x"], ["--node-secret=x"]])
def test_a_secret_of_older_versions_is_refused_with_a_fix(capsys, words):
    assert main(["serve", *words]) == 2
    assert "Keep the network between them private" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "cause", "fix"),
    [
        (["--nnodes", "2", "--node-rank", "1"], "the address of the head node is not known", "--master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "with 2 hosts it is at most 1", "0 to 1"),
        (["--node-rank", "1"], "--nnodes is 1", "the same --nnodes"),
    ],
)
def test_serve_names_the_fault_before_it_starts_anything(capsys, arguments, cause, fix):
    assert main(["serve", "--port", "0", *arguments]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: ") and cause in lines[0]
    assert lines[1].startswith("fix: ") and fix in lines[1]


def test_doctor_checks_this_host_as_one_of_several(monkeypatch):
    words: list[str] = []
    monkeypatch.setattr("oarlock.server.cli.doctor.run_program", lambda module, given: words.extend(given))
    main(["doctor", "--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "-tp", "2"])
    (passed,) = [json.loads(word.partition("=")[2]) for word in words if word.startswith("--nodes")]
    assert passed.items() >= {"node_rank": 0, "nnodes": 2, "address": "127.0.0.1"}.items()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_wrong_interface_is_named_with_those_there_are(capsys, rank):
    given = ["--nnodes", "2", "--node-rank", rank, "--master-addr", "127.0.0.1", "--node-interface", "nosuch0"]
    assert main(["serve", "--port", "0", "-tp", "2", *given]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("time=")]
    assert "nosuch0" in lines[-2] and "lo (127.0.0.1" in lines[-1]


def test_a_port_that_is_taken_is_found_before_the_model_is_read(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        given = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1"]
        given += ["--master-port", str(other.getsockname()[1])]
        (tmp_path / "config.json").write_text("damaged")
        assert main(["serve", str(tmp_path), "--port", "0", "-tp", "2", *given]) == 3
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("time=")]
    assert "already in use" in lines[-2] and "--master-port" in lines[-1]
