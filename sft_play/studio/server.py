"""Serves the studio on 127.0.0.1 until it is interrupted."""

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from sft_play.launch.nodes import LOOPBACK, free_port, from_elsewhere
from sft_play.studio.app import Studio
from sft_play.studio.planner import Planner
from sft_play.ui.console import console

PORT = 7007
IDLE_S = 30  # a connection on which nothing comes is closed


class Handler(WSGIRequestHandler):
    """Handles a connection; requests are not logged."""

    timeout = IDLE_S

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing: a page asks every few seconds."""


@contextlib.contextmanager
def serving(runs: Path, port: int = PORT) -> Iterator[BaseWSGIServer]:
    """A server for a folder of runs, on this port or another free one; closed at the end."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    planner = Planner()
    # Bound here: werkzeug would end the process if somebody else took the port just now.
    with socket.create_server((LOOPBACK, free_port(port))) as bound:
        app = Studio(runs, planner)
        server = make_server(LOOPBACK, 0, app, threaded=True, request_handler=Handler, fd=bound.fileno())
    try:
        yield server
    finally:
        planner.close()
        server.server_close()


def serve(runs: Path) -> None:
    """Prints how to reach the studio of a folder, and serves it until it is stopped."""
    with serving(runs) as server:
        console().print(f"Studio: http://{LOOPBACK}:{server.port}   (stop it with Ctrl-C)")
        console().print(from_elsewhere(server.port), highlight=False)
        server.serve_forever()  # until KeyboardInterrupt
    console().print("stopped the studio")
