"""The launchers of one run on several machines, each connected to that of machine 0, for as long as the run takes.

They meet before any work is done, so that nobody waits for what another one will never say. A machine whose rank failed
says so, and one that is gone is noticed by its connection: without this the ranks of the others would wait in a collective
for parallel.timeout_s, and not know why.

One JSON object a line. Nothing that arrives is executed; whoever can reach the port is trusted, as with torch's own store.
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

JOIN_TIMEOUT_S = 600.0  # somebody may be typing
HELLO_TIMEOUT_S = 10.0
RETRY_S = 0.5
POLL_S = 0.05
LONGEST_LINE = 4_000_000
# A machine that loses power or its network says nothing: 5 s of silence, then a question every 2 s, five times.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 15_000}

Message = dict[str, Any]


@dataclass
class Peer:
    """The connection to one other machine."""

    node: int
    connection: socket.socket
    host: str = ""
    left: bool = False  # it said goodbye, or is gone
    _buffer: bytes = field(default=b"", repr=False)

    def send(self, message: Message) -> None:
        """Sends a line; whether it arrives shows when the connection is next read."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> list[Message] | None:
        """The lines that are there, at most after so many seconds; None when the connection has ended."""
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
                return None  # whoever that is, it is none of us
            if not data or len(self._buffer) > LONGEST_LINE:
                return messages or None
        return messages

    def answer(self, timeout_s: float) -> Message | None:
        """The next line; None if none came."""
        return next(iter(self.receive(timeout_s) or []), None)


class Link:
    """The connections of one launcher: of machine 0 to all others, of another one to machine 0."""

    def __init__(self, nodes: Nodes, peers: list[Peer]) -> None:
        self.nodes, self._peers = nodes, peers
        self._cause: RankExit | None = None
        self._offers: dict[int, Message] = {}
        self._decision: Message | None = None

    def agree(self, offer: Message, decide: Callable[[list[Message]], Message]) -> Message:
        """Waits until every machine has made an offer; returns what machine 0 decided from all of them.

        Args:
            offer: of this machine.
            decide: what machine 0 makes of the offers, in the order of the machines; what it raises ends all.

        Raises:
            SftPlayError: another machine failed before it came to that, or `decide` did.
        """
        offer = {**offer, "node": self.nodes.rank, "host": socket.gethostname()}
        if self.nodes.rank:
            self._peers[0].send({"offer": offer})
            self._wait_for(lambda: self._decision is not None)
            return dict(self._decision or {})
        self._offers[0] = offer
        self._wait_for(lambda: len(self._offers) == self.nodes.count)
        decision = decide([one for _, one in sorted(self._offers.items())])
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
        """What ended the run on another machine, as soon as that is known; waits for it at most so long."""
        deadline = time.monotonic() + wait_s
        while self._cause is None:
            for peer in self._peers:
                if not peer.left:
                    self._hear(peer)
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        return self._cause

    def _hear(self, peer: Peer) -> None:
        messages = peer.receive(0)
        for message in messages or []:
            if message.get("done"):
                peer.left = True
            elif "offer" in message:
                self._offers[peer.node] = message["offer"]
            elif "decision" in message:
                self._decision = message["decision"]
            elif "failed" in message and self._cause is None:
                self._spread(RankExit(**message["failed"]))
        if messages is None and not peer.left:
            peer.left = True
            text = f"machine {peer.node} ({peer.host}) is gone: its launcher was killed, or the machine or its network failed"
            self._spread(RankExit(0, LaunchError.exit_code, text))

    def wait_for_main(self) -> None:
        """Machine 0 may have more to do, such as answers; the others end with it.

        Raises:
            SftPlayError: it failed.
        """
        if self.nodes.rank:
            self._wait_for(lambda: self._peers[0].left and self._cause is None)

    def tell(self, cause: RankExit) -> None:
        """Says on all machines what ended the run here, unless another one was first."""
        if self._cause is None:
            text = f"machine {self.nodes.rank} ({socket.gethostname()}): {cause.message}"
            self._spread(RankExit(cause.rank, cause.code, text))

    def _spread(self, cause: RankExit) -> None:
        self._cause = self._cause or cause
        for peer in self._peers:
            peer.send({"failed": asdict(self._cause)})

    def close(self, *, done: bool) -> None:
        """Ends the connections; `done` says that all is well here."""
        for peer in self._peers:
            if done:
                peer.send({"done": True})
            peer.connection.close()


