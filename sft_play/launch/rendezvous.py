"""A store for the ranks of one machine that listens on loopback only.

torch's own rendezvous listens on every interface, without a password, whatever address it is given (also --standalone
and --master-addr 127.0.0.1), and its port is chosen before it is bound. Here the socket is bound first, to 127.0.0.1 and a
port that the kernel picks, and handed to the store: nobody outside can connect, and runs that start together never meet.

torch finds `get_handler` through the entry point "torchrun.handlers" of this package under the name "loopback":
    accelerate launch --rdzv_backend loopback ...     torchrun --rdzv-backend loopback ...
"""

import datetime
import socket
from collections.abc import Callable
from typing import Any

from sft_play.launch.ports import LOOPBACK

STORE_TIMEOUT = datetime.timedelta(seconds=600)


def get_handler() -> Callable[[Any], Any]:
    """What torch registers; importing this module costs nothing."""
    return create_handler


def create_handler(parameters: Any) -> Any:
    """The rendezvous of one launcher, ready: there is nobody to wait for.

    Raises:
        ValueError: several machines are asked for; they need an address that the others can reach.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    if parameters.max_nodes != 1:
        raise ValueError("--rdzv-backend loopback is for one machine; for several use static or c10d")

    class Loopback(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return "loopback"

    server = socket.create_server((LOOPBACK, 0))
    port = server.getsockname()[1]
    handler = Loopback(LOOPBACK, port, 0, 1, parameters.run_id, int(STORE_TIMEOUT.total_seconds()))
    handler._store = TCPStore(
        LOOPBACK, port, 1, is_master=True, timeout=STORE_TIMEOUT, multi_tenant=True, master_listen_fd=server.detach()
    )
    return handler
