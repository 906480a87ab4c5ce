"""Membership of the hosts of one group, in torch's store: who has joined, the facts to agree on, and the ending.

    hosts/N   node N's name, address, start and facts: written when it is able to start, emptied if it leaves early
    group     the start of every node, written by node 0 when all have joined and agree
    ending    the first cause of the end, written by the node that knows it first

Node 0 keeps the store, on the address of its interface, unless torchrun does. Any program that reaches its port can
take part, so no one else may have access to the network between the hosts.
"""

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from oarlock.base.errors import StartupError
from oarlock.workers.config import NodesConfig
from oarlock.workers.distributed.topology import StoreAddress
from oarlock.workers.platform.network import Interface, resolved
from oarlock.workers.ranks.nodes import Ending, Facts, first_difference, listen, own_host, own_interface, printable

_LOOK_S = 0.1  # interval of checks for new nodes
_RETRY_S = 0.5  # interval of attempts to reach the store
_CONNECT_S = 3.0
_STORE_S = 20.0  # time for a store that has been reached to reply
_LEAVE_S = 2.0  # time for the others to read why the group does not start
_FOREVER = timedelta(days=365)
_PREFIX = "oarlock"


class _DisplacedError(StartupError):
    """Another host has this node's number. Only this node ends."""


class Membership:
    """One node's membership. `store` contains only this group's keys."""

    def __init__(
        self, nodes: NodesConfig, own: Interface, connect: Callable[[], dist.TCPStore], where: StoreAddress
    ) -> None:
        """Connect to the store. `own`: the interface of this node. `connect`: makes a client of the store at `where`;
        each client can wait for one key."""
        self.node, self.nnodes = nodes.node_rank, nodes.nnodes
        self.where, self.own = where, own
        self.names: list[str] = []  # names of all nodes
        self._connect = connect
        self._client = connect()  # kept, because the store ends with its process's last reference to it
        self.store = dist.PrefixStore(where.prefix, self._client)

    def agree(self, facts: Facts, deadline: float, on_waiting: Callable[[str], None]) -> None:
        """Wait for all nodes, and compare their facts. Raises the same `StartupError` on all nodes that have joined."""
        own = {"host": own_host(), "address": self.own.address, "start": secrets.token_hex(8)}
        own["facts"] = {"number of": {"nodes": self.nnodes}, **facts}
        self.store.set(f"hosts/{self.node}", json.dumps(own))
        try:
            while not self._all_agree(own, deadline, on_waiting):
                time.sleep(_LOOK_S)
        except _DisplacedError:
            raise
        except StartupError as error:
            self._end_start(error)
        except dist.DistError as error:
            raise StartupError(
                f"Node 0 at {self.where.address} has left while the nodes waited for each other: "
                f"{str(error).splitlines()[0]}",
                "See its log.",
            ) from None
        except BaseException:
            self.store.set(f"hosts/{self.node}", "")  # this node may join again
            raise

    def end(self, ending: Ending) -> Ending:
        """Write how the group ends. Return the ending that was written first."""
        return Ending.from_bytes(self.store.compare_set("ending", "", ending.to_bytes().decode()))

    def watch(self, on_ending: Callable[[Ending | str], None]) -> None:
        """Call `on_ending` in another thread when the ending of the group is known, or with a description if the store
        is lost."""
        store = dist.PrefixStore(self.where.prefix, self._connect())
        store.set_timeout(_FOREVER)

        def wait() -> None:
            try:
                on_ending(Ending.from_bytes(store.get("ending")))
            except dist.DistError:
                on_ending("has closed the connection")

        threading.Thread(target=wait, name="ending", daemon=True).start()

    def _all_agree(self, own: dict, deadline: float, on_waiting: Callable[[str], None]) -> bool:
        """Return whether all nodes have joined and agree, as far as this node knows. Raises `StartupError` if they do
        not."""
        store, node = self.store, self.node
        if store.check(["ending"]):
            raise _error(Ending.from_bytes(store.get("ending")))
        stored = {key: store.get(f"hosts/{key}") for key in range(self.nnodes) if store.check([f"hosts/{key}"])}
        hosts = {number: json.loads(text) for number, text in stored.items() if text}
        names = {number: f"node {number} ({printable(of['host'])}, {of['address']})" for number, of in hosts.items()}
        if hosts[node]["start"] != own["start"]:
            raise _DisplacedError(
                f"{names[node]} has joined with the --node-rank of this host ({own_host()}), which is node {node} too.",
                "Give each node a --node-rank of its own.",
            )
        for number in hosts if 0 in hosts else ():
            different = first_difference(hosts[0]["facts"], names[0], hosts[number]["facts"], names[number])
            if different is not None:
                raise different
        missing = [number for number in range(self.nnodes) if number not in hosts]
        listed = f"node{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.nnodes}"
        if time.monotonic() > deadline:
            raise StartupError(
                f"{listed} did not join in time." if missing else "Node 0 did not start in time.",
                "Start every node with the same --master-addr and --master-port; see their logs; or raise "
                "--node-timeout.",
            )
        starts = {str(number): hosts[number]["start"] for number in hosts}
        if not missing and node == 0:
            store.set("group", json.dumps(starts))
        where = f"at {self.where.address}, port {self.where.port}"
        on_waiting(f"waiting for {listed if missing else 'node 0'} {where}")
        self.names = list(names.values())
        return not missing and store.check(["group"]) and json.loads(store.get("group")) == starts

    def _end_start(self, error: StartupError) -> None:
        """Publish to the others why the group does not start, unless they know already, and raise the error."""
        try:
            ending = self.end(Ending.of(error))
            self.store.set(f"left/{self.node}", "")
            if self.node == 0:
                self._await_leaving()
        except dist.DistError:  # the store has ended: node 0 no longer waits for this node
            raise error from None
        raise _error(ending)

    def _await_leaving(self) -> None:
        """Wait until all nodes that have joined know why the group ends: the store ends with this process."""
        deadline = time.monotonic() + _LEAVE_S
        keys = [f"left/{number}" for number in range(self.nnodes) if self.store.check([f"hosts/{number}"])]
        while not self.store.check(keys) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)


