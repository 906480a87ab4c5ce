"""Reading of a command line: the server that it starts, also inside `docker run … IMAGE …`, and its flags."""

import re
import shlex
from dataclasses import dataclass, field

from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.migrate.llama_server import LLAMA_SERVER, OLLAMA, OLLAMA_COMMANDS
from oarlock.server.cli.migrate.sglang import SGLANG
from oarlock.server.cli.migrate.tgi import TGI
from oarlock.server.cli.migrate.translation import KnownServer, Translation
from oarlock.server.cli.migrate.vllm import VLLM
from oarlock.server.config.option_groups import HttpSettings

# The server that an image starts if the line has no command.
IMAGES = {
    "vllm": re.compile(r"(.*/)?(vllm/vllm-openai|vllm-cpu-release-repo|rocm/vllm|nvidia/vllm)([:@].*)?"),
    "tgi": re.compile(r"(.*/)?text-generation-inference([:@].*)?"),
    "llama-server": re.compile(r"(.*/)?(ggml-org|ggerganov)/llama\.cpp([:@].*)?"),
    "sglang": re.compile(r"(.*/)?lmsysorg/sglang([:@].*)?"),
    "ollama": re.compile(r"(.*/)?ollama/ollama([:@].*)?"),
}
_SET, _PORT, _VOLUME = ("-e", "--env"), ("-p", "--publish"), ("-v", "--volume")
_NETWORK, _DEVICES = ("--network", "--net"), ("--gpus",)
_ALL = "0.0.0.0"
_ANY_PORT = "Docker would choose the host's port: choose one by --port."
_HUB_CACHE = "/root/.cache/huggingface"
_HUB_CACHES = ("~/.cache/huggingface", "$HOME/.cache/huggingface", "${HOME}/.cache/huggingface")


@dataclass(slots=True)
class Container:
    """The flags of `docker run` before the image."""

    server: str = ""  # a key of `IMAGES`
    arguments: list[str] = field(default_factory=list)  # words after the image
    variables: dict[str, str] = field(default_factory=dict)
    ports: list[tuple[str, str, str]] = field(default_factory=list)  # (address, port of the host, of the container)
    volumes: list[tuple[str, str]] = field(default_factory=list)  # (path on the host, in the container)
    shares_network: bool = False  # whether it has the host's network
    devices: str | None = None  # devices in the format of CUDA_VISIBLE_DEVICES
    others: list[str] = field(default_factory=list)  # flags that concern only the container
    notes: list[tuple[str, str]] = field(default_factory=list)
    lost: list[tuple[str, str]] = field(default_factory=list)


def read_container(words: list[str]) -> Container | None:
    """Read `words`, which follow `docker run`. Returns None if they name no known image."""
    found = Container()
    words = list(words)
    while words:
        word = words.pop(0)
        image = next((name for name, pattern in IMAGES.items() if pattern.fullmatch(word)), None)
        if image is not None:
            found.server, found.arguments = image, words
            return found
        flag, equals, value = word.partition("=")
        if word[:2] == "-p" and word[2:3].isdigit():
            flag, equals, value = "-p", "=", word[2:]
        if word in ("-P", "--publish-all"):
            found.lost.append((word, _ANY_PORT))
            continue
        known = (*_SET, *_PORT, *_VOLUME, *_NETWORK, *_DEVICES, "--env-file")
        if flag not in known:
            found.others.append(word)
            continue
        _take(found, flag, value if equals or not words else words.pop(0))
    return None


def _take(found: Container, flag: str, value: str) -> None:
    if flag in _SET:
        name, equals, text = value.partition("=")
        if equals:  # without a value, the shell's own is used
            found.variables[name] = text
    elif flag == "--env-file":
        found.lost.append((f"--env-file {value}", "variables in a file are not read here; write them before the line."))
    elif flag in _PORT:
        _publish(found, value)
    elif flag in _VOLUME:
        outside, _, inside = value.partition(":")
        found.volumes.append((outside, inside.partition(":")[0]))
    elif flag in _NETWORK:
        found.shares_network = value == "host"
        if not found.shares_network:
            found.others.append(f"{flag} {value}")
    else:
        _give_devices(found, value)


