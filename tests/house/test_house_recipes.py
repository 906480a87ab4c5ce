"""The container recipes do what the README promises. Each check is shown to fail on a planted mistake."""

import importlib.metadata
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from oarlock.server.config.settings import OPTIONS
from oarlock.workers.platform.cuda_driver import LEAST_DRIVERS
from tests.house import locks, recipes
from tests.house.rules import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images(target):
    assert recipes.image_faults(DOCKERFILE, target) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER oarlock", "USER root"),
        ("USER oarlock\n", ""),
        ("'http://127.0.0.1:8000/health'", "'http://127.0.0.1:8000/version'"),
        ('CMD ["python", "-c"', 'CMD ["curl"'),
        (" --start-period=180s", ""),
        ('ENTRYPOINT ["oarlock"]', "ENTRYPOINT oarlock"),
        ("STOPSIGNAL SIGTERM\n", ""),
        ("COPY --from=build-cuda", "COPY"),
        ("AS cuda", "AS gpu"),
    ],
)
def test_a_fault_in_an_image_is_noticed(old, new):
    assert old in DOCKERFILE
    assert recipes.image_faults(DOCKERFILE.replace(old, new), "cuda") != []


def test_both_images_start_from_one_pinned_base():
    assert recipes.base_faults(DOCKERFILE) == []
    digest = re.findall(r"@sha256:[0-9a-f]{64}\n", DOCKERFILE)[0]
    for old, new in (
        (digest, "\n"),
        (digest, f"{digest[:-2]}\n"),
        (digest, f"{digest[:-2]}g\n"),
        ("FROM ${PYTHON_IMAGE} AS runtime", "FROM python:3.13-slim-bookworm AS runtime"),
    ):
        assert old in DOCKERFILE
        assert len(recipes.base_faults(DOCKERFILE.replace(old, new))) == 1


def test_the_build_context_holds_what_the_image_needs():
    ignored = (ROOT / ".dockerignore").read_text()
    needed = ["requirements.txt", *locks.FILES, "pyproject.toml", "setup.py", "README.md", "LICENSE", "oarlock"]
    needed += ["server", "engine", "workers", "base", "configs", "integrations", "models"]
    assert recipes.context_faults(DOCKERFILE, ignored, needed) == []
    assert recipes.context_faults(DOCKERFILE, ignored.replace("!models\n", ""), needed) != []
    assert recipes.context_faults(DOCKERFILE, ignored.replace("*\n", "", 1), needed) != []
    assert all((ROOT / name).exists() for name in needed)


def built(services):
    """Services of this repository's images."""
    return [service for service in services.values() if "build" in service]


def test_what_watches_the_servers():
    """Prometheus and Grafana: of one version each, on loopback only, with the files of this repository read-only."""
    services = recipes.compose(COMPOSE)["services"]
    watching = {name: service for name, service in services.items() if "build" not in service}
    assert watching.keys() == {"prometheus", "grafana"}
    for service in watching.values():
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])
        # The host's network, where the loopback address of `make serve` is: so they must not listen beyond it.
        assert service["network_mode"] == "host" and "ports" not in service and "networks" not in service
        assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
        files = {target: source for target, source in recipes.mounts(service).items() if source.startswith("./")}
        assert files and all((ROOT / source).exists() for source in files.values())
        assert all(volume.endswith(":ro") for volume in service["volumes"] if volume.startswith("./"))
    provisioned = recipes.mounts(watching["grafana"])
    home = next(text for text in watching["grafana"]["environment"] if "HOME_DASHBOARD" in text).partition("=")[2]
    assert provisioned[home] == "./configs/grafana/oarlock.json"
    folder = recipes.compose((ROOT / "configs/grafana/dashboards.yml").read_text())["providers"][0]["options"]["path"]
    assert home.startswith(f"{folder}/")
    source = recipes.compose((ROOT / "configs/grafana/datasource.yml").read_text())["datasources"][0]
    assert "--web.listen-address=127.0.0.1:9090" in watching["prometheus"]["command"]
    assert source["url"] == "http://127.0.0.1:9090"
    assert {"GF_SERVER_HTTP_ADDR=127.0.0.1", "GF_SERVER_HTTP_PORT=3000"} <= set(watching["grafana"]["environment"])
    flags = dict(word.split("=", 1) for word in watching["prometheus"]["command"])  # in place of the image's own
    mounts = recipes.mounts(watching["prometheus"])
    assert str(Path(flags["--config.file"]).parent) in mounts and flags["--storage.tsdb.path"] in mounts
    target = recipes.compose((ROOT / "configs/prometheus/prometheus.yml").read_text())
    (asked,) = target["scrape_configs"][0]["static_configs"][0]["targets"]
    assert asked == f"127.0.0.1:{OPTIONS['port'].default}" and OPTIONS["host"].default == "127.0.0.1"  # of `make serve`
    for service in built(services):
        assert service["ports"] == [f"{asked}:8000"]
        assert "OARLOCK_OPEN_METRICS=true" in service["environment"]


