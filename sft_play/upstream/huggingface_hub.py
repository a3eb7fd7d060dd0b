"""The network of huggingface_hub: a Hub that is silent is given up on, and what is cached is used instead.

Its calls wait for an answer without a limit, or with one, but ask a Hub that is silent or out of reach again
and again (2.4). What makes this unnecessary: one limit for all of its calls, after which it uses what is
cached. `hf_xet`, which brings large files, has a client of its own, which nothing here limits.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from sft_play.ui.console import warn
from sft_play.ui.progress import spinner
from sft_play.upstream.patching import lasting, patched

REACH_SECONDS = 5.0  # until there is a connection, and until a host answers for the first time
ANSWER_SECONDS = 15.0  # until any other answer begins, and between its parts
COMMIT_SECONDS = 120.0  # the same for a commit, which the Hub checks before it answers


def limit_network() -> None:
    """Gives the client of huggingface_hub these limits; call it before anything may use the network."""
    lasting(_limited_network)


@contextmanager
def _limited_network() -> Iterator[None]:
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils import _http

    before = _http._GLOBAL_CLIENT_FACTORY  # since 1.0; there is no public way to ask for it
    set_client_factory(functools.partial(_limited_client, before))
    try:
        with patched(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE):
            yield
    finally:
        set_client_factory(before)


def _limited_client(make: Any) -> Any:
    """A client as `make` makes it, whose requests have limits also where none are asked for."""
    plain, answered = make(), set()

    class Limited(type(plain)):  # type: ignore[misc]
        def send(self, request: Any, **arguments: object) -> Any:
            host = request.url.host
            limits = request.extensions["timeout"] = _limits(request)
            between_parts = limits["read"]
            try:
                with nullcontext() if host in answered else spinner(f"asking {host}"):
                    if host not in answered:
                        limits["read"] = min(between_parts, REACH_SECONDS)
                    response = super().send(request, **arguments)
            except Exception as error:
                silent = "Timeout" in type(error).__name__
                no_host = type(error).__name__ == "ConnectError" and host not in answered
                # huggingface_hub sends a part of an upload again
                if not (silent or no_host) or request.method == "PUT":
                    raise
                url = str(request.url).partition("?")[0]
                what = f"{url} did not answer in time" if silent else f"{host} cannot be reached ({error})"
                raise _gave_up(what) from error
            answered.add(host)
            limits["read"] = between_parts
            return response

    return Limited(event_hooks=plain.event_hooks, follow_redirects=True, timeout=None)


def _limits(request: Any) -> dict[str, float]:
    """The most seconds of each part of a request."""
    asked = request.extensions.get("timeout", {})
    limits = {name: asked.get(name) or ANSWER_SECONDS for name in ("connect", "read", "write", "pool")}
    limits["connect"] = min(limits["connect"], REACH_SECONDS)
    if "/commit/" in request.url.path:
        limits["read"] = COMMIT_SECONDS
    return limits


def without_xet() -> AbstractContextManager[None]:
    """In the block, files are uploaded by HTTP: hf_xet waits forever for a storage that is silent."""
    from huggingface_hub import constants

    return patched(constants, "HF_HUB_DISABLE_XET", True)


def is_network_error(error: BaseException) -> bool:
    """Whether the HTTP client raised it."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")


def _gave_up(what: str) -> Exception:
    """Turns offline mode on, here and in processes started later, says so, and returns the error to raise."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if not constants.HF_HUB_OFFLINE:
        warn(f"{what}: the Hub is not asked again, only what is cached is used")
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    return OfflineModeIsEnabled(what)
