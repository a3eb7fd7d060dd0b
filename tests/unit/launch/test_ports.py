import socket

from sft_play.launch.ports import LOOPBACK, free_port


def test_a_free_port_is_taken_as_preferred():
    port = free_port()
    assert port > 0 and free_port(port) == port


def test_a_busy_port_is_replaced_by_another():
    with socket.create_server((LOOPBACK, 0)) as server:
        busy = server.getsockname()[1]
        assert free_port(busy) not in (busy, 0)


def test_a_port_that_does_not_exist_is_replaced_too():
    assert 0 < free_port(70000) < 65536