WRITTEN = re.compile(r"docker compose [^`\n#]*\bup\b[^`\n#:]*")


def test_a_line_that_starts_the_monitoring_starts_no_model():
    """Nor builds an image, nor asks for GPUs: in every page, and in the comments of the files."""
    services = recipes.compose(COMPOSE)["services"]
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("configs/**/*.yml"), ROOT / "docker-compose.yml"]
    lines = [line.split() for file in files for line in WRITTEN.findall(file.read_text())]
    watching = [line for line in lines if {"monitoring", "prometheus", "grafana"} & set(line)]
    assert len(lines) > len(watching) > 3
    assert [line for line in watching if recipes.started(services, line) != {"prometheus", "grafana"}] == []


@pytest.mark.parametrize(
    ("line", "started"),
    [
        ("up", {"oarlock"}),
        ("--profile monitoring up", {"oarlock", "prometheus", "grafana"}),
        ("--profile monitoring up -d prometheus", {"prometheus"}),
        ("up -d prometheus grafana", {"prometheus", "grafana"}),
        ("--profile 1gpu up oarlock-1gpu", {"oarlock-1gpu"}),
        ("--profile cpu up", {"oarlock", "oarlock-cpu"}),
    ],
)
def test_services_that_a_line_starts(line, started):
    services = recipes.compose(COMPOSE)["services"]
    assert recipes.started(services, f"docker compose {line}".split()) == started


def test_services():
    services = recipes.compose(COMPOSE)["services"]
    assert recipes.service_faults(services["oarlock"], gpus=2) == []
    assert recipes.service_faults(services["oarlock-1gpu"], gpus=1) == []
    assert recipes.service_faults(services["oarlock-cpu"], gpus=0) == []
    assert services["oarlock-1gpu"]["profiles"] == ["1gpu"] and services["oarlock-cpu"]["profiles"] == ["cpu"]
    assert "profiles" not in services["oarlock"]  # `docker compose up` starts this one and no other
    rocm = services["oarlock-rocm"]
    assert rocm["profiles"] == ["rocm"] and rocm["devices"] == ["/dev/kfd", "/dev/dri"] and not rocm["deploy"]
    assert "/whl/rocm" in rocm["build"]["args"][0] and rocm["image"] == "oarlock:rocm"
    for service in built(services):
        assert service["build"]["target"] in recipes.stages(DOCKERFILE)
        # A named volume takes its owner from the image's folder: without one it would belong to root.
        named = recipes.compose(COMPOSE)["volumes"]
        folders = [target for target, source in recipes.mounts(service).items() if source in named]
        made = recipes.everything_run(recipes.stages(DOCKERFILE), service["build"]["target"])
        created = re.findall(r"mkdir -p ([^&]+)", made)[0].split()
        assert set(folders) <= set(created) and "chown -R oarlock:oarlock /cache" in made
        config = ROOT / service["command"][service["command"].index("--config") + 1]
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        ranks = tomllib.loads(config.read_text()).get("tensor_parallel_size", 1)
        assert not reserved or ranks == sum(device["count"] for device in reserved)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("count: 2", "count: 1"),
        ("shm_size: 8gb", "shm_size: 64mb"),
        ("    shm_size: 8gb\n", ""),
        ("stop_grace_period: 45s", "stop_grace_period: 30s"),
        ('["127.0.0.1:8000:8000"]', '["8000:8000"]'),
        ("/health'", "/version'"),
        ("start_period: 15m", "start_period: 5s"),
        ("restart: on-failure:3", "restart: on-failure"),
        ("restart: on-failure:3", "restart: always"),
        ("init: true", "ipc: host"),
        ('"huggingface:/cache/huggingface", ', ""),
    ],
)
def test_a_fault_in_the_service_is_noticed(old, new):
    assert old in COMPOSE
    service = recipes.compose(COMPOSE.replace(old, new))["services"]["oarlock"]
    assert recipes.service_faults(service, gpus=2) != []


