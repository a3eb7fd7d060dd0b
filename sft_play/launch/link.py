"""Connects the launchers of a multi-node run: each holds a connection to machine 0 while the run lasts.

They connect before any work is done, so that no machine waits for one that has already failed. A machine
reports when one of its ranks fails, and one that disappears is noticed by its closed connection. Without
this, the ranks on other machines would wait in a collective for parallel.timeout_s without knowing why.

The protocol is one JSON object per line. Nothing that is received is executed; everyone who can reach the
port is trusted, as with torch's own store.
"""

import contextlib
import json
import select
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sft_play.errors import ConfigError, LaunchError
from sft_play.launch.nodes import Nodes, is_address
from sft_play.launch.ranks import RankExit, raise_unless_done
from sft_play.runlog import console

JOIN_TIMEOUT_S = 600.0  # a person may have to type the command on each machine
HELLO_TIMEOUT_S = 10.0
RETRY_S = 0.5
POLL_S = 0.05
LONGEST_LINE = 4_000_000
# Detects a machine that lost power or its network: after 5 s of silence, five probes at intervals of 2 s.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}

Message = dict[str, Any]


@dataclass
class Peer:
    """The connection to one other machine."""

    node: int
    connection: socket.socket
    host: str = ""
    left: bool = False  # it is done, or its connection is lost
    _buffer: bytes = field(default=b"", repr=False)

    def send(self, message: Message) -> None:
        """Sends a message; a lost connection is noticed at the next read."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> list[Message] | None:
        """The messages that have arrived, after waiting at most so long; None if the connection is closed."""
        messages: list[Message] = []
        while select.select([self.connection], [], [], 0 if messages else timeout_s)[0]:
            try:
                data = self.connection.recv(65536)
            except OSError:
                data = b""
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            try:
                messages += [dict(json.loads(line)) for line in lines]
            except (ValueError, TypeError):
                return None  # not one of our launchers
            if not data or len(self._buffer) > LONGEST_LINE:
                return messages or None
        return messages

    def answer(self, timeout_s: float) -> Message | None:
        """The next message; None if there is none in time."""
        return next(iter(self.receive(timeout_s) or []), None)


class Link:
    """The connections of one launcher: on machine 0 to all others, on any other machine to machine 0."""

    def __init__(self, nodes: Nodes, peers: list[Peer]) -> None:
        self.nodes, self._peers = nodes, peers
        self._cause: RankExit | None = None
        self._offers: dict[int, Message] = {}
        self._decision: Message | None = None

    def agree(self, offer: Message, decide: Callable[[list[Message]], Message]) -> Message:
        """Collects an offer from every machine; returns the decision that machine 0 made from them.

        Args:
            offer: the offer of this machine.
            decide: called on machine 0 with all offers, in the order of the machines; an exception ends the
                run on all machines.

        Raises:
            SftPlayError: another machine failed before, or `decide` did.
        """
        offer = {**offer, "node": self.nodes.rank, "host": socket.gethostname()}
        if self.nodes.rank:
            self._peers[0].send({"offer": offer})
            self._wait_for(lambda: self._decision is not None)
            return dict(self._decision or {})
        self._offers[0] = offer
        self._wait_for(lambda: len(self._offers) == self.nodes.count)
        decision = decide([self._offers[node] for node in sorted(self._offers)])
        for peer in self._peers:
            peer.send({"decision": decision})
        return decision

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        while not ready():
            cause = self.failure()
            if cause and not ready():
                raise_unless_done(cause)
            time.sleep(POLL_S)

    def failure(self, wait_s: float = 0.0) -> RankExit | None:
        """The failure that ended the run on another machine, after waiting for it at most so long."""
        deadline = time.monotonic() + wait_s
        while self._cause is None:
            for peer in self._peers:
                if not peer.left:
                    self._read_from(peer)
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        return self._cause

    def _read_from(self, peer: Peer) -> None:
        messages = peer.receive(0)
        for message in messages or []:
            if message.get("done"):
                peer.left = True
            elif "offer" in message:
                self._offers[peer.node] = message["offer"]
            elif "decision" in message:
                self._decision = message["decision"]
            elif "failed" in message and self._cause is None:
                self._broadcast_failure(RankExit(**message["failed"]))
        if messages is None and not peer.left:
            peer.left = True
            text = (
                f"lost the connection to machine {peer.node} ({peer.host}): its launcher was killed, or the "
                "machine or its network failed"
            )
            self._broadcast_failure(RankExit(0, LaunchError.exit_code, text))

    def wait_for_main(self) -> None:
        """Waits until machine 0 is done, which may evaluate after training.

        Raises:
            SftPlayError: it failed.
        """
        if self.nodes.rank:
            self._wait_for(lambda: self._peers[0].left and self._cause is None)

    def report_failure(self, cause: RankExit) -> None:
        """Reports to all machines what ended the run here, unless another machine was first."""
        if self._cause is None:
            text = f"machine {self.nodes.rank} ({socket.gethostname()}): {cause.message}"
            self._broadcast_failure(RankExit(cause.rank, cause.code, text))

    def _broadcast_failure(self, cause: RankExit) -> None:
        self._cause = self._cause or cause
        for peer in self._peers:
            peer.send({"failed": asdict(self._cause)})

    def close(self, *, done: bool) -> None:
        """Closes the connections; `done` tells the other machines that this one finished without errors."""
        for peer in self._peers:
            if done:
                peer.send({"done": True})
            peer.connection.close()


def connect(nodes: Nodes) -> Link:
    """Connects to the other machines.

    Raises:
        LaunchError: the port is in use, or a machine did not join within JOIN_TIMEOUT_S.
        ConfigError: the machines were started with contradictory settings.
    """
    if nodes.rank:
        return Link(nodes, [_join_main(nodes)])
    with _listen(nodes) as server:
        where = f"{nodes.main_address}:{nodes.main_port}"
        console().print(f"  machine 0 is waiting for the other machines on {where}", highlight=False)
        peers = _accept_all(nodes, server)
    return Link(nodes, [peers[node] for node in sorted(peers)])


def _listen(nodes: Nodes) -> socket.socket:
    """Listens only on the given address; on all addresses if it is a name, which may resolve to loopback.

    Raises:
        LaunchError: the port is in use.
        ConfigError: the address is not one of this machine.
    """
    literal = is_address(nodes.main_address)
    family = socket.AF_INET6 if literal and ":" in nodes.main_address else socket.AF_INET
    try:
        return socket.create_server((nodes.main_address if literal else "", nodes.main_port), family=family)
    except OSError as error:
        if error.errno == 98:  # EADDRINUSE
            raise LaunchError(
                f"port {nodes.main_port} of this machine is in use; choose another one on all machines: "
                "MASTER_PORT=<port>"
            ) from None
        raise ConfigError(
            f"MASTER_ADDR={nodes.main_address} is not an address of this machine ({error.strerror}); use "
            "RANK=0 on the machine that has this address"
        ) from None


def _accept_all(nodes: Nodes, server: socket.socket) -> dict[int, Peer]:
    """Accepts connections until every machine has joined, then welcomes them."""
    peers: dict[int, Peer] = {}
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while len(peers) < nodes.count - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(node) for node in range(1, nodes.count) if node not in peers)
            raise LaunchError(
                f"machine {missing} did not join within {JOIN_TIMEOUT_S:.0f} s; run the same command there "
                "with its own RANK"
            ) from None
        connection.settimeout(None)
        _keep_alive(connection)
        peer = Peer(-1, connection)
        hello = peer.answer(HELLO_TIMEOUT_S) or {}
        problem = _refusal(hello, nodes, peers)
        if problem:
            peer.send({"refused": problem})
            connection.close()
            continue
        peer.node, peer.host = hello["node"], str(hello.get("host"))
        peers[peer.node] = peer
        console().print(f"  machine {peer.node} joined: {peer.host}", highlight=False)
    for peer in peers.values():
        peer.send({"welcome": socket.gethostname()})
    return peers


def _refusal(hello: Message, nodes: Nodes, peers: dict[int, Peer]) -> str | None:
    """Why a connection is refused, if it is; a machine that disconnected while waiting may join again."""
    node = hello.get("node")
    if hello.get("nodes") != nodes.count:
        return f"machine 0 was started with NODES={nodes.count}, this one with NODES={hello.get('nodes')}"
    if not isinstance(node, int) or not 0 < node < nodes.count:
        return f"RANK={node}: expected 1 to {nodes.count - 1}"
    if node in peers and peers[node].receive(0) is not None:
        return f"two machines were started with RANK={node}"
    return None


def _join_main(nodes: Nodes) -> Peer:
    """Connects to machine 0, which may not be listening yet."""
    where = f"{nodes.main_address}:{nodes.main_port}"
    console().print(f"  machine {nodes.rank} is waiting for machine 0 on {where}", highlight=False)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection(
                (nodes.main_address, nodes.main_port), timeout=HELLO_TIMEOUT_S
            )
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine 0 cannot be reached at {where}: {error}. "
                    "Check that it was started with RANK=0, and that no firewall is between the machines"
                ) from None
            time.sleep(RETRY_S)
    connection.settimeout(None)
    _keep_alive(connection)
    peer = Peer(0, connection)
    peer.send({"node": nodes.rank, "nodes": nodes.count, "host": socket.gethostname()})
    answer = peer.answer(JOIN_TIMEOUT_S)
    if answer is None:
        raise LaunchError(
            "machine 0 disconnected before all machines had joined; see the error on its console"
        )
    if "refused" in answer:
        raise ConfigError(str(answer["refused"]))
    peer.host = str(answer.get("welcome"))
    return peer


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
