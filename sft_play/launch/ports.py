"""Free ports of this machine."""

import socket

LOOPBACK = "127.0.0.1"


def free_port(preferred: int = 0, host: str = LOOPBACK) -> int:
    """`preferred` if nobody listens there, else another port that is free now."""
    for port in (preferred, 0):
        try:
            with socket.create_server((host, port)) as server:  # reuses an address that only waits to be forgotten
                return server.getsockname()[1]
        except (OSError, OverflowError):
            if port == 0:
                raise
    raise AssertionError("port 0 always ends the loop")
