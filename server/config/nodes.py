"""How this host finds and trusts the others that serve the same model: the options that say so, checked together."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from engine.config import NodesConfig
from engine.errors import StartupError
from server.config.settings import Settings

SECRET = "OARLOCK_NODE_SECRET"
SECRET_LENGTH = 32  # characters, at least
_MAKE_SECRET = "make one with `openssl rand -hex 32`, and give every host the same"


def nodes_config(settings: Settings, environment: Mapping[str, str]) -> NodesConfig | None:
    """None where the model is served by this host alone. Raises `StartupError`."""
    nnodes, rank = settings.nnodes, settings.node_rank
    if nnodes == 1 and not rank:
        return None
    if nnodes == 1:
        raise StartupError(f"--node-rank is {rank}, but --nnodes is 1.", "Give every host the same --nnodes.")
    if settings.data_parallel_size > 1:
        raise StartupError(
            f"--data-parallel-size {settings.data_parallel_size} with --nnodes {nnodes}: replicas share one host.",
            "Start one server for each group of hosts, without --data-parallel-size, behind a proxy.",
        )
    if rank is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but which of them this host is, is not known.",
            f"Give each host its own --node-rank, from 0 to {nnodes - 1}; 0 serves HTTP.",
        )
    if rank >= nnodes:
        raise StartupError(
            f"--node-rank is {rank}, but of {nnodes} hosts the last is {nnodes - 1}.",
            f"Use a number from 0 to {nnodes - 1}, another one on each host, or raise --nnodes.",
        )
    if settings.master_addr is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but the address of the head node is not known.",
            "Give --master-addr the name or address of the host with --node-rank 0, the same on every host.",
        )
    return NodesConfig(
        node_rank=rank,
        nnodes=nnodes,
        address=settings.master_addr,
        port=settings.master_port,
        interface=settings.node_interface,
        secret=_secret(settings.node_secret_file, environment),
        timeout_s=settings.node_timeout,
    )


def _secret(file: str | None, environment: Mapping[str, str]) -> str:
    """That of the file, if one is named, else that of the environment, without white space around it."""
    if file is None:
        source, text = SECRET, environment.get(SECRET, "")
        if SECRET not in environment:
            raise StartupError(
                "Several hosts need a secret that they share, so that no other can join them.",
                f"Give --node-secret-file a file that holds it, or set {SECRET}; {_MAKE_SECRET}.",
            )
    else:
        source, text = f"The file {file}", _read(Path(file))
    secret = text.strip()
    if len(secret) < SECRET_LENGTH:
        held = f"only {len(secret)} characters" if secret else "nothing"
        raise StartupError(
            f"{source} holds {held}, but the secret of several hosts has at least {SECRET_LENGTH}.",
            f"To replace it, {_MAKE_SECRET}.",
        )
    if not secret.isprintable():
        raise StartupError(f"{source} holds several lines.", f"It must hold the secret alone: {_MAKE_SECRET}.")
    return secret


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartupError(
            f"The file of the secret, {path}, cannot be read: {error.strerror}.",
            "Give --node-secret-file a file that this user can read.",
        ) from None
    except UnicodeDecodeError:
        raise StartupError(f"The file of the secret, {path}, is not text.", f"Write one: {_MAKE_SECRET}.") from None


def why_exposed(settings: Settings) -> str | None:
    """A warning for the operator, if other users of this host can read the file of the secret."""
    path = settings.node_secret_file
    if path is None or not os.stat(path).st_mode & (stat.S_IROTH | stat.S_IWOTH):
        return None
    return f"other users of this host can read the secret in {path}: chmod 600 {path}"
