"""Free ports of this machine."""

import socket

LOOPBACK = "127.0.0.1"


def free_port(preferred: int = 0, host: str = LOOPBACK) -> int:
    """`preferred` if it is free, otherwise another port that is free now."""
    for port in (preferred, 0):
        try:
            # create_server sets SO_REUSEADDR, so a port in TIME_WAIT counts as free.
            with socket.create_server((host, port)) as server:
                return server.getsockname()[1]
        except (OSError, OverflowError):
            if port == 0:
                raise
    raise AssertionError("port 0 always ends the loop")