def connect(nodes: Nodes) -> Link:
    """Meets the other machines.

    Raises:
        LaunchError: the port is taken, or a machine did not come within JOIN_TIMEOUT_S.
        ConfigError: the machines were started with numbers that do not go together.
    """
    if nodes.rank:
        return Link(nodes, [_knock(nodes)])
    with _listen(nodes) as server:
        console().print(f"  machine 0 waits for the others on {nodes.main_address}:{nodes.main_port}", highlight=False)
        peers = _gather(nodes, server)
    return Link(nodes, [peer for _, peer in sorted(peers.items())])


def _listen(nodes: Nodes) -> socket.socket:
    """On the given address alone; on all if it is a name, which often leads to a loopback address on its own machine.

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
                f"port {nodes.main_port} of this machine is in use; take another one on all machines: MASTER_PORT=<port>"
            ) from None
        raise ConfigError(
            f"MASTER_ADDR={nodes.main_address} is no address of this machine ({error.strerror}); RANK=0 belongs on the machine "
            "that has it"
        ) from None


def _gather(nodes: Nodes, server: socket.socket) -> dict[int, Peer]:
    """Accepts connections until every machine is there, and tells them."""
    peers: dict[int, Peer] = {}
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while len(peers) < nodes.count - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            missing = ", ".join(str(node) for node in range(1, nodes.count) if node not in peers)
            raise LaunchError(f"machine {missing} did not come within {JOIN_TIMEOUT_S:.0f} s") from None
        connection.settimeout(None)
        _keep_alive(connection)
        peer = Peer(-1, connection)
        hello = peer.answer(HELLO_TIMEOUT_S) or {}
        problem = _misfit(hello, nodes, peers)
        if problem:
            peer.send({"refused": problem})
            connection.close()
            continue
        peer.node, peer.host = hello["node"], str(hello.get("host"))
        peers[peer.node] = peer
        console().print(f"  machine {peer.node} is here: {peer.host}", highlight=False)
    for peer in peers.values():
        peer.send({"welcome": socket.gethostname()})
    return peers


def _misfit(hello: Message, nodes: Nodes, peers: dict[int, Peer]) -> str | None:
    """Why who knocked is not let in; a machine that went away while waiting may come again."""
    node = hello.get("node")
    if hello.get("nodes") != nodes.count:
        return f"machine 0 was started with NODES={nodes.count}, this one with NODES={hello.get('nodes')}"
    if not isinstance(node, int) or not 0 < node < nodes.count:
        return f"RANK={node}: expected 1 to {nodes.count - 1}"
    if node in peers and peers[node].receive(0) is not None:
        return f"two machines were started with RANK={node}"
    return None


def _knock(nodes: Nodes) -> Peer:
    """Connects to machine 0, which may not be there yet."""
    where = f"{nodes.main_address}:{nodes.main_port}"
    console().print(f"  machine {nodes.rank} waits for machine 0 on {where}", highlight=False)
    deadline = time.monotonic() + JOIN_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((nodes.main_address, nodes.main_port), timeout=HELLO_TIMEOUT_S)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine 0 cannot be reached at {where}: {error}. "
                    "Was it started with RANK=0, and may the machines talk to each other on any port?"
                ) from None
            time.sleep(RETRY_S)
    connection.settimeout(None)
    _keep_alive(connection)
    peer = Peer(0, connection)
    peer.send({"node": nodes.rank, "nodes": nodes.count, "host": socket.gethostname()})
    answer = peer.answer(JOIN_TIMEOUT_S)
    if answer is None:
        raise LaunchError("machine 0 went away before all machines were there; its own console says why")
    if "refused" in answer:
        raise ConfigError(str(answer["refused"]))
    peer.host = str(answer.get("welcome"))
    return peer


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
