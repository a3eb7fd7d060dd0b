"""Launchers that meet in a real store, each with a thread of its own or, to be killed, in a process of its own."""

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import product

import pytest

from sft_play.errors import ConfigError, DataError, LaunchError
from sft_play.launch import link as link_module
from sft_play.launch.link import Link
from sft_play.launch.nodes import LOOPBACK, Nodes, free_port
from sft_play.launch.ranks import RankExit


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as threads:
        yield threads


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch):
    """Each machine waits for a beat or two, when it joins and when it ends."""
    monkeypatch.setattr(link_module, "BEAT_S", 0.1)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(link_module, "LOST_S", 3.0)


def joined(rank: int, port: int, count: int = 3, address: str = LOOPBACK) -> Link:
    link = Link(Nodes(count, rank, address, port))
    try:
        link.join()
    except BaseException:
        link.close()
        raise
    return link


def close(*links: Link) -> None:
    """All at once, as on several machines: the first one waits for the others."""
    with ThreadPoolExecutor(len(links)) as threads:
        list(threads.map(Link.close, links))


@pytest.fixture
def links(pool, port):
    futures = [pool.submit(joined, rank, port) for rank in (2, 0, 1)]
    two, main, one = [future.result(20) for future in futures]
    yield [main, one, two]
    close(main, one, two)


OTHER = """
import sys, time
from sft_play.launch.link import Link
from sft_play.launch.nodes import Nodes
from sft_play.launch.ranks import RankExit
rank, count, port = map(int, sys.argv[1:])
link = Link(Nodes(count, rank, "127.0.0.1", port))
try:
    link.join()
    time.sleep(100)
finally:
    link.report_failure(RankExit(0, 1, "interrupted"))
    link.close()
"""


@pytest.fixture
def start():
    """Starts a machine in a process."""
    started: list[subprocess.Popen] = []

    def process(rank: int, count: int, port: int) -> subprocess.Popen:
        words = [str(number) for number in (rank, count, port)]
        started.append(subprocess.Popen([sys.executable, "-c", OTHER, *words], stdout=subprocess.DEVNULL))
        return started[-1]

    yield process
    for other in started:
        other.kill()
        other.wait()


def test_machines_that_come_in_any_order_agree_on_what_the_first_one_decides(links, pool):
    def decide(offers):
        return {"sum": sum(offer["value"] for offer in offers), "order": [offer["node"] for offer in offers]}

    answers = [pool.submit(link.agree, {"value": 10**rank}, decide) for rank, link in enumerate(links)]
    assert [answer.result(20) for answer in answers] == [{"sum": 111, "order": [0, 1, 2]}] * 3


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_they_meet_at_an_ipv6_address_and_at_a_host_name(pool, port, address):
    joining = [pool.submit(joined, rank, port, 2, address) for rank in range(2)]
    links = [link.result(20) for link in joining]
    answers = [pool.submit(link.agree, {}, lambda offers: {"machines": len(offers)}) for link in links]
    assert [answer.result(20) for answer in answers] == [{"machines": 2}] * 2
    close(*links)


def test_a_failure_is_known_to_all_with_its_code_and_the_first_one_counts(links):
    links[1].report_failure(RankExit(3, DataError.exit_code, "rows.jsonl:7: content is null"))
    for link in links:
        cause = link.failure(5)
        assert (cause.rank, cause.code) == (3, DataError.exit_code)
        assert cause.message == f"machine 1 ({socket.gethostname()}): rows.jsonl:7: content is null"
    links[2].report_failure(RankExit(5, 1, "later"))
    time.sleep(2 * link_module.BEAT_S)
    assert [link.failure().rank for link in links] == [3, 3, 3]


def test_who_fails_before_the_plan_ends_the_waiting_of_the_others(links, pool):
    waiting = [pool.submit(link.agree, {}, lambda offers: {}) for link in links[:2]]
    links[2].report_failure(RankExit(0, DataError.exit_code, "no rows"))
    for future in waiting:
        with pytest.raises(DataError, match=r"machine 2 .*: no rows"):
            future.result(20)


def test_the_reason_reaches_all_even_if_the_first_machine_ends_at_once(links, pool):
    waiting = [pool.submit(link.wait_for_main) for link in links[1:]]
    links[0].report_failure(RankExit(0, DataError.exit_code, "no rows"))
    links[0].close()
    for future in waiting:
        with pytest.raises(DataError, match=r"machine 0 .*: no rows"):
            future.result(5)


