"""Connects the launchers of a multi-node run: they keep a board up to date in torch's own store.

Machine 0 serves the store (`torch.distributed.TCPStore`) while the run lasts. Every machine rewrites its
entry twice a second and reads those of all: who is alive, who offers which plan, who has ended. The first
failure has an entry of its own. Without this, the ranks on other machines would wait in a collective for
parallel.timeout_s without knowing why.

Entries are JSON; nothing that is read is executed. Like torchrun's own rendezvous, the store has neither
authentication nor encryption: who reaches the port can read and change the board.
"""

import json
import math
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sft_play.errors import ConfigError, LaunchError, SftPlayError
from sft_play.launch.nodes import Nodes, listen, wait_until_reached
from sft_play.launch.ranks import RankExit, raise_unless_done
from sft_play.spelling import var
from sft_play.ui.console import console

if TYPE_CHECKING:
    from torch.distributed import TCPStore

JOIN_TIMEOUT_S = 600.0  # a person may have to type the command on each machine
BEAT_S, POLL_S = 0.5, 0.05
LOST_S = 15.0  # a machine whose entry has not changed for so long is lost
SUSPECT_S = 5.0  # the same, once a rank has lost its connection to another one
CLOSE_S = 5.0  # how long machine 0 serves the store for those that have not read yet how the run ended
FAILURE = "failure"

Entry = dict[str, Any]


