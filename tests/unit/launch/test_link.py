"""Launchers that meet over real sockets, each in a thread of its own."""

import json
import socket
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest

from sft_play.errors import ConfigError, DataError, LaunchError
from sft_play.launch import link as link_module
from sft_play.launch.link import connect
from sft_play.launch.nodes import Nodes
from sft_play.launch.ports import LOOPBACK, free_port
from sft_play.launch.ranks import RankExit


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def port() -> int:
    return free_port()


def nodes(rank: int, port: int, count: int = 3) -> Nodes:
    return Nodes(count, rank, LOOPBACK, port)


@pytest.fixture
def links(pool, port):
    joined = [pool.submit(connect, nodes(rank, port)) for rank in (2, 0, 1)]
    two, main, one = [future.result(20) for future in joined]
    yield [main, one, two]
    for link in (main, one, two):
        link.close(done=True)


def test_machines_that_come_in_any_order_agree_on_what_the_first_one_decides(links, pool):
    def decide(offers):
        return {"sum": sum(offer["value"] for offer in offers), "order": [offer["node"] for offer in offers]}

    answers = [pool.submit(link.agree, {"value": 10**rank}, decide) for rank, link in enumerate(links)]
    assert [answer.result(20) for answer in answers] == [{"sum": 111, "order": [0, 1, 2]}] * 3


def test_a_failure_is_known_to_all_with_its_code_and_the_first_one_counts(links):
    links[1].report_failure(RankExit(3, DataError.exit_code, "rows.jsonl:7: content is null"))
    for link in (links[0], links[2]):
        cause = link.failure(5)
        assert (cause.rank, cause.code) == (3, DataError.exit_code)
        assert cause.message == f"machine 1 ({socket.gethostname()}): rows.jsonl:7: content is null"
    links[2].report_failure(RankExit(5, 1, "later"))
    assert links[0].failure().rank == 3


def test_who_fails_before_the_plan_ends_the_waiting_of_the_others(links, pool):
    waiting = [pool.submit(link.agree, {}, lambda offers: {}) for link in links[:2]]
    links[2].report_failure(RankExit(0, DataError.exit_code, "no rows"))
    for future in waiting:
        with pytest.raises(DataError, match=r"machine 2 .*: no rows"):
            future.result(20)


def test_a_machine_that_goes_without_a_word_is_named_and_one_that_is_done_is_not(links):
    links[2].close(done=True)
    assert links[0].failure(0.5) is None
    links[1].close(done=False)
    cause = links[0].failure(5)
    assert cause.code == LaunchError.exit_code and cause.message.startswith(
        "lost the connection to machine 1 ("
    )


def test_the_others_end_with_the_first_one(links, pool):
    waiting = pool.submit(links[1].wait_for_main)
    time.sleep(0.3)
    assert not waiting.done()
    links[0].close(done=True)
    assert waiting.result(10) is None


def test_a_machine_with_another_number_of_nodes_is_told_so_and_the_others_go_on(pool, port):
    main = pool.submit(connect, nodes(0, port, 2))
    with pytest.raises(ConfigError, match="NODES=2, this one with NODES=4"):
        pool.submit(connect, nodes(1, port, 4)).result(20)
    for future in [main, pool.submit(connect, nodes(1, port, 2))]:
        future.result(20).close(done=True)


def test_the_second_machine_with_the_same_rank_is_told_so_and_the_others_go_on(pool, port):
    main = pool.submit(connect, nodes(0, port))
    twins = [pool.submit(connect, nodes(1, port)) for _ in range(2)]
    refused, waiting = wait(twins, 20, FIRST_COMPLETED)  # whichever reached machine 0 later
    with pytest.raises(ConfigError, match="two machines were started with RANK=1"):
        refused.pop().result(0)
    for future in [main, pool.submit(connect, nodes(2, port)), *waiting]:
        future.result(20).close(done=True)


def test_a_stranger_is_not_let_in(pool, port):
    main = pool.submit(connect, nodes(0, port, 2))
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", json.dumps({"nodes": 2, "node": "x"}).encode() + b"\n"):
        deadline = time.monotonic() + 10
        while True:
            try:
                stranger = socket.create_connection((LOOPBACK, port), timeout=5)
                break
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with stranger:
            stranger.sendall(text)
            assert b"refused" in stranger.recv(4096)
    second = connect(nodes(1, port, 2))
    for link in (main.result(20), second):
        link.close(done=True)


def test_a_port_in_use_and_an_address_of_another_machine_are_said(port):
    with socket.create_server((LOOPBACK, port)):
        with pytest.raises(LaunchError, match=f"port {port} of this machine is in use.*MASTER_PORT"):
            connect(nodes(0, port))
    with pytest.raises(ConfigError, match="MASTER_ADDR=192.0.2.1 is not an address of this machine"):
        connect(Nodes(2, 0, "192.0.2.1", port))


def test_machines_that_do_not_come_are_named(monkeypatch, port):
    monkeypatch.setattr(link_module, "JOIN_TIMEOUT_S", 0.3)
    with pytest.raises(LaunchError, match="machine 1, 2 did not join"):
        connect(nodes(0, port))
    with pytest.raises(LaunchError, match=f"machine 0 cannot be reached at {LOOPBACK}:{port}"):
        connect(nodes(1, port))
