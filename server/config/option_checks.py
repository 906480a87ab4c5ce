"""Checks beyond the type and range of an option: unknown names, patterns, and options that depend on each other.

`AllowedHosts` are the names that a request's Host header may have, against DNS rebinding: a foreign web page may point
a name of its own at this machine, and the browser then sends that name in the Host header.
"""

import importlib.util
import ipaddress
import os
import re
import socket
from collections.abc import Iterable
from typing import Protocol

from oarlock.server.config import vllm_flags
from oarlock.server.config.options import OptionError, nearest

_MAX_UDS_BYTES = 107  # bytes of `sun_path` in Linux's sockaddr_un, without the final zero
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")


class KVOffloadSettings(Protocol):
    """The options that `check_kv_offload` reads."""

    @property
    def kv_offload_memory(self) -> int | None: ...

    @property
    def kv_offload_path(self) -> str | None: ...

    @property
    def kv_offload_disk(self) -> int | None: ...

    @property
    def enable_prefix_caching(self) -> bool: ...

    @property
    def record(self) -> str | None: ...


def check_allowed_hosts(patterns: Iterable[str]) -> None:
    """Raise `OptionError` for a pattern of `--allowed-hosts` that is neither a name nor an address."""
    for pattern in patterns:
        if not is_pattern(pattern):
            raise OptionError(
                f"--allowed-hosts is {pattern[:80]!r}, but it must be a name or an address without scheme or port.",
                "For example: --allowed-hosts llm.example.org '*.example.org'",
            )


def check_allowed_origins(origins: Iterable[str]) -> None:
    """Raise `OptionError` for a value of `--allowed-origins` that no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise OptionError(
                f"--allowed-origins is {origin[:80]!r}, but it must be a scheme and a host in lower case, "
                "with a port if it is not the scheme's default, and no path; or *.",
                "For example: --allowed-origins https://chat.example.org http://localhost:3000",
            )


def check_root_path(path: str | None) -> None:
    """Raise `OptionError` for a path that does not look like /llm or /models/llm."""
    if path is not None and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
        raise OptionError(
            f"--root-path is {path[:80]!r}, but it must begin with /, not end with /, and contain only "
            "letters, digits, / and ._~-",
            "For example: --root-path /llm",
        )


def check_listening(uds: str | None, certificate: str | None, key: str | None) -> None:
    """Raise `OptionError` for a Unix socket's path that is too long, or a certificate or key without the other."""
    if uds is not None and len(os.fsencode(uds)) > _MAX_UDS_BYTES:
        raise OptionError(
            f"--uds has {len(os.fsencode(uds))} bytes, but the name of a Unix socket has {_MAX_UDS_BYTES} at most.",
            "Choose a shorter path: --uds /run/oarlock/http.sock",
        )
    if (certificate is None) != (key is None):
        given, missing = ("certfile", "keyfile") if key is None else ("keyfile", "certfile")
        raise OptionError(
            f"--ssl-{given} is given without --ssl-{missing}.",
            "HTTPS takes both: --ssl-certfile fullchain.pem --ssl-keyfile privkey.pem",
        )


def check_metrics_prefix(prefix: str) -> None:
    """Raise `OptionError` if the prefix would make a metric's name invalid, or is the prefix of other metrics."""
    if not re.fullmatch("[A-Za-z_:][A-Za-z0-9_:]{0,63}", prefix) or prefix == "oarlock:":
        raise OptionError(
            f"--metrics-prefix is {prefix[:80]!r}, but it must consist of letters, digits, _ and :, not "
            "begin with a digit, and not be oarlock:, the prefix of other metrics.",
            "For example: --metrics-prefix llm:",
        )


def check_step_size(max_num_batched_tokens: int | None, max_num_seqs: int) -> None:
    """Raise `OptionError` if a step has room for fewer tokens than running sequences."""
    if max_num_batched_tokens is not None and max_num_batched_tokens < max_num_seqs:
        raise OptionError(
            f"--max-num-batched-tokens ({max_num_batched_tokens}) is below --max-num-seqs "
            f"({max_num_seqs}): a step could not give every running sequence a token.",
            f"Raise --max-num-batched-tokens to at least {max_num_seqs}, or lower --max-num-seqs.",
        )


