"""A rendezvous store for the ranks of one machine that listens on loopback only.

torch's own rendezvous listens on every interface, without authentication, whatever address it is given (even
with --standalone or --master-addr 127.0.0.1), and chooses its port before binding it. Here the socket is
bound first, to 127.0.0.1 and a port that the kernel picks, and then passed to the store: nobody can connect
from outside, and runs that start at the same time never collide.

torch finds `get_handler` by this package's entry point "loopback" in the group "torchrun.handlers":

    accelerate launch --rdzv_backend loopback ...     torchrun --rdzv-backend loopback ...
"""

import datetime
import os
import socket
from collections.abc import Callable
from typing import Any

from sft_play.launch.nodes import LOOPBACK
from sft_play.upstream.torch import wait_for_ranks

SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds that ranks have to save what they have
STORE_TIMEOUT = datetime.timedelta(seconds=600)


def get_handler() -> Callable[[Any], Any]:
    """The function that torch registers; importing this module does not import torch."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """The rendezvous of one launcher, complete at once, since a single machine waits for no other.

    Raises:
        ValueError: more than one machine is requested.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    if parameters.max_nodes != 1:
        raise ValueError(
            "--rdzv-backend loopback supports one machine only; use static or c10d for multi-node"
        )

    wait_for_ranks(int(os.environ.get(SHUTDOWN_VARIABLE, 30)))

    class Loopback(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return "loopback"

    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    handler = Loopback(LOOPBACK, port, 0, 1, parameters.run_id, int(STORE_TIMEOUT.total_seconds()))
    handler._store = TCPStore(
        LOOPBACK,
        port,
        1,
        is_master=True,
        timeout=STORE_TIMEOUT,
        multi_tenant=True,
        master_listen_fd=server.detach(),
    )
    return handler