def _publish(found: Container, value: str) -> None:
    """Read `[[address:]port:]port[/tcp]`."""
    match = re.fullmatch(r"(?:(?:(\[.*\]|[^:\[\]]*):)?(\d*|\$\w+|\$\{\w+\}):)?(\d+)(?:/tcp)?", value)
    if match is None:
        found.lost.append((f"-p {value}", "one port is listened on: --port."))
    elif not match[2]:
        found.lost.append((f"-p {value}", _ANY_PORT))
    else:
        found.ports.append(((match[1] or _ALL).strip("[]"), match[2], match[3]))


def _give_devices(found: Container, value: str) -> None:
    devices = re.fullmatch(r'"?device=([^"]+)"?', value.strip("'"))
    if devices is not None:
        found.devices = devices[1]
    elif value.isdigit():
        found.devices = ",".join(map(str, range(int(value))))
    elif value == "all":
        found.notes.append((f"--gpus {value}", "every GPU is there; CUDA_VISIBLE_DEVICES names fewer."))
    else:
        found.lost.append((f"--gpus {value}", "CUDA_VISIBLE_DEVICES says which devices are used."))


def take_out_of_container(found: Translation, container: Container, port: int) -> None:
    """Make `found` the same server without the container. It listens inside on `port`, unless its flags name
    another."""
    if container.devices is not None:
        found.environment["CUDA_VISIBLE_DEVICES"] = container.devices
    found.notes += container.notes
    found.lost += container.lost
    _move_paths(found, container)
    if not container.shares_network:
        _listen_as_published(found, container, port)
    if container.others:
        written = " ".join(["docker run", *container.others])
        found.notes.append((written, "this concerns the container: docker-compose.yml and Dockerfile have ours."))


def _listen_as_published(found: Translation, container: Container, port: int) -> None:
    inside = found.value("port") or str(port)
    published = [each for each in container.ports if each[2] == inside]
    for address, outside, within in container.ports:
        if within != inside:
            found.lost.append((f"-p {outside}:{within}", f"the server in the container listens on {inside}."))
        elif (address, outside, within) != published[0]:
            found.lost.append((f"-p {address}:{outside}:{within}", "one address and port is listened on."))
    if published:
        address, outside, _ = published[0]
        found.set("-p", "host", [address])
        found.set("-p", "port", [outside])
    else:
        found.set("docker run", "host", ["127.0.0.1"])
        found.set("docker run", "port", [inside])
        text = "no port is published, so only other containers reach it; this line is for this machine alone."
        found.notes.append(("docker run", text))


def _move_paths(found: Translation, container: Container) -> None:
    """Replace paths inside the container by the paths of the host that are mounted there."""
    for outside, inside in container.volumes:
        inside = inside.rstrip("/")
        if inside == _HUB_CACHE:
            if outside.rstrip("/") in _HUB_CACHES:
                found.notes.append((f"-v {outside}:{inside}", "the hub's cache is used where it is."))
            else:
                found.environment["HF_HOME"] = outside
            continue
        if inside == "/data" and container.server == "tgi" and not (found.model or "").startswith("/data"):
            found.set(f"-v {outside}:{inside}", "download_dir", [outside])
            continue
        before = found.command()
        if found.model is not None:
            found.model = _moved(found.model, inside, outside)
        for words in found.flags.values():
            words[1:] = [_moved(word, inside, outside) for word in words[1:]]
        if found.command() == before:
            container.others.append(f"-v {outside}:{inside}")