def test_the_compose_file_is_one():
    assert recipes.compose_faults(recipes.compose(COMPOSE)) == []
    for service in built(recipes.compose(COMPOSE)["services"]):
        assert recipes.mounts(service)["/models"] == "${MODELS_DIR:-./models}"
        assert service["env_file"] == [{"path": ".env", "required": False}]
        index, image = service["build"]["args"]
        assert index.partition("=")[0] == "TORCH_INDEX" and image == "PYTHON_IMAGE"
        environment = recipes.environment(recipes.stages(DOCKERFILE), service["build"]["target"])
        assert environment["HF_HOME"] in recipes.mounts(service)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("init: true", "initt: true"),
        ("context: .", "contxt: ."),
        ("  huggingface:  #", "  hub:  #"),
        ("required: false", "required: true"),
        ("args: [TORCH_INDEX, PYTHON_IMAGE]", "arguments: [TORCH_INDEX]"),
        ("ports: [", "ports: [8000, "),
    ],
)
def test_a_mistake_in_the_compose_file_is_noticed(old, new):
    assert old in COMPOSE
    assert recipes.compose_faults(recipes.compose(COMPOSE.replace(old, new))) != []


def kept_folders(service):
    document = recipes.compose(COMPOSE)
    return [target for target, source in recipes.mounts(service).items() if source in document["volumes"]]


def test_triton_finds_what_it_needs_when_the_image_runs():
    kept = kept_folders(recipes.compose(COMPOSE)["services"]["oarlock"])
    assert recipes.triton_faults(DOCKERFILE, "cuda", kept) == []
    for old, new in (
        ("--no-install-recommends gcc libc6-dev", "--no-install-recommends gcc"),
        ("'#include <Python.h>'", "''"),
        ("TRITON_CACHE_DIR=/cache/oarlock/triton", "TRITON_CACHE_DIR=/tmp/triton"),
        ("TRITON_CACHE_DIR=/cache/oarlock/triton ", ""),
    ):
        assert old in DOCKERFILE
        assert len(recipes.triton_faults(DOCKERFILE.replace(old, new), "cuda", kept)) == 1
    assert len(recipes.triton_faults(DOCKERFILE, "cuda", ["/cache/huggingface"])) == 1


