"""A server in a container: the flags of `docker run` before its image, and the same server without the container."""

import argparse
import re
from dataclasses import dataclass

from oarlock.server.cli.arguments import Parser, UsageError
from oarlock.server.cli.migrate.dialects import DIALECTS, TGI, Dialect
from oarlock.server.cli.migrate.translation import Translation

_ANY_PORT = "Docker would choose a port: choose one with --port."
_HUB_CACHE = "/root/.cache/huggingface"
_HUB_CACHES = ("~/.cache/huggingface", "$HOME/.cache/huggingface", "${HOME}/.cache/huggingface")
_PORT = re.compile(r"(?:(?:(\[.*\]|[^:\[\]]*):)?(\d*|\$\w+|\$\{\w+\}):)?(\d+)(?:/tcp)?")  # [[address:]port:]port[/tcp]


@dataclass(frozen=True, slots=True)
class Container:
    dialect: Dialect  # of the image
    arguments: list[str]  # words after the image
    flags: argparse.Namespace  # flags before it that concern the server
    others: list[str]

    @property
    def shares_network(self) -> bool:
        return self.flags.network == "host"

    def leave(self, found: Translation, port: int) -> None:
        """Make `found` the same server without the container, in which it listens on `port` or on its --port."""
        for value in self.flags.env_file:
            found.lost.append((f"--env-file {value}", "write the variables before the line."))
        if self.flags.gpus:
            _give_devices(found, self.flags.gpus)
        others = self.others + _move_paths(found, self.flags.volume, is_tgi=self.dialect is TGI)
        if not self.shares_network:
            _listen_as_published(found, self.flags, found.flags.get("port", ["", str(port)])[1])
            others += [f"--network {self.flags.network}"] if self.flags.network else []
        if others:
            written = " ".join(["docker run", *others])
            found.notes.append((written, "this concerns the container: see docker-compose.yml and Dockerfile."))


def _listen_as_published(found: Translation, flags: argparse.Namespace, inside: str) -> None:
    """Listen on the address and port at which port `inside` of the container is published."""
    address, outside, published = "127.0.0.1", inside, ""
    found.lost += [("-P", _ANY_PORT)] if flags.publish_all else []
    for value in flags.publish:
        match = _PORT.fullmatch(value)
        if match is None:
            found.lost.append((f"-p {value}", "the server listens on one port: --port."))
        elif not match[2]:
            found.lost.append((f"-p {value}", _ANY_PORT))
        elif match[3] != inside:
            found.lost.append((f"-p {value}", f"the server in the container listens on {inside}."))
        elif published:
            found.lost.append((f"-p {value}", "the server listens on one address and port."))
        else:
            address, outside, published = (match[1] or "0.0.0.0").strip("[]"), match[2], value
    found.set(f"-p {published}", "--host", [address])
    found.set(f"-p {published}", "--port", [outside])
    if not published:
        found.notes.append(("docker run", "no port is published, so only clients on this machine reach the server."))


def _give_devices(found: Translation, value: str) -> None:
    named = re.fullmatch(r'"?device=([^"]+)"?', value.strip("'"))
    if value == "all":
        found.notes.append(("--gpus all", "all GPUs are visible; CUDA_VISIBLE_DEVICES selects some."))
    elif named or value.isdigit():
        found.environment["CUDA_VISIBLE_DEVICES"] = named[1] if named else ",".join(map(str, range(int(value))))
    else:
        found.lost.append((f"--gpus {value}", "CUDA_VISIBLE_DEVICES selects the devices."))


def _move_paths(found: Translation, volumes: list[str], *, is_tgi: bool) -> list[str]:
    """Replace paths inside the container by the paths of the host that are mounted there. Return unused mounts."""
    unused = []
    for volume in volumes:
        outside, _, inside = volume.partition(":")
        inside = inside.partition(":")[0].rstrip("/")
        written, before = f"-v {outside}:{inside}", found.command()
        if inside == _HUB_CACHE and outside.rstrip("/") in _HUB_CACHES:
            found.notes.append((written, "the hub's cache is used directly."))
        elif inside == _HUB_CACHE:
            found.environment["HF_HOME"] = outside
        elif inside == "/data" and is_tgi and not (found.model or "").startswith("/data"):
            found.set(written, "--download-dir", [outside])
        else:
            found.model = found.model and _moved(found.model, inside, outside)
            for words in found.flags.values():
                words[1:] = [_moved(word, inside, outside) for word in words[1:]]
            unused += [written] if found.command() == before else []
    return unused


def _moved(path: str, inside: str, outside: str) -> str:
    """Return the host's path for `path` in the container, if it is below `inside`."""
    is_below = inside != "" and f"{path}/".startswith(f"{inside}/")
    return outside.rstrip("/") + path[len(inside) :] if is_below else path


def read_container(words: list[str]) -> Container:
    """Read the words after `docker run`. Raises `UsageError` if they name no known image."""
    images = [
        (at, dialect)
        for at, word in enumerate(words)
        for dialect in DIALECTS
        if re.fullmatch(rf"(.*/)?({dialect.image})([:@].*)?", word)
    ]
    if not images:
        known = ", ".join(dialect.title for dialect in DIALECTS)
        raise UsageError("LINE runs no image of a known server.", f"Known are those of {known}.")
    at, dialect = images[0]
    parser = Parser(prog="docker run", add_help=False, allow_abbrev=False)
    for names in (("-e", "--env"), ("-p", "--publish"), ("-v", "--volume"), ("--env-file",)):
        parser.add_argument(*names, action="append", default=[])
    parser.add_argument("-P", "--publish-all", action="store_true")
    parser.add_argument("--network", "--net", default="")
    parser.add_argument("--gpus")
    flags, others = parser.parse_known_args(words[:at])
    return Container(dialect, words[at + 1 :], flags, others)
