"""A Hub that is silent is given up on once; from then on only the cache is used."""

import contextlib
import functools
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
from huggingface_hub import constants, get_session, hf_hub_download, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import _http as hub_http
from huggingface_hub.utils import _xet_progress_reporting
from huggingface_hub.utils._http import default_client_factory

from sft_play import hub
from sft_play.config.schema import ModelConfig
from sft_play.data.sources import open_source
from sft_play.errors import ConfigError, DataError
from sft_play.model.load import load_model_config

# Without "close", a client may send its next request on a connection that is being closed.
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100000\r\n\r\n"


@pytest.fixture
def serve(monkeypatch):
    """`serve(answer)` starts a server on which `answer(connection)` is called, and makes it the Hub."""
    listeners = []

    def start(answer) -> list[int]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)
        calls = []

        def one(connection):
            with connection:
                asked = b""
                while not asked.endswith(b"\r\n\r\n") and (more := connection.recv(65536)):
                    asked += more  # what is left unread would reset the connection when it is closed
                calls.append(1)
                with contextlib.suppress(OSError):  # the client has gone
                    answer(connection)

        def accept():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        return calls

    yield start
    for listener in listeners:
        listener.close()


@pytest.fixture(autouse=True)
def online(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(hub, "STALL_SECONDS", 0.5)
    reporter = _xet_progress_reporting.XetDownloadProgressReporter
    monkeypatch.setattr(_xet_progress_reporting, "XetDownloadProgressReporter", reporter)
    hub._say.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.limit_network.cache_clear()
    hub.limit_network()
    yield
    set_client_factory(default_client_factory)
    hub.limit_network.cache_clear()


silent = functools.partial(time.sleep, 60)


def stop_after_the_head(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    silent()


@pytest.mark.parametrize("answer", [lambda connection: silent(), stop_after_the_head])
def test_a_call_without_an_answer_ends_and_is_not_repeated(serve, answer, capsys):
    calls = serve(answer)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get(f"{constants.ENDPOINT}/api/models/a/b", timeout=None)
    assert time.monotonic() - began < 10 and len(calls) == 1
    assert " ".join(capsys.readouterr().out.split()).count("the Hub is not asked again") == 1


def test_a_download_that_stops_ends(serve):
    serve(stop_after_the_head)
    with (
        get_session().stream("GET", f"{constants.ENDPOINT}/weights", timeout=None) as response,
        pytest.raises(Exception, match="timed out") as error,
    ):
        response.read()
    assert hub.is_network_error(error.value)


def test_what_the_server_sends_in_time_arrives(serve):
    body = bytes(range(256)) * 40
    serve(lambda connection: connection.sendall(HEAD.replace(b"100000", b"10240") + body))
    assert get_session().get(f"{constants.ENDPOINT}/x").content == body
    with get_session().stream("GET", f"{constants.ENDPOINT}/x") as response:
        assert response.read() == body
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.thorough
def test_what_is_cached_is_used_and_what_is_not_is_one_sentence(serve, tmp_path):
    serve(lambda connection: silent())
    snapshot = tmp_path / "cache" / "models--org--cached" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}'
    )
    (tmp_path / "cache" / "models--org--cached" / "refs").mkdir()
    (tmp_path / "cache" / "models--org--cached" / "refs" / "main").write_text("abc")
    assert load_model_config(ModelConfig(name="org/cached")).hidden_size == 64
    with pytest.raises(ConfigError, match="model.name: the config of 'org/other' cannot be loaded"):
        load_model_config(ModelConfig(name="org/other"))
    with pytest.raises(DataError, match="data.train_path: 'org/rows' is not a local file"):
        open_source("org/rows", "train")
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("org/other", "config.json")


BUSY = "HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Length: 0\r\n{}\r\n\r\n"


@pytest.mark.parametrize("header", ["Retry-After: 86400", 'RateLimit: "api";r=0;t=86400'])
def test_a_busy_hub_is_asked_a_few_times_and_not_waited_for_as_long_as_it_says(
    serve, header, monkeypatch, capsys
):
    waits = []
    monkeypatch.setattr(hub_http, "time", SimpleNamespace(sleep=waits.append))
    calls = serve(lambda connection: connection.sendall(BUSY.format(header).encode()))
    with pytest.raises(HfHubHTTPError, match="429"):
        hub_http.http_backoff("GET", f"{constants.ENDPOINT}/api/models/a/b")
    assert len(calls) == 6 and waits == [hub.LONGEST_WAIT + 1] * 5
    assert " ".join(capsys.readouterr().out.split()).count("wants to be asked again in 86,400 s") == 1


