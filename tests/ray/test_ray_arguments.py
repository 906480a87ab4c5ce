"""Arguments of the Ray application's YAML, without Ray: the file of the repository, and every mistake in `args`."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from oarlock_ray import arguments
from oarlock_ray.arguments import ArgumentError

from tests.e2e.running import ROOT

FOLDER = ROOT / "integrations" / "ray"
CONFIG = yaml.safe_load((FOLDER / "oarlock.yaml").read_text())
APPLICATION = CONFIG["applications"][0]
HERE = str(Path(sys.executable).with_name("oarlock"))


def read(flags="--device cpu", **more):
    return arguments.read({"command": f"{HERE} serve models/oarlock-demo {flags}", **more})


def test_the_yaml_of_the_repository_is_a_replica_of_two_gpus():
    command = APPLICATION["args"]["command"]
    replica = arguments.read({"command": command.replace("oarlock", HERE, 1)})
    assert (replica.num_gpus, replica.num_cpus, replica.slots) == (2, 2, 256)
    assert replica.max_ongoing_requests == 320
    assert list(replica.command[1:]) == command.split()[1:]


def test_the_yaml_names_existing_parts():
    module, name = APPLICATION["import_path"].split(":")
    source = ast.parse((FOLDER / f"{module.replace('.', '/')}.py").read_text())  # importing it would import Ray
    assert name in [node.name for node in source.body if isinstance(node, ast.FunctionDef)]
    deployment = APPLICATION["deployments"][0]
    assert f'name="{deployment["name"]}"' in (FOLDER / "oarlock_ray" / "app.py").read_text()
    policy = deployment["autoscaling_config"]["policy"]
    module, name = policy["policy_function"].split(":")
    getattr(importlib.import_module(module), name)(**policy["policy_kwargs"])


def test_the_page_names_existing_parts():
    page = (ROOT / "docs" / "replicas.md").read_text()
    module, name = re.search(r"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=([\w.]+)\.(\w+)", page).groups()
    layers = getattr(importlib.import_module(module), name)()
    assert [one.cls.__name__ for one in layers] == ["LostReplica", "PromptPrefix"]
    assert (
        "pip install ./integrations/ray" in page
        and "RAY_AUTH_MODE=token" in page
        and "integrations/ray/oarlock.yaml" in page
    )


@pytest.mark.slow
def test_an_installed_application_has_all_its_files(tmp_path):
    source = shutil.copytree(FOLDER, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", tmp_path / "to", source], check=True, timeout=120)
    files = {path.name for path in (FOLDER / "oarlock_ray").glob("*.py")}
    assert files == {path.name for path in (tmp_path / "to" / "oarlock_ray").glob("*.py")}


def test_the_pins_of_the_tests_are_the_version_of_the_requirements():
    (needed,) = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = needed.removeprefix("ray[serve]==")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["ray"] == [f"ray=={wanted}"]
    assert f"\nray=={wanted}\n" in (ROOT / "tests" / "ray" / "pins.txt").read_text()


@pytest.mark.parametrize(
    ("flags", "cpus", "gpus", "slots"),
    [
        ("--device cpu", 1, 0, 64),
        ("--device cpu --tensor-parallel-size 2 --num-threads 3 --max-num-seqs 8", 6, 0, 8),
        ("--device cuda --tensor-parallel-size 2 --pipeline-parallel-size 2 --num-threads 3", 4, 4, 64),
    ],
)
def test_a_replica_takes_the_memory_of_its_ranks(flags, cpus, gpus, slots):
    replica = read(flags)
    assert (replica.num_cpus, replica.num_gpus, replica.slots) == (cpus, gpus, slots)


@pytest.mark.parametrize(
    ("given", "cause", "fix"),
    [
        ({"comand": "oarlock serve"}, "args has an unknown key: comand.", "There is only `command`"),
        ({}, "args.command is not a command line.", "For example"),
        ({"command": ["oarlock", "serve"]}, "args.command is not a command line.", "For example"),
        ({"command": "oarlock 'serve"}, "args.command cannot be split: No closing quotation.", "quotation mark"),
        ({"command": "oarlock bench"}, "does not begin with `oarlock serve`: oarlock bench", "For example"),
        ({"command": "oarlock serve --port=1"}, "--port=1, which each replica sets for itself", "http_options"),
        ({"command": "nowhere/oarlock serve"}, "nowhere/oarlock cannot be run: No such file", "absolute path"),
        ({"command": f"{HERE} serve --max-num-seqs 0"}, "--max-num-seqs is 0", "For example: --max-num-seqs 32"),
        ({"command": f"{HERE} serve --tensor-paralel-size 2"}, "Unknown flag", "Did you mean --tensor-parallel-size?"),
        ({"command": f"{HERE} serve"}, "leaves the device open", "--device cpu"),
        ({"command": "oarlock serve --node-rank 0"}, "--node-rank, which each replica sets for itself", "Leave it out"),
        (
            {"command": f"{HERE} serve --device cpu -tp 4 --nnodes 3"},
            "4 ranks, which cannot be divided equally among 3",
            "--nnodes",
        ),
        ({"command": f"{HERE} serve --device cpu -tp 2 -dp 2 --nnodes 2"}, "share one node", "num_replicas"),
    ],
)
def test_a_mistake_is_one_line_of_cause_and_one_of_fix(given, cause, fix):
    with pytest.raises(ArgumentError) as caught:
        arguments.read(given)
    first, second = str(caught.value).splitlines()
    assert first.startswith("error: ") and cause in first
    assert second.startswith("fix: ") and fix in second


@pytest.mark.parametrize("of_hosts", ["--nnodes 2", "--distributed-executor-backend ray"])
def test_a_replica_of_several_nodes_takes_an_equal_share_of_each(of_hosts):
    replica = read(f"--device cuda -tp 4 -pp 2 {of_hosts}")
    assert replica.bundles() == [{"CPU": 4, "GPU": 4}] * 2
    assert (replica.num_cpus, replica.num_gpus) == (4, 4), "the actor takes the first share"


@pytest.mark.slow
def test_each_part_is_told_where_it_is():
    one, other = (read("--device cpu -pp 2 --nnodes 2").part(number, "10.0.0.1", 7) for number in (0, 1))
    assert one[:-5] == other[:-5] == list(read("--device cpu -pp 2 --nnodes 2").command)
    where = ["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=7"]
    assert other[-5:] == ["--distributed-executor-backend=mp", *where]


@pytest.mark.parametrize(
    ("printed", "error"),
    [
        ("a line\nerror: No memory.\nfix: Buy some.\nlast", ("No memory.", "Buy some.")),
        (
            "a line\nlast one\n",
            ("It ended. Its last line: last one", "The log of the replica has all of its output."),
        ),
        (
            "a level=ERROR event=engine_dead\nlast one\n",
            (
                "It ended. Its last error: a level=ERROR event=engine_dead",
                "The log of the replica has all of its output.",
            ),
        ),
        ("", ("It ended.", "The log of the replica has all of its output.")),
    ],
)
def test_the_last_error_is_the_last_line_of_the_server(printed, error):
    assert arguments.last_error(printed, "It ended.") == error