def check_kv_offload(settings: KVOffloadSettings) -> None:
    """Raise `OptionError` if the options for KV blocks outside of the pool do not go together."""
    if settings.kv_offload_disk is not None and settings.kv_offload_path is None:
        raise OptionError(
            "--kv-offload-disk limits the files of a directory, but --kv-offload-path does not name one.",
            "For example: --kv-offload-path /var/cache/oarlock/kv --kv-offload-disk 200GiB",
        )
    if settings.kv_offload_memory is None and settings.kv_offload_path is None:
        return
    if not settings.enable_prefix_caching:
        raise OptionError(
            "--kv-offload-memory and --kv-offload-path store KV blocks for the prefix cache, which "
            "--no-enable-prefix-caching turns off.",
            "Leave one of them out.",
        )
    if settings.record is not None:
        raise OptionError(
            "--record cannot replay the KV blocks that --kv-offload-memory and --kv-offload-path load.",
            "Leave one of them out.",
        )


_NODE_SECRET_FIX = (
    "Leave it out: hosts connect through torch's store, which has no authentication. Keep the network "
    "between them private, or use WireGuard."
)
_REMOVED = {"node_secret_file": _NODE_SECRET_FIX, "node_secret": _NODE_SECRET_FIX}


def unknown_name(what: str, name: str, known: Iterable[str]) -> OptionError:
    """Return the error for an unknown name, with the nearest known name as a suggestion. `what` is the kind of name."""
    near = nearest(name, known)
    fix = f"Did you mean {near}?" if near else "`oarlock config show` lists all of them."
    return OptionError(f"Unknown {what}: {name}.", removed(name) or vllm_flags.what_holds(name) or fix)


def removed(name: str) -> str | None:
    """Return the fix for a flag, variable or key that older versions had, or None for any other name."""
    return _REMOVED.get(name.removeprefix("--").removeprefix("OARLOCK_").lower().replace("-", "_"))


def check_traces_endpoint(endpoint: str | None) -> None:
    """Raise `OptionError` if the endpoint is not a URL, or if the libraries are missing."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise OptionError(
            f"--otlp-traces-endpoint is {endpoint!r:.80}, but it must be a URL: traces are sent over HTTP.",
            "For example: --otlp-traces-endpoint http://localhost:4318/v1/traces",
        )
    if not all(map(_is_there, ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"))):
        raise OptionError(
            "--otlp-traces-endpoint sends traces, for which Python packages of OpenTelemetry are missing.",
            "Run: pip install 'oarlock[otel]' (in a checkout: pip install --editable '.[otel]')",
        )


def _is_there(module: str) -> bool:
    """Return whether a module could be imported. Its parent packages may be missing too."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


# Endings that no public name server may answer for (RFC 6761, 6762, 8375; ICANN's reservation of .internal).
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_pattern(pattern: str) -> bool:
    """Return whether a pattern is valid: a name or an address, `*.` and a domain, or `*`."""
    return _PATTERN.fullmatch(pattern.lower()) is not None or _address(pattern.strip("[]")) is not None


_AUTHORITY = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::[0-9]*)?")


class AllowedHosts:
    """The Host names that one server accepts.

    Always accepted are `localhost`, every numeric address (which cannot be rebound), and the host that the server
    listens on. If the network can reach the server, it also accepts this machine's own name, names without a dot, as
    containers have, and names that only a local network can resolve. On loopback, the last kind would allow rebinding
    by other machines of the local network.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """Set the accepted names.

        `host`: the address that the server listens on. `allowed`: more names; `*.example.org` allows all names below
        it, `*` any name.
        """
        patterns = {pattern.lower().strip("[]").rstrip(".") for pattern in allowed}
        self._any = "*" in patterns
        self._endings = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))
        self._names = patterns | {"localhost", host.lower()}
        self._is_wide = not is_loopback(host)
        if self._is_wide:
            self._names.add(socket.gethostname().lower())
            self._endings += _PRIVATE_ENDINGS

    def __contains__(self, header: bytes) -> bool:
        """Return whether this Host header is allowed. HTTP/1.0 probes send no such header; browsers always do."""
        text = header.decode("latin-1").strip().lower()
        if self._any or not text:
            return True
        authority = _AUTHORITY.fullmatch(text)
        if authority is None:
            return False
        name = (authority["address"] or authority["name"]).removesuffix(".")
        if name in self._names or name.endswith(self._endings) or _address(name) is not None:
            return True
        return self._is_wide and re.fullmatch("[a-z0-9_-]+", name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
