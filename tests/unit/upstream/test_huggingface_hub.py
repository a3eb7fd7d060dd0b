"""A Hub that is silent is given up on once; from then on only the cache is used."""

import contextlib
import functools
import io
import socket
import threading
import time

import pytest
from huggingface_hub import HfApi, constants, get_session, hf_hub_download
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import _http
from rich.console import Console

from sft_play.config.schema import ModelConfig
from sft_play.data.sources import open_source
from sft_play.errors import ConfigError, DataError
from sft_play.model.load import load_model_config
from sft_play.ui.console import set_console
from sft_play.upstream import huggingface_hub as hub
from sft_play.upstream.patching import undone

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
    monkeypatch.setattr(hub, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    with undone():
        hub.limit_network()
        yield


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


def test_a_hub_that_cannot_be_reached_is_asked_once_whoever_asks(capsys):
    """A client of its own would have been asked six times, with pauses of 23 s in all."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(OfflineModeIsEnabled):
            list(HfApi(endpoint=address).list_repo_tree("org/model"))
    assert time.monotonic() - began < 10
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("127.0.0.1 cannot be reached") == said.count("the Hub is not asked again") == 1


def test_a_host_that_has_answered_once_has_longer_for_the_next_answer(serve):
    slow = []

    def answer(connection):
        if slow:
            time.sleep(0.3)  # longer than until the first answer
        slow.append(1)
        connection.sendall(HEAD.replace(b"100000", b"0"))

    serve(answer)
    for _ in range(2):
        assert get_session().get(f"{constants.ENDPOINT}/x").status_code == 200


def test_who_waits_for_the_hub_is_told(serve):
    serve(lambda connection: silent())
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    set_console(screen)
    try:
        with pytest.raises(OfflineModeIsEnabled):
            get_session().get(f"{constants.ENDPOINT}/x")
    finally:
        set_console(None)
    assert "asking 127.0.0.1" in screen.file.getvalue()


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


def test_it_is_limited_once_and_not_after_the_block():
    factory = _http._GLOBAL_CLIENT_FACTORY
    with undone():
        hub.limit_network()
        assert _http._GLOBAL_CLIENT_FACTORY is factory  # that of the fixture, which lasts longer
    with hub._limited_network():
        assert _http._GLOBAL_CLIENT_FACTORY is not factory
        constants.HF_HUB_OFFLINE = True  # as after a call without an answer
    assert _http._GLOBAL_CLIENT_FACTORY is factory and not constants.HF_HUB_OFFLINE
