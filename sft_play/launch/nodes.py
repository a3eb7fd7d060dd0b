"""Multi-node runs: which machine this is, how it reaches the others, and the command to run on each."""

import ipaddress
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from sft_play.errors import ConfigError
from sft_play.launch.ports import LOOPBACK

DEFAULT_PORT = 29500  # torchrun's default too
ADDRESS_PLACEHOLDER = "<address of machine 0>"


@dataclass(frozen=True)
class Nodes:
    """This machine's place in a multi-node run; the default is a run on this machine alone."""

    count: int = 1
    rank: int = 0
    main_address: str = LOOPBACK
    main_port: int = 0


ALONE = Nodes()


@dataclass(frozen=True)
class NodeFlags:
    """--nodes, --node-rank, --master-addr and --master-port as typed; empty or None if not given."""

    count: str | None = None
    rank: str | None = None
    address: str | None = None
    port: str | None = None


def read_nodes(flags: NodeFlags, settings: Sequence[str]) -> Nodes:
    """This machine's place in a multi-node run; `ALONE` if --nodes was not given.

    Args:
        flags: the flags as typed.
        settings: settings of the make command that are the same on all machines, for messages.

    Raises:
        ConfigError: a value is missing or invalid; the message lists the command for each machine.
    """
    if flags.count is None:
        if any((flags.rank, flags.address, flags.port)):
            raise ConfigError(
                "--node-rank, --master-addr and --master-port need --nodes, the number of machines"
            )
        return ALONE
    count = whole_number("NODES", flags.count or "2", 1)
    port = whole_number("MASTER_PORT", flags.port or str(DEFAULT_PORT), 1, 65535)
    missing = [name for name, value in _needed(flags).items() if not value]
    if missing and count > 1:
        commands = "\n".join(commands_for(count, flags.address or ADDRESS_PLACEHOLDER, port, settings))
        raise ConfigError(
            f"not set: {', '.join(missing)}. Run one command on each of the {count} machines:\n{commands}"
        )
    rank = whole_number("RANK", flags.rank or "0", 0, count - 1)
    return Nodes(count, rank, flags.address or LOOPBACK, port)


def _needed(flags: NodeFlags) -> dict[str, str | None]:
    return {"NODES": flags.count, "RANK": flags.rank, "MASTER_ADDR": flags.address}


def whole_number(name: str, text: str, low: int, high: int | None = None) -> int:
    """Parses the whole number of a make variable.

    Args:
        name: of the variable, for messages.
        text: its value.
        low: the smallest allowed number.
        high: the largest allowed number, if there is one.

    Raises:
        ConfigError: it is not a whole number, or out of range.
    """
    if text.isdigit() and low <= int(text) and (high is None or int(text) <= high):
        return int(text)
    allowed = f"from {low} to {high}" if high is not None else f"of at least {low}"
    raise ConfigError(f"{name}={text}: expected a whole number {allowed}")


def commands_for(count: int, address: str, port: int, settings: Sequence[str]) -> list[str]:
    """The command for each machine.

    Args:
        count: number of machines.
        address: of machine 0.
        port: of machine 0.
        settings: settings of the make command that are the same on all machines.
    """
    where = f"MASTER_ADDR={address}"
    if port != DEFAULT_PORT:
        where += f" MASTER_PORT={port}"
    shared = " ".join([where, *settings])
    return [f"  make train-multinode NODES={count} RANK={rank} {shared}" for rank in range(count)]


def make_settings(config: str, overrides: Sequence[str], processes: int, engine: str | None) -> list[str]:
    """A run as settings of a make command, quoted for a shell.

    Args:
        config: path of the config.
        overrides: `key=value` overrides.
        processes: processes on each machine; 0 if not given.
        engine: "ddp" or "deepspeed_z2"; None if not given.
    """
    values = {"NGPU": str(processes or ""), "ENGINE": engine or "", "CONFIG": config}
    values["ARGS"] = shlex.join(overrides)
    return [f"{name}={shlex.quote(value)}" for name, value in values.items() if value]


def is_address(text: str) -> bool:
    """Whether this is an IP address, not a host name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def interface_towards(address: str) -> str | None:
    """The network interface through which this machine reaches `address`; None if unknown.

    By default, gloo and NCCL use the interface that the machine's own name resolves to, often loopback.
    """
    try:
        family, kind, *_, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            local = probe.getsockname()[0]
    except OSError:
        return None
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == local for one in found):
            return name
    return None