@pytest.mark.thorough
def test_a_machine_that_goes_without_a_word_is_named(start, pool, impatient):
    """The first one or the other, killed or stopped; all at the same time, since each waits for seconds."""

    def lose(rank: int, number: int) -> None:
        port = free_port()
        other = start(1 - rank, 2, port)
        link = joined(rank, port, 2)
        assert link.failure() is None
        other.send_signal(number)
        began = time.monotonic()
        while (cause := link.failure()) is None:
            assert time.monotonic() - began < 2 * link_module.LOST_S
            time.sleep(0.05)
        assert cause.code == LaunchError.exit_code
        assert cause.message.startswith(f"lost the connection to machine {1 - rank} ({socket.gethostname()})")
        link.close()

    cases = product((0, 1), (signal.SIGKILL, signal.SIGSTOP))
    for waiting in [pool.submit(lose, *case) for case in cases]:
        waiting.result()


@pytest.mark.thorough
def test_a_machine_that_is_done_is_not_lost(links, impatient):
    links[2].close()
    time.sleep(1.5 * link_module.LOST_S)
    assert [link.failure() for link in links] == [None, None, None]


def test_the_others_end_with_the_first_one(links, pool):
    waiting = [pool.submit(link.wait_for_main) for link in links[1:]]
    time.sleep(0.3)
    assert not any(future.done() for future in waiting)
    links[0].close()
    assert [future.result(10) for future in waiting] == [None, None]


def test_a_machine_with_another_number_of_nodes_is_told_so_and_the_others_go_on(pool, port):
    main = pool.submit(joined, 0, port, 2)
    with pytest.raises(ConfigError, match="NODES=2, this one with NODES=4"):
        pool.submit(joined, 1, port, 4).result(20)
    links = [main, pool.submit(joined, 1, port, 2)]
    close(*(future.result(20) for future in links))


def test_one_of_two_machines_with_the_same_rank_is_told_so_and_the_others_go_on(pool, port):
    main = pool.submit(joined, 0, port)
    twins = [pool.submit(joined, 1, port) for _ in range(2)]
    refused, waiting = wait(twins, 20, FIRST_COMPLETED)
    with pytest.raises(ConfigError, match=f"two machines were started with RANK=1.*{socket.gethostname()}"):
        refused.pop().result(0)
    links = [main, pool.submit(joined, 2, port), *waiting]
    close(*(future.result(20) for future in links))


@pytest.mark.thorough
def test_a_machine_that_leaves_while_it_waits_may_come_again(pool, port, start, capsys):
    main = pool.submit(joined, 0, port)
    first = start(1, 3, port)
    said = ""
    while "machine 1 joined" not in said:
        said += capsys.readouterr().out
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    assert first.wait(10) != 0 and not main.done()
    links = [main, *(pool.submit(joined, rank, port) for rank in (1, 2))]
    close(*(future.result(20) for future in links))


@pytest.mark.thorough
def test_who_comes_when_the_run_has_begun_is_told_so(links, port):
    with pytest.raises(LaunchError, match="already begun"):
        joined(1, port)
    assert [link.failure(1) for link in links] == [None, None, None]


def test_a_stranger_disturbs_nobody(links, pool, port):
    for text in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"\0" * 100_000):
        with socket.create_connection((LOOPBACK, port), timeout=5) as stranger:
            stranger.sendall(text)
    answers = [pool.submit(link.agree, {}, lambda offers: {"of": len(offers)}) for link in links]
    assert [answer.result(20) for answer in answers] == [{"of": 3}] * 3


def test_a_port_in_use_and_an_address_of_another_machine_are_said(port):
    with socket.create_server((LOOPBACK, port)):
        with pytest.raises(LaunchError, match=f"port {port} of this machine is in use.*MASTER_PORT"):
            joined(0, port)
    with pytest.raises(ConfigError, match="MASTER_ADDR=192.0.2.1 is not an address of this machine"):
        joined(0, port, 2, "192.0.2.1")


def test_machines_that_do_not_come_are_named(monkeypatch, port):
    monkeypatch.setattr(link_module, "JOIN_TIMEOUT_S", 0.3)
    with pytest.raises(LaunchError, match="machine 1, 2 did not join"):
        joined(0, port)
    with pytest.raises(LaunchError, match=f"machine 0 cannot be reached at {LOOPBACK}:{port}"):
        joined(1, port)