def join(nodes: NodesConfig, facts: Facts, on_waiting: Callable[[str], None]) -> Membership:
    """Return this node's membership after all nodes have joined and agree. `facts`: must be the same on all nodes
    (`oarlock.workers.fingerprint.node_facts`). `on_waiting` is called several times a second; an error that it raises
    ends the waiting.

    Raises `StartupError`.
    """
    deadline = time.monotonic() + nodes.timeout_s
    own = own_interface(nodes)
    prefix = _PREFIX if nodes.launcher_store is None else f"{_PREFIX}/{nodes.launcher_store}"
    if nodes.node_rank == 0 and nodes.launcher_store is None:
        listener = listen(nodes)
        where = StoreAddress(own.address, listener.getsockname()[1], prefix)
        kept = _keep_store(listener, where)
        membership = Membership(nodes, own, lambda: kept, where)
    else:
        where = StoreAddress(resolved(nodes.address, nodes.timeout_s), nodes.port, prefix)
        _await_listener(nodes, where, deadline, on_waiting)
        membership = Membership(nodes, own, lambda: _connected(where), where)
    membership.agree(facts, deadline, on_waiting)
    return membership


def _keep_store(listener: socket.socket, where: StoreAddress) -> dist.TCPStore:
    """Return the store, run by this process on a socket that is already listening."""
    fd = listener.detach()
    return dist.TCPStore(
        where.address, where.port, is_master=True, wait_for_workers=False, master_listen_fd=fd,
        timeout=timedelta(seconds=_STORE_S),
    )  # fmt: skip


def _await_listener(
    nodes: NodesConfig, where: StoreAddress, deadline: float, on_waiting: Callable[[str], None]
) -> None:
    """Wait until the port accepts connections. Torch's own attempts cannot be interrupted, and fill the log."""
    source = None if nodes.interface is None else (own_interface(nodes).address, 0)
    reason = "it was not tried"
    while time.monotonic() < deadline:
        on_waiting(f"looking for node 0 at {nodes.address}, port {where.port}")
        try:
            socket.create_connection((where.address, where.port), _CONNECT_S, source_address=source).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY_S, max(0.0, deadline - time.monotonic())))
    raise StartupError(
        f"Node {nodes.node_rank} could not reach node 0 at {nodes.address}, port {where.port}, within "
        f"{nodes.timeout_s:g} s: {reason}.",
        "Start node 0, and give all nodes the same --master-addr and --master-port; or raise --node-timeout.",
    )


def _connected(where: StoreAddress) -> dist.TCPStore:
    """Return a client of the store. If the port belongs to another kind of server, torch would wait forever; this
    raises `StartupError`."""
    made: list[dist.TCPStore] = []

    def connect() -> None:
        timeout = timedelta(seconds=_STORE_S)
        made.append(dist.TCPStore(where.address, where.port, is_master=False, wait_for_workers=False, timeout=timeout))

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(_STORE_S)
    if not made:
        raise StartupError(
            f"The server at {where.address}, port {where.port}, is not the store of node 0.",
            "Check --master-addr and --master-port.",
        )
    return made[0]


def _error(ending: Ending) -> StartupError:
    return StartupError(ending.cause, ending.fix or "See the log of that node.", ending.exit_code)