TORCH, REST = "-r torch.txt torch==", "--require-hashes -r requirements.lock"
CPU_INDEX = "--index-url https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("target", "index", "installs"),
    [
        ("build-cpu", None, [f"--no-deps {CPU_INDEX} {TORCH}", REST]),
        ("build-cpu", "", [f"--no-deps {TORCH}", REST]),
        ("build-cpu", "https://index.example", [f"--no-deps --index-url https://index.example {TORCH}", REST]),
        ("build-cuda", None, [f"{REST} -r requirements-cuda.lock", REST]),
        ("build-cuda", "", [f"{REST} -r requirements-cuda.lock", REST]),
        ("build-cuda", "https://index.example", [f"--index-url https://index.example {TORCH}", REST]),
    ],
)
def test_packages_come_from_locks_and_torch_from_the_index_that_the_build_names(tmp_path, target, index, installs):
    """The build's own commands, with a `pip` that writes down how it was called."""
    stage = recipes.stages(DOCKERFILE)[target]
    install = next(text for word, text in stage.steps if word == "RUN" and "torch.txt" in text)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@ $(echo "$@" | grep -q torch.txt && cat torch.txt)" >> calls\n')
    (tmp_path / "pip").chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    default = next(text for word, text in stage.steps if word == "ARG").partition("=")[2]
    used = default if index is None else index
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({"TORCH_INDEX": used} if used else {})
    subprocess.run(["sh", "-ec", re.sub(r"--mount=\S+", "", install)], cwd=tmp_path, env=environment, check=True)
    calls = [re.sub(r"(torch==)[\d.]+$", r"\1", call.strip()) for call in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [f"install {words}" for words in installs]


def test_every_command_of_the_build_is_shell():
    for stage in recipes.stages(DOCKERFILE).values():
        for word, text in stage.steps:
            if word == "RUN":
                subprocess.run(["sh", "-nc", re.sub(r"--mount=\S+", "", text)], check=True)


def test_compose_itself_accepts_the_file():
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("the docker client with its compose plug-in is not installed")
    command = ["docker", "compose", "--profile", "1gpu", "--profile", "cpu", "config", "--quiet"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def all_locked():
    found = [locks.read_lock((ROOT / file).read_text()) for file in locks.FILES]
    assert not found[0].keys() & found[1].keys()
    return found[0] | found[1]


def test_the_locks_hold_what_the_requirements_pin():
    requirements, locked = (ROOT / "requirements.txt").read_text(), all_locked()
    requirements += "\n".join(["", *locks.pinned_extras(), ""])
    assert "pyzmq==" in requirements
    assert locks.unlocked(requirements, locked) == []
    assert locks.unlocked(f"{requirements}\ncellar==1.0\n", locked) == ["cellar==1.0"]
    assert locks.unlocked(requirements.replace("numpy==", "numpy==9"), locked) != []
    assert locks.unlocked(requirements, locked | {"numpy": (locked["numpy"][0], [])}) != []
    assert all(re.fullmatch(r"[0-9a-f]{64}", found) for _, hashes in locked.values() for found in hashes)
    for file, of_cuda in zip(locks.FILES, (False, True), strict=True):
        names = locks.read_lock((ROOT / file).read_text())
        assert names and all(bool(locks.OF_CUDA.fullmatch(name)) == of_cuda for name in names)


def test_the_locks_hold_what_every_package_of_theirs_needs():
    """By the metadata of those that are installed here in the same version."""
    locked, looked_at = all_locked(), 0
    image = {"python_version": "3.13", "python_full_version": "3.13.0", "sys_platform": "linux", "extra": ""}
    for name, (version, _) in locked.items():
        try:
            installed = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if installed.version != version:
            continue
        looked_at += 1
        needs = [Requirement(text) for text in installed.requires or []]
        wanted = [need for need in needs if need.marker is None or need.marker.evaluate(image)]
        missing = [str(need) for need in wanted if locks.unlocked(f"{need.name}{need.specifier}", locked)]
        assert missing == [], name
    assert looked_at > 30


@pytest.mark.parametrize(
    ("wheel", "usable"),
    [
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_x86_64.whl", True),
        ("torch-2.13.0-cp313-cp313-manylinux_2_28_aarch64.whl", True),
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp313-cp313t-manylinux_2_28_x86_64.whl", False),
        ("torch-2.13.0-cp313-cp313-win_amd64.whl", False),
        ("safetensors-0.8.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True),
        ("safetensors-0.8.0-cp310-abi3-musllinux_1_2_x86_64.whl", False),
        ("anyio-4.16.0-py3-none-any.whl", True),
        ("cuda_toolkit-13.0.3.0-py2.py3-none-any.whl", True),
        ("new-1.0-py3-none-manylinux_2_39_x86_64.whl", False),
        ("anyio-4.16.0.tar.gz", False),
    ],
)
def test_a_wheel_that_the_images_can_install(wheel, usable):
    assert locks.is_usable(wheel) == usable


def test_a_lock_is_read_as_it_is_written():
    packages = {"a-b": ("1", ["a" * 64]), "b": ("2.0", ["0" * 64, "f" * 64])}
    assert locks.read_lock(locks.as_lock(packages, "some")) == packages


def test_the_driver_that_the_recipe_names_is_the_one_that_the_start_asks_for():
    built = locks.read_lock((ROOT / "requirements-cuda.lock").read_text())["nvidia-cuda-runtime"][0]
    assert f"built for CUDA {'.'.join(built.split('.')[:2])}" in DOCKERFILE
    assert LEAST_DRIVERS[int(built.split(".")[0])] in DOCKERFILE


def test_durations_and_sizes():
    assert recipes.seconds("1m30s") == 90
    assert recipes.size_bytes("8gb") == 8 * 2**30


def test_the_ranges_are_of_the_pinned_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"oarlock": "oarlock.__main__:main"}
    ranges = {line.split(";")[0].split(">")[0].strip() for line in project["project"]["dependencies"]}
    pins = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}
    assert ranges == pins


def test_a_wheel_carries_the_demo_model_without_its_training():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    folder = ROOT / "models" / "oarlock-demo"
    shipped = {path for pattern in patterns["share/oarlock/models/oarlock-demo"] for path in ROOT.glob(pattern)}
    assert (folder / "training" / "train_demo_model.py").is_file()
    assert shipped == {path for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
def test_the_demo_models_training_starts(monkeypatch, capsys):
    script = ROOT / "models" / "oarlock-demo" / "training" / "train_demo_model.py"
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(script), run_name="__main__")  # in this process, which has imported most of it
    assert left.value.code == 0 and "--evaluate" in capsys.readouterr().out
