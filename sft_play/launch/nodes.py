"""Several machines: which one this is, how it reaches the others, and what to type on each."""

import ipaddress
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from sft_play.errors import ConfigError
from sft_play.launch.ports import LOOPBACK

DEFAULT_PORT = 29500  # where torchrun looks too
SOMEONES_ADDRESS = "<address of machine 0>"


@dataclass(frozen=True)
class Nodes:
    """Where this machine stands among several; the default is a single one."""

    count: int = 1
    rank: int = 0
    main_address: str = LOOPBACK
    main_port: int = 0


ALONE = Nodes()


@dataclass(frozen=True)
class NodeFlags:
    """The words of --nodes, --node-rank, --master-addr and --master-port as typed; empty or None where not given."""

    count: str | None = None
    rank: str | None = None
    address: str | None = None
    port: str | None = None


def read_nodes(flags: NodeFlags, words: Sequence[str]) -> Nodes:
    """This machine's place; a single machine where --nodes was not given.

    Args:
        flags: as typed.
        words: settings of the make command that do not differ between machines, for the commands in a message.

    Raises:
        ConfigError: a value is missing or no such number; names the command of each machine.
    """
    if flags.count is None:
        if any((flags.rank, flags.address, flags.port)):
            raise ConfigError("--node-rank, --master-addr and --master-port need --nodes, the number of machines")
        return ALONE
    count = whole_number("NODES", flags.count or "2", 1)
    port = whole_number("MASTER_PORT", flags.port or str(DEFAULT_PORT), 1, 65535)
    missing = [name for name, value in _needed(flags).items() if not value]
    if missing and count > 1:
        commands = "\n".join(commands_for(count, flags.address or SOMEONES_ADDRESS, port, words))
        raise ConfigError(f"{' and '.join(missing)} not given. Type on each of the {count} machines:\n{commands}")
    return Nodes(count, whole_number("RANK", flags.rank or "0", 0, count - 1), flags.address or LOOPBACK, port)


def _needed(flags: NodeFlags) -> dict[str, str | None]:
    return {"NODES": flags.count, "RANK": flags.rank, "MASTER_ADDR": flags.address}


def whole_number(name: str, text: str, low: int, high: int | None = None) -> int:
    """The number of a knob.

    Raises:
        ConfigError: it is none, or out of range.
    """
    if text.isdigit() and low <= int(text) <= (int(text) if high is None else high):
        return int(text)
    allowed = f"from {low} to {high}" if high is not None else f"from {low}"
    raise ConfigError(f"{name}={text}: expected a whole number {allowed}")


def commands_for(count: int, address: str, port: int, words: Sequence[str]) -> list[str]:
    """What to type on each machine."""
    where = f"MASTER_ADDR={address}" + ("" if port == DEFAULT_PORT else f" MASTER_PORT={port}")
    rest = "".join(f" {word}" for word in words)
    return [f"  make train-multinode NODES={count} RANK={rank} {where}{rest}" for rank in range(count)]


def make_words(config: str, overrides: Sequence[str], processes: int, engine: str | None) -> list[str]:
    """A run as settings of a make command, quoted for a shell."""
    values = {"NGPU": str(processes) if processes else "", "ENGINE": engine or "", "CONFIG": config}
    values["ARGS"] = " ".join(shlex.quote(word) for word in overrides)
    return [f"{name}={shlex.quote(value)}" for name, value in values.items() if value]


def is_address(text: str) -> bool:
    """Whether this is an IP address and not a name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def interface_towards(address: str) -> str | None:
    """The network interface over which this machine reaches `address`, which may be its own; None if that is not known.

    gloo and NCCL else take the interface of the machine's own name, which often is a loopback address.
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