def _moved(path: str, inside: str, outside: str) -> str:
    """Return the host's path for `path` in the container, if it is below `inside`."""
    is_below = inside != "" and f"{path}/".startswith(f"{inside}/")
    return outside.rstrip("/") + path[len(inside) :] if is_below else path


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_BEFORE = ("env", "exec", "sudo", "nohup", "export", "&&", ";", "time")
_ENDS = ("&", "&&", "|", "||", ";")
_KNOWN = (
    "vllm serve, python -m vllm.entrypoints.openai.api_server, llama-server, text-generation-launcher, "
    "python -m sglang.launch_server, ollama serve and ollama run."
)


_SERVERS = {"vllm": VLLM, "llama-server": LLAMA_SERVER, "tgi": TGI, "sglang": SGLANG, "ollama": OLLAMA}


def translate(line: str) -> Translation:
    """Translate a command line. Raises `UsageError` if it cannot be read or starts no known server."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"LINE cannot be read: {error}.", "Close every quotation mark.") from None
    variables: dict[str, str] = {}
    while words and (words[0] in _BEFORE or _VARIABLE.fullmatch(words[0])):
        name, equals, value = words.pop(0).partition("=")
        if equals:
            variables[name] = value.removesuffix(";")
    if words[:1] in (["docker"], ["podman"], ["nerdctl"]) and words[1:2] == ["run"]:
        found = _of_container(words[2:], variables)
    else:
        program = _program(words)
        if program is None:
            raise UsageError("LINE starts no server that is known.", f"Known are: {_KNOWN}")
        name, rest = program
        found = _SERVERS[name].translate(rest, variables)
        _listen(found, _SERVERS[name])
    found.drop_what_does_not_go_together()
    return found


def _program(words: list[str]) -> tuple[str, list[str]] | None:
    """Return the key of `_SERVERS`, and the words that its translation takes."""
    for at, word in enumerate(words):
        program, rest = word.rpartition("/")[2].removesuffix(".exe"), _without_shell(words[at + 1 :])
        if program in ("vllm", "sglang") and rest[:1] == ["serve"]:
            return program, rest[1:]
        if word in ("vllm.entrypoints.openai.api_server", "sglang.launch_server"):
            return word.partition(".")[0], rest
        if program == "llama-server":
            return program, rest
        if program == "text-generation-launcher":
            return "tgi", rest
        if program == "ollama" and rest and rest[0] in OLLAMA_COMMANDS:
            return program, rest
    return None


def _without_shell(words: list[str]) -> list[str]:
    """Return the words of one command, without the words that its shell reads."""
    found: list[str] = []
    words = list(words)
    while words and words[0] not in _ENDS:
        word = words.pop(0)
        redirected = re.fullmatch(r"[0-9&]?>>?(.*)", word)
        if redirected is None:
            found.append(word)
        elif not redirected[1] and words:
            words.pop(0)  # the file that it writes
    return found


def _listen(found: Translation, server: KnownServer) -> None:
    """Add the server's default address, if its line has none and ours is different."""
    if "uds" in found.flags:
        return
    missing = [
        (name, value)
        for name, value, ours in (("host", server.host, HttpSettings.host), ("port", server.port, HttpSettings.port))
        if name not in found.flags and value != ours
    ]
    for name, value in missing:
        found.set(f"--{name}", name, [str(value)])
    if missing:
        found.notes.append((" ".join(f"--{name} {value}" for name, value in missing), server.address_note))


def _of_container(words: list[str], variables: dict[str, str]) -> Translation:
    container = read_container(words)
    if container is None:
        raise UsageError(
            "LINE runs no image of a server that is known.",
            "Known are those of vLLM, llama.cpp, TGI, SGLang and Ollama.",
        )
    given = variables | container.variables
    program = _program(container.arguments)
    name, rest = program or (container.server, _without_shell(container.arguments))
    if name == "ollama" and program is None:
        rest = ["serve", *rest]
    server = _SERVERS[name]
    found = server.translate(rest, given)
    take_out_of_container(found, container, server.port if program else server.port_in_image)
    if container.shares_network:
        _listen(found, server)
    return found
