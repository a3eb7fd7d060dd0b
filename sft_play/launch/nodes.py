"""Machines of a run: which one this is, the command for each, and their addresses and ports."""

import errno
import ipaddress
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from sft_play.errors import ConfigError, LaunchError
from sft_play.spelling import make, var

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500  # torchrun's default too
ADDRESS_PLACEHOLDER = "<address of machine 0>"
CONNECT_TIMEOUT_S = 10.0
RETRY_S = 0.5


@dataclass(frozen=True)
class Nodes:
    """This machine's place in a multi-node run; the default is a run on this machine alone."""

    count: int = 1
    rank: int = 0
    main_address: str = LOOPBACK
    main_port: int = 0
    peer: str | None = None  # an address of another machine, if this one is the first


ALONE = Nodes()


def read_nodes(
    settings: Mapping[str, object], count: str | None, rank: str | None, address: str | None, port: str | None
) -> Nodes:
    """This machine's place in a multi-node run, from its flags as typed; `ALONE` if --nodes was not given.

    Raises:
        ConfigError: a value is missing or invalid; the message lists the command for each machine.
    """
    if count is None:
        if rank or address or port:
            raise ConfigError(
                "--node-rank, --master-addr and --master-port need --nodes, the number of machines"
            )
        return ALONE
    machines = whole_number(var(NODES=count), count or "2", 1)
    port_number = whole_number(var(MASTER_PORT=port), port or str(DEFAULT_PORT), 1, 65535)
    needed = {"NODES": count, "RANK": rank, "MASTER_ADDR": address}
    missing = [var(**{name: None}) for name, value in needed.items() if not value]
    if missing and machines > 1:
        commands = commands_for(machines, address or ADDRESS_PLACEHOLDER, port_number, settings)
        text = f"not set: {', '.join(missing)}. Run one command on each of the {machines} machines:"
        raise ConfigError("\n".join([text, *commands]))
    number = whole_number(var(RANK=rank), rank or "0", 0, machines - 1)
    return Nodes(machines, number, address or LOOPBACK, port_number)


def whole_number(typed: str, text: str, low: int, high: int | None = None) -> int:
    """The whole number in a setting, "NGPU=2"; ConfigError if it is none, or out of range."""
    if text.isdigit() and low <= int(text) and (high is None or int(text) <= high):
        return int(text)
    allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"
    raise ConfigError(f"{typed}: expected a whole number {allowed}")


def commands_for(count: int, address: str, port: int, settings: Mapping[str, object]) -> list[str]:
    """The command for each machine, with the address of machine 0 and the settings that all share."""
    where = {"MASTER_ADDR": address, "MASTER_PORT": port if port != DEFAULT_PORT else None}
    shared = {**{name: value for name, value in where.items() if value}, **settings}
    return [f"  {make('train-multinode', NODES=count, RANK=rank, **shared)}" for rank in range(count)]


def listen(nodes: Nodes) -> socket.socket:
    """Listens only on the given address; on all addresses if it is a name, which may resolve to loopback.

    Raises:
        LaunchError: the port is in use.
        ConfigError: the address is not one of this machine.
    """
    host, family = nodes.main_address, socket.AF_INET
    try:
        if ipaddress.ip_address(host).version == 6:
            family = socket.AF_INET6
    except ValueError:
        host = ""
    try:
        return socket.create_server((host, nodes.main_port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {nodes.main_port} of this machine is in use; choose another one on all machines: "
                + var(MASTER_PORT="<port>")
            ) from None
        raise ConfigError(
            f"{var(MASTER_ADDR=nodes.main_address)} is not an address of this machine ({error.strerror}); "
            f"use {var(RANK=0)} on the machine that has this address"
        ) from None


def wait_until_reached(nodes: Nodes, timeout_s: float) -> None:
    """Waits until machine 0 listens; LaunchError if it does not within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((nodes.main_address, nodes.main_port), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"machine 0 cannot be reached at {nodes.main_address}:{nodes.main_port}: {error}. Check "
                    f"that it was started with {var(RANK=0)}, and that no firewall is between the machines"
                ) from None
        time.sleep(RETRY_S)


def interface_of(nodes: Nodes) -> str | None:
    """The network interface through which this machine reaches the others of a run; None if unknown.

    By default, gloo and NCCL use the interface that the machine's own name resolves to, often loopback. So it
    may be with the name of machine 0, as Debian writes /etc/hosts: then the way to another machine counts.
    """
    if nodes.count == 1:
        return interface_towards(LOOPBACK)
    found, loopback = interface_towards(nodes.main_address), interface_towards(LOOPBACK)
    if nodes.peer and found == loopback and not _is_address(nodes.main_address):
        return interface_towards(nodes.peer)
    return found


def _is_address(text: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def address_towards(address: str) -> str | None:
    """The address that this machine has to whoever it reaches at `address`; None if unknown."""
    try:
        family, kind, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(address: str) -> str | None:
    """The network interface through which this machine reaches `address`; None if unknown."""
    local = address_towards(address)
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == local for one in found):
            return name
    return None


def from_elsewhere(port: int) -> str:
    """How a browser on another machine reaches a server on a port of this one."""
    return f"  from another machine: ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}"


def free_port(preferred: int = 0, host: str = LOOPBACK) -> int:
    """`preferred` if it is free, otherwise another port that is free now."""
    try:
        # create_server sets SO_REUSEADDR, so a port in TIME_WAIT counts as free.
        with socket.create_server((host, preferred)) as server:
            return server.getsockname()[1]
    except (OSError, OverflowError):
        if not preferred:
            raise
    return free_port(host=host)
