"""The container recipes do what the README promises: images, services, and packages from locks."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from oarlock.server.config.settings import OPTIONS
from oarlock.workers.platform.cuda_driver import LEAST_DRIVERS
from tests.house import recipes
from tests.house.rules import ROOT
from tools import locks

DOCKERFILE = (ROOT / "Dockerfile").read_text()
STAGES = recipes.stages()
COMPOSE = recipes.compose()
SERVICES = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DRAIN_SECONDS = 30  # the time in which open requests may finish after the first SIGTERM


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images(target):
    image = STAGES[target]
    assert recipes.last(image, "USER") == "oarlock" and recipes.last(image, "STOPSIGNAL") == "SIGTERM"
    health = recipes.last(image, "HEALTHCHECK")
    assert '["python", ' in health and "8000/health'" in health and re.search(r"--start-period=\d+s", health)
    # In the exec form: a shell would not pass signals on.
    assert all(json.loads(recipes.last(image, instruction)) for instruction in ("ENTRYPOINT", "CMD"))
    assert [text for word, text in image if word == "COPY"] == [
        f"--from=build-{target} /opt/{name} /opt/{name}" for name in ("venv", "oarlock")
    ]


def test_images_start_from_one_pinned_base():
    (base,) = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) - STAGES.keys() == {"${PYTHON_IMAGE}"}


def test_the_build_context_has_the_files_of_the_image():
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    needed = ["requirements.txt", *locks.FILES, "pyproject.toml", "setup.py", "README.md", "LICENSE", "oarlock"]
    needed += ["server", "engine", "workers", "base", "configs", "integrations", "models"]
    assert next(line for line in ignored if line and line[0] != "#") == "*" and "COPY . .\n" in DOCKERFILE
    assert [name for name in needed if f"!{name}" not in ignored or not (ROOT / name).exists()] == []


def test_triton_has_a_compiler_and_a_cache():
    runs = " ".join(text for word, text in STAGES["cuda"] if word == "RUN")
    assert "apt-get install -y --no-install-recommends gcc libc6-dev" in runs and "#include <Python.h>" in runs
    cache = Path(recipes.environment(STAGES["cuda"])["TRITON_CACHE_DIR"])
    assert {parent.as_posix() for parent in cache.parents} & recipes.mounts(SERVICES["oarlock"]).keys()


@pytest.mark.parametrize("name", OURS)
def test_services(name):
    service = OURS[name]
    gpus, profile = {"oarlock": (2, None), "oarlock-1gpu": (1, "1gpu")}.get(name, (0, name.removeprefix("oarlock-")))
    assert service.get("profiles") == (profile and [profile])  # `docker compose up` starts only the first
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert [device["count"] for device in devices] == ([gpus] if gpus else [])
    config = tomllib.loads((ROOT / service["command"][service["command"].index("--config") + 1]).read_text())
    assert not gpus or config.get("tensor_parallel_size", 1) == gpus
    assert service["ports"] == ["127.0.0.1:8000:8000"] and "OARLOCK_OPEN_METRICS=true" in service["environment"]
    assert int(service["shm_size"].removesuffix("gb")) >= 1
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    assert re.fullmatch(r"on-failure:[1-9]", service["restart"])  # another try does not help after some statuses
    check = service["healthcheck"]
    assert check["test"][:2] == ["CMD", "python"] and "/health'" in check["test"][-1]
    assert re.fullmatch(r"[1-9]\d*m", check["start_period"])
    assert (
        service["read_only"]
        and service["cap_drop"] == ["ALL"]
        and not {"privileged", "ipc", "network_mode"} & service.keys()
    )
    assert service["env_file"] == [{"path": ".env", "required": False}]
    mounts, image = recipes.mounts(service), STAGES[service["build"]["target"]]
    assert mounts["/models"] == "${MODELS_DIR:-./models}" and recipes.environment(image)["HF_HOME"] in mounts
    assert [re.split("=", argument)[0] for argument in service["build"]["args"]] == ["TORCH_INDEX", "PYTHON_IMAGE"]
    # A named volume takes its owner from the image's folder: without the folder it would belong to root.
    (made,) = re.findall(r"mkdir -p ([^&]+) && chown -R oarlock:oarlock /cache", DOCKERFILE)
    assert {target for target, source in mounts.items() if source in COMPOSE["volumes"]} == set(made.split())


def test_prometheus_and_grafana_listen_on_loopback_and_find_each_other():
    prometheus, grafana = (SERVICES[name] for name in ("prometheus", "grafana"))
    assert SERVICES.keys() - OURS.keys() == {"prometheus", "grafana"}
    for service in (prometheus, grafana):
        assert service["profiles"] == ["monitoring"] and re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])
        files = [volume for volume in service["volumes"] if volume[0] == "."]
        assert all((ROOT / file.split(":")[0]).exists() and file.endswith(":ro") for file in files)
    assert {"GF_SERVER_HTTP_ADDR=127.0.0.1", "GF_SERVER_HTTP_PORT=3000"} <= set(grafana["environment"])
    home = "/etc/dashboards/oarlock.json"
    assert f"GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH={home}" in grafana["environment"]
    assert recipes.mounts(grafana)[home] == "./configs/grafana/oarlock.json"
    assert "{path: /etc/dashboards}" in (ROOT / "configs/grafana/dashboards.yml").read_text()
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["command"]
    assert "url: http://127.0.0.1:9090\n" in (ROOT / "configs/grafana/datasource.yml").read_text()
    server = f"{OPTIONS['host'].default}:{OPTIONS['port'].default}"
    assert f'"{server}"' in (ROOT / "configs/prometheus/prometheus.yml").read_text()
    # Without names, `docker compose up` starts the service `oarlock` as well.
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.yml"), ROOT / "docker-compose.yml"]
    lines = [line for file in files for line in re.findall(r"docker compose [^`\n]*", file.read_text())]
    watching = [line.rstrip() for line in lines if re.search("monitoring|prometheus|grafana", line)]
    assert len(watching) > 3 and set(watching) == {"docker compose up -d prometheus grafana"}


def test_compose_itself_accepts_the_file():
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("the docker client with its compose plug-in is not installed")
    command = ["docker", "compose", "--profile", "1gpu", "--profile", "cpu", "config", "--quiet"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


TORCH, REST = "-r torch.txt torch==", "--require-hashes -r requirements.lock"
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("target", "index", "installs"),
    [
        ("build-cpu", None, [f"--no-deps {CPU_INDEX} {TORCH}", REST]),
        ("build-cpu", "", [f"--no-deps {TORCH}", REST]),
        ("build-cpu", "https://index.example", [f"--no-deps --index-url https://index.example {TORCH}", REST]),
        ("build-cuda", "", [f"{REST} -r requirements-cuda.lock", REST]),
        ("build-cuda", "https://index.example", [f"--index-url https://index.example {TORCH}", REST]),
    ],
)
def test_packages_come_from_locks_and_torch_from_the_index_that_the_build_names(tmp_path, target, index, installs):
    """Run the build's own commands with a `pip` that records its arguments."""
    for _, text in [step for step in STAGES[target] if step[0] == "RUN"]:
        subprocess.run(["sh", "-nc", re.sub(r"--mount=\S+", "", text)], check=True)  # each is shell
    install = next(text for word, text in STAGES[target] if word == "RUN" and "torch.txt" in text)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@ $(echo "$@" | grep -q torch.txt && cat torch.txt)" >> calls\n')
    (tmp_path / "pip").chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    used = recipes.last(STAGES[target], "ARG").partition("=")[2] if index is None else index
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({"TORCH_INDEX": used} if used else {})
    subprocess.run(["sh", "-ec", re.sub(r"--mount=\S+", "", install)], cwd=tmp_path, env=environment, check=True)
    calls = [re.sub(r"(torch==)[\d.]+$", r"\1", call.strip()) for call in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [f"install {words}" for words in installs]


def test_the_locks_hold_the_pins_and_the_needs_of_every_package():
    """Needs are read from the metadata of packages that are installed here in the locked version."""
    shared, of_cuda = (locks.read_lock((ROOT / file).read_text()) for file in locks.FILES)
    locked = shared | of_cuda
    assert not shared.keys() & of_cuda.keys()
    pins = "\n".join([(ROOT / "requirements.txt").read_text(), *locks.pinned_extras()])
    assert locks.unlocked(pins, locked) == [] and locks.unlocked("numpy==9.0", locked) == ["numpy==9.0"]
    image = {"python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux", "extra": ""}
    installed = {canonicalize_name(dist.name): dist for dist in importlib.metadata.distributions()}
    same = [dist for name, dist in installed.items() if locked.get(name, ("",))[0] == dist.version]
    needs = [Requirement(text) for dist in same for text in dist.requires or []]
    wanted = [f"{need.name}{need.specifier}" for need in needs if need.marker is None or need.marker.evaluate(image)]
    assert len(same) > 30 and locks.unlocked("\n".join(wanted), locked) == []


def test_the_driver_that_the_recipe_names_is_the_one_that_the_start_requires():
    built = locks.read_lock((ROOT / "requirements-cuda.lock").read_text())["nvidia-cuda-runtime"][0]
    assert f"built for CUDA {'.'.join(built.split('.')[:2])}" in DOCKERFILE
    assert LEAST_DRIVERS[int(built.split(".")[0])] in DOCKERFILE


def test_a_wheel_carries_the_models_without_their_training():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    folders = {f"share/oarlock/models/{folder.name}": folder for folder in (ROOT / "models").iterdir()}
    assert patterns.keys() == folders.keys()
    for target, folder in folders.items():
        shipped = {path for pattern in patterns[target] for path in ROOT.glob(pattern)}
        assert shipped == {path for path in folder.iterdir() if path.is_file()}
