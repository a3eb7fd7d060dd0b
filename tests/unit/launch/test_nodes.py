import shlex
import socket

import pytest

from sft_play.errors import ConfigError
from sft_play.launch.nodes import (
    ALONE,
    LOOPBACK,
    Nodes,
    free_port,
    interface_of,
    interface_towards,
    read_nodes,
)
from sft_play.report.layout import make_settings

SETTINGS = make_settings("configs/run.yaml", ["train.epochs=1", "output.name=a b"], NGPU=4, ENGINE="ddp")


def test_without_the_flag_there_is_one_machine():
    assert read_nodes(SETTINGS, None, None, None, None) == ALONE == Nodes()


def test_a_machine_knows_its_place_and_where_the_first_one_is():
    assert read_nodes(SETTINGS, "2", "1", "10.0.0.1", "") == Nodes(2, 1, "10.0.0.1", 29500)
    assert read_nodes(SETTINGS, "3", "0", "node7", "12345") == Nodes(3, 0, "node7", 12345)
    assert read_nodes(SETTINGS, "1", "", "", "").count == 1  # as SLURM's script says it for one node


def test_what_is_missing_is_asked_for_with_the_command_of_each_machine():
    with pytest.raises(ConfigError, match="^not set: RANK, MASTER_ADDR") as error:
        read_nodes(SETTINGS, "3", "", "", "12345")
    commands = str(error.value).splitlines()[1:]
    assert len(commands) == 3
    for rank, command in enumerate(commands):
        assert (
            f"make train-multinode NODES=3 RANK={rank} MASTER_ADDR=<address of machine 0> MASTER_PORT=12345"
            in command
        )
        knobs = dict(
            word.split("=", 1) for word in shlex.split(command.replace("<address of machine 0>", "x"))[2:]
        )
        assert (knobs["NGPU"], knobs["ENGINE"], knobs["CONFIG"]) == ("4", "ddp", "configs/run.yaml")
        assert shlex.split(knobs["ARGS"]) == ["train.epochs=1", "output.name=a b"]
    with pytest.raises(ConfigError, match="not set: RANK") as error:
        read_nodes(SETTINGS, "2", "", "10.0.0.1", "")
    assert "MASTER_ADDR=10.0.0.1 NGPU=4" in str(error.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("0", "0", "a", ""), "NODES=0: expected a whole number of at least 1"),
        (("x", "0", "a", ""), "NODES=x"),
        (("2", "2", "a", ""), "RANK=2: expected a whole number from 0 to 1"),
        (("2", "0", "a", "70000"), "MASTER_PORT=70000"),
        ((None, "1", None, None), "need --nodes"),
    ],
)
def test_numbers_that_cannot_be_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        read_nodes(SETTINGS, *flags)


def test_the_interface_is_that_of_the_route():
    assert interface_towards(LOOPBACK) == "lo"
    assert interface_towards("name.invalid") is None


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (ALONE, "lo"),
        (Nodes(2, 0, LOOPBACK, 29500, peer="name.invalid"), "lo"),  # typed so: all are on this machine
        (Nodes(2, 1, "localhost", 29500), "lo"),
        (Nodes(2, 0, "localhost", 29500, peer="name.invalid"), None),
    ],
)
def test_a_first_machine_whose_name_is_loopback_to_itself_takes_the_way_to_another(nodes, found):
    assert interface_of(nodes) == found


def test_a_free_port_is_taken_as_preferred():
    port = free_port()
    assert port > 0 and free_port(port) == port


def test_a_busy_port_is_replaced_by_another():
    with socket.create_server((LOOPBACK, 0)) as server:
        busy = server.getsockname()[1]
        assert free_port(busy) not in (busy, 0)


def test_a_port_that_does_not_exist_is_replaced_too():
    assert 0 < free_port(70000) < 65536
