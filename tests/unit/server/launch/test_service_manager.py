"""The protocol of service managers: whose variables count, which socket is taken, and what is told when."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import Settings
from oarlock.server.http.listeners import bind, bind_unix
from oarlock.server.launch.service_manager import ServiceManager

ME, ANOTHER = str(os.getpid()), "1"


@pytest.fixture
def told(tmp_path):
    """(the address, a function that returns what has arrived there since the last call)."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(path)
        channel.setblocking(False)

        def receive():
            messages = []
            while True:
                try:
                    messages.append(dict(line.split("=", 1) for line in channel.recv(4096).decode().splitlines()))
                except BlockingIOError:
                    return messages

        yield path, receive


def test_without_a_manager_nothing_happens():
    environment = {"PATH": "/bin"}
    manager = ServiceManager(environment)
    assert manager.listener(Settings()) is None
    manager.loading("weights", 0.5)
    manager.ready()
    manager.stopping(1.0)
    asyncio.run(asyncio.wait_for(manager.watch(), 60))  # ends at once
    assert environment == {"PATH": "/bin"}


def test_the_variables_of_another_process_do_not_count_and_none_is_passed_on():
    environment = {"LISTEN_PID": ANOTHER, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "WATCHDOG_USEC": "1000"}
    environment |= {"WATCHDOG_PID": ANOTHER, "HOME": "/root"}
    manager = ServiceManager(environment)
    assert manager.listener(Settings()) is None and manager.num_sockets == 0
    asyncio.run(asyncio.wait_for(manager.watch(), 60))
    assert environment == {"HOME": "/root"}


@pytest.fixture
def hand_over(monkeypatch):
    """Pretends that a listening socket is descriptor 3 of this process."""

    def hand(listener):
        descriptor = os.dup(listener.fileno())
        monkeypatch.setattr(
            "oarlock.server.launch.service_manager.inherited", lambda fds: socket.socket(fileno=descriptor)
        )
        return ServiceManager({"LISTEN_PID": ME, "LISTEN_FDS": "1"})

    return hand


def test_the_settings_get_the_address_of_the_socket(hand_over, tmp_path):
    with bind("127.0.0.1", 0) as listener:
        taken, settings = hand_over(listener).listener(Settings())
        taken.close()
        assert (settings.host, settings.port) == listener.getsockname() and settings.uds is None
    with bind("0.0.0.0", 0) as listener:  # what it is open to follows from the socket
        taken, settings = hand_over(listener).listener(Settings())
        taken.close()
        assert not settings.is_local
    with bind_unix(str(tmp_path / "s")) as listener:
        taken, settings = hand_over(listener).listener(Settings())
        taken.close()
        assert settings.uds == str(tmp_path / "s") and settings.is_local


def test_an_address_that_is_not_the_sockets_is_an_error(hand_over):
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        for asked in (Settings(port=9), Settings(host="0.0.0.0", port=port), Settings(uds="/run/x")):
            with pytest.raises(StartupError, match=f"127.0.0.1:{port}, but the settings specify") as caught:
                hand_over(listener).listener(asked)
            assert "socket unit" in caught.value.fix
        taken, _ = hand_over(listener).listener(Settings(port=port))  # the same one may be named
        taken.close()


def test_phases_are_reported_once(told):
    address, receive = told
    manager = ServiceManager({"NOTIFY_SOCKET": address})
    for fraction in (0.1, 0.1, 0.1001, 0.2):
        manager.loading("loading weights", fraction)
    manager.ready()
    manager.stopping(39.0)
    assert receive() == [
        {"STATUS": "loading weights 10%", "EXTEND_TIMEOUT_USEC": "330000000"},
        {"STATUS": "loading weights 20%", "EXTEND_TIMEOUT_USEC": "330000000"},
        {"READY": "1", "STATUS": "serving"},
        {"STOPPING": "1", "STATUS": "finishing open requests", "EXTEND_TIMEOUT_USEC": "39000000"},
    ]


def test_an_abstract_address(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"\0{tmp_path}")
        ServiceManager({"NOTIFY_SOCKET": f"@{tmp_path}"}).ready()
        channel.settimeout(60)
        assert channel.recv(4096) == b"READY=1\nSTATUS=serving"


def test_the_watchdog_is_fed_until_it_is_told_to_stop(told):
    address, receive = told

    async def scenario():
        watch = asyncio.create_task(
            ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": ME}).watch()
        )
        fed = []
        async with asyncio.timeout(60):
            while len(fed) < 3:
                await asyncio.sleep(0.005)
                fed += receive()
        assert not watch.done() and fed[0] == {"WATCHDOG": "1"}
        watch.cancel()

    asyncio.run(scenario())


def test_a_manager_that_does_not_listen_costs_a_line_of_the_log(tmp_path, caplog):
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert "event=service_manager_not_notified" in caplog.text