def test_a_hub_that_is_busy_for_a_moment_is_asked_again_when_it_says(serve, monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(hub_http, "time", SimpleNamespace(sleep=waits.append))
    answers = iter([BUSY.format("Retry-After: 7").encode(), HEAD.replace(b"100000", b"2") + b"{}"])
    serve(lambda connection: connection.sendall(next(answers)))
    assert hub_http.http_backoff("GET", f"{constants.ENDPOINT}/api/models/a/b").json() == {}
    assert waits == [8] and capsys.readouterr().out == ""


class OfXet(BaseHTTPRequestHandler):
    """A Hub whose file is to be had by the protocol of hf_xet, from a storage beside the Hub."""

    storage: ClassVar[str] = ""

    def do_HEAD(self):
        self.answer({
            "Content-Length": "7", "ETag": '"' + "0" * 64 + '"', "X-Repo-Commit": "1" * 40, "X-Xet-Hash": "2" * 64,
            "Link": f'<http://{self.headers["Host"]}/token>; rel="xet-auth"',
        })  # fmt: skip

    def do_GET(self):
        later = str(int(time.time()) + 3600)
        token = {"X-Xet-Cas-Url": self.storage, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": later}
        self.answer({**token, "Content-Length": "0"})

    def answer(self, headers):
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def storage(monkeypatch):
    """`storage(answer)` starts the storage, which answers so, and makes a Hub with a file there the Hub."""
    stopped = []

    def start(answer) -> list[str]:
        asked = []

        class Storage(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(f"{self.command} {self.path}")
                answer(self)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        addresses = []
        for handler in (Storage, OfXet):
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            server.block_on_close = False
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            stopped.append(server)
            addresses.append(f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(OfXet, "storage", addresses[0])
        monkeypatch.setattr(constants, "ENDPOINT", addresses[1])
        template = addresses[1] + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return asked

    yield start
    for server in stopped:
        server.shutdown()
        server.server_close()


def test_a_download_by_hf_xet_that_stalls_ends_and_reports_nothing_to_the_storage(
    storage, monkeypatch, capsys
):
    pytest.importorskip("hf_xet")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # as set_environment does
    for name in ("AFTER", "INTERVAL"):
        monkeypatch.setenv(f"HF_XET_TELEMETRY_HEARTBEAT_{name}", "100ms")
    asked = storage(lambda handler: silent())
    began = time.monotonic()
    with pytest.raises(OfflineModeIsEnabled, match="hf_xet brought nothing for 0.5 s"):
        hf_hub_download("org/other", "model.safetensors")
    assert time.monotonic() - began < 10
    assert asked == [f"GET /v2/reconstructions/{'2' * 64}"]
    with pytest.raises(LocalEntryNotFoundError):
        hf_hub_download("org/other", "model.safetensors")
    assert " ".join(capsys.readouterr().out.split()).count("the Hub is not asked again") == 1


@contextlib.contextmanager
def progress():
    with _xet_progress_reporting.XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=logging.ERROR
    ) as reporter:
        yield lambda transferred: reporter.update_progress(
            SimpleNamespace(
                total_bytes=100, total_bytes_completed=0, total_bytes_completion_rate=None,
                total_transfer_bytes_completed=transferred, total_transfer_bytes_completion_rate=None,
            )
        )  # fmt: skip


def test_a_download_that_is_slow_goes_on_and_so_does_one_that_waits_for_it():
    with progress() as report, progress():
        for transferred in range(10):
            report(transferred)
            time.sleep(0.1)
    assert not constants.HF_HUB_OFFLINE


def test_reports_without_another_byte_are_a_stall():
    with pytest.raises(OfflineModeIsEnabled, match="brought nothing"), progress() as report:
        for _ in range(10):
            report(1)
            time.sleep(0.1)


def test_a_storage_that_refuses_is_not_called_a_stall(storage):
    pytest.importorskip("hf_xet")
    storage(lambda handler: handler.send_error(404))
    with pytest.raises(Exception, match="404") as error:
        hf_hub_download("org/other", "model.safetensors")
    assert not isinstance(error.value, OfflineModeIsEnabled) and not constants.HF_HUB_OFFLINE