class Link:
    """The board as one launcher knows it, kept up to date by a thread.

    Only that thread uses the store, whose operations block while machine 0 is silent, whatever their limit.
    """

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self._where = f"{nodes.main_address}:{nodes.main_port}"
        self._keys = [f"machine{node}" for node in range(nodes.count)]
        self._entry: Entry = {"host": socket.gethostname(), "nodes": nodes.count}
        self._written = ""  # this machine's entry in the store
        self._board: list[Entry] = [{}] * nodes.count  # as last read; {} for a machine that has not joined
        self._changed_at = [math.inf] * nodes.count
        self._report: RankExit | None = None  # the failure that this machine has to report
        self._cause: RankExit | None = None  # the failure that ended the run
        self._closes_at, self._patience_s = math.inf, LOST_S
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep_up_to_date, daemon=True)

    def join(self) -> None:
        """Waits until all machines have joined.

        Raises:
            LaunchError: the port is in use, a machine did not join in time, or the run has already begun.
            ConfigError: the machines were started with contradictory settings.
        """
        self._thread.start()
        awaited = "machine 0" if self.nodes.rank else "the other machines"
        console().print(
            f"  machine {self.nodes.rank} is waiting for {awaited} on {self._where}", highlight=False
        )
        if self.nodes.rank == 0:
            deadline = time.monotonic() + JOIN_TIMEOUT_S
            self._wait_for(lambda: not self._missing() or time.monotonic() > deadline)
            if missing := self._missing():
                text = f"machine {', '.join(map(str, missing))} did not join within {JOIN_TIMEOUT_S:.0f} s"
                raise LaunchError(f"{text}; run the same command there with its own {var(RANK=None)}")
            self._publish(started=True)
        self._wait_for(self._has_started)

    def agree(self, offer: Entry, decide: Callable[[list[Entry]], Entry]) -> Entry:
        """Collects an offer from every machine; returns the decision that machine 0 made from them.

        `decide` is called there with all offers, in the order of the machines; if it fails, the run ends.

        Raises:
            SftPlayError: another machine failed before, or `decide` did.
        """
        self._publish(offer={**offer, "node": self.nodes.rank, "host": self._entry["host"]})
        if self.nodes.rank == 0:
            self._wait_for(lambda: all("offer" in entry for entry in self._board))
            self._publish(decision=decide([entry["offer"] for entry in self._board]))
        self._wait_for(lambda: "decision" in self._board[0])
        return dict(self._board[0]["decision"])

    def failure(self, wait_s: float = 0.0) -> RankExit | None:
        """The failure that ended the run, after waiting for it at most so long.

        Who waits has seen a rank lose its peer, so that a silent machine is taken for lost sooner.
        """
        deadline = time.monotonic() + wait_s
        self._patience_s = SUSPECT_S if wait_s else LOST_S
        while self._cause is None:
            if self._is_silent(self.nodes.rank) and not self._has_ended():
                self._cause = self._lost(0)  # it does not answer the thread
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(POLL_S)
        return self._cause

    def report_failure(self, cause: RankExit) -> None:
        """Reports to all machines what ended the run here, unless another machine was first."""
        text = f"machine {self.nodes.rank} ({self._entry['host']}): {cause.message}"
        self._report = self._report or RankExit(cause.rank, cause.code, text)
        self._wake.set()

    def wait_for_main(self) -> None:
        """Waits until machine 0 is done, which may evaluate after training; raises its error if it failed."""
        if self.nodes.rank:
            self._wait_for(lambda: "ended" in self._board[0] and self._cause is None)

    def close(self) -> None:
        """Ends the exchange; machine 0 first gives the others a few seconds to read how the run ended."""
        self._closes_at = time.monotonic() + CLOSE_S
        self._wake.set()
        self._thread.join(CLOSE_S + BEAT_S)

    def _publish(self, **values: object) -> None:
        self._entry = {**self._entry, **values}
        self._wake.set()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        while not ready():
            cause = self.failure()
            if cause and not ready():
                raise_unless_done(cause)
            time.sleep(POLL_S)

    def _missing(self) -> list[int]:
        return [
            node
            for node, entry in enumerate(self._board)
            if not entry or "ended" in entry or self._is_silent(node)
        ]

    def _is_silent(self, node: int) -> bool:
        return time.monotonic() - self._changed_at[node] > self._patience_s

    def _has_started(self) -> bool:
        return "started" in self._board[0]

    def _has_ended(self) -> bool:
        """Whether the run has ended for this machine."""
        return self._closes_at < math.inf or self._cause is not None or "ended" in self._board[0]

    def _lost(self, node: int) -> RankExit:
        text = f"lost the connection to machine {node} ({self._board[node].get('host', self._where)})"
        text += ": its launcher was killed, or the machine or its network failed"
        return RankExit(0, LaunchError.exit_code, text)

    def _keep_up_to_date(self) -> None:
        try:
            store = self._open()
            while not self._is_over():
                self._exchange(store)
                self._wake.wait(BEAT_S)
                self._wake.clear()
        except SftPlayError as error:
            self._cause = RankExit(0, error.exit_code, str(error))
        except Exception:  # noqa: BLE001 - of torch, or of an entry that is not ours
            self._cause = self._cause or self._lost(0)

    def _open(self) -> "TCPStore":
        """The store, with the entry of this machine.

        Raises:
            ConfigError: machine 0 was started with another number of machines.
            LaunchError: the port is in use, machine 0 cannot be reached, or the run has begun.
        """
        from torch.distributed import TCPStore

        server = None if self.nodes.rank else listen(self.nodes)
        if server is None:
            wait_until_reached(self.nodes, JOIN_TIMEOUT_S)  # torch would print a stack at each attempt
        self._changed_at[self.nodes.rank] = time.monotonic()
        store = TCPStore(
            self.nodes.main_address,
            self.nodes.main_port,
            is_master=server is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=LOST_S),
            master_listen_fd=server.detach() if server else None,
        )
        if server is not None:
            for key in (FAILURE, *self._keys[1:]):
                store.set(key, "")
        elif (main := json.loads(store.get(self._keys[0])))["nodes"] != self.nodes.count:
            found = f"{var(NODES=main['nodes'])}, this one with {var(NODES=self.nodes.count)}"
            raise ConfigError(f"machine 0 was started with {found}")
        elif "started" in main:
            raise LaunchError(
                f"machine 0 on {self._where} has already begun a run: choose another {var(MASTER_PORT=None)}"
            )
        self._written = json.dumps(self._entry)
        store.set(self._keys[self.nodes.rank], self._written)
        return store

    def _exchange(self, store: "TCPStore") -> None:
        """Writes this machine's entry, and reads those of all.

        Raises:
            ConfigError: another machine writes this entry, too.
        """
        ended = {"ended": True} if self._has_ended() else {}  # asked before the report, which goes first
        if self._report and (self._has_started() or self.nodes.rank == 0):
            store.compare_set(FAILURE, "", json.dumps(asdict(self._report)))
        text = json.dumps({**self._entry, **ended, "beat": time.monotonic()})
        found = store.compare_set(self._keys[self.nodes.rank], self._written, text).decode()
        if found != text:
            other = json.loads(found)["host"]
            raise ConfigError(
                f"two machines were started with {var(RANK=self.nodes.rank)}: this one and {other}"
            )
        self._written = text
        *board, failure = (json.loads(value or "{}") for value in store.multi_get([*self._keys, FAILURE]))
        for node, entry in enumerate(board):
            if entry != self._board[node]:
                self._changed_at[node] = time.monotonic()
            if self.nodes.rank == 0 and node and entry and not self._board[node]:
                console().print(f"  machine {node} joined: {entry['host']}", highlight=False)
        if failure:
            self._cause = self._cause or RankExit(**failure)
        self._board = board
        if self._has_started() and not self._has_ended():
            lost = [node for node in self._missing() if "ended" not in board[node]]
            self._report = self._report or (self._lost(lost[0]) if lost else None)

    def _is_over(self) -> bool:
        """Whether this machine has said that it has ended, and on machine 0 all others as well."""
        if self.nodes.rank or "ended" not in self._board[0]:
            return "ended" in self._board[self.nodes.rank]
        return len(self._missing()) == self.nodes.count or time.monotonic() > self._closes_at
