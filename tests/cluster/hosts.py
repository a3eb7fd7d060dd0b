"""Two hosts on this machine: network namespaces with a name and an address each, joined by a veth pair."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.conftest import REPOSITORY
from tests.integration.cli import Done, environment

ADDRESSES = ("192.168.213.1", "192.168.213.2")  # above those of loopback, to which gloo would connect
VENV = Path(sys.executable).parents[1]


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done


def missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "ip is not installed: make test-cluster"
    trial = f"sft-trial-{os.getpid()}"
    done = ip("netns", "add", trial, check=False)
    ip("netns", "del", trial, check=False)
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else None


def make_command(target: str, *words: str) -> list[str]:
    """What a person types, with the Python that runs the tests."""
    forgotten = [
        word for name in ("MAKEFLAGS", "MAKELEVEL", "ARGS") for word in ("--unset", name)
    ]  # those of the tests' own make
    return [
        "env",
        *forgotten,
        "make",
        "--silent",
        f"--old-file={VENV}/.ready",
        target,
        f"VENV={VENV}",
        *words,
    ]


class Host:
    """One of the two."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.namespace = f"sft-{os.getpid()}-{number}"
        self.cable = f"sft{os.getpid() % 10**6}-{number}"
        self.address = ADDRESSES[number]

    def start(self, *command: str, own: tuple[Path, Path] | None = None) -> subprocess.Popen:
        """Starts a command here; `own` bind-mounts its first folder over the second, on this host only."""
        disk = f"mount --bind {own[0]} {own[1]} && " if own else ""
        script = f'{disk}hostname host{self.number} && exec "$@"'
        words = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            "unshare",
            "--uts",
            "sh",
            "-c",
            script,
            "sh",
            *command,
        ]
        pipe = subprocess.PIPE
        guard = [
            sys.executable,
            "-m",
            "sft_play.machine.process",
        ]  # ends with the tests, however they end
        return subprocess.Popen(
            [*guard, *words], cwd=REPOSITORY, env=environment(), text=True, stdout=pipe, stderr=pipe
        )

    def train(self, *words: str, own: tuple[Path, Path] | None = None) -> subprocess.Popen:
        """`make train-multinode` with one process on each host."""
        knobs = ["NODES=2", f"RANK={self.number}", f"MASTER_ADDR={ADDRESSES[0]}", "NGPU=1", *words]
        return self.start(*make_command("train-multinode", *knobs), own=own)

    def kill(self) -> None:
        """Ends every process of this host at once."""
        while pids := ip("netns", "pids", self.namespace, check=False).stdout.split():
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)

    def unplug(self) -> None:
        """Nothing gets out or in any more, and nobody is told."""
        ip("-n", self.namespace, "link", "set", self.cable, "down")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """The hosts for as long as the block runs."""
    hosts = (Host(0), Host(1))
    _remove_left_over()
    try:
        for host in hosts:
            ip("netns", "add", host.namespace)
        ip("link", "add", hosts[0].cable, "type", "veth", "peer", "name", hosts[1].cable)
        for host in hosts:
            ip("link", "set", host.cable, "netns", host.namespace)
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.cable)
            for interface in ("lo", host.cable):
                ip("-n", host.namespace, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            ip("netns", "del", host.namespace, check=False)  # the cable goes with it
            ip("link", "del", host.cable, check=False)  # or it never got there


def _remove_left_over() -> None:
    """Namespaces of tests that were killed."""
    for name in re.findall(r"^sft-\d+-[01]", ip("netns", "list").stdout, re.MULTILINE):
        if not psutil.pid_exists(int(name.split("-")[1])):
            ip("netns", "del", name, check=False)


def finish_both(processes: list[subprocess.Popen], timeout_s: float = 150) -> list[Done]:
    """Waits for both commands."""
    deadline = time.monotonic() + timeout_s
    done = []
    for process in processes:
        out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
        done.append(Done(process.returncode, out, err))
    return done
