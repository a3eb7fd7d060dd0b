"""The Hugging Face Hub: limits for the network, and the access token of `make push`.

A Hub that is silent is given up on, and what is cached is used instead. huggingface_hub limits the wait for
an answer, but not in all of its calls, and asks a silent Hub again and again. A busy Hub may say when to ask
again, and huggingface_hub would wait for as long as it says. `hf_xet`, which brings large files, has a client
of its own that waits forever; it is watched from outside.
"""

import functools
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from sft_play.errors import ConfigError
from sft_play.ui.console import warn

ANSWER_SECONDS = 15.0  # until an answer begins, and between its parts
COMMIT_SECONDS = 120.0  # the same for a commit, which the Hub checks before it answers
STALL_SECONDS = 60.0  # without a byte in any download of hf_xet
LONGEST_WAIT = 60  # seconds, before each of the few further tries that huggingface_hub makes

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@functools.cache
def limit_network() -> None:
    """Gives the clients of huggingface_hub these limits; call it before anything may use the network."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _xet_progress_reporting as reporting
    from huggingface_hub.utils._http import default_client_factory

    def make_client() -> Any:
        client = default_client_factory()
        client.send = _limited(client.send, sys.modules[type(client).__module__.partition(".")[0]])  # type: ignore[method-assign]
        return client

    set_client_factory(make_client)
    reporting.XetDownloadProgressReporter = _watched(reporting.XetDownloadProgressReporter)  # type: ignore[misc]


def _limited(send: Callable[..., Any], library: Any) -> Callable[..., Any]:
    """`send` of an HTTP client of `library` (httpx), with limits also where none are asked for."""

    def limited(request: Any, **arguments: Any) -> Any:
        url, asked = str(request.url).partition("?")[0], request.extensions.get("timeout", {})
        limits = {name: asked.get(name) or ANSWER_SECONDS for name in ("connect", "read", "write", "pool")}
        if "/commit/" in request.url.path:
            limits["read"] = COMMIT_SECONDS
        request.extensions["timeout"] = limits
        try:
            response = send(request, **arguments)
        except library.TimeoutException as error:
            if request.method == "PUT":  # part of an upload, which huggingface_hub sends again
                raise
            raise _gave_up(f"{url} did not answer in time") from error
        _shorten_wait(response, url)
        return response

    return limited


def _watched(reporter: type[Any]) -> type[Any]:
    """The class that hf_xet reports the progress of a download to, with a watch that ends it if it stalls."""

    class Watched(reporter):  # type: ignore[misc]
        last_byte = 0.0  # when any download brought one, in seconds of the monotonic clock

        def __enter__(self) -> Any:
            Watched.last_byte = time.monotonic()
            self._seen, self._stalled, self._over = (0, 0), False, threading.Event()
            threading.Thread(target=self._watch, daemon=True).start()
            return super().__enter__()

        def update_progress(self, group_report: Any, _item_reports: Any = None) -> None:
            seen = group_report.total_bytes_completed, group_report.total_transfer_bytes_completed
            if seen != self._seen:
                self._seen, Watched.last_byte = seen, time.monotonic()
            super().update_progress(group_report, _item_reports)

        def __exit__(self, *error: Any) -> None:
            self._over.set()
            super().__exit__(*error)
            if self._stalled:
                raise _gave_up(f"a download by hf_xet brought nothing for {STALL_SECONDS:g} s")

        def _watch(self) -> None:
            from huggingface_hub.utils._xet import abort_xet_session

            while not self._over.wait(STALL_SECONDS / 20):
                if time.monotonic() - Watched.last_byte > STALL_SECONDS:
                    self._stalled = True
                    abort_xet_session()  # all downloads, none of which brings anything
                    return

    return Watched


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


@functools.cache
def _say(text: str) -> None:
    """Prints a line, once in this process."""
    warn(text)


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


def access_token(repository: str) -> str:
    """The access token of the Hub; ConfigError if REPO is wrong, or there is no token."""
    from huggingface_hub import get_token

    if not REPOSITORY.fullmatch(repository):
        raise ConfigError(f"REPO={repository} is not the name of a repository; expected: REPO=user/name")
    token = get_token()
    if not token:
        raise ConfigError(
            "make push needs an access token of the Hugging Face Hub: make one that may write at "
            "https://huggingface.co/settings/tokens, then run `.venv/bin/hf auth login` or set HF_TOKEN"
        )
    return token
