"""Limits for the network: a Hub that is silent, or drips, is given up on, and what is cached is used instead.

huggingface_hub limits the wait for single reads, which a server that sends a byte a second never exceeds, and
not in all of its calls. A download that stalls is resumed by huggingface_hub, a few times. A busy Hub may say
when to ask again, and huggingface_hub would wait for as long as it says. `hf_xet` has its own client, which
cannot be limited, so it is left out: files come by HTTP, as without that package.
"""

import contextvars
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.markup import escape

from sft_play.runlog import console

ANSWER_SECONDS = 15.0  # until the head of an answer is there
COMMIT_SECONDS = 120.0  # the same for a commit, which the Hub checks before it answers
STALL_SECONDS, STALL_BYTES = 30.0, 1024  # an answer that brings less than this in that time has stalled
LONGEST_WAIT = 60  # seconds, before each of the few further tries that huggingface_hub makes
XET_SETTING = "HF_HUB_DISABLE_XET"  # huggingface_hub's variable; with 0, the user prefers speed to limits


@functools.cache
def limit_network() -> None:
    """Gives the HTTP client of huggingface_hub these limits; call it before anything may use the network."""
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    if XET_SETTING not in os.environ:
        constants.HF_HUB_DISABLE_XET = True

    def make_client() -> Any:
        client = default_client_factory()
        client.send = _limited(client.send, sys.modules[type(client).__module__.partition(".")[0]])  # type: ignore[method-assign]
        return client

    set_client_factory(make_client)


def _limited(send: Callable[..., Any], library: Any) -> Callable[..., Any]:
    """`send` of an HTTP client of `library` (httpx), with limits on the whole call."""

    def limited(request: Any, *, stream: bool = False, **arguments: Any) -> Any:
        url, asked = str(request.url).partition("?")[0], request.extensions.get("timeout", {})
        limits = {name: asked.get(name) or ANSWER_SECONDS for name in ("connect", "read", "write", "pool")}
        if "/commit/" in request.url.path:
            limits["read"] = COMMIT_SECONDS
        request.extensions["timeout"] = limits
        if request.method == "PUT":  # an upload: each of its writes has its limit, all of it may take hours
            return send(request, stream=stream, **arguments)
        call = functools.partial(send, request, stream=True, **arguments)
        seconds = COMMIT_SECONDS if "/commit/" in request.url.path else ANSWER_SECONDS
        response = _within(call, url, library.TimeoutException, seconds)
        _shorten_wait(response, url)
        response.stream = _limited_stream(response.stream, url, library)
        if not stream:
            try:
                response.read()
            except library.TimeoutException:
                raise _gave_up(f"{url} stopped answering") from None
            finally:
                response.close()
        return response

    return limited


def _within(call: Callable[[], Any], url: str, timeouts: type[Exception], seconds: float) -> Any:
    """The result of a call, which is left behind in its thread if it takes too long.

    Raises:
        OfflineModeIsEnabled: it did.
    """
    found: list[Any] = []
    context = contextvars.copy_context()

    def run() -> None:
        try:
            found.append((context.run(call), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise _gave_up(f"{url} did not answer within {seconds:g} s")
    result, error = found[0]
    if isinstance(error, timeouts):
        raise _gave_up(f"{url} did not answer in time")
    if error is not None:
        raise error
    return result


def _shorten_wait(response: Any, url: str) -> None:
    """Has huggingface_hub ask a busy Hub again after LONGEST_WAIT, if the Hub wants more than that."""
    from huggingface_hub.utils import parse_ratelimit_headers

    asked, limits = response.headers.get("retry-after", ""), parse_ratelimit_headers(response.headers)
    seconds = limits.reset_in_seconds if limits and not limits.remaining else 0
    seconds = max(seconds, int(asked[:9]) if asked.isdecimal() else 0)
    if response.is_success or seconds <= LONGEST_WAIT:
        return
    _say(
        f"{url}: the Hub is busy, and wants to be asked again in {seconds:,} s; it is asked after "
        f"{LONGEST_WAIT} s, a few times"
    )
    response.headers.pop("ratelimit", None)
    response.headers["retry-after"] = str(LONGEST_WAIT)


def _limited_stream(stream: Any, url: str, library: Any) -> Any:
    """The stream of a response, which times out once it has stalled; huggingface_hub resumes downloads."""

    def chunks(self: Any) -> Iterator[bytes]:
        began, received = time.monotonic(), 0
        for chunk in stream:
            yield chunk
            received += len(chunk)
            if received >= STALL_BYTES:
                began, received = time.monotonic(), 0
            elif time.monotonic() - began > STALL_SECONDS:
                raise library.ReadTimeout(f"{url} sent less than {STALL_BYTES} bytes in {STALL_SECONDS:g} s")

    methods = {"__iter__": chunks, "close": lambda self: stream.close()}
    return type("LimitedStream", (library.SyncByteStream,), methods)()


@functools.cache
def _say(text: str) -> None:
    """Prints a line, once in this process."""
    console().print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def is_network_error(error: BaseException) -> bool:
    """Whether the HTTP client raised it."""
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2")


def _gave_up(what: str) -> Exception:
    """Turns offline mode on, here and in processes started later, says so, and returns the error to raise."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if not constants.HF_HUB_OFFLINE:
        _say(f"{what}: the Hub is not asked again, only what is cached is used")
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    return OfflineModeIsEnabled(what)
