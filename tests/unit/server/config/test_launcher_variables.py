"""Variables that torchrun and LeaderWorkerSet set become options; a missing one is an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oarlock.server.config.nodes import LEADER_WORKER_SET, TORCHRUN, first_on_host, launched, nodes_config
from oarlock.server.config.option_groups import MASTER_PORT
from oarlock.server.config.options import OptionError
from oarlock.server.config.settings import Settings
from oarlock.server.config.sources import load_settings
from tests.e2e.running import free_port

ROOT = Path(__file__).resolve().parents[4]
# All that torchrun sets (`torch.distributed.elastic.agent.server.local_elastic_agent`), on the second of two hosts.
BY_TORCHRUN = {
    "LOCAL_RANK": "0",
    "RANK": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "1",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "1",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_LWS = {"LWS_LEADER_ADDRESS": "model-0.model.default", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "3"}


def _without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def test_torchrun_names_this_host():
    loaded = load_settings({}, BY_TORCHRUN)
    settings = loaded.settings
    assert (settings.nnodes, settings.node_rank, settings.master_addr) == (2, 1, "10.0.0.1")
    assert settings.master_port == 29500
    origins = {loaded.origins[name] for name in ("nnodes", "node_rank", "master_addr", "master_port")}
    assert origins == {TORCHRUN}


def test_leader_worker_set_names_this_host():
    loaded = load_settings({}, BY_LWS)
    settings = loaded.settings
    assert (settings.nnodes, settings.node_rank, settings.master_addr) == (4, 3, "model-0.model.default")
    assert settings.master_port == MASTER_PORT
    assert (loaded.origins["nnodes"], loaded.origins["master_port"]) == (LEADER_WORKER_SET, "default")


def test_ray_places_each_stage_on_a_host_whatever_other_launchers_say():
    stages = {"pipeline_parallel_size": 3, "tensor_parallel_size": 2}
    loaded = load_settings({"distributed_executor_backend": "ray"} | stages, BY_LWS | BY_TORCHRUN)
    assert (loaded.settings.nnodes, loaded.origins["nnodes"], loaded.settings.node_rank) == (3, "ray", None)
    assert load_settings({"distributed_executor_backend": "ray", "nnodes": 2} | stages, {}).settings.nnodes == 2


def test_torchrun_in_a_leader_worker_set_counts_alone():
    assert load_settings({}, BY_LWS | BY_TORCHRUN).settings.nnodes == 2


def test_settings_of_the_operator_precede_launcher_variables(tmp_path):
    path = tmp_path / "oarlock.toml"
    path.write_text('node_interface = "eth1"\nmaster_port = 7')
    loaded = load_settings({"master_addr": "a"}, BY_TORCHRUN | {"OARLOCK_NNODES": "8"}, str(path))
    settings = loaded.settings
    found = (settings.nnodes, settings.node_rank, settings.master_addr, settings.master_port, settings.node_interface)
    assert found == (8, 1, "a", 7, "eth1")


def test_variables_of_other_programs_change_nothing():
    foreign = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "RANK": "3", "WORLD_SIZE": "9", "LOCAL_RANK": "2"}
    assert load_settings({}, foreign).settings == Settings()
    assert load_settings({}, {"LWS_GROUP_SIZE": "", "GROUP_RANK": ""}).settings == Settings()


def test_one_host_under_torchrun_is_one_host():
    alone = BY_TORCHRUN | {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    assert load_settings({}, alone).settings.nnodes == 1


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        (_without(BY_TORCHRUN, "MASTER_ADDR"), "but not MASTER_ADDR"),
        (_without(BY_TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "but not MASTER_ADDR and MASTER_PORT"),
        (_without(BY_TORCHRUN, "GROUP_RANK"), "but not GROUP_RANK"),
        (_without(BY_TORCHRUN, "GROUP_WORLD_SIZE"), "has GROUP_RANK, MASTER_ADDR, MASTER_PORT of torchrun"),
        (BY_TORCHRUN | {"GROUP_RANK": "first"}, "GROUP_RANK, a variable of torchrun, is 'first'"),
        (BY_TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT, a variable of torchrun, is '-1'"),
        (BY_TORCHRUN | {"MASTER_PORT": "65536"}, "--master-port is 65536, but it must be at most 65535"),
        (_without(BY_LWS, "LWS_WORKER_INDEX"), "but not LWS_WORKER_INDEX"),
        (_without(BY_LWS, "LWS_LEADER_ADDRESS"), "but not LWS_LEADER_ADDRESS"),
        (BY_LWS | {"LWS_GROUP_SIZE": "two"}, "LWS_GROUP_SIZE, a variable of LeaderWorkerSet, is 'two'"),
    ],
)
def test_missing_or_wrong_variables_are_named_with_a_fix(environment, cause):
    with pytest.raises(OptionError) as caught:
        load_settings({}, environment)
    assert cause in caught.value.cause
    assert "--" in caught.value.fix and "\n" not in caught.value.cause + caught.value.fix


def test_a_variable_that_is_not_needed_may_be_missing():
    given = dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"))
    assert launched(_without(BY_TORCHRUN, "MASTER_ADDR", "GROUP_RANK"), given) == (TORCHRUN, {})


def test_ranks_meet_in_the_store_of_torchrun_unless_another_port_is_named():
    settings = load_settings({}, BY_TORCHRUN).settings
    nodes = nodes_config(settings, BY_TORCHRUN)
    assert nodes is not None and (nodes.port, nodes.launcher_store) == (29500, "none/0")
    again = nodes_config(settings, BY_TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again is not None and again.launcher_store == "none/1", "keys of another attempt are not ours"
    own = [BY_TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, BY_LWS]
    for environment in own:
        nodes = nodes_config(load_settings({}, environment).settings, environment)
        assert nodes is not None and nodes.launcher_store is None
    nodes = nodes_config(load_settings({"master_port": 7}, BY_TORCHRUN).settings, BY_TORCHRUN)
    assert nodes is not None and nodes.launcher_store is None


def test_the_first_torchrun_process_of_each_host_starts_its_ranks():
    of_four = BY_TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    assert first_on_host(of_four, 4) and not first_on_host(of_four | {"LOCAL_RANK": "1"}, 4)
    assert first_on_host(BY_TORCHRUN, 4) and first_on_host({"LOCAL_RANK": "1"}, 1)
    with pytest.raises(OptionError, match="torchrun starts 4 processes") as caught:
        first_on_host(of_four, 2)
    assert "--nproc-per-node 1" in caught.value.fix


@pytest.mark.soak
def test_torchrun_itself():
    """Two groups of one process each meet on this machine, and each knows which it is."""
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OARLOCK_")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    processes = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), "-m", "oarlock", "config"],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    for rank, text in enumerate(printed):
        found = {line.split()[0]: line.split()[1:] for line in text.splitlines()}
        assert found["nnodes"] == ["2", "torchrun"]
        assert found["node_rank"] == [str(rank), "torchrun"]
        assert found["master_addr"] == ["127.0.0.1", "torchrun"]
        assert found["master_port"] == [str(port), "torchrun"]
