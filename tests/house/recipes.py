"""Finds mistakes in a Dockerfile and a compose file, without docker.

Reads their syntax as far as this repository uses it.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

DRAIN_SECONDS = 30  # how long open requests may finish after the first SIGTERM


@dataclass
class Stage:
    """One `FROM` with its instructions, in order."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def last(self, instruction: str) -> str | None:
        return next((text for word, text in reversed(self.steps) if word == instruction), None)


def stages(dockerfile: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, text = line.strip().partition(" ")
        if not word:
            continue
        if word == "FROM":
            base, _, name = text.partition(" AS ")
            current = found[name or str(len(found))] = Stage(name, base)
        elif current is not None:
            current.steps.append((word, text.strip()))
    return found


def inherited(found: dict[str, Stage], name: str, instruction: str) -> str | None:
    """The instruction that holds for a stage: its own, or that of the stages it is made from."""
    stage = found.get(name)
    while stage is not None:
        if (text := stage.last(instruction)) is not None:
            return text
        stage = found.get(stage.base)
    return None


def everything_run(found: dict[str, Stage], name: str) -> str:
    """All RUN instructions that went into a stage, its own and those of the stages it is made from."""
    texts: list[str] = []
    stage = found.get(name)
    while stage is not None:
        texts += [text for word, text in stage.steps if word == "RUN"]
        stage = found.get(stage.base)
    return "\n".join(texts)


def environment(found: dict[str, Stage], name: str) -> dict[str, str]:
    """The variables of a stage, those of the stages it is made from included."""
    chain: list[Stage] = []
    stage = found.get(name)
    while stage is not None:
        chain.insert(0, stage)
        stage = found.get(stage.base)
    texts = [text for stage in chain for word, text in stage.steps if word == "ENV"]
    return dict(pair.split("=", 1) for text in texts for pair in text.split())


def image_faults(dockerfile: str, target: str) -> list[str]:
    """Mistakes in one of the two images."""
    found = stages(dockerfile)
    if target not in found:
        return [f"no stage is named {target}"]
    faults = []
    user = inherited(found, target, "USER")
    if user is None or user.split(":")[0] in ("root", "0"):
        faults.append(f"runs as {user or 'root'}")
    health = inherited(found, target, "HEALTHCHECK") or ""
    if "/health" not in health or '"python"' not in health:
        faults.append("the healthcheck does not ask /health with Python: the image has no curl")
    if not re.search(r"--start-period=\d+s", health):
        faults.append("the healthcheck allows no time to load")
    for instruction in ("ENTRYPOINT", "CMD"):
        text = inherited(found, target, instruction)
        if text is None or not text.startswith("["):
            faults.append(f"{instruction} is not in the exec form, so signals would stop at a shell")
        elif not json.loads(text):
            faults.append(f"{instruction} is empty")
    if inherited(found, target, "STOPSIGNAL") != "SIGTERM":
        faults.append("STOPSIGNAL is not SIGTERM")
    if not any(word == "COPY" and text.startswith("--from=") for word, text in found[target].steps):
        faults.append("is not built in stages: the build's tools would ship")
    return faults


def base_faults(dockerfile: str) -> list[str]:
    """Stages that start from anything but the image that the build names, by tag and digest."""
    default = re.findall(r"^ARG PYTHON_IMAGE=(.*)$", dockerfile, re.M)
    faults = []
    if len(default) != 1 or not re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", default[0]):
        faults.append(f"the base image is not named by one tag and one digest: {default}")
    found = stages(dockerfile)
    foreign = {stage.base for stage in found.values()} - found.keys() - {"${PYTHON_IMAGE}"}
    return faults + [f"a stage starts from {base}" for base in sorted(foreign)]


def triton_faults(dockerfile: str, target: str, kept: list[str]) -> list[str]:
    """Needs of Triton that the running image lacks. `kept`: folders of the container that are volumes."""
    found = stages(dockerfile)
    faults = []
    installed = re.findall(r"apt-get install [^&]*", everything_run(found, target))
    if not any({"gcc", "libc6-dev"} <= set(text.split()) for text in installed):
        faults.append("holds no C compiler, with which Triton makes what launches kernels")
    if "#include <Python.h>" not in everything_run(found, target):
        faults.append("does not try out whether Python's headers are there")
    cache = environment(found, target).get("TRITON_CACHE_DIR", "~/.triton")
    if not any(cache.startswith(f"{folder}/") for folder in kept):
        faults.append(f"compiles kernels anew with every container: {cache} is not kept")
    return faults


def context_faults(dockerfile: str, dockerignore: str, needed: list[str]) -> list[str]:
    """Files the image needs and the build context lacks, or the other way about."""
    if "COPY . ." not in dockerfile:
        return ["the build does not copy the context"]
    rules = [line.strip() for line in dockerignore.splitlines() if line.strip() and not line.startswith("#")]
    if rules[0] != "*":
        return ["the context is not closed by default"]
    return [f"{name} does not reach the build" for name in needed if f"!{name}" not in rules]


def seconds(text: str | int) -> float:
    """A compose duration: `45s`, `3m`, `1m30s`."""
    parts = re.findall(r"(\d+)(h|m|s)", str(text))
    assert parts and "".join(number + unit for number, unit in parts) == str(text), text
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def size_bytes(text: str | int) -> int:
    """A compose size: `8gb`, `512mb`, or a plain number of bytes."""
    match = re.fullmatch(r"(\d+)(gb|mb|kb|b)?", str(text).lower())
    assert match, text
    return int(match[1]) * {"gb": 2**30, "mb": 2**20, "kb": 2**10, "b": 1, None: 1}[match[2]]


def service_faults(service: dict[str, Any], *, gpus: int) -> list[str]:
    """Mistakes in one service of the compose file."""
    faults = []
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    reserved = sum(device.get("count", 0) for device in devices if "gpu" in device.get("capabilities", []))
    if reserved != gpus:
        faults.append(f"reserves {reserved} GPUs, not {gpus}")
    if size_bytes(service.get("shm_size", 0)) < 2**30:
        faults.append("shm_size is below 1 GiB")
    if seconds(service.get("stop_grace_period", "10s")) <= DRAIN_SECONDS:
        faults.append(f"stop_grace_period does not outlast the {DRAIN_SECONDS} s of draining")
    ports = service.get("ports", [])
    if not ports or not all(str(port).startswith("127.0.0.1:") for port in ports):
        faults.append("publishes a port beyond loopback")
    check = service.get("healthcheck", {})
    if check.get("test", [None])[:2] != ["CMD", "python"] or "/health" not in check["test"][-1]:
        faults.append("the healthcheck does not ask /health with Python")
    if seconds(check.get("start_period", "0s")) < 60:
        faults.append("the healthcheck allows no time to load")
    if not re.fullmatch(r"on-failure:[1-9]", str(service.get("restart"))):
        faults.append("is not restarted on failure a few times at most: after some statuses another try is useless")
    if service.get("privileged") or service.get("ipc") == "host" or service.get("network_mode") == "host":
        faults.append("has more rights on the host than it needs")
    if not any("huggingface" in str(volume) for volume in service.get("volumes", [])):
        faults.append("downloads its model anew with every container")
    return faults


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Mounts of a service: path in the container -> the named volume or the folder of the host."""
    found = {}
    for volume in service.get("volumes", []):
        source = re.match(r"\$\{[^}]*\}|[^:]+", volume)
        assert source, volume
        found[volume[source.end() + 1 :].split(":")[0]] = source[0]
    return found


def started(services: dict[str, Any], words: list[str]) -> set[str]:
    """Services that `docker compose … up …` starts: those that it names, else those of its profiles and of none."""
    arguments = words[words.index("up") + 1 :]
    named = {word for word in arguments if not word.startswith("-")}
    profiles = {words[at + 1] for at, word in enumerate(words) if word == "--profile"}
    return named or {
        name
        for name, service in services.items()
        if profiles >= set(service.get("profiles", [])) or profiles & set(service.get("profiles", []))
    }


# Keys of a compose service that this repository uses: any other is taken for a misspelling.
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "deploy", "env_file", "environment", "healthcheck", "image", "init", "networks"),
    *(
        "ports",
        "profiles",
        "read_only",
        "restart",
        "security_opt",
        "shm_size",
        "stop_grace_period",
        "stop_signal",
        "tmpfs",
    ),
    *("devices", "group_add", "network_mode", "ulimits", "volumes"),
}
BUILD_KEYS = {"context", "target", "args"}


def compose_faults(document: dict[str, Any]) -> list[str]:
    """Faults that the compose specification refuses, or reads otherwise than it was meant."""
    faults = [f"{key} is no top-level key" for key in document.keys() - {"name", "services", "volumes"}]
    for name, service in document["services"].items():
        faults += [f"{name}: {key} is no key of a service" for key in service.keys() - SERVICE_KEYS]
        faults += [f"{name}: {key} is no key of a build" for key in service.get("build", {}).keys() - BUILD_KEYS]
        for key in ("command", "environment", "ports", "volumes", "tmpfs", "cap_drop", "security_opt"):
            if not all(isinstance(item, str) for item in service.get(key, [])):
                faults.append(f"{name}: {key} is not a list of texts")
        for file in service.get("env_file", []):
            if not isinstance(file, dict) or file.keys() != {"path", "required"} or file["required"] is not False:
                faults.append(f"{name}: env_file {file} must not be needed")
        for target, source in mounts(service).items():
            is_path = source.startswith((".", "/", "$"))
            if not target.startswith("/") or (not is_path and source not in document.get("volumes", {})):
                faults.append(f"{name}: {source}:{target} is no mount of a declared volume")
    return faults


def compose(text: str) -> dict[str, Any]:
    """The parsed compose file."""
    return yaml.safe_load(text)
