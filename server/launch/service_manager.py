"""systemd, or another service manager with its protocol: the socket that it passes, and the notifications to it.

Follows sd_listen_fds(3) and sd_notify(3). Without a manager, nothing here has an effect.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import MutableMapping
from dataclasses import replace

from oarlock.base.errors import StartupError
from oarlock.server.config.option_groups import HttpSettings
from oarlock.server.config.settings import Settings
from oarlock.server.http.listeners import address_of, inherited
from oarlock.server.observability.logs import event, logger

# While a model loads, its progress extends the time limit of the start. Loading itself ends after 300 s without
# progress.
_START_S = 330.0
_NAMES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_log = logger("service_manager")


class ServiceManager:
    """Service manager that started this process, if it uses the protocol of systemd."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Take its variables out of `environment`: they are only for this process."""
        given = {name: environment.pop(name, "") for name in _NAMES}
        self._notify_socket = given["NOTIFY_SOCKET"]
        pid = str(os.getpid())
        self.num_sockets = _number(given["LISTEN_FDS"]) if given["LISTEN_PID"] == pid else 0
        watched = given["WATCHDOG_PID"] in ("", pid)
        self._watchdog_s = _number(given["WATCHDOG_USEC"]) / 1e6 if watched else 0.0
        self._last_status = ""

    def listener(self, settings: Settings) -> tuple[socket.socket, Settings] | None:
        """Return the socket that was handed over, and the settings with its address; None if there is none.

        Raises `StartupError`, also if the settings name another address.
        """
        if not self.num_sockets:
            return None
        listener = inherited(self.num_sockets)
        address = address_of(listener)
        asked: tuple[str, int] | str | None = settings.uds
        if asked is None and (settings.host, settings.port) != (HttpSettings.host, HttpSettings.port):
            asked = (settings.host, settings.port)
        if asked not in (None, address):
            listener.close()
            raise StartupError(
                f"The service manager passes a socket at {_shown(address)}, but the settings specify {_shown(asked)}.",
                "Leave out --host, --port and --uds: the socket unit defines the address.",
            )
        _log.info(event("socket_inherited", address=_shown(address)))
        if isinstance(address, str):
            return listener, replace(settings, uds=address)
        return listener, replace(settings, host=address[0], port=address[1])

    def loading(self, phase: str, fraction: float) -> None:
        """Report progress of the start: this fraction of this phase is done."""
        status = f"{phase} {fraction:.0%}"
        if status != self._last_status:  # progress comes many times a second
            self._last_status = status
            self._send(STATUS=status, EXTEND_TIMEOUT_USEC=f"{_START_S * 1e6:.0f}")

    def ready(self) -> None:
        """Report that requests are served."""
        self._send(READY="1", STATUS="serving")

    def stopping(self, within_s: float) -> None:
        """Report that the server ends, after open requests."""
        self._send(STOPPING="1", STATUS="finishing open requests", EXTEND_TIMEOUT_USEC=f"{within_s * 1e6:.0f}")

    async def watch(self) -> None:
        """Report twice per interval that this process's loop is running, if the manager asks for it. Never returns
        then.

        The server itself watches the engine and its ranks.
        """
        while self._watchdog_s:
            self._send(WATCHDOG="1")
            await asyncio.sleep(self._watchdog_s / 2)

    def _send(self, **values: str) -> None:
        if not self._notify_socket:
            return
        name = self._notify_socket
        address = f"\0{name[1:]}" if name.startswith("@") else name  # Linux's abstract names, without a file
        text = "\n".join(f"{key}={value}" for key, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto(text.encode(), address)
        except OSError as error:  # it serves all the same; the manager will report the missing notification
            _log.warning(event("service_manager_not_notified", address=name, cause=error.strerror or str(error)))


def _number(text: str) -> int:
    with contextlib.suppress(ValueError):
        return max(0, int(text))
    return 0


def _shown(address: tuple[str, int] | str | None) -> str:
    if isinstance(address, tuple):
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{host}:{address[1]}"
    return str(address)
