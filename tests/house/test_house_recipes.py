"""The container recipes do what the README promises. Each check is shown to fail on a planted mistake."""

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.house import recipes
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


def test_the_build_context_holds_what_the_image_needs():
    ignored = (ROOT / ".dockerignore").read_text()
    needed = ["requirements.txt", "pyproject.toml", "README.md", "LICENSE", "oarlock.py"]
    needed += ["server", "engine", "workers", "configs", "models"]
    assert recipes.context_faults(DOCKERFILE, ignored, needed) == []
    assert recipes.context_faults(DOCKERFILE, ignored.replace("!models\n", ""), needed) != []
    assert recipes.context_faults(DOCKERFILE, ignored.replace("*\n", "", 1), needed) != []
    assert all((ROOT / name).exists() for name in needed)


def test_services():
    services = recipes.compose(COMPOSE)["services"]
    assert recipes.service_faults(services["oarlock"], gpus=2) == []
    assert recipes.service_faults(services["oarlock-cpu"], gpus=0) == []
    assert services["oarlock-cpu"]["profiles"] == ["cpu"]
    assert "profiles" not in services["oarlock"]  # `docker compose up` starts this one and no other
    for service in services.values():
        assert service["build"]["target"] in recipes.stages(DOCKERFILE)
        # A named volume takes its owner from the image's folder: without one it would belong to root.
        named = recipes.compose(COMPOSE)["volumes"]
        folders = [target for target, source in recipes.mounts(service).items() if source in named]
        made = recipes.everything_run(recipes.stages(DOCKERFILE), service["build"]["target"])
        created = re.findall(r"mkdir -p ([^&]+)", made)[0].split()
        assert set(folders) <= set(created) and "chown -R oarlock:oarlock /cache" in made
        config = service["command"][service["command"].index("--config") + 1]
        assert (ROOT / config).is_file()


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
        ('"huggingface:/cache/huggingface"]', "]"),
    ],
)
def test_a_fault_in_the_service_is_noticed(old, new):
    assert old in COMPOSE
    service = recipes.compose(COMPOSE.replace(old, new))["services"]["oarlock"]
    assert recipes.service_faults(service, gpus=2) != []


def test_the_compose_file_is_one():
    assert recipes.compose_faults(recipes.compose(COMPOSE)) == []
    for service in recipes.compose(COMPOSE)["services"].values():
        assert recipes.mounts(service)["/models"] == "${MODELS_DIR:-./models}"
        assert service["env_file"] == [{"path": ".env", "required": False}]
        assert service["build"]["args"] == ["TORCH_INDEX"]
        environment = recipes.environment(recipes.stages(DOCKERFILE), service["build"]["target"])
        assert environment["HF_HOME"] in recipes.mounts(service)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("init: true", "initt: true"),
        ("context: .", "contxt: ."),
        ("  huggingface:\n", "  hub:\n"),
        ("required: false", "required: true"),
        ("args: [TORCH_INDEX]", "arguments: [TORCH_INDEX]"),
        ("ports: [", "ports: [8000, "),
    ],
)
def test_a_mistake_in_the_compose_file_is_noticed(old, new):
    assert old in COMPOSE
    assert recipes.compose_faults(recipes.compose(COMPOSE.replace(old, new))) != []


@pytest.mark.parametrize("target", ["build-cpu", "build-cuda"])
@pytest.mark.parametrize("index", [None, "", "https://index.example/simple"])
def test_torch_comes_from_the_index_that_the_build_names(tmp_path, target, index):
    """The build's own commands, with a `pip` that writes down how it was called."""
    stage = recipes.stages(DOCKERFILE)[target]
    install = next(text for word, text in stage.steps if word == "RUN" and "torch.txt" in text)
    (tmp_path / "pip").write_text('#!/bin/sh\necho "$@" >> calls; cat torch.txt >> calls 2>/dev/null; true\n')
    (tmp_path / "pip").chmod(0o755)
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    default = next(text for word, text in stage.steps if word == "ARG").partition("=")[2]
    used = default if index is None else index
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({"TORCH_INDEX": used} if used else {})
    subprocess.run(["sh", "-ec", re.sub(r"--mount=\S+", "", install)], cwd=tmp_path, env=environment, check=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    chosen = f"--index-url {used} " if used else ""
    assert calls[0] == f"install {chosen}-r torch.txt"
    assert re.fullmatch(r"torch==[\d.]+", calls[1])
    assert calls[2:] == ["install -r requirements.txt"]
    assert (default == "https://download.pytorch.org/whl/cpu") == (target == "build-cpu")


def test_every_command_of_the_build_is_shell():
    for stage in recipes.stages(DOCKERFILE).values():
        for word, text in stage.steps:
            if word == "RUN":
                subprocess.run(["sh", "-nc", re.sub(r"--mount=\S+", "", text)], check=True)


def test_compose_itself_accepts_the_file():
    if not shutil.which("docker") or subprocess.run(["docker", "compose", "version"], capture_output=True).returncode:
        pytest.skip("the docker client with its compose plug-in is not installed")
    command = ["docker", "compose", "--profile", "cpu", "config", "--quiet"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_durations_and_sizes():
    assert recipes.seconds("1m30s") == 90
    assert recipes.size_bytes("8gb") == 8 * 2**30


def test_a_wheel_carries_the_three_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"oarlock": "server.entrypoints.cli:main"}
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["server*", "engine*", "workers*"]
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
def test_the_demo_models_training_starts():
    script = ROOT / "models" / "oarlock-demo" / "training" / "train_demo_model.py"
    result = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "--evaluate" in result.stdout, result.stderr
